"""Connections of psycopg 3, blocking and async."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from retrysafe.core.ports import Waits
from retrysafe.stores.postgres.drivers.port import Rows
from retrysafe.stores.postgres.user_connections import UserConnection, unknown


def adapted(connection: object) -> UserConnection:
    """The port over a psycopg connection."""
    if isinstance(connection, psycopg.Connection):
        return _Blocking(connection)
    if isinstance(connection, psycopg.AsyncConnection):
        return _Suspending(connection)
    raise unknown(connection)


class _Blocking:
    waits = Waits.BLOCKING

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    async def lasting(self) -> object:
        return self._connection

    async def catch_up(self) -> None:
        if self._connection.pgconn.pipeline_status:
            # A block in the user's pipeline begins and ends with a sync.
            with self._connection.pipeline():
                return

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        # A cursor of our own: the user's may give rows of any shape and take other placeholders.
        with psycopg.RawCursor(self._connection, row_factory=tuple_row) as cursor:
            if self._connection.pgconn.pipeline_status:
                # Without the sync at its end there would be no answer yet.
                with self._connection.pipeline():
                    cursor.execute(sql.encode(), params)
            else:
                cursor.execute(sql.encode(), params)
            return cursor.fetchall() if cursor.description else []

    async def begin_savepoint(self) -> None:
        await self.fetch("SAVEPOINT retrysafe", ())

    async def release_savepoint(self) -> None:
        await self.fetch("RELEASE SAVEPOINT retrysafe", ())

    async def roll_back_savepoint(self) -> None:
        await self.fetch("ROLLBACK TO SAVEPOINT retrysafe", ())
        await self.fetch("RELEASE SAVEPOINT retrysafe", ())


class _Suspending:
    waits = Waits.SUSPENDING

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def lasting(self) -> object:
        return self._connection

    async def catch_up(self) -> None:
        if self._connection.pgconn.pipeline_status:
            async with self._connection.pipeline():
                return

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        async with psycopg.AsyncRawCursor(self._connection, row_factory=tuple_row) as cursor:
            if self._connection.pgconn.pipeline_status:
                async with self._connection.pipeline():
                    await cursor.execute(sql.encode(), params)
            else:
                await cursor.execute(sql.encode(), params)
            return await cursor.fetchall() if cursor.description else []

    async def begin_savepoint(self) -> None:
        await self.fetch("SAVEPOINT retrysafe", ())

    async def release_savepoint(self) -> None:
        await self.fetch("RELEASE SAVEPOINT retrysafe", ())

    async def roll_back_savepoint(self) -> None:
        await self.fetch("ROLLBACK TO SAVEPOINT retrysafe", ())
        await self.fetch("RELEASE SAVEPOINT retrysafe", ())
