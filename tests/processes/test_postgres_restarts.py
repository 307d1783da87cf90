"""A server that restarts while a loop looks away: an outage to the loop, and nothing else."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from retrysafe import StoreUnavailable
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.port import PoolOptions, Session


async def open_all(connector: AsyncpgConnector) -> None:
    """Uses as many connections at once as there may be."""
    barrier = asyncio.Barrier(PoolOptions().size_limit)

    async def use(session: Session) -> None:
        await session.fetch("SELECT 1")
        await barrier.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(barrier.parties):
            group.create_task(connector.transact(use))


async def ask(connector: AsyncpgConnector, way: str) -> None:
    # The driver prepares a statement that is new to a connection, which takes a turn of the loop
    # more: then it sees the other connections end while they are given back.
    sql = "SELECT 2" if way == "new" else "SELECT 1"
    if way == "transaction":
        await connector.transact(lambda session: session.fetch(sql))
    else:
        await connector.fetch(sql)


@pytest.mark.parametrize("way", ["new", "prepared", "transaction"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restart_behind_the_back_of_a_loop_is_an_outage(mortal_server, end, way):
    """A loop that was busy meanwhile finds all its connections ended at once: whoever asks first is
    told that the server did not answer, in the store's words, and no connection is missing then."""

    async def main() -> None:
        connector = AsyncpgConnector(mortal_server.url(), "the server", PoolOptions())
        await open_all(connector)
        assert len(connector._resting) == PoolOptions().size_limit
        getattr(mortal_server, end)()
        mortal_server.start()
        with pytest.raises(StoreUnavailable):
            await ask(connector, way)
        await ask(connector, way)
        await open_all(connector)
        await connector.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_pool_is_closed_after_a_restart_behind_the_back_of_its_loop(mortal_server, end):
    """Whatever has become of its connections, closing it is no error, and leaves none behind."""

    async def main() -> None:
        connector = AsyncpgConnector(mortal_server.url(), "the server", PoolOptions())
        await open_all(connector)
        getattr(mortal_server, end)()
        mortal_server.start()
        await asyncio.wait_for(connector.close(), 60)
        assert connector._resting == []
        await ask(connector, "new")
        await connector.close()

    asyncio.run(main())


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restart_inside_a_transaction_is_an_outage(mortal_server, end):
    """Neither its rollback nor giving its connection back is told in the driver's words."""

    async def main() -> None:
        connector = AsyncpgConnector(mortal_server.url(), "the server", PoolOptions())

        async def restarted(session: Session) -> None:
            await session.fetch("SELECT 1")
            getattr(mortal_server, end)()
            mortal_server.start()
            await session.fetch("SELECT 2")

        with pytest.raises(StoreUnavailable):
            await connector.transact(restarted)
        await open_all(connector)
        await connector.close()

    asyncio.run(main())


def test_an_internal_error_of_the_driver_is_an_outage(mortal_server):
    """asyncpg's own mistakes around a lost connection leave the store as the outage they are of."""

    async def main() -> None:
        connector = AsyncpgConnector(mortal_server.url(), "the server", PoolOptions())

        async def fail(_session: Session) -> None:
            raise asyncpg.InternalClientError("a holder that is free")

        with pytest.raises(StoreUnavailable, match="the server does not answer"):
            await connector.transact(fail)
        await connector.close()

    asyncio.run(main())
