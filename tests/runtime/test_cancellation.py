"""Cancellation and interrupts at each stage: the key is never freed, an outcome is never lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    InFlight,
    OperationInFlight,
    Policy,
    StoreUnavailable,
)
from retrysafe.core.ports import Waits
from retrysafe.observe import Event
from retrysafe.stores import Condition
from tests.runtime.staged import (
    KEY,
    PATIENCE_SECONDS,
    Clock,
    Hold,
    StagedStore,
    TaskHold,
    drive,
    raised,
    turns,
)

POLICY = Policy(lease=timedelta(seconds=30))
WAIT = POLICY.with_changes(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=PATIENCE_SECONDS))


class Scene:
    """An object for tasks over a store with a clock, and an operation that notes its runs."""

    def __init__(self, waits: Waits = Waits.SUSPENDING) -> None:
        self.clock = Clock()
        self.store = StagedStore(waits=waits, now_ms=self.clock)
        self.heard: list[Event] = []
        self.idem = AsyncIdempotency(self.store, policy=POLICY, observers=[self.heard.append])
        self.ran: list[str] = []

    def operation(self, name: str, hold: TaskHold | None = None):
        async def run() -> str:
            self.ran.append(name)
            if hold is not None:
                await hold()
            return name

        return run

    def start(self, name: str, hold: TaskHold | None = None, policy=None) -> asyncio.Task:
        return asyncio.create_task(self.answer(name, hold, policy))

    async def start_until(self, rows: str) -> tuple[asyncio.Task, TaskHold]:
        """A run that has its claims, or its settlements, on their way; they wait for the hold."""
        hold = TaskHold()
        self.store.before = lambda commit: hold() if getattr(commit, rows) else None
        task = self.start("first")
        await hold.reached()
        return task, hold

    async def answer(self, name: str, hold: TaskHold | None = None, policy=None):
        return await self.idem.answer(
            KEY, self.operation(name, hold), name="", request="r", policy=policy
        )

    async def condition(self) -> Condition:
        stored = await self.store.inner.read(KEY)
        return Condition.ABSENT if stored is None else stored.condition


async def _cancel(task: asyncio.Task) -> None:
    task.cancel()
    assert isinstance(await raised(task), asyncio.CancelledError)


def test_cancelled_while_the_claim_is_under_way():
    """Nothing ran; a claim that was made all the same is freed by its lease alone."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:
            task, hold = await scene.start_until("claims")
            await _cancel(task)
            hold.open()
            await turns()
            scene.store.before = None
            assert scene.ran == []
            assert await scene.condition() is Condition.RUNNING
            with pytest.raises(OperationInFlight):
                await scene.answer("second")
            scene.clock.advance(30)
            answer = await scene.answer("third")
            assert (answer.value, answer.attempt) == ("third", 2)
            assert scene.ran == ["third"]

    drive(main())


@pytest.mark.parametrize("waits", list(Waits))
def test_cancelled_while_the_operation_runs(waits):
    """Nobody knows how far it got: the key stays pending until its lease ends."""

    async def main() -> None:
        scene = Scene(waits)
        async with scene.idem:
            hold = TaskHold()
            task = scene.start("first", hold)
            await hold.reached()
            await _cancel(task)
            assert await scene.condition() is Condition.RUNNING
            assert scene.store.kinds == [["claim"]]
            with pytest.raises(OperationInFlight):
                await scene.answer("second")
            # Nothing renews the lease of an operation that no longer runs.
            assert scene.idem._calls._bound.loop_ports.heartbeat.leases == []
            scene.clock.advance(30)
            answer = await scene.answer("third")
            assert (answer.value, answer.attempt) == ("third", 2)
            assert scene.ran == ["first", "third"]

    drive(main())


def test_cancelled_while_the_outcome_is_being_stored():
    """The operation is done: its outcome is stored without the caller, and replayed."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:
            task, hold = await scene.start_until("settlements")
            await _cancel(task)
            assert await scene.condition() is Condition.RUNNING
            hold.open()
            await scene.idem._calls._bound.loop_ports.background.drain()
            assert await scene.condition() is Condition.SUCCEEDED
            story = ["called", "claimed", "answered", "completed"]
            assert [event.kind for event in scene.heard] == story
            assert scene.heard[0].result == "executed"  # As far as its caller will ever know.
            answer = await scene.answer("second")
            assert (answer.value, answer.replayed) == ("first", True)
            assert scene.ran == ["first"]

    drive(main())


def test_cancelled_while_a_blocking_store_writes_the_outcome():
    """The same when the write is in a worker thread, which cannot be cancelled."""

    async def main() -> None:
        scene = Scene(Waits.BLOCKING)
        async with scene.idem:
            hold = Hold()
            scene.store.before = lambda commit: hold() if commit.settlements else None
            task = scene.start("first")
            await asyncio.to_thread(hold.reached)
            await _cancel(task)
            hold.open()
            await scene.idem._calls._bound.loop_ports.background.drain()
            assert await scene.condition() is Condition.SUCCEEDED
            assert (await scene.answer("second")).value == "first"

    drive(main())


@pytest.mark.parametrize("error", [StoreUnavailable("down"), OSError("odd")])
def test_outcome_of_a_cancelled_caller_is_stored_although_the_store_fails_at_first(error):
    """The caller is gone and the store is down: the write is tried again in the background."""

    async def main() -> None:
        scene = Scene()
        hold = TaskHold()
        tries = []

        async def fail_at_first(commit) -> None:
            if commit.settlements:
                tries.append(len(commit.settlements))
                await hold()
                if len(tries) <= 3:
                    raise error

        scene.store.before = fail_at_first
        async with scene.idem:
            task = scene.start("first")
            await hold.reached()
            await _cancel(task)
            hold.open()
            # Closing waits for the last write, so nothing more is needed here.
        assert len(tries) == 4
        assert await scene.condition() is Condition.SUCCEEDED
        assert scene.ran == ["first"]

    drive(main())


def test_caller_that_is_cancelled_twice_still_leaves_its_outcome():
    """Impatient callers cancel again; the last write does not depend on them."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:
            task, hold = await scene.start_until("settlements")
            task.cancel()
            task.cancel()
            assert isinstance(await raised(task), asyncio.CancelledError)
            hold.open()
        assert await scene.condition() is Condition.SUCCEEDED

    drive(main())


