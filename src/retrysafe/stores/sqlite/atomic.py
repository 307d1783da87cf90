"""Atomic mode on SQLite: retrysafe's part of a transaction on the user's own connection.

Owns the write lock that the decisions need. SQLite has one for the whole file, so a rival is
anybody who writes to it. Under the lock nothing changes, which is why waiting for a leased owner of
the key would be waiting for ourselves.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    Payload,
    Settlement,
    StagedEntry,
    StepWrite,
)
from retrysafe.core.ports import Fate, SettleResult, Waits
from retrysafe.errors import InvalidInput, SchemaMissing, StoreError, TransactionMissing
from retrysafe.reentry import OpenBlock
from retrysafe.stores.sqlite import claims, outbox, rows, settlements, steps
from retrysafe.stores.sqlite.file import full_code, primary_code
from retrysafe.stores.sqlite.schema import SQL

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

_ENDED: Final = "the transaction ended inside the block: commit or roll back after it"


def plain_connection(connection: object) -> sqlite3.Connection:
    """The driver's connection inside a user's; raises `InvalidInput` for an unknown kind.

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
        return connection
    kind = type(connection)
    raise InvalidInput(
        f"{kind.__module__}.{kind.__qualname__} is no connection that the SQLite store can join: "
        "pass a sqlite3.Connection, or Django's connection, to the same file"
    )


