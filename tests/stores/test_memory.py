"""The memory store is a store, plain, behind the fault wrapper, and on an event loop."""

import asyncio

import pytest

from retrysafe.runtime.threaded import ThreadedStore
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, StoreSuite


class TestMemoryStore(StoreSuite):
    def make_store(self, clock):
        return MemoryStore(now_ms=clock)


class TestFaultyStoreWithoutFaults(StoreSuite):
    """A wrapper without faults must be invisible, else its faults would prove nothing."""

    def make_store(self, clock):
        return FaultyStore(MemoryStore(now_ms=clock))


class TestMemoryStoreOnALoop(StoreSuite):
    """The suite drives stores that suspend as well."""

    @pytest.fixture(autouse=True)
    def runner(self):
        with asyncio.Runner() as self.loop:
            yield

    def run(self, flow):
        return self.loop.run(flow)

    def make_store(self, clock):
        return ThreadedStore(MemoryStore(now_ms=clock))
