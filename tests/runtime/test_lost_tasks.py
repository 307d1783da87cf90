"""A task that nobody holds is ended by the garbage collector, in the middle of anything."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from retrysafe import GLOBAL, AsyncIdempotency
from retrysafe.core.cache import ReplayCache
from retrysafe.core.model import Condition
from retrysafe.core.policy import InFlight, Policy
from retrysafe.errors import OperationInFlight
from retrysafe.stores.memory import MemoryStore

LIMIT_SECONDS = 10
HASTY = Policy(in_flight=InFlight.FAIL)


@pytest.fixture(autouse=True)
def _no_collection_of_its_own_accord() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def _begin_and_lose(idem: AsyncIdempotency, ended: list[str]) -> None:
    """Leaves the run of the key "lost" to the next collection, in the middle of its operation."""
    # What the loop says of such a task is of no matter here.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    begun = asyncio.Event()

    async def never() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("lost")

    task = asyncio.create_task(idem.run("lost", never, name="charge"))
    await begun.wait()
    del task


def test_a_lost_operation_keeps_its_key():
    """Nobody knows how far it got, so only the lease frees the key, as after a cancellation."""

    async def charge() -> str:
        return "charged again"

    async def lose() -> None:
        idem = AsyncIdempotency(MemoryStore(), caller=GLOBAL)
        ended: list[str] = []
        await _begin_and_lose(idem, ended)
        gc.collect()
        assert ended == ["lost"]
        stored = await idem.read("lost")
        assert stored is not None
        assert stored.condition is Condition.RUNNING
        with pytest.raises(OperationInFlight):
            await idem.run("lost", charge, name="charge", policy=HASTY)

    asyncio.run(lose())


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
