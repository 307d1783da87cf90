"""The asyncpg connector: connections at hand, and those who wait for one."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.drivers.asyncpg import AsyncpgConnector
from retrysafe.stores.postgres.drivers.port import PLANNER_SETTINGS, PoolOptions
from retrysafe.stores.postgres.drivers.psycopg import PsycopgConnector


def _connector(url: str, size_limit: int) -> AsyncpgConnector:
    options = PoolOptions(size_limit=size_limit, connect_timeout=timedelta(seconds=20))
    return AsyncpgConnector(url, "the server", options)


def test_more_callers_than_connections_all_get_their_turn(postgres_server):
    """A connection that is given back goes to whoever waits for one."""

    async def main() -> list[int]:
        connector = _connector(postgres_server.url(), 2)
        try:
            answers = await asyncio.gather(
                *(connector.fetch("SELECT $1::bigint", [number]) for number in range(50))
            )
        finally:
            await connector.close()
        return [rows[0][0] for rows in answers]

    assert asyncio.run(main()) == list(range(50))


def test_one_caller_keeps_to_one_connection(postgres_server):
    """Statements one after the other share a connection, a cancelled one included."""

    async def main() -> set[int]:
        connector = _connector(postgres_server.url(), 4)
        try:
            pids = set()
            for _ in range(5):
                ((pid,),) = await connector.fetch("SELECT pg_backend_pid()")
                pids.add(pid)
            sleeping = asyncio.create_task(connector.fetch("SELECT pg_sleep(60)"))
            await asyncio.sleep(0)
            sleeping.cancel()
            await asyncio.wait([sleeping])
            ((pid,),) = await connector.fetch("SELECT pg_backend_pid()")
            pids.add(pid)
            return pids
        finally:
            await connector.close()

    assert len(asyncio.run(main())) <= 2


def test_plans_are_made_once_and_by_the_primary_key(postgres_server):
    """A plan made on empty tables must still be right when they are large."""

    async def main() -> dict[str, str]:
        connector = _connector(postgres_server.url(), 1)
        try:
            return {
                name: (await connector.fetch(f"SHOW {name}"))[0][0] for name in PLANNER_SETTINGS
            }
        finally:
            await connector.close()

    assert asyncio.run(main()) == PLANNER_SETTINGS


def test_a_prepared_statement_outlives_a_migration(postgres_server):
    """A release that changes a column's type must not break the processes of the one before."""

    async def main() -> list[object]:
        connector = _connector(postgres_server.url(), 1)
        try:
            await connector.transact(
                lambda session: session.script(
                    "CREATE TABLE changing (size int); INSERT INTO changing VALUES (7)"
                )
            )
            select = "SELECT size FROM changing"
            found = [(await connector.fetch(select))[0][0]]
            change = "ALTER TABLE changing ALTER size TYPE text"
            await connector.transact(lambda session: session.script(change))
            found += [(await connector.fetch(select))[0][0] for _ in range(2)]
            await connector.transact(lambda session: session.script("DROP TABLE changing"))
            return found
        finally:
            await connector.close()

    assert asyncio.run(main()) == [7, "7", "7"]


def test_a_statement_is_prepared_once(postgres_server):
    """To prepare it again would be a round trip of its own."""

    async def main() -> list[int]:
        connector = _connector(postgres_server.url(), 1)
        try:
            for number in range(3):
                await connector.fetch("SELECT $1::bigint AS asked", [number])
            return [
                row[0]
                for row in await connector.fetch(
                    "SELECT generic_plans + custom_plans FROM pg_prepared_statements"
                    " WHERE statement LIKE '% AS asked'"
                )
            ]
        finally:
            await connector.close()

    assert asyncio.run(main()) == [3]


def test_statements_that_differ_do_not_pile_up(postgres_server):
    """Some texts have a name or a date in them, and a connection may live for weeks."""

    async def main() -> int:
        connector = _connector(postgres_server.url(), 1)
        try:
            for number in range(250):
                await connector.fetch(f"SELECT {number}")
            return (await connector.fetch("SELECT count(*) FROM pg_prepared_statements"))[0][0]
        finally:
            await connector.close()

    assert asyncio.run(main()) <= 110


def test_a_shared_connection_keeps_its_settings(pgbouncer):
    """Behind a pooler the next client of the same connection must not inherit ours."""

    async def with_asyncpg() -> str:
        connector = _connector(pgbouncer.url(), 1)
        try:
            return (await connector.fetch("SHOW plan_cache_mode"))[0][0]
        finally:
            await connector.close()

    assert asyncio.run(with_asyncpg()) == "auto"
    assert _shown(pgbouncer.url()) == "auto"


def test_threads_have_the_same_plans(postgres_server):
    """The blocking driver's connections are set up as the others are."""
    assert _shown(postgres_server.url()) == "force_generic_plan"


def _shown(url: str) -> str:
    connector = PsycopgConnector(url, "the server", PoolOptions())
    try:
        return run_sync(connector.fetch("SHOW plan_cache_mode"))[0][0]
    finally:
        run_sync(connector.close())
