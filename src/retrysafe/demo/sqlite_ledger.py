"""The ledger in a SQLite file: blocking calls in a thread, one writer at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final, TypeVar

from retrysafe.demo import ledger
from retrysafe.demo.ledger import Entry, entry_of

T = TypeVar("T")

TABLE: Final = "retrysafe_demo_ledger"
_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS {TABLE} (
    position INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    operation TEXT NOT NULL,
    customer TEXT NOT NULL,
    key TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    details TEXT NOT NULL,
    process INTEGER NOT NULL,
    executed_at TEXT NOT NULL,
    asked INTEGER NOT NULL DEFAULT 1
)
"""
# Ledgers of earlier demos do not count repetitions.
_ADD_ASKED: Final = f"ALTER TABLE {TABLE} ADD COLUMN asked INTEGER NOT NULL DEFAULT 1"
# Another process may hold the file's write lock through a slow order.
_BUSY_SECONDS: Final = 30.0


def _sql(statement: str) -> str:
    return statement.format(table=TABLE).replace("$", "?")


def _is_current(connection: sqlite3.Connection) -> bool:
    return "asked" in {name for _, name, *_ in connection.execute(f"PRAGMA table_info({TABLE})")}


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute(_SCHEMA)
    if not _is_current(connection):
        connection.execute(_ADD_ASKED)


class SqliteLedger:
    """The ledger beside retrysafe's own tables, in the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # SQLite has one writer per file. Whoever waits for its turn here blocks no thread.
        self._writing = asyncio.Lock()

    async def open(self) -> None:
        """Nothing is kept open: SQLite connects in microseconds."""

    async def prepare(self) -> None:
        """Makes the table, or brings an earlier demo's up to date."""
        # Looked up first: the write lock may be held by a slow order of a demo that runs already.
        if await asyncio.to_thread(self._reading, _is_current):
            return
        async with self.transaction() as connection:
            await asyncio.to_thread(_prepare, connection)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[sqlite3.Connection]:
        """A connection that has the write lock; commits at the end."""
        async with self._writing:
            connection = await asyncio.to_thread(self._connect)
            try:
                await asyncio.to_thread(connection.execute, "BEGIN IMMEDIATE")
                yield connection
                await asyncio.to_thread(connection.execute, "COMMIT")
            finally:
                # Closing rolls back what was not committed.
                await asyncio.to_thread(connection.close)

    async def add(self, connection: sqlite3.Connection, entry: Entry) -> None:
        """Writes an entry in the connection's transaction."""
        await asyncio.to_thread(connection.execute, _sql(ledger.INSERT), entry.row())

    async def add_once(self, connection: sqlite3.Connection, entry: Entry) -> None:
        """Writes an entry, or counts a repetition of the one that has its id."""
        await asyncio.to_thread(connection.execute, _sql(ledger.INSERT_ONCE), entry.row())

    async def entries(self, operation: str = "", customer: str = "") -> list[Entry]:
        """What was executed, in order; an empty text stands for all."""
        found = await self._fetch(ledger.SELECT, operation, customer, ledger.ENTRIES_LIMIT)
        return [entry_of(row) for row in found]

    async def entry(self, entry_id: str, operation: str) -> Entry | None:
        """One entry."""
        found = await self._fetch(ledger.SELECT_ONE, entry_id, operation)
        return entry_of(found[0]) if found else None

    async def close(self) -> None:
        """Nothing stays open between two calls."""

    async def _fetch(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        def fetch(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            return connection.execute(_sql(statement), values).fetchall()

        return await asyncio.to_thread(self._reading, fetch)

    def _reading(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with closing(self._connect()) as connection:
            return work(connection)

    def _connect(self) -> sqlite3.Connection:
        # Its calls hop between threads, though never two at a time.
        return sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
