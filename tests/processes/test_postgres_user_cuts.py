"""Connections that are cut during the COMMIT of the user's own transaction.

Nobody can tell the user whether it happened. The retry finds it out: outcome and business write
are in one commit, so either both are there or neither is.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from contextlib import closing
from typing import Any

import asyncpg
import psycopg
import pytest

from retrysafe import AsyncIdempotency, Idempotency, current_attempt
from retrysafe.core.model import State
from retrysafe.stores import Condition
from tests.servers.cutting import Cut, CuttingProxy
from tests.servers.fixtures import migrated, schema_on

PATIENCE_SECONDS = 30
CUTS = pytest.mark.parametrize("cut", list(Cut))
FACES = pytest.mark.parametrize("face", ["blocking", "async"])
WAYS = pytest.mark.parametrize("way", ["atomic", "complete_in"])


class Shop:
    """A table of orders beside the store, reached directly and through a proxy that cuts."""

    def __init__(self, url: str, proxy: CuttingProxy, server_port: int) -> None:
        self.store_url = url
        self.direct_url, _, self.schema = url.partition("?schema=")
        self.cut_url = self.direct_url.replace(f":{server_port}/", f":{proxy.port}/")
        self.proxy = proxy
        self.key = uuid.uuid4().hex
        self.insert = f"INSERT INTO {self.schema}.orders (key) VALUES ('{self.key}')"
        self.runs = 0
        self.connection: psycopg.Connection[Any] = psycopg.connect(self.direct_url, autocommit=True)

    def orders(self) -> int:
        query = f"SELECT count(*) FROM {self.schema}.orders WHERE key = %s"
        return self.connection.execute(query, (self.key,)).fetchone()[0]

    def wait_for_the_end_of(self, server_pid: int) -> None:
        """The server needs a moment to see that its client is gone, and to roll back."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        pause = threading.Event()
        for _ in range(PATIENCE_SECONDS * 50):
            if not self.connection.execute(query, (server_pid,)).fetchone()[0]:
                return
            pause.wait(0.02)
        raise AssertionError("the server keeps the connection")


@pytest.fixture(scope="module")
def shop_url(postgres_server):
    """A migrated store with a table of orders beside it."""
    with schema_on(postgres_server.url()) as url:
        migrated(url)
        direct_url, _, schema = url.partition("?schema=")
        with psycopg.connect(direct_url) as connection:
            connection.execute(f"CREATE TABLE {schema}.orders (key text)")
        yield url


@pytest.fixture
def shop(postgres_server, shop_url):
    with closing(CuttingProxy(postgres_server.port)) as proxy:
        made = Shop(shop_url, proxy, postgres_server.port)
        with closing(made.connection):
            yield made


def blocking_place(shop: Shop, idem: Idempotency, way: str, cut: Cut | None) -> str:
    """Permits the order; with a cut, the connection ends during the COMMIT."""
    connection = psycopg.connect(shop.direct_url if cut is None else shop.cut_url)
    pid = connection.execute("SELECT pg_backend_pid()").fetchone()[0]
    connection.rollback()

    def commit() -> None:
        if cut is not None:
            shop.proxy.arm(b"COMMIT", cut)
        try:
            connection.commit()
        except psycopg.OperationalError:
            shop.wait_for_the_end_of(pid)
            raise

    def operation() -> None:
        shop.runs += 1
        connection.execute(shop.insert)
        current_attempt().complete_in(connection, "placed")
        commit()

    with closing(connection):
        if way == "complete_in":
            return idem.run(shop.key, operation, name="place", request="pen")
        with idem.atomic(connection, shop.key, name="place", request="pen") as run:
            if not run.replayed:
                shop.runs += 1
                connection.execute(shop.insert)
                run.complete("placed")
        commit()
        return run.value


async def async_place(shop: Shop, idem: AsyncIdempotency, way: str, cut: Cut | None) -> str:
    """The same on asyncpg."""
    connection = await asyncpg.connect(shop.direct_url if cut is None else shop.cut_url)
    pid = await connection.fetchval("SELECT pg_backend_pid()")
    transaction = connection.transaction()
    await transaction.start()

    async def commit() -> None:
        if cut is not None:
            shop.proxy.arm(b"COMMIT", cut)
        try:
            await transaction.commit()
        except (OSError, asyncpg.PostgresConnectionError):
            await asyncio.to_thread(shop.wait_for_the_end_of, pid)
            raise

    async def operation() -> None:
        shop.runs += 1
        await connection.execute(shop.insert)
        await current_attempt().complete_in(connection, "placed")
        await commit()

    try:
        if way == "complete_in":
            return await idem.run(shop.key, operation, name="place", request="pen")
        async with idem.atomic(connection, shop.key, name="place", request="pen") as run:
            if not run.replayed:
                shop.runs += 1
                await connection.execute(shop.insert)
                await run.complete("placed")
        await commit()
        return run.value
    finally:
        connection.terminate()


@WAYS
@CUTS
@FACES
def test_a_cut_during_the_users_commit_is_found_out_by_the_retry(shop, way, cut, face):
    """The caller gets the driver's error. When nothing was committed the retry runs; when it was,
    the retry gets the outcome and runs nothing. There is one order and one outcome either way."""
    if face == "blocking":
        with Idempotency(shop.store_url, caller="owner") as idem:
            with pytest.raises(psycopg.OperationalError):
                blocking_place(shop, idem, way, cut)
            placed = [blocking_place(shop, idem, way, None) for _ in range(2)]
    else:

        async def scenario() -> list[str]:
            async with AsyncIdempotency(shop.store_url, caller="owner") as idem:
                with pytest.raises((OSError, asyncpg.PostgresConnectionError)):
                    await async_place(shop, idem, way, cut)
                return [await async_place(shop, idem, way, None) for _ in range(2)]

        placed = asyncio.run(scenario())
    assert shop.proxy.cuts == 1
    assert placed == ["placed", "placed"]
    assert shop.runs == (1 if cut is Cut.AFTER else 2)
    assert shop.orders() == 1
    with Idempotency(shop.store_url, caller="owner") as idem:
        stored = idem.read(shop.key)
    assert stored.condition is Condition.SUCCEEDED
    assert [item.state for item in stored.outcomes].count(State.SUCCEEDED) == 1
