"""The SQLite store over Django's own connection, for tests.

A `TestCase` is one transaction that is never committed: nobody else sees what it writes, and nobody
else writes at all. So the store's statements run in it, each in a savepoint. Renewals come from
another thread and are not written: no test takes as long as a lease.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from django.db import connections, transaction

from retrysafe.core.model import Decision, ExtendAnswer, Extension
from retrysafe.core.ports import ExtendResult
from retrysafe.errors import StoreError, StoreRejected
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.sqlite import SqliteStore, schema
from retrysafe.stores.sqlite.atomic import SqliteTransaction
from retrysafe.stores.sqlite.grace import Grace
from retrysafe.stores.sqlite.outbox import SqliteOutbox
from retrysafe.stores.sqlite.sweep import Sweeping

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


def renewed(extensions: Sequence[Extension]) -> list[ExtendResult]:
    """The answers to renewals that are not written."""
    now_ms = wall_clock_ms()
    return [
        ExtendAnswer(Decision.APPLY, item.lease_ms, now_ms + item.lease_ms) for item in extensions
    ]


class _DjangoConnections:
    """Django's connection of the thread that asks, in the place of the store's own ones."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self.grace = Grace()
        self.file = SimpleNamespace(require_unmoved=lambda: None, loss=lambda: None)

    def plain(self) -> sqlite3.Connection:
        """The driver's connection, with the tables that a test database may lack."""
        wrapper: Any = connections[self._alias]
        wrapper.ensure_connection()
        plain: sqlite3.Connection = wrapper.connection
        return plain

    def write(self, work: Work[T]) -> T:
        """Runs the work in a transaction, or in a savepoint of the one that is open."""
        try:
            with transaction.atomic(using=self._alias):
                plain = self.plain()
                self._prepare(plain)
                return work(plain)
        except sqlite3.Error as error:
            raise self.store_error(error) from error

    write_first = write
    read = write

    def prepare(self) -> None:
        """Makes the tables."""
        self.write(lambda connection: None)

    def _prepare(self, plain: sqlite3.Connection) -> None:
        if schema.pending_migrations(plain):
            schema.apply_pending(plain, wall_clock_ms)

    def refuse_reentry(self) -> None:
        """There is no lock of ours to wait for."""

    def store_error(self, error: Exception) -> StoreError:
        """The error in retrysafe's words."""
        if isinstance(error, sqlite3.OperationalError):
            return StoreError(f"the test database {self._alias!r} refuses: {error}")
        return StoreRejected(f"SQLite cannot take what it was given: {error}")

    def close(self) -> None:
        """Django closes its own."""


class SharedSqliteStore(SqliteStore):
    """The store in the test database of an alias."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self.path = Path(str(connections[alias].settings_dict["NAME"]))
        self._now_ms = wall_clock_ms
        shared: Any = _DjangoConnections(alias)
        self._connections = shared
        self._write, self._read = shared.write, shared.read
        self.outbox = SqliteOutbox(shared, wall_clock_ms)
        self._sweeping = Sweeping(shared, wall_clock_ms)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases in the minds of their owners."""
        return renewed(extensions)

    def join(self, connection: object) -> SqliteTransaction:
        """The open transaction of Django's connection."""
        return _InTest(
            connection,
            store=self,
            path=self.path,
            require_unmoved=self._connections.file.require_unmoved,
            now_ms=self._now_ms,
            prepare=self._connections.prepare,
            has_outcome=self._has_outcome,
            has_step=self._has_step,
        )


class _InTest(SqliteTransaction):
    def _require_same_file(self, connection: sqlite3.Connection) -> None:
        """The store has no other than the user's; it lacks the tables at most."""
        if schema.pending_migrations(connection):
            schema.apply_pending(connection, wall_clock_ms)
