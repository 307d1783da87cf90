"""Atomic mode on SQLite: retrysafe's part of a transaction on the user's own connection.

Owns the write lock that the decisions need. SQLite has one for the whole file, so a rival is
anybody who writes to it. Under the lock nothing changes, which is why waiting for a leased owner of
the key would be waiting for ourselves.
"""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

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
from retrysafe.stores.sqlite.user_connections import Driver, Work, adapted

T = TypeVar("T")


class SqliteTransaction:
    """A user's transaction on the store's file."""

    def __init__(
        self,
        connection: object,
        *,
        store: object,
        path: Path,
        require_unmoved: Callable[[], None],
        now_ms: Callable[[], int],
        prepare: Callable[[], object],
        has_outcome: Callable[[Settlement], bool],
        has_step: Callable[[StepWrite], bool],
    ) -> None:
        self._user, self.waits = adapted(connection)
        # Found by `begin`, which comes before everything else.
        self._driver: Driver
        self._store = store
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
        self._driver = await self._user.reach()
        await self._run(self._begin)
        await self._user.set_savepoint()

    def _begin(self, connection: sqlite3.Connection) -> None:
        self._require_unmoved()
        self._require_same_file(connection)
        if not connection.in_transaction:
            if connection.isolation_level is None:
                raise TransactionMissing(
                    "this connection has no open transaction, so nothing could commit together "
                    "with your writes: run connection.execute('BEGIN IMMEDIATE') before the block"
                )
            self._prepare()
            # The binding would begin at the next write anyway, and the user commits.
            connection.execute("BEGIN")

    async def keep(self) -> None:
        """Releases the savepoint; raises `TransactionMissing` when it is gone."""
        self._leave_block()
        await self._user.release_savepoint()

    async def undo(self) -> None:
        """Rolls back to the savepoint and ends it."""
        self._leave_block()
        await self._user.roll_back_savepoint()

    # The claim.

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Takes the file's write lock, within the connection's own timeout or the given time."""
        is_locked = await self._run(lambda connection: self._lock(connection, wait_seconds))
        if is_locked and self.waits is Waits.BLOCKING:
            self._block = OpenBlock(self._path, threading.get_ident(), self.is_open)
        elif is_locked:
            self._block = OpenBlock(self._store, asyncio.current_task(), self.is_open)
        return is_locked

    def _lock(self, connection: sqlite3.Connection, wait_seconds: float | None) -> bool:
        (earlier_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
        limit_ms = earlier_ms if wait_seconds is None else math.ceil(wait_seconds * 1000)
        try:
            # Inside the try: a signal that raises right after it must not change the user's limit.
            if limit_ms != earlier_ms:
                connection.execute(f"PRAGMA busy_timeout = {limit_ms}")
            self._take_write_lock(connection)
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
        return await self._run(lambda connection: self._look(connection, request))

    def _look(self, connection: sqlite3.Connection, request: ClaimRequest) -> ClaimAnswer:
        record = rows.select(connection, request.key.digest)
        _, answer = transitions.claim(record, request, self._now_ms())
        if answer.decision is Decision.REPLAY:
            row = connection.execute(SQL["select_outcome"], (request.key.digest,)).fetchone()
            answer.payload = None if row is None else Payload(*row)
        return answer

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key as the store does, on the user's connection."""
        (answer,) = await self._run(
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
            self._take_write_lock(connection)
            return settlements.settle(connection, [settlement], self._now_ms())

        (answer,) = await self._run(write)
        if isinstance(answer, StoreError):
            raise answer
        return answer.decision

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        """Writes outbox entries; the user's commit makes them deliverable."""

        def write(connection: sqlite3.Connection) -> None:
            try:
                self._take_write_lock(connection)
                outbox.insert(connection, entries, None, self._now_ms())
            except sqlite3.OperationalError as error:
                if full_code(error) == sqlite3.SQLITE_ERROR:
                    raise self._schema_missing(error) from error
                raise

        await self._run(write)

    async def fate(self, settlement: Settlement) -> Fate:
        """Compares what the store sees with what the user's connection sees."""
        sought = {"digest": settlement.key.digest, "token": settlement.token}

        def is_there(connection: sqlite3.Connection) -> bool:
            (count,) = connection.execute(SQL["count_outcomes"], sought).fetchone()
            return bool(count)

        return await self._fate(lambda: self._has_outcome(settlement), is_there)

    async def _fate(self, stands: Callable[[], bool], is_there: Work[bool]) -> Fate:
        # First: what has ended before the store is asked is seen by the store.
        is_open = self.is_open()
        if await self._driver.ask(stands):
            return Fate.STANDS
        if not is_open:
            # Nor is the connection asked: its pool may have lent it to somebody else.
            return Fate.UNDONE
        try:
            return Fate.OPEN if await self._run(is_there) else Fate.UNDONE
        except sqlite3.ProgrammingError:
            # Of another thread, or closed meanwhile, which rolls back.
            return Fate.OPEN if self.is_open() else Fate.UNDONE

    # Steps.

    async def record_step(self, write: StepWrite) -> Decision:
        """Records the step as the store does, on the user's connection.

        Extends the lease as well: nobody could while this transaction had the file, and the commit
        must not show a lease that has ended meanwhile.
        """

        def record(connection: sqlite3.Connection) -> Decision:
            self._take_write_lock(connection)
            if steps.is_there(connection, write):
                return Decision.LOST
            now_ms = self._now_ms()
            extension = Extension(write.key, write.token, write.lease_ms)
            claims.extend(connection, [extension], now_ms)
            return steps.record(connection, write, now_ms)

        return await self._run(record)

    async def step_fate(self, write: StepWrite) -> Fate:
        """Compares what the store sees with what the user's connection sees."""
        return await self._fate(
            lambda: self._has_step(write), lambda connection: steps.is_there(connection, write)
        )

    def is_open(self) -> bool:
        """Whether the connection has a transaction.

        Any thread may ask, also where only one may use the connection, and while that does.
        """
        return self._user.is_open()

    def _take_write_lock(self, connection: sqlite3.Connection) -> None:
        """Raises also when it is the lock of a file that others do not find any more."""
        connection.execute(SQL["take_write_lock"])
        self._require_unmoved()

    def _leave_block(self) -> None:
        if self._block is not None:
            self._block.leave()
            self._block = None

    # The user's connection.

    async def _run(self, work: Work[T]) -> T:
        return await self._driver.run(lambda connection: _plainly(connection, work))

    def _schema_missing(self, error: sqlite3.OperationalError) -> SchemaMissing:
        return SchemaMissing(
            f"{self._path} has no current retrysafe schema ({error}): run 'retrysafe "
            f"migrate --store sqlite:///{self._path}' before the first transaction"
        )

    def _require_same_file(self, connection: sqlite3.Connection) -> None:
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


def _plainly(connection: sqlite3.Connection, work: Work[T]) -> T:
    """Does the work with rows and texts as they are, whatever shape the user has asked for.

    Not a context manager: a signal that raises before its body would leave them so.
    """
    row_factory, text_factory = connection.row_factory, connection.text_factory
    try:
        connection.row_factory, connection.text_factory = None, str
        return work(connection)
    finally:
        connection.row_factory, connection.text_factory = row_factory, text_factory
