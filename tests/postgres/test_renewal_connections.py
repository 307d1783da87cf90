"""The connections of renewals: when one is kept, and when it is given up; both drivers."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.drivers import asyncpg, asyncpg_renewals, psycopg_renewals
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.port import Conflict, PoolOptions, RowRefused
from retrysafe.stores.postgres.drivers.psycopg import PsycopgConnector

PID = "SELECT pg_backend_pid()"
CONFLICT = "DO $$ BEGIN RAISE EXCEPTION 'a rival' USING ERRCODE = '40001'; END $$"


class Client:
    """A connector, and how its flows are run."""

    def __init__(self, face: str, url: str) -> None:
        self._runner = asyncio.Runner() if face == "async" else None
        made: Any = PsycopgConnector if self._runner is None else AsyncpgConnector
        self.connector = made(url, "here", PoolOptions())

    def run(self, flow: Any) -> Any:
        return run_sync(flow) if self._runner is None else self._runner.run(flow)

    def pid(self, seconds: float = 5.0) -> int:
        """Which server process renews."""
        return self.run(self.connector.fetch_renewal(seconds, PID))[0][0]

    def close(self) -> None:
        self.run(self.connector.close())
        if self._runner is not None:
            self._runner.close()


@pytest.fixture(params=["blocking", "async"])
def client(request, postgres_server) -> Iterator[Client]:
    client = Client(request.param, postgres_server.url())
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize(("sql", "error"), [("SELECT 1/0", RowRefused), (CONFLICT, Conflict)])
def test_a_connection_outlives_what_the_server_refuses(client, sql, error):
    """The server answered: a new connection would cost the next renewal its time for nothing."""
    first = client.pid()
    with pytest.raises(error):
        client.run(client.connector.fetch_renewal(5.0, sql))
    assert client.pid() == first


def test_long_leases_keep_their_connection(client, monkeypatch):
    """It rests until the next renewal comes; one that rested longer is not used again."""
    now_ms = [0]
    for module in (psycopg_renewals, asyncpg_renewals):
        monkeypatch.setattr(module, "wall_clock_ms", lambda: now_ms[0])
    # A lease of 150 s is renewed every 50 s, and a renewal may take 25 s.
    first = client.pid(25.0)
    now_ms[0] += 50_000
    assert client.pid(25.0) == first
    now_ms[0] += 50_000
    assert client.pid(5.0) != first


# asyncio and asyncpg warn of what was left open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_connections_of_closed_loops_are_forgotten(postgres_server):
    """A loop that ends without `close` leaves nothing behind for the life of the store."""
    connector = AsyncpgConnector(postgres_server.url(), "here", PoolOptions())

    async def renew() -> None:
        await connector.fetch_renewal(5.0, PID)

    async def main() -> None:
        await renew()
        assert len(connector._renewals._idle) == 1
        await connector.close()

    asyncio.run(renew())
    asyncio.run(main())
    gc.collect()


def test_a_connection_without_keepalive_is_ended(postgres_server, monkeypatch):
    """To set it takes a descriptor; where there is none, the connection must not keep its own."""
    opened: list[Any] = []

    def refuse(connection: Any, _: Any) -> None:
        opened.append(connection)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(asyncpg, "set_keepalive", refuse)

    async def main() -> None:
        connector = AsyncpgConnector(postgres_server.url(), "here", PoolOptions())
        with pytest.raises(StoreUnavailable):
            await connector.fetch("SELECT 1")
        await connector.close()

    asyncio.run(main())
    assert opened
    assert all(connection.is_closed() for connection in opened)
