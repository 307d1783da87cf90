"""Event loops that end without `close`, as every `asyncio.run` may.

Attacked: the moment after the last line of `main`. The loop cancels all tasks that it finds and is
closed, while the outcomes of operations that have run still wait for the store: in the queue, on
their way, or handed over by callers that were cancelled before.
Must hold: each of these outcomes is stored before the loop is closed, and the operations are never
run again. What cannot be stored in time is told as an error, with its key and its operation.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator

import anyio
import psycopg
import pytest
import uvloop

from retrysafe import AsyncIdempotency, Idempotency, current_attempt
from retrysafe.core.model import State
from retrysafe.runtime import task_ports

# Nobody closes anything here, which is the point: the drivers warn of what they find open. uvloop
# hangs when such a warning is made an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# What the ended loops leave, until the process ends: tasks that never ended, and their sockets. A
# later test that meets them in its garbage would fail for them.
_KEPT: list[AsyncIdempotency] = []

# More than two full batches: most of them are still in the queue when the loop ends.
COUNT = 300
RUNNERS = {
    "asyncio.run": asyncio.run,
    "uvloop.run": uvloop.run,
    "anyio.run": lambda flow: anyio.run(lambda: flow),
}


class HeldStore:
    """A store that lets nobody write while it is held; by another connection, as others do it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opened: list[AsyncIdempotency] = []
        if url.startswith("sqlite"):
            path = url.removeprefix("sqlite:///")
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._statement = "BEGIN IMMEDIATE"
        else:
            plain, _, self._schema = url.partition("?schema=")
            self._connection = psycopg.connect(plain)
            self._statement = f"LOCK TABLE {self._schema}.keys IN ACCESS EXCLUSIVE MODE"

    def opened(self) -> AsyncIdempotency:
        """One that nobody closes, but whose threads end with the test."""
        self._opened.append(AsyncIdempotency(self.url, caller="shop"))
        _KEPT.append(self._opened[-1])
        return self._opened[-1]

    def hold(self) -> None:
        self._connection.execute(self._statement)

    def release(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        while self._opened:
            parts = self._opened.pop()._calls._bound.loop_ports
            if parts is not None:
                parts.heartbeat.stop(10)
                if parts.threaded is not None:
                    parts.threaded.end_workers()
        if not self.url.startswith("sqlite"):
            # What a closed loop was in the middle of stays open, with its locks.
            self._connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND position(%s in query) > 0",
                [self._schema],
            )
        self._connection.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def held(request, tmp_path):
    """The store on each database, migrated, and what holds it."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
        with Idempotency(url, caller="shop") as idem:
            idem.sweep()
    else:
        url = request.getfixturevalue("migrated_url")
    store = HeldStore(url)
    yield store
    store.close()


class Charges:
    """Many charges that have run, and whose outcomes wait for the store."""

    def __init__(self, held: HeldStore, count: int = COUNT) -> None:
        self.idem = held.opened()
        self.ran: list[int] = []
        self._held = held
        self._count = count

    async def charge(self, number: int) -> int:
        """Ends together with all the others, when the store lets nobody write any more."""
        self.ran.append(number)
        if len(self.ran) == self._count:
            self._held.hold()
            self._all_ran.set()
        await self._all_ran.wait()
        return number

    async def begin(self) -> list[asyncio.Task[int]]:
        """Returns when all of them wait for the store."""
        self._all_ran = asyncio.Event()
        runs = [
            asyncio.create_task(self.idem.run(f"k-{number}", self.charge, number))
            for number in range(self._count)
        ]
        await self._all_ran.wait()
        while self._queued() < self._count:  # noqa: ASYNC110 — the queue has no event to wait for.
            await asyncio.sleep(0)
        return runs

    async def have_left(self) -> None:
        """Returns when nothing is queued: all of it is on its way to the store."""
        while self.idem._calls._bound.loop_ports.group_commit._endings:  # noqa: ASYNC110 — as above.
            await asyncio.sleep(0.01)

    def _queued(self) -> int:
        commit = self.idem._calls._bound.loop_ports.group_commit
        batches = commit._batches.values()
        return sum(len(batch.settlements) for batch in batches) + len(commit._endings)

    async def release_at_the_end(self) -> AsyncGenerator[None, None]:
        """The store is back when the loop has cancelled all tasks, and not before."""
        try:
            yield
        finally:
            # What was cancelled on its way has reached the server by then.
            await asyncio.sleep(0.1)
            self._held.release()

    def require_stored(self) -> None:
        """Every outcome is there, and nothing ran twice."""
        assert sorted(self.ran) == list(range(self._count))
        with Idempotency(self._held.url, caller="shop") as reader:
            stored = [reader.read(f"k-{number}").record for number in range(self._count)]
        assert {record.state for record in stored} == {State.SUCCEEDED}


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_queued_is_stored_when_the_loop_ends(held, runner, caplog):
    """The callers are cancelled by the end of the loop itself."""
    charges = Charges(held)

    async def main() -> None:
        await charges.begin()
        await anext(release)

    release = charges.release_at_the_end()
    RUNNERS[runner](main())
    charges.require_stored()
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_cancelled_callers_left_is_stored_when_the_loop_ends(held, runner, caplog):
    """The callers were cancelled before; what finishes their writes must survive the end."""
    charges = Charges(held)

    async def main() -> None:
        runs = await charges.begin()
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)
        await anext(release)

    release = charges.release_at_the_end()
    RUNNERS[runner](main())
    charges.require_stored()
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


def test_what_is_on_its_way_for_cancelled_callers_is_not_taken_back(held, caplog):
    """The end of the loop cancels neither the statement nor who waits for it, nor does it close
    the connection under them: nobody else is left who could write again."""
    charges = Charges(held, count=3)

    async def main() -> None:
        runs = await charges.begin()
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)
        if held.url.startswith("postgresql"):
            # Beside the first batch, once that is held up. SQLite takes one at a time.
            await charges.have_left()
        await anext(release)

    release = charges.release_at_the_end()
    asyncio.run(main())
    charges.require_stored()
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


def test_the_result_of_a_step_is_stored_when_the_loop_ends(held):
    """A step that has run is not run again because its loop ended."""
    charges = Charges(held)
    idem = charges.idem
    calls = []

    async def reserve() -> str:
        calls.append("reserve")
        held.hold()
        reserved.set()
        return "reserved"

    async def order() -> None:
        await current_attempt().step("reserve", reserve)

    async def main() -> None:
        nonlocal reserved
        reserved = asyncio.Event()
        tasks.append(asyncio.create_task(idem.run("k", order, request=None)))
        await reserved.wait()
        await asyncio.sleep(0)
        await anext(release)

    reserved = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    release = charges.release_at_the_end()
    asyncio.run(main())
    with Idempotency(held.url, caller="shop") as reader:
        assert [step.name for step in reader.read("k").steps] == ["reserve"]
    assert calls == ["reserve"]


def test_what_cannot_be_stored_in_time_is_reported(held, monkeypatch, caplog):
    """The store does not come back: the loop ends all the same, and every key is in the log."""
    monkeypatch.setattr(task_ports, "LAST_WRITES_SECONDS", 0.2)
    charges = Charges(held, count=5)

    async def main() -> None:
        await charges.begin()

    asyncio.run(main())
    told = [line.getMessage() for line in caplog.records if line.levelno >= logging.ERROR]
    held.release()
    assert len(told) == 5
    for number in range(5):
        (line,) = (line for line in told if line.startswith(f"settle failed: key 'k-{number}', "))
        assert "Charges.charge, attempt 1: the event loop ended before the store had" in line


LEFT_OPEN = """
import asyncio, sqlite3, sys
from retrysafe import AsyncIdempotency

path = sys.argv[1]
idem = AsyncIdempotency(f"sqlite:///{path}", caller="shop")

async def charge():
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    kept.append(holder)

async def main():
    run = asyncio.create_task(idem.run("k", charge))
    while not kept:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    if sys.argv[2] == "cancelled":
        run.cancel()
        await asyncio.wait([run])
    else:
        kept.append(run)

kept = []
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
kept[0].rollback()
"""


@pytest.mark.parametrize("caller", ["cancelled", "waiting"])
def test_a_loop_that_is_only_closed_is_told_of_at_the_end_of_the_process(caller, tmp_path):
    """Without `asyncio.run` nobody ends the tasks of a loop; what they owed is named at least."""
    command = [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "shop.db"), caller]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert "settle failed: key 'k', operation __main__.charge, attempt 1: the " in ended.stderr
