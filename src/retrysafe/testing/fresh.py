"""Fresh stores for tests, each with a clock that can be turned.

Owns how a store is made empty: a new one in memory or in a file; in PostgreSQL one schema for the
whole test run, emptied for each test, because migrating takes most of a second.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrysafe.core.model import ClaimRequest, Record
from retrysafe.core.ports import Store
from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.opening import open_store, sqlite_path
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.stores.sqlite.grace import Grace

Turn = Callable[[timedelta], object]


class TurnedClock:
    """The host's clock, as far ahead as a test has turned it."""

    def __init__(self) -> None:
        self._ahead_ms = 0

    def __call__(self) -> int:
        """Milliseconds since the epoch."""
        return wall_clock_ms() + self._ahead_ms

    def advance(self, by: timedelta) -> None:
        """Turns it forward."""
        self._ahead_ms += by // timedelta(milliseconds=1)


class _NoGrace(Grace):
    """Spares nobody: on a busy machine a lease that a test has ended would go on for seconds."""

    def spared(self, record: Record, request: ClaimRequest, now_ms: int) -> None:
        """No lease goes on."""


def fresh_store(kind: str, folder: Path, schemas: Schemas, *, is_async: bool) -> tuple[Store, Turn]:
    """An empty store, and what turns its clock; raises `ValueError` for an unknown kind.

    `memory`, `sqlite` (a file in the folder), the URL of a SQLite file of your own, or of a
    PostgreSQL database, where the store has a schema of its own.
    """
    clock = TurnedClock()
    if kind in ("memory", "memory://"):
        return MemoryStore(now_ms=clock), clock.advance
    if kind == "sqlite" or kind.startswith("sqlite:///"):
        path = folder / "retrysafe.db" if kind == "sqlite" else sqlite_path(kind)
        store = SqliteStore(path, now_ms=clock)
        store._connections.grace = _NoGrace()  # noqa: SLF001 — no store offers that.
        return store, clock.advance
    if kind.startswith("postgres"):
        url = schemas.emptied(kind)
        return open_store(url, is_async=is_async), lambda by: schemas.age(url, by)
    raise ValueError(
        f"{kind!r} is no store for tests: use 'memory', 'sqlite', sqlite:///path/to/file.db or "
        "postgresql://user@host/database"
    )


class Schemas:
    """The schemas that a test run has made in PostgreSQL databases."""

    def __init__(self) -> None:
        self._made: dict[str, str] = {}

    def emptied(self, url: str) -> str:
        """The URL with a schema that only this test run uses, migrated and empty."""
        made = self._made.get(url)
        if made is None:
            name = f"retrysafe_test_{os.getpid()}_{uuid.uuid4().hex[:8]}"
            made = f"{url}{'&' if '?' in url else '?'}schema={name}"
            _aside(made, lambda store: store.migrate())
            self._made[url] = made
            return made
        tables = (
            "keys",
            "outcomes",
            "steps",
            "arguments",
            "renewals",
            "outbox",
            "operator_actions",
        )
        _aside(made, lambda store: _execute(store, "TRUNCATE " + ", ".join(map(_named, tables))))
        return made

    @staticmethod
    def age(url: str, by: timedelta) -> None:
        """Makes all records older, which is the same as a clock that goes on."""
        by_ms = by // timedelta(milliseconds=1)
        columns = "lease_ends_at_ms", "expires_at_ms", "claimed_at_ms", "settled_at_ms"
        changes = ", ".join(f"{name} = {name} - {by_ms}" for name in columns)

        async def age(store: PostgresStore) -> None:
            sets = f"SET {changes}", f"SET {changes.partition(',')[0]}"
            for table, values in zip(("keys", "renewals"), sets, strict=True):
                await _execute(store, f"UPDATE {_named(table)} {values}")

        _aside(url, age)

    def drop(self) -> None:
        """Drops them all; those of a server that the test run has stopped are gone already."""
        for made in self._made.values():
            with suppress(StoreUnavailable):
                _aside(made, lambda store: _execute(store, "DROP SCHEMA {schema} CASCADE"))
        self._made.clear()


def _named(table: str) -> str:
    return f"{{schema}}.{table}"


async def _execute(store: PostgresStore, sql: str) -> None:
    connector = store._connector  # noqa: SLF001 — what tests do to tables, no store offers.
    await connector.fetch(sql.replace("{schema}", store.schema_name))


def _aside(url: str, work: Callable[[Any], Any]) -> None:
    """Works on a store of its own, by whichever driver is installed."""
    if find_spec("psycopg") is not None:
        store = open_store(url)
        try:
            run_sync(work(store))
        finally:
            run_sync(store.close())
        return
    # In a thread of its own: a test's loop may be running here.
    failed: list[BaseException] = []

    async def whole() -> None:
        store = open_store(url, is_async=True)
        try:
            await work(store)
        finally:
            await store.close()

    def run() -> None:
        try:
            asyncio.run(whole())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