def test_cancelled_follower_disturbs_nobody():
    """A waiting duplicate that is cancelled leaves the run and the other waiters alone."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:
            hold = TaskHold()
            first = scene.start("first", hold)
            await hold.reached()
            impatient = scene.start("second", policy=WAIT)
            patient = scene.start("third", policy=WAIT)
            await turns()
            await _cancel(impatient)
            hold.open()
            assert (await first).value == "first"
            assert (await patient).value == "first"
            assert scene.ran == ["first"]

    drive(main())


def test_follower_of_a_cancelled_run_waits_for_the_lease():
    """The leader is cancelled in its operation: a waiting duplicate takes over, but not early."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:
            hold = TaskHold()
            first = scene.start("first", hold)
            await hold.reached()
            second = scene.start("second", policy=WAIT)
            await turns()
            await _cancel(first)
            polls = len(scene.store.commits) + 2
            await asyncio.to_thread(
                scene.store.wait_until, lambda: len(scene.store.commits) > polls
            )
            assert scene.ran == ["first"]
            scene.clock.advance(30)
            answer = await second
            assert (answer.value, answer.attempt) == ("second", 2)

    drive(main())


def test_timeout_around_a_run_is_a_cancellation():
    """`asyncio.timeout` ends the wait; the key is left to its lease, as for any cancellation."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await scene.answer("first", TaskHold())
            assert await scene.condition() is Condition.RUNNING

    drive(main())


def test_operation_that_cancels_itself_is_no_failure():
    """CancelledError from inside the operation is no outcome either."""

    async def main() -> None:
        scene = Scene()
        async with scene.idem:

            async def operation() -> None:
                raise asyncio.CancelledError

            task = asyncio.create_task(scene.idem.run(KEY, operation, request=None))
            assert isinstance(await raised(task), asyncio.CancelledError)
            assert await scene.condition() is Condition.RUNNING

    drive(main())


# Threads are not cancelled but interrupted.


class _ExitNow(BaseException):
    """Not an Exception: a worker that is told to go."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, _ExitNow])
def test_interrupted_operation_leaves_the_key_to_its_lease(kind):
    """Ctrl-C and exit are no failures: the key stays pending, and nothing renews it."""
    clock = Clock()
    store = StagedStore(now_ms=clock)
    with Idempotency(store, policy=POLICY) as idem:

        def operation() -> None:
            raise kind

        with pytest.raises(kind):
            idem.run(KEY, operation, name="", request=None)
        assert idem.read(KEY).condition is Condition.RUNNING
        assert store.kinds == [["claim"]]
        with pytest.raises(OperationInFlight):
            idem.run(KEY, lambda: "second", request=None)
        assert idem._calls._heartbeat.leases == []
        clock.advance(30)
        assert idem.answer(KEY, lambda: "third", request=None).attempt == 2


def test_interrupt_while_the_outcome_is_stored_stores_it_first():
    """The thread is interrupted in its last write: it writes once more, then gives way."""
    store = StagedStore()
    with Idempotency(store, policy=POLICY) as idem:
        interrupts = [KeyboardInterrupt()]

        def interrupt(commit) -> None:
            if commit.settlements and interrupts:
                raise interrupts.pop()

        store.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            idem.run(KEY, lambda: "first", name="", request="r")
        answer = idem.answer(KEY, lambda: "second", request="r")
        assert (answer.value, answer.replayed) == ("first", True)
        assert store.kinds == [["claim"], ["complete"], ["complete"], ["claim"]]


def test_second_interrupt_ends_the_last_write():
    """Whoever interrupts twice means it: the thread leaves, and the lease frees the key."""
    store = StagedStore()
    with Idempotency(store, policy=POLICY) as idem:

        def interrupt(commit) -> None:
            if commit.settlements:
                raise KeyboardInterrupt

        store.before = interrupt
        with pytest.raises(KeyboardInterrupt):
            idem.run(KEY, lambda: "first", name="", request="r")
        assert idem.read(KEY).condition is Condition.RUNNING
        # The object works on for other keys.
        store.before = None
        assert idem.run("another", lambda: 1, caller="tester", request=None) == 1
