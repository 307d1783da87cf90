"""SQLAlchemy's connections and sessions, blocking and async, on psycopg and asyncpg.

Savepoints are SQLAlchemy's own, so that a session forgets the objects of a block that was undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, scoped_session

from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput, TransactionMissing
from retrysafe.stores.postgres.drivers.port import Rows
from retrysafe.stores.postgres.user_connections import UserConnection, unknown, with_percent_signs

_PERCENT_DRIVERS: Final = ("psycopg", "psycopg_async")
_DOLLAR_DRIVERS: Final = ("asyncpg",)
_ASYNC_NAMES: Final = frozenset({"AsyncConnection", "AsyncSession", "async_scoped_session"})


def adapted(connection: object) -> UserConnection:
    """The port over a connection or a session of SQLAlchemy."""
    if isinstance(connection, Connection | Session | scoped_session):
        return _Blocking(connection)
    # By name: importing SQLAlchemy's asyncio part fails where greenlet is not installed.
    if _ASYNC_NAMES & {kind.__name__ for kind in type(connection).__mro__}:
        return _Suspending(connection)
    raise unknown(connection)


def _arguments(dialect: Any, sql: str, params: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The statement as the dialect's driver takes it."""
    if dialect.driver in _PERCENT_DRIVERS:
        return with_percent_signs(sql, params)
    if dialect.driver in _DOLLAR_DRIVERS:
        return sql, tuple(params)
    raise InvalidInput(
        f"the PostgreSQL store cannot join a transaction on {dialect.name}+{dialect.driver}: use "
        "postgresql+psycopg, or postgresql+asyncpg in asyncio"
    )


def _require_active(savepoint: Any) -> None:
    if savepoint is None or not savepoint.is_active:
        raise TransactionMissing(
            "the transaction ended inside the block: commit or roll back after it"
        )


class _Blocking:
    waits = Waits.BLOCKING

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._savepoint: Any = None

    def _connection(self) -> Any:
        return self._owner if isinstance(self._owner, Connection) else self._owner.connection()

    async def lasting(self) -> object:
        return self._connection().connection.driver_connection

    async def catch_up(self) -> None:
        return

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        connection = self._connection()
        result = connection.exec_driver_sql(*_arguments(connection.dialect, sql, params))
        rows: Rows = result.fetchall() if result.returns_rows else []
        return rows

    async def begin_savepoint(self) -> None:
        _arguments(self._connection().dialect, "", ())
        self._savepoint = self._owner.begin_nested()
        try:
            # A session sets a savepoint when it is used; ours must be there before the lock.
            self._connection()
        except BaseException:
            await self.roll_back_savepoint()
            raise

    async def release_savepoint(self) -> None:
        _require_active(self._savepoint)
        self._savepoint.commit()

    async def roll_back_savepoint(self) -> None:
        if self._savepoint is not None and self._savepoint.is_active:
            self._savepoint.rollback()


class _Suspending:
    waits = Waits.SUSPENDING

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._savepoint: Any = None

    async def _connection(self) -> Any:
        # A connection runs statements of the driver itself; a session lends one that does.
        if hasattr(self._owner, "exec_driver_sql"):
            return self._owner
        return await self._owner.connection()

    async def lasting(self) -> object:
        return (await self._connection()).sync_connection.connection.driver_connection

    async def catch_up(self) -> None:
        return

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        connection = await self._connection()
        result = await connection.exec_driver_sql(*_arguments(connection.dialect, sql, params))
        rows: Rows = result.fetchall() if result.returns_rows else []
        return rows

    async def begin_savepoint(self) -> None:
        _arguments((await self._connection()).dialect, "", ())
        self._savepoint = await self._owner.begin_nested()
        try:
            await self._connection()
        except BaseException:
            await self.roll_back_savepoint()
            raise

    async def release_savepoint(self) -> None:
        _require_active(self._savepoint)
        await self._savepoint.commit()

    async def roll_back_savepoint(self) -> None:
        if self._savepoint is not None and self._savepoint.is_active:
            await self._savepoint.rollback()
