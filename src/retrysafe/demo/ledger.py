"""The ledger: one entry for every execution, in the store's own database.

This is the shop's table, not one of retrysafe's. It makes a double execution visible.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from retrysafe.errors import StoreNotWritable, StoreUnavailable, StoreUrlInvalid
from retrysafe.stores import SqliteStore, open_store
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.naming import checked_schema_name
from retrysafe.stores.postgres.urls import PostgresUrl, postgres_url

# As clients see it: the details of the operation, and these fields. `asked` counts how often it was
# requested; only the first request executed it.
Entry = dict[str, Any]
_NAMES: Final = "id, operation, customer, key, attempt, outcome, process, executed_at, asked"
_FIELDS: Final = _NAMES.split(", ")
_CREATE: Final = """
CREATE TABLE IF NOT EXISTS {table} (
    position {position} PRIMARY KEY, id text NOT NULL UNIQUE, operation text NOT NULL,
    customer text NOT NULL, key text NOT NULL, attempt integer NOT NULL, outcome text NOT NULL,
    details text NOT NULL, process integer NOT NULL, executed_at text NOT NULL,
    asked integer NOT NULL DEFAULT 1
)
"""
_INSERT: Final = """
INSERT INTO {table} AS made (details, {names})
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
ON CONFLICT (id) DO UPDATE SET asked = made.asked + 1
"""
# Nobody reads 10,000 entries, and a list without a limit could stop the demo.
_SELECT: Final = """
SELECT details, {names} FROM {table}
WHERE ($1 = '' OR operation = $1) AND ($2 = '' OR customer = $2) AND ($3 = '' OR id = $3)
ORDER BY position LIMIT 10000
"""


class Ledger(ABC):
    """The ledger in either database."""

    table: str

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[None]:
        """Creates the table if it is missing, and closes all connections at the end."""

    @abstractmethod
    def connection(self) -> AbstractAsyncContextManager[Any]:
        """A connection without a transaction, to read with."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """A connection with an open transaction: commits at the end, rolls back on any error."""

    @abstractmethod
    async def fetch(self, connection: Any, statement: str, *values: Any) -> Any:
        """Runs a statement; returns its rows."""

    async def add(
        self,
        connection: Any,
        operation: str,
        details: dict[str, Any],
        *,
        key: str,
        attempt: int,
        entry_id: str = "",
    ) -> Entry:
        """Writes an execution in the connection's transaction; returns its entry.

        An entry that has this id stays as it is and counts the repetition: payment providers do the
        same when you send them an idempotency key.
        """
        details = {"outcome": "ok"} | details
        customer, outcome = details.pop("customer"), details.pop("outcome")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        entry_id = entry_id or f"{operation}_{uuid.uuid4().hex}"
        values = (entry_id, operation, customer, key, attempt, outcome, os.getpid(), now, 1)
        statement = _INSERT.format(table=self.table, names=_NAMES)
        await self.fetch(connection, statement, json.dumps(details), *values)
        return details | dict(zip(_FIELDS, values, strict=True))

    async def entries(
        self, *, operation: str = "", customer: str = "", entry_id: str = ""
    ) -> list[Entry]:
        """What was executed, in order; an empty text stands for all."""
        statement = _SELECT.format(table=self.table, names=_NAMES)
        async with self.connection() as connection:
            rows = await self.fetch(connection, statement, operation, customer, entry_id)
        return [json.loads(row[0]) | dict(zip(_FIELDS, row[1:], strict=True)) for row in rows]


class SqliteLedger(Ledger):
    """In the store's file. `sqlite3` blocks, so its calls run in threads."""

    table = "retrysafe_demo_ledger"

    def __init__(self, path: Path) -> None:
        self._path = path
        # A SQLite file has one writer at a time. Who waits here blocks no thread.
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Creates the table if it is missing; no connection is open between two calls."""
        # Not in `transaction`: if the table is there, this needs no write lock, which a slow order
        # of another process may hold.
        async with self.connection() as connection:
            await self.fetch(connection, _CREATE.format(table=self.table, position="integer"))
        yield

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[sqlite3.Connection]:
        """A new connection; SQLite connects in microseconds."""
        connection = await asyncio.to_thread(
            sqlite3.connect,
            self._path,
            timeout=30.0,  # A slow order of another process may hold the write lock that long.
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            yield connection
        finally:
            # Closing rolls back what is not committed.
            await asyncio.to_thread(connection.close)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        """A connection that holds the file's write lock."""
        async with self._turn, self.connection() as connection:
            await self.fetch(connection, "BEGIN IMMEDIATE")
            yield connection
            await self.fetch(connection, "COMMIT")

    async def fetch(self, connection: Any, statement: str, *values: Any) -> Any:
        """Runs a statement in a thread; returns its rows."""

        def fetch() -> Any:
            return connection.execute(statement.replace("$", "?"), values).fetchall()

        return await asyncio.to_thread(fetch)


class PostgresLedger(Ledger):
    """In a schema of its own, in the store's database, through asyncpg."""

    def __init__(self, url: PostgresUrl) -> None:
        self._url = url
        self._schema = checked_schema_name(f"{url.schema_name}_demo")
        self.table = f"{self._schema}.ledger"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Makes the pool, and creates the table if it is missing; raises `StoreUnavailable`."""
        import asyncpg  # noqa: PLC0415 — only PostgreSQL needs this driver.

        self._read_only = asyncpg.ReadOnlySQLTransactionError
        async with asyncpg.create_pool(
            self._url.for_asyncpg,
            min_size=0,
            max_size=20,  # Each slow order holds one. retrysafe has connections of its own.
            timeout=10.0,
            statement_cache_size=100 if self._url.pool.has_prepared_statements else 0,
        ) as self._pool:
            try:
                await self._create()
            except (OSError, asyncpg.PostgresError) as error:
                raise StoreUnavailable(f"{self._url.location} does not answer: {error}") from error
            yield

    async def _create(self) -> None:
        position = "bigint GENERATED ALWAYS AS IDENTITY"
        async with self.transaction() as connection:
            # Two demos that start together must not create the schema together.
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext($1))", self._schema)
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
            await connection.execute(_CREATE.format(table=self.table, position=position))

    def connection(self) -> Any:
        """A connection of the pool."""
        return self._pool.acquire(timeout=10.0)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """A connection of the pool with an open transaction."""
        try:
            async with self.connection() as connection, connection.transaction():
                yield connection
        except (StoreNotWritable, self._read_only):
            # A failover: the pool's other connections lead to the same old server.
            await self._pool.expire_connections()
            raise

    async def fetch(self, connection: Any, statement: str, *values: Any) -> Any:
        """Runs a statement; returns its rows."""
        return await connection.fetch(statement, *values)


def open_ledger(url: str) -> Ledger:
    """The ledger in the store's own database; raises `StoreUrlInvalid` where there is none."""
    store = open_store(url, is_async=True)
    if isinstance(store, SqliteStore):
        return SqliteLedger(store.path)
    if isinstance(store, PostgresStore):
        return PostgresLedger(postgres_url(url))
    raise StoreUrlInvalid(
        f"the demo needs a store that survives it, and {url} ends with its process: use "
        "sqlite:///path/to/file.db or postgresql://user@host/database"
    )


async def create_tables(url: str) -> None:
    """Creates or migrates the tables of the store and the ledger; raises `StoreError`."""
    ledger = open_ledger(url)
    store = open_store(url, is_async=True)
    assert isinstance(store, SqliteStore | PostgresStore)  # Others have no ledger.
    try:
        await store.migrate()
    finally:
        await store.close()
    async with ledger.opened():
        pass
