"""Event loops and threads, mixed in every way that applications mix them."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InvalidInput, Policy, current_attempt
from retrysafe.core.ports import Waits
from retrysafe.errors import FlowSuspended
from retrysafe.stores import Condition
from tests.runtime.staged import KEY, Hold, StagedStore, TaskHold, Worker, drive, turns


async def _first() -> str:
    return "first"


async def _second() -> str:
    return "second"


def test_two_loops_one_after_the_other(url):
    """asyncio.run twice with one object: the second loop sees what the first one stored."""
    idem = AsyncIdempotency(url, policy=Policy(lease=timedelta(milliseconds=200)))

    async def first() -> None:
        assert await idem.run(KEY, _first, name="") == "first"

    async def second() -> None:
        answer = await idem.answer(KEY, _second, name="")
        assert (answer.value, answer.replayed) == ("first", True)

        async def long() -> str:
            # The timer of the second loop renews.
            attempt = current_attempt()
            before = attempt.deadline
            for _ in range(3000):
                await asyncio.sleep(0.01)
                if attempt.deadline > before:
                    return "renewed"
            return "never renewed"

        assert await idem.run("another", long, caller="tester") == "renewed"
        await idem.close()

    drive(first())
    drive(second())


def test_loop_that_ended_under_a_running_operation_is_replaced(url):
    """asyncio.run cancels what is left; the next loop starts afresh and finds the key pending."""
    idem = AsyncIdempotency(url)
    tasks = set()

    async def leave_behind() -> None:
        hold = TaskHold()
        tasks.add(asyncio.create_task(idem.run(KEY, hold, request=None)))
        await hold.reached()

    async def look() -> None:
        async with idem:
            assert (await idem.read(KEY)).condition is Condition.RUNNING
            assert await idem.run("another", _first, caller="tester") == "first"

    asyncio.run(leave_behind())
    drive(look())


def test_a_loop_that_only_rests_is_not_taken_for_the_running_one():
    """Two loops of one thread in turn: the object belongs to the first until that is closed."""
    idem = AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING))

    async def first() -> None:
        assert await idem.run(KEY, _first, name="") == "first"

    async def second() -> None:
        with pytest.raises(InvalidInput, match="make one per loop"):
            await idem.run(KEY, _second, name="")

    async def end() -> None:
        assert await idem.run(KEY, _second, name="") == "first"
        await idem.close()

    resting = asyncio.new_event_loop()
    try:
        resting.run_until_complete(first())
        drive(second())
        resting.run_until_complete(end())
    finally:
        resting.close()


def test_a_loop_that_goes_on_in_another_thread_is_found_there():
    """What belongs to a loop belongs to it in whichever thread it runs."""
    idem = AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING))

    async def run() -> str:
        return await idem.run(KEY, _first, name="")

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(run()) == "first"
        worker = Worker(lambda: loop.run_until_complete(run()))
        assert worker.result() == "first"
        loop.run_until_complete(idem.close())
    finally:
        loop.close()


def test_a_loop_that_went_on_elsewhere_is_not_taken_for_the_next_one_here():
    """Its first thread runs another loop while it is in the middle of a step in the second one."""
    idem = AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING))
    hold = Hold()

    async def run() -> str:
        return await idem.run(KEY, _first, name="")

    async def run_and_stand_still() -> None:
        assert await run() == "first"
        hold()

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(run()) == "first"
        worker = Worker(lambda: loop.run_until_complete(run_and_stand_still()))
        hold.reached()
        with pytest.raises(InvalidInput, match="make one per loop"):
            drive(run())
        hold.open()
        worker.result()
        loop.run_until_complete(idem.close())
    finally:
        loop.close()


def test_two_live_loops_are_refused_clearly():
    """Two loops at once would share what belongs to one; the error says what to do."""
    idem = AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING))
    hold = Hold()

    async def first() -> None:
        async with idem:
            assert await idem.run(KEY, _first) == "first"
            await asyncio.to_thread(hold)

    async def second() -> None:
        with pytest.raises(InvalidInput, match="make one per loop"):
            await idem.run(KEY, _second)

    runner = Worker(drive, first())
    hold.reached()
    drive(second())
    hold.open()
    runner.result()


def test_blocking_operation_may_run_a_loop_of_its_own(url):
    """A sync operation that calls asyncio.run inside works: no loop is hidden around it."""
    with Idempotency(url) as idem:

        def operation() -> str:
            attempt = current_attempt()

            async def inside() -> str:
                await asyncio.sleep(0)
                assert current_attempt() is attempt
                return "from the loop"

            return asyncio.run(inside())

        assert idem.run(KEY, operation) == "from the loop"


def test_async_object_inside_a_blocking_operation(url):
    """Both faces, nested, on one file."""
    with Idempotency(url) as outer:

        async def inside() -> str:
            async with AsyncIdempotency(url) as inner:
                return await inner.run("inner", _first, caller="tester")

        assert outer.run(KEY, lambda: asyncio.run(inside()), request=None) == "first"
        assert outer.read("inner", caller="tester").condition is Condition.SUCCEEDED


def test_blocking_object_inside_a_running_loop(url):
    """It blocks the loop for the time of the call, and works."""

    async def main() -> None:
        with Idempotency(url) as idem:
            assert idem.run(KEY, lambda: "first", request=None) == "first"
            assert await asyncio.to_thread(idem.run, KEY, lambda: "second", request=None) == "first"

    drive(main())


def test_one_store_for_both_objects():
    """A thread and a task race for one key: the task finds the thread's run in flight."""
    store = StagedStore()

    async def main() -> None:
        with Idempotency(store) as blocking:
            async with AsyncIdempotency(store) as tasks:
                hold = Hold()
                runner = Worker(blocking.run, KEY, hold, name="", request="r")
                await asyncio.to_thread(hold.reached)
                with pytest.raises(Exception, match="has not ended"):
                    await tasks.run(KEY, _second, name="", request="r")
                hold.open()
                await asyncio.to_thread(runner.result)
                answer = await tasks.answer(KEY, _second, name="", request="r")
                assert (answer.value, answer.replayed) == (None, True)

    drive(main())


