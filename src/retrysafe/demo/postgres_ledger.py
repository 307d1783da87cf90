"""The ledger in PostgreSQL, through asyncpg."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from retrysafe.demo import ledger
from retrysafe.demo.ledger import Entry, entry_of
from retrysafe.errors import StoreNotWritable, StoreUnavailable
from retrysafe.stores.postgres.naming import checked_schema_name
from retrysafe.stores.postgres.urls import PostgresUrl

_SCHEMA: Final = """
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {schema}.ledger (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text NOT NULL UNIQUE,
    operation text NOT NULL,
    customer text NOT NULL,
    key text NOT NULL,
    attempt integer NOT NULL,
    outcome text NOT NULL,
    details text NOT NULL,
    process integer NOT NULL,
    executed_at text NOT NULL,
    asked integer NOT NULL DEFAULT 1
);
"""
# Ledgers of earlier demos do not count repetitions. Looked up first: changing a table waits for the
# open orders of a demo that runs already, even if there is nothing to change.
_HAS_ASKED: Final = """
SELECT EXISTS (
    SELECT FROM pg_attribute WHERE attrelid = $1::text::regclass AND attname = 'asked'
)
"""
_ADD_ASKED: Final = "ALTER TABLE {table} ADD COLUMN asked integer NOT NULL DEFAULT 1"
# Two demos that start at the same time must not make the same schema at the same time.
_PREPARE_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext($1))"
# Each slow order holds one; retrysafe's own connections come on top.
_POOL_SIZE: Final = 20
_CONNECT_SECONDS: Final = 10.0


class PostgresLedger:
    """The ledger in a schema of its own, in the store's database."""

    def __init__(self, url: PostgresUrl) -> None:
        self._url = url
        self._schema = checked_schema_name(f"{url.schema_name}_demo")
        self._pool: Any = None

    async def open(self) -> None:
        """Makes the pool; it connects when a connection is needed."""
        self._pool = await asyncpg.create_pool(
            self._url.for_asyncpg,
            min_size=0,
            max_size=_POOL_SIZE,
            timeout=_CONNECT_SECONDS,
            statement_cache_size=100 if self._url.pool.has_prepared_statements else 0,
        )

    async def prepare(self) -> None:
        """Makes the table, or brings an earlier demo's up to date; raises `StoreUnavailable`."""
        try:
            async with self.transaction() as connection:
                await connection.execute(_PREPARE_LOCK, self._schema)
                await connection.execute(_SCHEMA.format(schema=self._schema))
                if not await connection.fetchval(_HAS_ASKED, f"{self._schema}.ledger"):
                    await connection.execute(self._sql(_ADD_ASKED))
        except (OSError, asyncpg.PostgresError) as error:
            raise StoreUnavailable(f"{self._url.location} does not answer: {error}") from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.Connection]:
        """A connection with an open transaction; commits at the end."""
        pool = self._pool
        try:
            async with (
                pool.acquire(timeout=_CONNECT_SECONDS) as connection,
                connection.transaction(),
            ):
                yield connection
        except (StoreNotWritable, asyncpg.ReadOnlySQLTransactionError):
            # A failover: the others lead to the same server. This pool is ours, so retrysafe leaves
            # it alone.
            await pool.expire_connections()
            raise

    async def add(self, connection: asyncpg.Connection, entry: Entry) -> None:
        """Writes an entry in the connection's transaction."""
        await connection.execute(self._sql(ledger.INSERT), *entry.row())

    async def add_once(self, connection: asyncpg.Connection, entry: Entry) -> None:
        """Writes an entry, or counts a repetition of the one that has its id."""
        await connection.execute(self._sql(ledger.INSERT_ONCE), *entry.row())

    async def entries(self, operation: str = "", customer: str = "") -> list[Entry]:
        """What was executed, in order; an empty text stands for all."""
        found = await self._fetch(ledger.SELECT, operation, customer, ledger.ENTRIES_LIMIT)
        return [entry_of(tuple(row)) for row in found]

    async def entry(self, entry_id: str, operation: str) -> Entry | None:
        """One entry."""
        found = await self._fetch(ledger.SELECT_ONE, entry_id, operation)
        return entry_of(tuple(found[0])) if found else None

    async def close(self) -> None:
        """Closes the connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def _fetch(self, statement: str, *values: Any) -> list[Any]:
        found: list[Any] = await self._pool.fetch(self._sql(statement), *values)
        return found

    def _sql(self, statement: str) -> str:
        return statement.format(table=f"{self._schema}.ledger")
