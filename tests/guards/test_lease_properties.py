"""The properties behind the guards of renewals; each runs by itself, without a server."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from retrysafe import AsyncIdempotency, Policy
from retrysafe.core.events import Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import Extension
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.core.renewal import renew
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.heartbeat import ThreadHeartbeat
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.sqlite.store import SqliteStore
from retrysafe.testing.suite.probe import key_of, request

# Only a missing guard lets a test wait so long.
LIMIT_SECONDS = 3.0


class Renewed(MemoryStore):
    """A blocking store that tells of renewals, and holds those up whose leases are long."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float] = []
        self.renewed = threading.Event()
        self.may_go_on = threading.Event()
        self.is_held = threading.Event()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(Waits.BLOCKING)

    async def extend(self, extensions: Sequence[Extension], timeout_seconds: float) -> Any:
        self.timeouts.append(timeout_seconds)
        if any(item.lease_ms >= 60_000 for item in extensions):
            self.is_held.set()
            assert self.may_go_on.wait(2 * LIMIT_SECONDS)
        else:
            self.renewed.set()
        return await super().extend(extensions, timeout_seconds)


def lease_of(lease_ms: int, asked_monotonic: float) -> Lease:
    key = Key(f"key {lease_ms}", caller="shop")
    return Lease(key, b"t" * 16, lease_ms, lease_ms, 0, asked_monotonic)


def test_a_renewal_gives_up_while_there_is_a_lease_to_save():
    """The store has a part of the lease to answer in, of which two more are left after it."""
    store = Renewed()
    run_sync(renew(store, [lease_of(30_000, 0.0)], lambda: 10.0, Reporter(None)))
    assert store.timeouts == [5.0]


def test_an_operation_that_blocks_its_loop_is_renewed():
    """Not by a timer of that loop, then."""
    store = Renewed()

    async def operation() -> bool:
        return store.renewed.wait(LIMIT_SECONDS)

    async def main() -> bool:
        policy = Policy(lease=timedelta(milliseconds=300))
        async with AsyncIdempotency(store, caller="shop", policy=policy) as idem:
            return await idem.run("key", operation, request=None)

    assert asyncio.run(main())


def test_a_renewal_of_a_long_lease_holds_up_no_short_one():
    """It may take longer than a short lease lasts."""
    store = Renewed()
    heartbeat = ThreadHeartbeat(store, Reporter(None), time.monotonic)
    try:
        heartbeat.add(lease_of(60_000, time.monotonic() - 30))
        assert store.is_held.wait(LIMIT_SECONDS)
        heartbeat.add(lease_of(300, time.monotonic()))
        assert store.renewed.wait(LIMIT_SECONDS)
    finally:
        store.may_go_on.set()
        heartbeat.stop(LIMIT_SECONDS)


def test_a_renewal_queues_behind_no_writer_of_its_process():
    """Whoever else waits for the SQLite file, it waits for the file alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "keys.db")
        wish = request(key_of("held"))
        run_sync(store.commit([wish], []))
        is_extended = threading.Event()

        def extend() -> None:
            run_sync(store.extend([Extension(wish.key, wish.token, 30_000)], 1.0))
            is_extended.set()

        renewal = threading.Thread(target=extend, daemon=True)
        with store._connections._turn:
            renewal.start()
            has_waited = not is_extended.wait(LIMIT_SECONDS)
        renewal.join(LIMIT_SECONDS)
        run_sync(store.close())
        assert not has_waited


def test_a_busy_writer_gives_way_to_a_renewal():
    """It has the lock when the renewal comes, and wants it again at once."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "keys.db")
        connections = store._connections
        written: list[str] = []

        def extend() -> None:
            connections.write_first(lambda _connection: written.append("renewal"))

        # Many times: who comes first at a lock that is not fair is chance.
        for _ in range(20):
            renewal = threading.Thread(target=extend, daemon=True)

            def until_it_waits(_connection: object, renewal: threading.Thread = renewal) -> None:
                renewal.start()
                limit = time.monotonic() + LIMIT_SECONDS
                while not connections._renewing.locked() and time.monotonic() < limit:
                    time.sleep(0.001)

            connections.write(until_it_waits)
            connections.write(lambda _connection: written.append("write"))
            renewal.join(LIMIT_SECONDS)
        run_sync(store.close())
        assert written == ["renewal", "write"] * 20
