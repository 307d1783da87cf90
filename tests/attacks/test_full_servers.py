"""Servers that are full: open connections work, and every new one is refused.

Other clients take what `max_connections` leaves, after an owner has claimed its key. Attacked is
that healthy owner on PostgreSQL, through both drivers: its renewals have a connection of their own,
which cannot be opened any more. What must hold: the lease is renewed over the pool, a rival is sent
away, and the pool gives up none of the connections that it would not get again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from retrysafe import AsyncIdempotency, Idempotency, OperationInFlight, Policy
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.port import PoolOptions
from retrysafe.stores.postgres.drivers.psycopg import PsycopgConnector
from retrysafe.stores.postgres.store import PostgresStore
from tests.servers.fixtures import migrated, schema_on
from tests.servers.postgres import PostgresServer

FACES = pytest.mark.parametrize("face", ["blocking", "async"])
LEASE = timedelta(seconds=1.5)
POLICY = Policy(lease=LEASE)
PID = "SELECT pg_backend_pid()"


@pytest.fixture(scope="module")
def small_server() -> Iterator[PostgresServer]:
    server = PostgresServer(settings={"fsync": "off", "max_connections": "12"})
    try:
        yield server.start()
    finally:
        server.remove()


@contextmanager
def filled(url: str) -> Iterator[None]:
    """Takes every connection that the server has left."""
    with ExitStack() as held:
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            while True:
                held.enter_context(psycopg.connect(url))
        yield


def made_store(url: str, face: str) -> PostgresStore:
    schema_name = url.rpartition("=")[2]
    url = url.partition("?")[0]
    made: Any = AsyncpgConnector if face == "async" else PsycopgConnector
    return PostgresStore(made(url, "here", PoolOptions()), location="here", schema_name=schema_name)


@FACES
def test_a_full_server_takes_no_key_from_its_owner(small_server, face):
    """The operation outlasts its lease on a full server; the rival hears that it is running."""
    runs: list[str] = []
    with schema_on(small_server.url()) as url, Idempotency(migrated(url), caller="shop") as rival:
        rival.run("another key", lambda: 1, name="pay", request=1)

        def operation() -> str:
            runs.append("owner")
            with filled(small_server.url()):
                time.sleep(1.5 * LEASE.total_seconds())
                with pytest.raises(OperationInFlight):
                    rival.run("the key", lambda: runs.append("rival"), name="pay", request=1)
            return "the outcome"

        store = made_store(url, face)
        if face == "blocking":
            with Idempotency(store, caller="shop", policy=POLICY) as idem:
                assert idem.run("the key", operation, name="pay", request=1) == "the outcome"
            run_sync(store.close())
        else:

            async def main() -> None:
                async with AsyncIdempotency(store, caller="shop", policy=POLICY) as idem:
                    flow = idem.run(
                        "the key", lambda: asyncio.to_thread(operation), name="pay", request=1
                    )
                    assert await flow == "the outcome"
                await store.close()

            asyncio.run(main())
    assert runs == ["owner"]


def test_what_cannot_be_opened_costs_no_open_connection(small_server):
    """A connection that comes back to the pool while another is refused is used again."""
    connector = PsycopgConnector(small_server.url(), "here", PoolOptions())
    is_taken, is_over = threading.Event(), threading.Event()
    pids: list[int] = []

    async def work(session: Any) -> None:
        pids.append((await session.fetch(PID))[0][0])
        is_taken.set()
        assert is_over.wait(30)

    holder = threading.Thread(target=lambda: run_sync(connector.transact(work)))
    holder.start()
    assert is_taken.wait(30)
    connect = connector._pool._connect

    def connect_late(seconds: float) -> Any:
        is_over.set()
        holder.join()
        return connect(seconds)

    connector._pool._connect = connect_late
    try:
        with filled(small_server.url()):
            with pytest.raises(StoreUnavailable, match="too many clients"):
                run_sync(connector.fetch(PID))
            assert run_sync(connector.fetch(PID))[0][0] == pids[0]
    finally:
        is_over.set()
        run_sync(connector.close())
