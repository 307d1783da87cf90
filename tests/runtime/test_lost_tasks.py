"""A task that nobody holds is ended by the garbage collector, in the middle of anything."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar

import pytest

from retrysafe import GLOBAL, AsyncIdempotency, current_attempt
from retrysafe.core.cache import ReplayCache
from retrysafe.core.model import Condition
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.steps.history import StepHistory
from retrysafe.errors import OperationInFlight
from retrysafe.stores import SqliteStore
from retrysafe.stores.memory.store import MemoryStore

LIMIT_SECONDS = 10
HASTY = Policy(in_flight=InFlight.FAIL)


@pytest.fixture(autouse=True)
def _no_collection_of_its_own_accord() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class _Client:
    """Ends by awaiting, as every client of a network does."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)


_own: ContextVar[int] = ContextVar("own")


async def _stand_still(begun: asyncio.Event) -> None:
    begun.set()
    await asyncio.get_running_loop().create_future()


async def _within_a_client(begun: asyncio.Event) -> None:
    async with _Client():
        await _stand_still(begun)


async def _with_a_variable(begun: asyncio.Event) -> None:
    token = _own.set(1)
    try:
        await _stand_still(begun)
    finally:
        _own.reset(token)


async def _begin_and_lose(
    idem: AsyncIdempotency,
    ended: list[str],
    operation: Callable[[asyncio.Event], Awaitable[None]] = _stand_still,
) -> None:
    """Leaves the run of the key "lost" to the next collection, in the middle of its operation."""
    # What the loop says of such a task is of no matter here.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    begun = asyncio.Event()

    async def never() -> None:
        try:
            await operation(begun)
        finally:
            ended.append("lost")

    task = asyncio.create_task(idem.run("lost", never, name="charge", request=[]))
    await begun.wait()
    del task


async def _collect(where: str) -> None:
    if where == "the loop's thread":
        gc.collect()
        return
    await asyncio.to_thread(gc.collect)


@pytest.mark.parametrize("where", ["the loop's thread", "another thread"])
@pytest.mark.parametrize("operation", [_stand_still, _within_a_client, _with_a_variable])
@pytest.mark.parametrize("make_store", [MemoryStore, SqliteStore])
def test_a_lost_operation_keeps_its_key(make_store, operation, where, tmp_path, monkeypatch):
    """Nobody knows how far it got, so only the lease frees the key, as after a cancellation."""
    # What an operation does that cannot be ended so is told there, and is of no matter here.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    store = make_store() if make_store is MemoryStore else make_store(tmp_path / "lost.db")

    async def charge() -> str:
        return "charged again"

    async def lose() -> None:
        async with AsyncIdempotency(store, caller=GLOBAL) as idem:
            ended: list[str] = []
            await _begin_and_lose(idem, ended, operation)
            await _collect(where)
            assert ended == ["lost"]
            # Whatever was written on the way out would be there by then.
            await idem.run("another", charge, name="charge")
            stored = await idem.read("lost")
            assert stored is not None
            assert stored.condition is Condition.RUNNING
            with pytest.raises(OperationInFlight):
                await idem.run("lost", charge, name="charge", policy=HASTY)

    asyncio.run(lose())
    if make_store is SqliteStore:
        asyncio.run(store.close())


def test_a_lost_step_that_ends_while_another_begins_stops_nobody(monkeypatch):
    """Both take the lock of the steps, in the same thread."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    begin, told = StepHistory.begin, []

    def collecting(self: StepHistory, *step: object) -> object:
        gc.collect()
        return begin(self, *step)

    async def quick() -> str:
        return "stepped"

    async def in_a_step() -> str:
        return await current_attempt().step("a", quick)

    async def lost_in_a_step(begun: asyncio.Event) -> None:
        await current_attempt().step("a", _stand_still, begun)

    async def both() -> None:
        idem = AsyncIdempotency(MemoryStore(), caller=GLOBAL)
        await _begin_and_lose(idem, told, lost_in_a_step)
        monkeypatch.setattr(StepHistory, "begin", collecting)
        told.append(await idem.run("other", in_a_step, request=None))

    thread = threading.Thread(target=lambda: asyncio.run(both()), daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert told == ["lost", "stepped"]


def test_a_lost_run_that_ends_while_another_is_remembered_stops_nobody(monkeypatch):
    """Both end in the same parts of the engine; neither may wait there for the other."""
    keep = ReplayCache.keep
    told: list[str] = []

    def collecting(self: ReplayCache, *outcome: object) -> None:
        # A collection may begin with any object that is made here.
        gc.collect()
        keep(self, *outcome)

    monkeypatch.setattr(ReplayCache, "keep", collecting)

    async def charge() -> str:
        return "charged"

    async def both() -> None:
        idem = AsyncIdempotency(MemoryStore(), caller=GLOBAL)
        await _begin_and_lose(idem, told)
        told.append(await idem.run("other", charge))

    # In a thread of its own: what waits for itself could not be stopped otherwise.
    thread = threading.Thread(target=lambda: asyncio.run(both()), daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    assert told == ["lost", "charged"]
