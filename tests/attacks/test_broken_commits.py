"""Attack: whatever is raised at whatever place of the group commit.

The stack ends, memory does, signals arrive in a row. What must hold: everybody who waits is told,
by an answer or by an error that says that the row may stand; the next call works.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from retrysafe import AsyncIdempotency, Idempotency, RetrysafeError, StoreUnavailable
from retrysafe.core.keys.canonical import TooDeep
from retrysafe.core.model import ClaimAnswer, Decision
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.runtime import drive, task_ports
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit import direct, tasks, threads
from retrysafe.runtime.group_commit.tasks import TaskGroupCommit
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.stores import MemoryStore
from retrysafe.testing.suite.probe import key_of, request
from tests.interrupting import Interrupted, Overflowed, at_every_place_at_once
from tests.runtime.staged import Worker, until

# Of a flow that was kept from being begun; Python says so when it is thrown away.
pytestmark = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)

# Nothing here takes a tenth of it; reaching it is a hang.
HANG_SECONDS = 20
# More frames than a whole call is deep.
FRAMES = 80


def _depth() -> int:
    frame, depth = sys._getframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _with_room(frames: int, act: Callable[[], object]) -> None:
    """Calls `act` where so many frames are left on the stack."""
    limit, hook = sys.getrecursionlimit(), sys.unraisablehook
    # What is thrown away down there is told where there is no room to tell it.
    sys.unraisablehook = lambda _: None
    sys.setrecursionlimit(_depth() + FRAMES + 50)

    def descend(left: int) -> None:
        if left:
            descend(left - 1)
        else:
            act()

    try:
        descend(FRAMES + 40 - frames)
    finally:
        sys.setrecursionlimit(limit)
        sys.unraisablehook = hook


class Watched(MemoryStore):
    """Says that a commit has begun. It has no lock in Python, which signals would leave taken."""

    def __init__(self, batches_in_flight: int) -> None:
        super().__init__()
        self._limit = batches_in_flight
        self.count = 0
        self.before: Callable[[], None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(Waits.BLOCKING, batch_limit=2, batches_in_flight=self._limit)

    async def commit(self, *rows: Any) -> Any:
        self.count += 1
        if self.before is not None:
            self.before()
        return await super().commit(*rows)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [Interrupted, Overflowed])
@pytest.mark.parametrize("batches_in_flight", [1, 2])
def test_a_carrier_that_breaks_off_anywhere_leaves_nobody_waiting(
    count: int, kind: type[Interrupted], batches_in_flight: int, monkeypatch
):
    """Two rows wait behind the commit of a third, and their threads are told of it."""
    monkeypatch.setattr(threads, "FEW_ROWS", 1)
    store = Watched(batches_in_flight)
    group = ThreadGroupCommit(store)
    numbers = iter(range(1_000_000))
    waiting: list[Worker] = []

    def claim() -> ClaimAnswer:
        return run_sync(group.claim(request(key_of(f"key-{next(numbers)}"))))

    def act() -> None:
        store.before = join_in
        with suppress(StoreUnavailable):
            claim()

    def join_in() -> None:
        store.before = None
        wanted.put(2)
        until(lambda: store.count > 1 or len(group._queue) == 2)

    def start() -> None:
        while count := wanted.get():
            waiting.extend(Worker(claim) for _ in range(count))

    # By another thread: one that is started by the struck thread would be struck in its start.
    wanted: SimpleQueue[int] = SimpleQueue()
    starter = Worker(start)
    places = 0
    modules = (threads, direct, drive)
    for places in at_every_place_at_once(count, act, *modules, kind=kind):
        store.before = None
        for worker in waiting:
            error = worker.ended()
            assert error is None or isinstance(error, StoreUnavailable), (places, error)
        assert Worker(claim).result().decision is Decision.ADMIT, places
        assert (group._carriers, group._queue) == (set(), []), places
        assert claim().decision is Decision.ADMIT, places
        waiting.clear()
        store.count = 0
    wanted.put(0)
    starter.result()
    assert places > 20


@pytest.mark.parametrize("batches_in_flight", [1, 2])
def test_a_batch_that_breaks_off_anywhere_leaves_no_task_waiting(batches_in_flight: int):
    """Rows of tasks that leave in two batches, whatever is raised in whichever place of them."""
    heard: set[type] = set()

    async def rows() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        group = TaskGroupCommit(Watched(batches_in_flight), loop)

        async def claim(name: str) -> Decision:
            return (await group.claim(request(key_of(name)))).decision

        async with asyncio.timeout(HANG_SECONDS):
            told = await asyncio.gather(*map(claim, "abc"), return_exceptions=True)
            heard.update(map(type, told))
            # One after the other; only one of them can be the one that was struck.
            later = [
                *await asyncio.gather(claim("next"), return_exceptions=True),
                *await asyncio.gather(claim("last"), return_exceptions=True),
            ]
            assert Decision.ADMIT in later
            await group.drain()
        assert (group._batches_count, group._rows_under_way) == (0, 0)

    places = 0
    modules = (tasks, direct, task_ports)
    for places in at_every_place_at_once(1, lambda: asyncio.run(rows()), *modules, kind=Overflowed):
        assert heard <= {Decision, StoreUnavailable, Overflowed}, places
    assert heard == {Decision, StoreUnavailable, Overflowed}
    assert places > 20


@pytest.fixture(params=["memory", "sqlite"])
def url(request, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'keys.db'}"


def test_a_call_where_the_stack_ends_leaves_nobody_waiting(url: str):
    """From a stack with ever less room: other threads and the next call work after each."""
    heard: set[str] = set()
    runs: list[str] = []
    with Idempotency(url, caller="tester", cache=False) as idem:
        idem.run("warm-up", lambda: 0, request=None)
        for room in range(FRAMES, 3, -1):

            def act(key: str = f"deep-{room}") -> None:
                try:
                    idem.run(key, runs.append, key, name="pay")
                except (RecursionError, RetrysafeError, TooDeep) as error:
                    heard.add(type(error).__name__)

            with suppress(RecursionError):
                _with_room(room, act)
            other = Worker(lambda key=f"other-{room}": idem.run(key, lambda: 1, request=None))
            assert other.result() == 1, f"nobody else is served after {room} frames"
            assert idem.run(f"next-{room}", lambda: 1, request=None) == 1
    assert "RecursionError" in heard
    assert runs
    assert len(runs) == len(set(runs))


def test_a_task_where_the_stack_ends_leaves_nobody_waiting(url: str):
    """The same on an event loop; closing does not wait for what never left."""
    heard: set[str] = set()

    async def main() -> None:
        async with AsyncIdempotency(url, caller="tester", cache=False) as idem:
            await idem.run("warm-up", _one)
            for room in range(FRAMES, 3, -1):
                with suppress(RecursionError):
                    _with_room_for(room, idem.run(f"deep-{room}", _one), heard)
                served = idem.run(f"next-{room}", _one)
                assert await asyncio.wait_for(served, HANG_SECONDS) == 1

    asyncio.run(asyncio.wait_for(main(), 3 * HANG_SECONDS))
    assert "RecursionError" in heard


async def _one() -> int:
    return 1


def _with_room_for(room: int, flow, heard: set[str]) -> None:
    """Takes the first step of a call; a task that goes on with it would have a stack of its own."""

    def act() -> None:
        try:
            flow.send(None)
        except StopIteration:
            pass
        except (RecursionError, RetrysafeError, TooDeep) as error:
            heard.add(type(error).__name__)

    try:
        _with_room(room, act)
    finally:
        flow.close()
