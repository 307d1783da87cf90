"""The connections of users that atomic mode can work on in SQLite, behind one small port.

Owns how the driver's connection is reached, in which thread it may be used, and whose savepoints
are set. A connection is recognised by the modules of its classes, so nothing is imported that the
user has not imported already.
"""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput, TransactionMissing
from retrysafe.stores.sqlite.file import full_code

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_ENDED: Final = "the transaction ended inside the block: commit or roll back after it"
_SESSIONS: Final = {("sqlalchemy", name) for name in ("Connection", "Session", "scoped_session")}
_ASYNC_SESSIONS: Final = {
    ("sqlalchemy", name) for name in ("AsyncConnection", "AsyncSession", "async_scoped_session")
}
_AIOSQLITE: Final = ("aiosqlite", "Connection")


class UserConnection(Protocol):
    """A user's connection, with the driver's errors passed through as they are."""

    async def reach(self) -> Driver:
        """The driver's connection; before anything else. Raises `InvalidInput`."""

    async def set_savepoint(self) -> None:
        """Sets a savepoint in the open transaction."""

    async def release_savepoint(self) -> None:
        """Releases it; raises `TransactionMissing` when it is gone."""

    async def roll_back_savepoint(self) -> None:
        """Rolls back to it and ends it."""

    def is_open(self) -> bool:
        """Whether the transaction goes on. Any thread may ask, also while the owner is at work."""


class Driver:
    """A connection of the standard library's binding, used in the thread that asks."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def run(self, work: Work[T]) -> T:
        """Does the work on the connection, in the thread that may use it."""
        return work(self._connection)

    async def ask(self, question: Callable[[], T]) -> T:
        """Asks the store, which blocks."""
        return question()

    def is_in_transaction(self) -> bool:
        """Whether the connection has a transaction."""
        try:
            return bool(self._connection.in_transaction)
        except (sqlite3.ProgrammingError, ValueError):
            return False  # Closed, so whatever was open was rolled back.


class AiosqliteDriver(Driver):
    """A connection of aiosqlite, which one thread of its own works on."""

    async def run(self, work: Work[T]) -> T:
        """Goes the way of the connection's own methods: it offers no other."""
        connection = self._connection
        try:
            plain = connection._conn  # noqa: SLF001
            done: T = await connection._execute(work, plain)  # noqa: SLF001
        except ValueError as error:
            raise sqlite3.ProgrammingError(str(error)) from error  # It is closed.
        return done

    async def ask(self, question: Callable[[], T]) -> T:
        """Asks in a worker: the loop must not wait for a file."""
        return await asyncio.to_thread(question)


def adapted(connection: object) -> tuple[UserConnection, Waits]:
    """The port over a user's connection, and how it waits; raises `InvalidInput`.

    Raises `TransactionMissing` when Django has none open: it would commit the outcome by itself.
    """
    if getattr(connection, "vendor", None) == "sqlite":
        # Django's wrapper, known by what it says of itself, so that Django is not imported here.
        if not getattr(connection, "in_atomic_block", False):
            raise TransactionMissing(
                "Django has no open transaction here: put the block into "
                "'with django.db.transaction.atomic():'"
            )
        connection = getattr(connection, "connection", None)
    if isinstance(connection, sqlite3.Connection):
        return _Plain(Driver(connection)), Waits.BLOCKING
    names = _names_of(connection)
    if _AIOSQLITE in names:
        return _Plain(AiosqliteDriver(connection)), Waits.SUSPENDING
    if not _SESSIONS.isdisjoint(names):
        return _Sqlalchemy(connection), Waits.BLOCKING
    if not _ASYNC_SESSIONS.isdisjoint(names):
        return _Sqlalchemy(connection), Waits.SUSPENDING
    kind = type(connection)
    raise InvalidInput(
        f"{kind.__module__}.{kind.__qualname__} is no connection that the SQLite store can join: "
        "pass a sqlite3.Connection, aiosqlite's, a SQLAlchemy Connection or Session (also async), "
        "or Django's connection, to the same file"
    )


def _names_of(value: object) -> set[tuple[str, str]]:
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}


class _Plain:
    """A driver's connection itself, with a savepoint of our own."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.is_open = driver.is_in_transaction

    async def reach(self) -> Driver:
        return self._driver

    async def set_savepoint(self) -> None:
        await self._driver.run(lambda connection: connection.execute("SAVEPOINT retrysafe"))

    async def release_savepoint(self) -> None:
        await self._driver.run(_release)

    async def roll_back_savepoint(self) -> None:
        await self._driver.run(_roll_back)


def _release(connection: sqlite3.Connection) -> None:
    if not connection.in_transaction:
        raise TransactionMissing(_ENDED)
    try:
        connection.execute("RELEASE retrysafe")
    except sqlite3.OperationalError as error:
        if full_code(error) != sqlite3.SQLITE_ERROR:
            raise
        # There is no such savepoint: this transaction is another one, which the binding began
        # by itself at the first write after the end of the one that the claim was made in.
        raise TransactionMissing(_ENDED) from error


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK TO retrysafe")
        connection.execute("RELEASE retrysafe")


class _Sqlalchemy:
    """A connection or a session of SQLAlchemy, blocking or async.

    Savepoints are SQLAlchemy's own, so that a session forgets the objects of a block that was
    undone.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        # Those that were found by `reach`: a pool lends the connection to others after the commit.
        self._driver: Driver | None = None
        self._transaction: Any = None
        self._savepoint: Any = None

    async def reach(self) -> Driver:
        lent = await self._lent()
        connection = getattr(lent, "sync_connection", lent)
        dialect, found = connection.dialect, connection.connection.driver_connection
        if isinstance(found, sqlite3.Connection):
            self._driver = Driver(found)
        elif _AIOSQLITE in _names_of(found):
            self._driver = AiosqliteDriver(found)
        else:
            raise InvalidInput(
                f"this SQLAlchemy session is on {dialect.name}+{dialect.driver}, and the store is "
                "a SQLite file: outcome and business write must be in one file. Use "
                "sqlite:///file.db (sqlite+aiosqlite in asyncio), or a store in your own database"
            )
        self._transaction = connection.get_transaction()
        if self._transaction is None:
            raise TransactionMissing(
                "this SQLAlchemy connection has no open transaction: put the block into "
                "'with connection.begin():'"
            )
        return self._driver

    async def _lent(self) -> Any:
        # A connection runs statements of the driver itself; a session lends one that does.
        owner = self._owner
        return owner if hasattr(owner, "exec_driver_sql") else await _ended(owner.connection())

    async def set_savepoint(self) -> None:
        self._savepoint = await _ended(self._owner.begin_nested())
        try:
            # A session sets a savepoint when it is used; ours must be there before the lock.
            await self._lent()
        except BaseException:
            await self.roll_back_savepoint()
            raise

    async def release_savepoint(self) -> None:
        if self._savepoint is None or not self._savepoint.is_active:
            raise TransactionMissing(_ENDED)
        await _ended(self._savepoint.commit())

    async def roll_back_savepoint(self) -> None:
        if self._savepoint is not None and self._savepoint.is_active:
            await _ended(self._savepoint.rollback())

    def is_open(self) -> bool:
        return (
            self._driver is not None
            and self._transaction.is_active
            and self._driver.is_in_transaction()
        )


async def _ended(value: Any) -> Any:
    """What a method of a session returned, awaited where the session is async."""
    return await value if inspect.isawaitable(value) else value
