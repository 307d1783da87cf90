"""Connections of asyncpg, alone or out of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrysafe.core.ports import Waits
from retrysafe.errors import TransactionMissing
from retrysafe.stores.postgres.drivers.port import Rows
from retrysafe.stores.postgres.user_connections import UserConnection, unknown


def adapted(connection: object) -> UserConnection:
    """The port over an asyncpg connection."""
    if not hasattr(connection, "is_in_transaction"):
        raise unknown(connection)
    return _Asyncpg(connection)


class _Asyncpg:
    waits = Waits.SUSPENDING

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def lasting(self) -> object:
        # A pool lends the same connection in a new wrapper each time.
        return getattr(self._connection, "_con", self._connection)

    async def catch_up(self) -> None:
        return

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        rows: Rows = await self._connection.fetch(sql, *params)
        return rows

    async def begin_savepoint(self) -> None:
        if not self._connection.is_in_transaction():
            raise TransactionMissing(
                "this asyncpg connection has no open transaction: put the block into "
                "'async with connection.transaction():'"
            )
        # Not connection.transaction(): it refuses a transaction that was begun by a statement.
        await self._connection.execute("SAVEPOINT retrysafe")

    async def release_savepoint(self) -> None:
        await self._connection.execute("RELEASE SAVEPOINT retrysafe")

    async def roll_back_savepoint(self) -> None:
        await self._connection.execute("ROLLBACK TO SAVEPOINT retrysafe")
        await self._connection.execute("RELEASE SAVEPOINT retrysafe")
