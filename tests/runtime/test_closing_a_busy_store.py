"""close() keeps its limit when the store cannot be hurried, and what goes on then harms nobody."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy
from retrysafe.core.ports import Waits
from retrysafe.runtime.calls import calls_of
from retrysafe.runtime.closing import Limit, end_aside_within, end_within
from retrysafe.stores import Condition, SqliteStore
from tests.runtime.staged import KEY, Hold, StagedStore, TaskHold, Worker, drive, until

BRIEFLY = timedelta(milliseconds=20)
# Far above the limit, for a slow machine, and far below the ten seconds that SQLite waits.
SOON_SECONDS = 5.0
OFTEN = Policy(lease=timedelta(milliseconds=300))


@pytest.fixture
def renewing(monkeypatch):
    """Set when a renewal has reached the store."""
    reached = threading.Event()
    extend = SqliteStore.extend

    def noting(self, extensions, timeout_seconds):
        reached.set()
        return extend(self, extensions, timeout_seconds)

    monkeypatch.setattr(SqliteStore, "extend", noting)
    return reached


@pytest.fixture
def locked(tmp_path):
    """Takes the write lock of the file, and gives it back."""
    with closing(sqlite3.connect(tmp_path / "keys.db", isolation_level=None)) as connection:
        yield connection
        assert not connection.in_transaction


def test_close_keeps_its_limit_while_a_renewal_waits_for_a_locked_file(
    url, locked, renewing, own_threads
):
    """Neither the heartbeat nor the store is waited for longer; the outcome is stored after it."""
    idem = Idempotency(url, policy=OFTEN)
    hold = Hold()
    runner = Worker(idem.run, KEY, hold, request=None)
    hold.reached()
    renewing.clear()
    locked.execute("BEGIN IMMEDIATE")
    assert renewing.wait(30)
    began = time.monotonic()
    assert idem.close(BRIEFLY) is False
    assert time.monotonic() - began < SOON_SECONDS
    locked.execute("ROLLBACK")
    hold.open()
    assert runner.ended() is None
    assert idem.close() is True
    until(lambda: not own_threads())
    with Idempotency(url) as other:
        assert other.read(KEY).condition is Condition.SUCCEEDED


def test_async_close_keeps_its_limit_while_a_renewal_waits_for_a_locked_file(
    url, locked, renewing, own_threads
):
    """The same in an event loop, which is not stopped meanwhile."""

    async def main() -> None:
        idem = AsyncIdempotency(url, policy=OFTEN)
        hold = TaskHold()
        runner = asyncio.create_task(idem.run(KEY, hold, request=None))
        await hold.reached()
        renewing.clear()
        locked.execute("BEGIN IMMEDIATE")
        assert await asyncio.to_thread(renewing.wait, 30)
        began = time.monotonic()
        assert await idem.close(BRIEFLY) is False
        assert time.monotonic() - began < SOON_SECONDS
        locked.execute("ROLLBACK")
        hold.open()
        await runner
        assert await idem.close() is True

    drive(main())
    until(lambda: not own_threads())
    with Idempotency(url) as other:
        assert other.read(KEY).condition is Condition.SUCCEEDED


def test_close_keeps_its_limit_while_an_operator_waits_for_a_locked_file(url, locked, own_threads):
    """Nothing runs and nothing is renewed: still a sweep may be inside the store."""
    idem = Idempotency(url)
    idem.run(KEY, lambda: 1, request=None)
    store = calls_of(idem).store
    locked.execute("BEGIN IMMEDIATE")
    sweeper = Worker(idem.release, KEY)
    until(store._connections._lock.locked)
    began = time.monotonic()
    assert idem.close(BRIEFLY) is True
    assert time.monotonic() - began < SOON_SECONDS
    locked.execute("ROLLBACK")
    assert "the operation succeeded" in str(sweeper.ended())
    assert idem.close() is True
    until(lambda: not own_threads())


def test_async_close_keeps_its_limit_while_a_commit_hangs():
    """The last write of a cancelled task counts as running, goes on, and is stored."""
    store = StagedStore(waits=Waits.SUSPENDING)

    async def operation() -> int:
        return 1

    async def main() -> None:
        idem = AsyncIdempotency(store)
        hold = TaskHold()
        store.before = lambda commit: hold() if commit.settlements else None
        runner = asyncio.create_task(idem.run(KEY, operation))
        await hold.reached()
        runner.cancel()
        await asyncio.wait((runner,))
        began = time.monotonic()
        assert await idem.close(BRIEFLY) is False
        assert time.monotonic() - began < SOON_SECONDS
        hold.open()
        assert await idem.close() is True
        assert (await store.inner.read(KEY)).condition is Condition.SUCCEEDED

    drive(main())


def test_async_close_keeps_its_limit_while_a_store_does_not_close():
    """A store that suspends is given up, as a pool whose connections are in use."""
    store = StagedStore(waits=Waits.SUSPENDING)

    async def main() -> None:
        idem = AsyncIdempotency(store)
        idem._calls.owns_store = True
        hold = TaskHold()
        store.close = hold
        began = time.monotonic()
        assert await idem.close(BRIEFLY) is True
        assert time.monotonic() - began < SOON_SECONDS
        await hold.reached()

    drive(main())


def test_async_close_keeps_its_limit_while_a_renewal_cannot_be_cancelled():
    """As a driver that waits for its server to confirm that the statement was given up."""
    store = StagedStore(waits=Waits.SUSPENDING)

    async def main() -> None:
        idem = AsyncIdempotency(store, policy=OFTEN)
        hold, renewal = TaskHold(), TaskHold()

        async def stubborn() -> None:
            try:
                await renewal()
            except asyncio.CancelledError:
                await renewal()

        store.before = lambda commit: stubborn() if commit.is_renewal else None
        runner = asyncio.create_task(idem.run(KEY, hold, request=None))
        await renewal.reached()
        began = time.monotonic()
        assert await idem.close(BRIEFLY) is False
        assert time.monotonic() - began < SOON_SECONDS
        renewal.open()
        hold.open()
        await runner
        assert await idem.close() is True

    drive(main())


# The thread that something ends in.


def ended_in_thread(work, wait):
    end_within(work, Limit(wait))


def ended_beside_a_loop(work, wait):
    drive(end_aside_within(work, Limit(wait)))


ENDINGS = pytest.mark.parametrize("end", [ended_in_thread, ended_beside_a_loop])


@ENDINGS
def test_what_ends_in_time_tells_what_it_raised(end):
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        end(work, timedelta(seconds=30))


@ENDINGS
def test_what_fails_after_the_limit_is_told_to_the_log(end, caplog, own_threads):
    """Nobody waits for it any more, and nobody else would hear of it."""
    hold = Hold()

    def work() -> None:
        hold()
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR, "retrysafe"):
        end(work, timedelta(0))
        hold.open()
        until(lambda: not own_threads())
    assert [record.getMessage() for record in caplog.records] == ["closing failed after its limit"]


@ENDINGS
def test_where_no_thread_can_be_had_it_ends_in_place(end, monkeypatch):
    """At the end of the process Python starts none, and `close` may be called just then."""
    ended = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    end(lambda: ended.append(threading.current_thread()), timedelta(seconds=30))
    assert ended == [threading.current_thread()]


def test_any_time_may_be_waited():
    """Longer than a thread can wait for is for ever."""
    with Idempotency("memory://", caller="tester") as idem:
        idem.run("k", lambda: 1, request=None)
        assert idem.close(timedelta.max) is True
