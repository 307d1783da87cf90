"""Relays of the attacks, in processes of their own: what they deliver, and what is stored of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

from retrysafe import GLOBAL, Idempotency, current_attempt
from retrysafe.core.outbox.entries import EntryQuery, StoredEntry
from retrysafe.relay import AsyncRelay, Delivery, Relay, RelayPolicy
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.processes.children import PATIENCE_SECONDS

# Long enough for a relay that lives to renew on a busy machine, short enough to wait for.
LEASE = timedelta(milliseconds=500)


def policy_of(lease: timedelta = LEASE, **settings) -> RelayPolicy:
    timeout = min(lease, timedelta(seconds=30))
    return RelayPolicy(lease=lease, timeout=timeout, poll=timedelta(milliseconds=20), **settings)


def stage(url: str, *names: str, aggregate: str | None = None) -> None:
    """Stages entries whose body is their name."""

    def operation() -> None:
        for name in names:
            current_attempt().outbox.stage("t", name, aggregate=aggregate, name=name)

    with Idempotency(url, caller=GLOBAL) as idem:
        idem.run(f"stages {' '.join(names)}", operation, name="stages", request=None)


def drain(
    url: str, deliver: Callable[[Delivery], None], policy: RelayPolicy, face: str, size: int
) -> None:
    """One drain by a relay of that kind."""
    if face == "threads":
        store = open_store(url)
        try:
            Relay(store, deliver, policy=policy, concurrency=size).drain()
        finally:
            run_sync(store.close())
        return

    async def main() -> None:
        store = open_store(url, is_async=True)
        try:
            await AsyncRelay(store, deliver, policy=policy, concurrency=size).drain()
        finally:
            closing = store.close()
            await closing if url.startswith("postgres") else run_sync(closing)

    asyncio.run(main())


def entries(url: str) -> dict[str, StoredEntry]:
    """What is stored, by name."""
    store = open_store(url)
    try:
        found = run_sync(store.outbox.list_entries(EntryQuery(limit=1_000)))
        return {item.entry.body.decode(): item for item in found}
    finally:
        run_sync(store.close())


def states(url: str) -> dict[str, str]:
    return {name: item.condition.value for name, item in entries(url).items()}


def wait_until(is_so: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Waits for something that comes by itself, such as the end of a lease."""
    give_up = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < give_up, "it never comes to that"
        time.sleep(0.01)
