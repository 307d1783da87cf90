"""What a store's test class provides, and the fixtures that the cases use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import pytest

from retrysafe.core.ports import Store, Waits
from retrysafe.runtime.drive import run_sync
from retrysafe.testing.clock import ManualClock
from retrysafe.testing.suite.probe import Probe

T = TypeVar("T")

# Only a deadlocked store gets near it; a race then fails instead of hanging for ever.
RACE_LIMIT_SECONDS: Final = 60.0


class SuiteBase:
    """The hooks of a test class; only `make_store` must be given."""

    def make_store(self, clock: ManualClock) -> Store:
        """A fresh, empty store that takes the time from the clock; the suite closes it."""
        raise NotImplementedError("a StoreSuite subclass gives make_store(self, clock)")

    def join_store(self, store: Store, clock: ManualClock) -> Store:
        """Another store object over the same records, as a second process would have one.

        The default is the same object, which is right only where the records live in it.
        """
        return store

    def run(self, flow: Coroutine[Any, Any, T]) -> T:
        """Drives a store's coroutine to its end; a store for event loops overrides it."""
        return run_sync(flow)

    @pytest.fixture
    def clock(self) -> ManualClock:
        """The store's clock."""
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> Iterator[Store]:
        """The store under test."""
        store = self.make_store(clock)
        yield store
        self.run(store.close())

    @pytest.fixture
    def joined(self, store: Store, clock: ManualClock) -> Iterator[Store]:
        """A second object over the records of the store under test."""
        joined = self.join_store(store, clock)
        yield joined
        if joined is not store:
            self.run(joined.close())

    @pytest.fixture
    def probe(self, store: Store, clock: ManualClock) -> Probe:
        """The store under test, with verbs for one row at a time."""
        return Probe(store, clock, self.run)

    def race(self, store: Store, flows: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
        """Runs all flows at once, as the store's kind has it, and gives their answers in order.

        A store that suspends is raced by tasks of one loop; any other by threads that a barrier
        lets go together.
        """
        if store.capabilities.waits is Waits.SUSPENDING:
            return self.run(_gathered(flows))
        barrier = threading.Barrier(len(flows))

        def racer(flow: Callable[[], Coroutine[Any, Any, T]]) -> T:
            barrier.wait(RACE_LIMIT_SECONDS)
            return self.run(flow())

        with ThreadPoolExecutor(len(flows), thread_name_prefix="racer") as pool:
            return list(pool.map(racer, flows, timeout=RACE_LIMIT_SECONDS))


async def _gathered(flows: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    async with asyncio.timeout(RACE_LIMIT_SECONDS):
        return await asyncio.gather(*(flow() for flow in flows))
