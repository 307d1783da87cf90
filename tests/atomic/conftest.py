from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from retrysafe import Idempotency
from tests.atomic.drivers import DRIVERS, Blocking
from tests.servers.fixtures import migrated, schema_on
from tests.servers.postgres import PostgresServer

# Closing an object waits for these. The thread of a transaction ends by itself, a moment after it.
ENDED_BY_CLOSING = ("retrysafe-heartbeat", "retrysafe-store")


@pytest.fixture(autouse=True)
def _all_closed() -> Iterator[None]:
    """After each test no object that it made and used is left open."""
    before = set(threading.enumerate())
    yield
    started = set(threading.enumerate()) - before
    left = [thread.name for thread in started if thread.name.startswith(ENDED_BY_CLOSING)]
    assert not left, f"threads left behind: {left}"


@dataclass
class Shop:
    """The store and a table of orders in one schema, and a connection to look at both."""

    server_url: str
    schema: str
    connection: psycopg.Connection[Any]

    @property
    def store_url(self) -> str:
        return f"{self.server_url}?schema={self.schema}"

    def orders(self) -> list[str]:
        rows = self.connection.execute(
            f"SELECT name FROM {self.schema}.orders ORDER BY id"
        ).fetchall()
        return [name for (name,) in rows]

    def entries(self) -> list[bytes]:
        """The bodies of what is to be delivered, in order."""
        rows = self.connection.execute(
            f"SELECT body FROM {self.schema}.outbox ORDER BY id"
        ).fetchall()
        return [body for (body,) in rows]

    def states(self) -> list[int]:
        rows = self.connection.execute(f"SELECT state FROM {self.schema}.keys").fetchall()
        return [state for (state,) in rows]

    def locks(self) -> int:
        """How many advisory locks are held anywhere on the server."""
        sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        return self.connection.execute(sql).fetchone()[0]


@contextmanager
def migrated_on(server: PostgresServer) -> Iterator[str]:
    """A migrated store with a table of orders beside it; making one takes most of a second."""
    with schema_on(server.url()) as url:
        migrated(url)
        server_url, _, schema = url.partition("?schema=")
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(
                f"CREATE TABLE {schema}.orders (id serial PRIMARY KEY, name text UNIQUE)"
            )
        yield url


@pytest.fixture(scope="package")
def migrated_url(postgres_server: PostgresServer) -> Iterator[str]:
    """One for all tests of the package; each empties it first."""
    with migrated_on(postgres_server) as url:
        yield url


@pytest.fixture
def shop(migrated_url: str) -> Iterator[Shop]:
    """An empty store and an empty table of orders."""
    server_url, _, schema = migrated_url.partition("?schema=")
    with psycopg.connect(server_url, autocommit=True) as connection:
        for table in ("keys", "outcomes", "steps", "renewals", "outbox", "orders"):
            connection.execute(f"DELETE FROM {schema}.{table}")
        yield Shop(server_url, schema, connection)


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.__name__)
def driver(request, shop: Shop) -> Iterator[Blocking]:
    """Every kind of connection in turn."""
    made = request.param(shop.server_url, shop.schema)
    yield made
    made.end()


@pytest.fixture
def rival(driver: Blocking, shop: Shop) -> Iterator[Blocking]:
    """Another process, as far as the database can tell, with the same kind of connections."""
    made = type(driver)(shop.server_url, shop.schema)
    yield made
    made.end()


@pytest.fixture
def idem(shop: Shop) -> Iterator[Idempotency]:
    """A face for threads on the shop's store."""
    with Idempotency(shop.store_url, caller="shop") as made:
        yield made
