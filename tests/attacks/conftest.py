"""Servers for the attacks: a primary, its standby, and an address that leads to either."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.psycopg import PsycopgConnector
from retrysafe.stores.postgres.urls import postgres_url

# Processes, the ledger of what they did, and a store that they share.
from tests.processes.conftest import database, ledger, start
from tests.processes.conftest import url as shared_url
from tests.servers.fixtures import migrated, missing, schema_on
from tests.servers.pgbouncer import PgBouncer, pgbouncer_binary
from tests.servers.postgres import PostgresServer
from tests.servers.process import unprivileged
from tests.servers.replication import MovingAddress, StandbyServer

__all__ = ["database", "ledger", "shared_url", "start"]


@pytest.fixture(scope="package")
def primary():
    server = PostgresServer(settings={"fsync": "off"})
    try:
        yield server.start()
    finally:
        server.remove()


@pytest.fixture(scope="package")
def standby(primary):
    server = StandbyServer(primary, {"fsync": "off"})
    try:
        server.start().wait_until_streaming()
        yield server
    finally:
        server.remove()


@pytest.fixture
def schema_url(primary):
    """The primary's own URL, with a schema of its own."""
    with schema_on(primary.url()) as url:
        yield migrated(url)


@pytest.fixture
def address(primary):
    with MovingAddress(primary.port) as made:
        yield made


@pytest.fixture
def url(schema_url, primary, address):
    """The same schema through the address that moves."""
    return schema_url.replace(f":{primary.port}/", f":{address.port}/")


class Driven:
    """A store of either kind, driven from a test without a loop."""

    def __init__(self, url, *, is_async, **options):
        self._runner = asyncio.Runner() if is_async else None
        parts = postgres_url(url)
        parts = replace(parts, pool=replace(parts.pool, **options))
        self.connector = (
            AsyncpgConnector(parts.for_asyncpg, parts.location, parts.pool)
            if is_async
            else PsycopgConnector(parts.for_libpq, parts.location, parts.pool)
        )
        self.store = PostgresStore(
            self.connector, location=parts.location, schema_name=parts.schema_name
        )

    def __call__(self, flow):
        return run_sync(flow) if self._runner is None else self._runner.run(flow)

    def close(self):
        self(self.store.close())
        if self._runner is not None:
            self._runner.close()


async def beside(connector, flow):
    """What the flow gives beside a connection in use; a blocking pool lets a thread in once."""
    if isinstance(connector, AsyncpgConnector):
        return await flow
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run_sync, flow).result()


@pytest.fixture
def driven():
    made = []

    def make(url, *, is_async, **options):
        made.append(Driven(url, is_async=is_async, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.fixture
def silent_port():
    """A host that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def pgbouncer_on():
    """Starts a PgBouncer in front of a port."""
    binary = pgbouncer_binary()
    if binary is None:
        missing("PgBouncer (apt-get install pgbouncer)")
    made = []

    def start(port):
        # As much of a server as it looks at.
        server = SimpleNamespace(
            port=port,
            user=unprivileged(),
            url=lambda database, port: f"postgresql://retrysafe@127.0.0.1:{port}/{database}",
        )
        made.append(PgBouncer(binary, server))
        return made[-1].start()

    yield start
    for item in made:
        item.remove()
