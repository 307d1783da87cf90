"""close(): waits for what runs, with a limit, and leaves no thread, task or connection behind."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InvalidInput
from retrysafe.core.ports import Waits
from retrysafe.errors import Closed
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, SqliteStore
from tests.runtime.staged import KEY, Hold, StagedStore, TaskHold, Worker, drive, raised, turns

BRIEFLY = timedelta(milliseconds=20)


def test_close_waits_for_running_operations(url):
    """A close that has time enough ends after the last operation, whose outcome is stored."""
    idem = Idempotency(url)
    hold = Hold()
    runner = Worker(idem.run, KEY, hold, request=None)
    hold.reached()
    closer = Worker(idem.close)
    _until_closed(idem)
    with pytest.raises(Closed):
        idem.run(KEY, hold, request=None)
    assert closer.is_alive()
    hold.open()
    assert closer.result() is True
    assert runner.ended() is None
    with Idempotency(url) as other:
        assert other.read(KEY).condition is Condition.SUCCEEDED


def _until_closed(idem: Idempotency) -> None:
    ticks = threading.Event()
    for _ in range(30_000):
        if idem._calls._gate.is_closed:
            return
        ticks.wait(0.001)
    pytest.fail("close() does not begin")


def test_close_gives_up_after_its_limit():
    """False when an operation still runs; nothing renews it any more, and it still settles."""
    store = StagedStore()
    idem = Idempotency(store)
    hold = Hold()
    runner = Worker(idem.run, KEY, hold, request=None)
    hold.reached()
    assert idem.close(BRIEFLY) is False
    assert not [item for item in threading.enumerate() if item.name == "retrysafe-heartbeat"]
    with pytest.raises(Closed):
        idem.run("another", lambda: 1, caller="tester", request=None)
    hold.open()
    assert runner.ended() is None
    assert run_sync(store.inner.read(KEY)).condition is Condition.SUCCEEDED
    assert idem.close() is True


def test_operation_that_outlives_close_still_stores_its_outcome_in_sqlite(url):
    """The store was closed under it: its last write opens the file once more, and closes it."""
    idem = Idempotency(url)
    hold = Hold()
    runner = Worker(idem.run, KEY, hold, request=None)
    hold.reached()
    assert idem.close(BRIEFLY) is False
    hold.open()
    assert runner.ended() is None
    assert idem.close() is True
    with Idempotency(url) as other:
        assert other.read(KEY).condition is Condition.SUCCEEDED


def test_closed_object_refuses_every_call(url):
    """Also a replay that the cache could serve."""
    idem = Idempotency(url)
    idem.run(KEY, lambda: 1, request=None)
    assert idem.close() is True
    for use in (
        lambda: idem.run(KEY, lambda: 1, request=None),
        lambda: idem.answer(KEY, lambda: 1, request=None),
    ):
        with pytest.raises(Closed):
            use()


def test_close_twice_and_close_unused(url):
    """Both are harmless."""
    idem = Idempotency(url)
    assert idem.close() is True
    assert idem.close() is True


def test_with_block_closes(url):
    """Leaving the block closes, and what it raises passes through."""
    with pytest.raises(ZeroDivisionError), Idempotency(url) as idem:
        idem.run(KEY, lambda: 1 / 0, request=None)
    with pytest.raises(Closed):
        idem.run(KEY, lambda: 1, request=None)


def test_store_object_stays_its_owners(tmp_path):
    """A store that was passed in is not closed: another object may be using it."""
    store = SqliteStore(tmp_path / "keys.db")
    with Idempotency(store) as idem:
        idem.run(KEY, lambda: 1, request=None)
    assert store._connections.writer is not None
    run_sync(store.close())


# The same for tasks.


async def running(idem):
    """A run that is in its operation, and what holds it there."""
    hold = TaskHold()
    runner = asyncio.create_task(idem.run(KEY, hold, request=None))
    await hold.reached()
    return runner, hold


def test_async_close_waits_for_running_operations(url):
    """The operation ends, its outcome is stored, then close() returns True."""

    async def main() -> None:
        idem = AsyncIdempotency(url)
        runner, hold = await running(idem)
        closer = asyncio.create_task(idem.close())
        await turns()
        assert not closer.done()
        assert isinstance(await raised(idem.run(KEY, hold, request=None)), Closed)
        hold.open()
        assert await closer is True
        await runner

    drive(main())
    with Idempotency(url) as other:
        assert other.read(KEY).condition is Condition.SUCCEEDED


@pytest.mark.parametrize("waits", list(Waits))
def test_async_close_gives_up_after_its_limit(waits):
    """False when an operation still runs; its outcome is stored when it ends."""
    store = StagedStore(waits=waits)

    async def main() -> None:
        idem = AsyncIdempotency(store)
        runner, hold = await running(idem)
        assert await idem.close(BRIEFLY) is False
        hold.open()
        await runner
        assert (await store.inner.read(KEY)).condition is Condition.SUCCEEDED
        assert await idem.close() is True

    drive(main())


def test_async_operation_that_outlives_close_still_stores_its_outcome_in_sqlite(url):
    """The owned store was closed under it: its last write still reaches the file."""

    async def main() -> None:
        idem = AsyncIdempotency(url)
        runner, hold = await running(idem)
        assert await idem.close(BRIEFLY) is False
        hold.open()
        await runner
        assert await idem.close() is True

    drive(main())
    with Idempotency(url) as other:
        assert other.read(KEY).condition is Condition.SUCCEEDED


def test_claim_that_outlives_close_starts_no_renewal():
    """A call that was still claiming when close() gave up runs, without a timer left behind."""
    store = StagedStore(waits=Waits.SUSPENDING)

    async def operation() -> int:
        return 1

    async def main() -> None:
        idem = AsyncIdempotency(store)
        hold = TaskHold()
        store.before = lambda commit: hold() if commit.claims else None
        runner = asyncio.create_task(idem.run(KEY, operation))
        await hold.reached()
        closer = asyncio.create_task(idem.close(BRIEFLY))
        for _ in range(30_000):
            # close() gave up waiting for the call when it stops the renewals.
            if idem._calls._bound.loop_ports.heartbeat.is_stopped:
                break
            await asyncio.sleep(0.001)
        hold.open()
        assert await closer is False
        assert await runner == 1
        beats = idem._calls._bound.loop_ports.heartbeat._beats.values()
        assert [beat._timer for beat in beats] == [None]

    drive(main())


def test_async_close_twice_and_close_unused(url):
    """Both are harmless."""

    async def operation() -> int:
        return 1

    async def main() -> None:
        unused = AsyncIdempotency(url)
        assert await unused.close() is True
        idem = AsyncIdempotency(url)
        assert await idem.run(KEY, operation) == 1
        assert await idem.close() is True
        assert await idem.close() is True
        async with AsyncIdempotency(url) as inner:
            assert await inner.run(KEY, operation) == 1
            assert await inner.close() is True

    drive(main())


def test_async_object_closed_in_one_loop_stays_closed_in_the_next(url):
    """A closed object does not come to life with the next asyncio.run."""

    async def operation() -> int:
        return 1

    idem = AsyncIdempotency(url)

    async def use_and_close() -> None:
        await idem.run(KEY, operation)
        await idem.close()

    async def use() -> None:
        with pytest.raises(Closed):
            await idem.run(KEY, operation)

    drive(use_and_close())
    drive(use())


def test_async_store_object_stays_its_owners(tmp_path):
    """The worker threads end with the object; the store and its connection do not."""
    store = SqliteStore(tmp_path / "keys.db")

    async def operation() -> int:
        return 1

    async def main() -> None:
        async with AsyncIdempotency(store) as idem:
            await idem.run(KEY, operation)

    drive(main())
    assert store._connections.writer is not None
    run_sync(store.close())


def test_a_limit_that_is_no_timedelta_is_refused(url):
    """Seconds or milliseconds: nobody has to guess. The object stays open."""
    idem = Idempotency(url)
    for wrong in (5, 0.5, None):
        with pytest.raises(InvalidInput, match=r"close takes a timedelta, got .*seconds=5"):
            idem.close(wrong)
    assert idem.run(KEY, lambda: 1, request=None) == 1
    assert idem.close() is True

    async def main() -> None:
        made = AsyncIdempotency(url)
        with pytest.raises(InvalidInput, match="close takes a timedelta"):
            await made.close(5)
        assert await made.run("another", turns, caller="tester") is None
        assert await made.close() is True

    drive(main())
