"""The PostgreSQL store over Django's own connection, for tests; see `testing_sqlite`.

Nothing here commits: in a `TestCase` everything is a savepoint of its transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import psycopg
from django.db import connections, transaction
from psycopg.rows import tuple_row

from retrysafe.contrib.django.databases import schema_name
from retrysafe.contrib.django.testing_sqlite import renewed
from retrysafe.core.model import Extension
from retrysafe.core.ports import ExtendResult, Waits
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.atomic import PostgresTransaction
from retrysafe.stores.postgres.drivers.port import RowRefused, Rows, translated
from retrysafe.stores.postgres.user_connections import adapted

T = TypeVar("T")


class _Session:
    def __init__(self, plain: Any) -> None:
        self._plain = plain

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        # A cursor of our own: Django's gives other types, and takes other placeholders.
        with psycopg.RawCursor(self._plain, row_factory=tuple_row) as cursor:
            cursor.execute(sql.encode(), list(params))
            return cursor.fetchall() if cursor.description else []

    async def script(self, sql: str) -> None:
        psycopg.ClientCursor(self._plain).execute(sql.encode())


class _DjangoConnector:
    """Django's connection of the thread that asks, in the place of a pool."""

    waits = Waits.BLOCKING

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self.location = f"the test database {alias!r}"

    async def transact(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        try:
            with transaction.atomic(using=self._alias):
                return run_sync(work(_Session(connections[self._alias].connection)))
        except (UnicodeError, psycopg.DataError) as error:
            raise RowRefused(str(error)) from error
        except psycopg.Error as error:
            raise translated(error.sqlstate, str(error).strip(), self.location) from error

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        return await self.transact(lambda session: session.fetch(sql, params))

    fetch_patiently = fetch

    async def fetch_within(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        return await self.fetch(sql, params)

    fetch_renewal = fetch_within

    def refuse_reentry(self) -> None:
        """There is no pool to wait for."""

    async def has_forgetful_pooler(self) -> bool:
        return False

    async def close_renewals(self) -> None:
        """There are none."""

    async def close(self) -> None:
        """Django closes its own."""

    def after_fork_in_child(self) -> None:
        """Django's connections are Django's."""


class _SameConnection:
    async def require(self, connection: Any) -> None:
        """The store has no other than the user's."""


_SAME: Final[Any] = _SameConnection()


class _InTest(PostgresTransaction):
    async def _is_open(self) -> bool:
        # The same connection sees what stands in it, and a test's transaction never ends.
        return False


class SharedPostgresStore(PostgresStore):
    """The store in the test database of an alias."""

    def __init__(self, alias: str) -> None:
        connector: Any = _DjangoConnector(alias)
        super().__init__(connector, location=connector.location, schema_name=schema_name())

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases in the minds of their owners."""
        return renewed(extensions)

    def join(self, connection: object) -> PostgresTransaction:
        """The open transaction of Django's connection."""
        return _InTest(
            adapted(connection),
            connector=self._connector,
            same_database=_SAME,
            statements=self._statements.texts,
            schema_name=self.schema_name,
            location=self.location,
        )