def test_loop_goes_on_while_a_blocking_store_writes():
    """A slow disk holds up a worker thread, never the loop."""
    store = StagedStore()

    async def main() -> None:
        hold = Hold()
        store.before = lambda commit: hold()
        async with AsyncIdempotency(store) as idem:
            task = asyncio.create_task(idem.run(KEY, _first))
            await asyncio.to_thread(hold.reached)
            await turns(50)
            assert not task.done()
            hold.open()
            assert await task == "first"

    drive(main())


def test_store_that_suspends_is_refused_by_the_blocking_object():
    """The mistake is told when the object is made."""
    with pytest.raises(InvalidInput, match="use AsyncIdempotency"):
        Idempotency(StagedStore(waits=Waits.SUSPENDING))


@pytest.mark.parametrize("waits", [Waits.BLOCKING, Waits.NEVER])
def test_store_that_suspends_against_its_word_fails_loudly(waits):
    """A flow that would need a loop says so; nothing ran, and the object still works."""
    store = StagedStore(waits=waits)
    ran = []

    async def suspend(commit) -> None:
        await asyncio.sleep(0)

    store.before = suspend
    with Idempotency(store) as idem:
        with pytest.raises(FlowSuspended, match="needs an event loop"):
            idem.run(KEY, lambda: ran.append(1), request=None)
        assert ran == []
        store.before = None
        assert idem.run(KEY, lambda: "first", request=None) == "first"


def test_attempt_follows_the_context():
    """Tasks and threads that copy the context see the attempt; others are told."""

    async def main() -> None:
        async with AsyncIdempotency(StagedStore(waits=Waits.NEVER)) as idem:

            async def operation() -> list[int]:
                child_task = asyncio.create_task(_number())
                return [await child_task, await asyncio.to_thread(_plain_number)]

            assert await idem.run(KEY, operation) == [1, 1]
            with pytest.raises(Exception, match="no operation is running here"):
                current_attempt()

    drive(main())
    with Idempotency(StagedStore()) as idem:

        def operation() -> str:
            return str(Worker(current_attempt).ended())

        assert "a new thread must copy the context" in idem.run(KEY, operation)


async def _number() -> int:
    return current_attempt().number


def _plain_number() -> int:
    return current_attempt().number


def test_concurrent_tasks_see_their_own_attempts():
    """Attempts do not leak from one task into another."""

    async def main() -> None:
        async with AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING)) as idem:

            async def operation() -> str:
                before = current_attempt().key.text
                await turns()
                assert current_attempt().key.text == before
                return before

            names = [f"key {number}" for number in range(20)]
            runs = (idem.run(name, operation, caller="tester") for name in names)
            assert await asyncio.gather(*runs) == names

    drive(main())


def test_no_thread_of_the_blocking_object_but_the_heartbeat(url):
    """Running an operation starts one thread at most, whatever the number of callers."""
    with Idempotency(url) as idem:
        before = threading.active_count()
        for number in range(5):
            idem.run(f"key {number}", lambda: 1, caller="tester", request=None)
        names = [thread.name for thread in threading.enumerate()]
        assert threading.active_count() == before + 1
        assert names.count("retrysafe-heartbeat") == 1