class SqliteTransaction:
    """A user's transaction on the store's file."""

    waits = Waits.BLOCKING

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: Path,
        require_unmoved: Callable[[], None],
        now_ms: Callable[[], int],
        prepare: Callable[[], object],
        has_outcome: Callable[[Settlement], bool],
        has_step: Callable[[StepWrite], bool],
    ) -> None:
        self._connection = connection
        self._path = path
        # Raises when the path leads to other files by now than the store has opened there.
        self._require_unmoved = require_unmoved
        self._now_ms = now_ms
        self._prepare = prepare
        self._has_outcome = has_outcome
        self._has_step = has_step
        self._block: OpenBlock | None = None

    # The frame around everything that is written.

    async def begin(self) -> None:
        """Sets a savepoint; a connection that begins by itself is made to do it now."""
        self._plainly(self._begin)

    def _begin(self, connection: sqlite3.Connection) -> None:
        self._require_unmoved()
        self._require_same_file()
        if not connection.in_transaction:
            if connection.isolation_level is None:
                raise TransactionMissing(
                    "this connection has no open transaction, so nothing could commit together "
                    "with your writes: run connection.execute('BEGIN IMMEDIATE') before the block"
                )
            self._prepare()
            # The binding would begin at the next write anyway, and the user commits.
            connection.execute("BEGIN")
        connection.execute("SAVEPOINT retrysafe")

    async def keep(self) -> None:
        """Releases the savepoint; raises `TransactionMissing` when it is gone."""
        self._leave_block()
        if not self._connection.in_transaction:
            raise TransactionMissing(_ENDED)
        try:
            self._connection.execute("RELEASE retrysafe")
        except sqlite3.OperationalError as error:
            if full_code(error) != sqlite3.SQLITE_ERROR:
                raise
            # There is no such savepoint: this transaction is another one, which the binding began
            # by itself at the first write after the end of the one that the claim was made in.
            raise TransactionMissing(_ENDED) from error

    async def undo(self) -> None:
        """Rolls back to the savepoint and ends it."""
        self._leave_block()
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK TO retrysafe")
            self._connection.execute("RELEASE retrysafe")

    # The claim.

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Takes the file's write lock, within the connection's own timeout or the given time."""
        return self._plainly(lambda connection: self._lock(connection, wait_seconds))

    def _lock(self, connection: sqlite3.Connection, wait_seconds: float | None) -> bool:
        (earlier_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
        limit_ms = earlier_ms if wait_seconds is None else math.ceil(wait_seconds * 1000)
        try:
            # Inside the try: a signal that raises right after it must not change the user's limit.
            if limit_ms != earlier_ms:
                connection.execute(f"PRAGMA busy_timeout = {limit_ms}")
            self._take_write_lock()
            self._block = OpenBlock(self._path, threading.get_ident(), self.is_open)
            return True
        except sqlite3.OperationalError as error:
            if full_code(error) == sqlite3.SQLITE_ERROR:
                raise self._schema_missing(error) from error
            if primary_code(error) != sqlite3.SQLITE_BUSY:
                raise
            if full_code(error) == sqlite3.SQLITE_BUSY_SNAPSHOT:
                # This transaction has read what a rival has changed since; only a new one can
                # go on, so the user must hear of it as it is.
                raise
            return False
        finally:
            if limit_ms != earlier_ms:
                connection.execute(f"PRAGMA busy_timeout = {earlier_ms}")

    async def look(self, request: ClaimRequest) -> ClaimAnswer:
        """The table's answer to a claim, without making it."""
        return self._plainly(lambda connection: self._look(connection, request))

    def _look(self, connection: sqlite3.Connection, request: ClaimRequest) -> ClaimAnswer:
        record = rows.select(connection, request.key.digest)
        _, answer = transitions.claim(record, request, self._now_ms())
        if answer.decision is Decision.REPLAY:
            row = connection.execute(SQL["select_outcome"], (request.key.digest,)).fetchone()
            answer.payload = None if row is None else Payload(*row)
        return answer

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key as the store does, on the user's connection."""
        (answer,) = self._plainly(
            lambda connection: claims.claim(connection, [request], self._now_ms())
        )
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def sees_changes(self) -> bool:
        """Never: whoever could change something waits for this transaction."""
        return False

    # The outcome.

    async def settle(self, settlement: Settlement) -> Decision:
        """Writes the ending, if the token holds the key."""

        def write(connection: sqlite3.Connection) -> list[SettleResult]:
            # Before the first read: a transaction that has read cannot always become the writer.
            self._take_write_lock()
            return settlements.settle(connection, [settlement], self._now_ms())

        (answer,) = self._plainly(write)
        if isinstance(answer, StoreError):
            raise answer
        return answer.decision

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        """Writes outbox entries; the user's commit makes them deliverable."""

        def write(connection: sqlite3.Connection) -> None:
            try:
                self._take_write_lock()
                outbox.insert(connection, entries, None, self._now_ms())
            except sqlite3.OperationalError as error:
                if full_code(error) == sqlite3.SQLITE_ERROR:
                    raise self._schema_missing(error) from error
                raise

        self._plainly(write)

    async def fate(self, settlement: Settlement) -> Fate:
        """Compares what the store sees with what the user's connection sees."""
        if self._has_outcome(settlement):
            return Fate.STANDS
        sought = {"digest": settlement.key.digest, "token": settlement.token}
        try:
            (count,) = self._plainly(
                lambda connection: connection.execute(SQL["count_outcomes"], sought).fetchone()
            )
        except sqlite3.ProgrammingError:
            return Fate.OPEN if self.is_open() else Fate.UNDONE
        return Fate.OPEN if count else Fate.UNDONE

    # Steps.

    async def record_step(self, write: StepWrite) -> Decision:
        """Records the step as the store does, on the user's connection.

        Extends the lease as well: nobody could while this transaction had the file, and the commit
        must not show a lease that has ended meanwhile.
        """

        def record(connection: sqlite3.Connection) -> Decision:
            self._take_write_lock()
            if steps.is_there(connection, write):
                return Decision.LOST
            now_ms = self._now_ms()
            extension = Extension(write.key, write.token, write.lease_ms)
            claims.extend(connection, [extension], now_ms)
            return steps.record(connection, write, now_ms)

        return self._plainly(record)

    async def step_fate(self, write: StepWrite) -> Fate:
        """Compares what the store sees with what the user's connection sees."""
        if self._has_step(write):
            return Fate.STANDS
        try:
            is_open = self._plainly(lambda connection: steps.is_there(connection, write))
        except sqlite3.ProgrammingError:
            return Fate.UNDONE  # Closed, so whatever was open was rolled back.
        return Fate.OPEN if is_open else Fate.UNDONE

    def is_open(self) -> bool:
        """Whether the connection has a transaction.

        Any thread may ask, also where only one may use the connection, and while that does.
        """
        try:
            return self._connection.in_transaction
        except sqlite3.ProgrammingError:
            return False  # Closed, so whatever was open was rolled back.

    def _take_write_lock(self) -> None:
        """Raises also when it is the lock of a file that others do not find any more."""
        self._connection.execute(SQL["take_write_lock"])
        self._require_unmoved()

    def _leave_block(self) -> None:
        if self._block is not None:
            self._block.leave()
            self._block = None

    # The user's connection.

    def _plainly(self, work: Work[T]) -> T:
        """Runs the work with rows and texts as they are, whatever shape the user has asked for.

        Not a context manager: a signal that raises before its body would leave them so.
        """
        connection = self._connection
        row_factory, text_factory = connection.row_factory, connection.text_factory
        try:
            connection.row_factory, connection.text_factory = None, str
            return work(connection)
        finally:
            connection.row_factory, connection.text_factory = row_factory, text_factory

    def _schema_missing(self, error: sqlite3.OperationalError) -> SchemaMissing:
        return SchemaMissing(
            f"{self._path} has no current retrysafe schema ({error}): run 'retrysafe "
            f"migrate --store sqlite:///{self._path}' before the first transaction"
        )

    def _require_same_file(self) -> None:
        connection = self._connection
        # A name in the file system need not be UTF-8.
        connection.text_factory = os.fsdecode
        try:
            listed = connection.execute("PRAGMA database_list").fetchall()
        except sqlite3.ProgrammingError as error:
            raise InvalidInput(
                f"this connection cannot be used here ({error}): for an event loop, open it with "
                "check_same_thread=False"
            ) from error
        finally:
            connection.text_factory = str
        files = {name: file for _, name, file in listed}
        file = files.get("main")
        if not file or not self._path.exists() or not Path(file).samefile(self._path):
            raise InvalidInput(
                f"this connection is to {file or 'a database in memory'!r}, and the store is "
                f"{str(self._path)!r}: outcome and business write must be in one file"
            )
