"""One process's two connections to a SQLite file: one that writes, one for readers.

Owns every transaction of the store, and the locks around them. None survives an exception, also not
one that a signal's handler raises between two instructions: what takes a lock or begins a
transaction is in the same frame as what ends it, and what ends it calls nothing but C (decision
31). So the work is passed in; there is no context manager to be interrupted before its body.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import compress
from operator import methodcaller
from pathlib import Path
from time import monotonic
from typing import Final, TypeVar

from retrysafe import forks
from retrysafe.errors import StoreError, StoreRejected
from retrysafe.reentry import reentered, require_outside
from retrysafe.stores.migrations import Migration
from retrysafe.stores.sqlite import schema
from retrysafe.stores.sqlite.file import DatabaseFile, make_durable, translated
from retrysafe.stores.sqlite.grace import BLOCKED_SECONDS, HELD_SECONDS, Grace

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

# What SQLite and its binding raise for a row that cannot be stored, as opposed to a database that
# cannot be reached. Such a row must fail alone, and its caller must see a `StoreError`.
_ROW_ERRORS: Final = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    OverflowError,
    UnicodeError,
)
SQLITE_ERRORS: Final = (*_ROW_ERRORS, sqlite3.DatabaseError)

# How long a fork waits for each of what is under way; a process that is stuck must be able to fork.
_FORK_WAIT_SECONDS: Final = 5.0
_TAKE: Final = methodcaller("acquire", timeout=_FORK_WAIT_SECONDS)
_RELEASE: Final = methodcaller("release")


class Connections:
    """The connections of this process, opened at their first use."""

    def __init__(
        self,
        path: Path,
        location: str,
        *,
        create: bool,
        migrate: bool,
        busy_seconds: float,
        now_ms: Callable[[], int],
    ) -> None:
        self._path = path
        self._location = location
        self._create = create
        self._migrate = migrate
        self._busy_seconds = busy_seconds
        self._now_ms = now_ms
        self.file = DatabaseFile(path, location)
        self.grace = Grace()
        self.writer: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._writing_thread: int | None = None
        # What writers queue at, except for renewals, and who is the next of them.
        self._turn = threading.Lock()
        self._next_thread: int | None = None
        # What renewals queue at, and who of them is the next: whoever else has the turn waits here.
        self._renewing = threading.Lock()
        self._renewing_thread: int | None = None
        self.reader: sqlite3.Connection | None = None
        self._reading_lock = threading.Lock()
        self._reading_thread: int | None = None
        # The locks that a thread holds while it forks.
        self._resting: dict[int, Iterator[threading.Lock]] = {}

    def write(self, work: Work[T]) -> T:
        """What the work returns, once it is committed; it runs under the file's write lock.

        Raises a `StoreError`, and what the work raises; nothing of it was written then.
        """
        thread = threading.get_ident()
        if thread in (self._next_thread, self._renewing_thread, self._writing_thread):
            raise reentered(self._location)
        # One at a time waits for the lock, and not while a renewal does: locks are not fair, so a
        # busy writer would take it again and again before a renewal gets it.
        with self._turn:
            try:
                self._next_thread = thread
                with self._renewing:
                    pass
                return self._write(work)
            finally:
                self._next_thread = None

    def refuse_reentry(self) -> None:
        """Raises `StoreUnavailable` in a thread that is writing: a signal's handler, then."""
        thread = threading.get_ident()
        if thread in (self._next_thread, self._renewing_thread, self._writing_thread):
            raise reentered(self._location)

    def write_first(self, work: Work[T]) -> T:
        """The same before all others that wait: for renewals, whose leases do not wait."""
        thread = threading.get_ident()
        if thread in (self._next_thread, self._renewing_thread, self._writing_thread):
            raise reentered(self._location)
        with self._renewing:
            try:
                self._renewing_thread = thread
                return self._write(work)
            finally:
                self._renewing_thread = None

    def _write(self, work: Work[T]) -> T:
        thread = threading.get_ident()
        require_outside(self._path, thread)
        try:
            with self._lock:
                try:
                    self._writing_thread = thread
                    connection = self.writer
                    if connection is None or connection.in_transaction:
                        connection = self._open()
                    asked = monotonic()
                    try:
                        # Inside the try: a signal that raises while this waits for the write lock
                        # is noticed only after it was got, and would leave it taken for everybody.
                        connection.execute("BEGIN IMMEDIATE")
                        if monotonic() - asked >= BLOCKED_SECONDS:
                            self.grace.note_wait(asked)
                        self.file.require_unmoved()
                        result = work(connection)
                        connection.execute("COMMIT")
                        if monotonic() - asked >= HELD_SECONDS:
                            # This process stood still, or its disk did, and kept all others from
                            # renewing: its next claim must not be the first to find out.
                            self.grace.note_wait(asked)
                    except BaseException:
                        # Not in a function: a signal that raises at its entry would keep it from
                        # rolling back, and other processes from writing.
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                        # Waited for in vain, most likely, or held for long.
                        if monotonic() - asked >= BLOCKED_SECONDS:
                            self.grace.note_wait(asked)
                        raise
                finally:
                    self._writing_thread = None
        except SQLITE_ERRORS as error:
            raise self.store_error(error) from error
        return result

    def read(self, work: Work[T]) -> T:
        """What the work returns, which sees one state of the file; it holds up no commit.

        The work fetches all rows that it asks for at once. A cursor that is left half-way, and kept
        by the traceback of an interruption, would show the next reader the same old state.
        """
        thread = threading.get_ident()
        if self._reading_thread == thread:
            raise reentered(self._location)
        try:
            with self._reading_lock:
                try:
                    self._reading_thread = thread
                    if self.writer is None:
                        self._prepare(thread)  # The schema is there, or this raises.
                    connection = self.reader
                    if connection is None:
                        connection, _ = self.file.connect(False, self._busy_seconds)
                        self.reader = connection
                    elif connection.in_transaction:
                        connection.execute("ROLLBACK")  # Left by one that failed.
                    try:
                        connection.execute("BEGIN")
                        # An operator must not be shown for ever what nobody else can see.
                        self.file.require_unmoved()
                        return work(connection)
                    finally:
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                finally:
                    self._reading_thread = None
        except SQLITE_ERRORS as error:
            raise self.store_error(error) from error

    def prepare(self) -> None:
        """Makes the file and its schema, as far as that is wanted; raises a `StoreError`."""
        try:
            self._prepare(threading.get_ident())
        except SQLITE_ERRORS as error:
            raise self.store_error(error) from error

    def _prepare(self, thread: int) -> None:
        if self._writing_thread == thread:
            raise reentered(self._location)
        with self._lock:
            try:
                self._writing_thread = thread
                self._open()
            finally:
                self._writing_thread = None

    def migrate(self) -> list[Migration]:
        """Applies what is missing and says what it was."""
        return self._apart(self._migrated)

    def pending_migrations(self) -> list[Migration]:
        """What `migrate` would apply."""
        return self._apart(schema.pending_migrations)

    def _apart(self, work: Work[T]) -> T:
        """Runs the work on a connection that is closed after it."""
        thread = threading.get_ident()
        if self._writing_thread == thread:
            raise reentered(self._location)
        try:
            with self._lock:
                try:
                    self._writing_thread = thread
                    connection, _ = self.file.connect(self._create, self._busy_seconds)
                    try:
                        return work(connection)
                    finally:
                        connection.close()
                finally:
                    self._writing_thread = None
        except SQLITE_ERRORS as error:
            raise self.store_error(error) from error

    def close(self) -> None:
        """Closes both; the next use opens new ones."""
        thread = threading.get_ident()
        if thread in (self._writing_thread, self._reading_thread):
            raise reentered(self._location)
        with self._reading_lock, self._lock:
            # In this order: an interruption leaves either connections and files that belong
            # together, or none.
            self.file.forget()
            writer, reader = self.writer, self.reader
            self.writer = self.reader = None
            try:
                if writer is not None:
                    writer.close()
            finally:
                if reader is not None:
                    reader.close()

    def _open(self) -> sqlite3.Connection:
        """The connection that writes; the caller holds the lock."""
        if self.writer is None:
            connection, file_id = self.file.connect(self._create, self._busy_seconds)
            try:
                if self._migrate:
                    self._migrated(connection)
                else:
                    # Before anything is changed: somebody else's database must stay as it is.
                    schema.require_current(connection, self._location)
                    make_durable(connection, self._busy_seconds)
                self.file.remember(connection, file_id)
            except BaseException:
                connection.close()
                raise
            self.writer = connection
        # A rollback that failed leaves its transaction open; nothing of it may go on.
        if self.writer.in_transaction:
            self.writer.execute("ROLLBACK")
        return self.writer

    def _migrated(self, connection: sqlite3.Connection) -> list[Migration]:
        schema.pending_migrations(connection)  # Raises for a schema that is not to be touched.
        make_durable(connection, self._busy_seconds)
        return schema.migrate(connection, self._now_ms)

    def store_error(self, error: Exception) -> StoreError:
        """The error in retrysafe's words."""
        lost = self.file.loss()
        if lost is not None:
            return lost  # SQLite's own words for files that do not belong together are of no help.
        if isinstance(error, sqlite3.OperationalError):
            return translated(error, self._location)
        if isinstance(error, _ROW_ERRORS):
            return StoreRejected(f"SQLite cannot take what it was given: {error}")
        return StoreError(f"{self._location} cannot be used: {error}")

    # Forks.

    def before_fork(self) -> None:
        """Waits for the commit and for the reading under way.

        Else SQLite's library would believe for ever in the child that their locks are taken, by a
        connection that is not its own: nobody could write there, or the log could not be cut back.
        """
        thread = threading.get_ident()
        if thread in self._resting:
            return  # It is called twice, see `forks`.
        # In the order in which a reading takes them. What is taken is noted in the same call, which
        # is all C: a signal that raises in between would leave a lock taken that nobody knows of.
        locks = (self._reading_lock, self._lock)
        is_taken: list[bool] = []
        taking = map(_TAKE, locks)
        self._resting[thread] = compress(locks, is_taken)
        is_taken.extend(taking)

    def after_fork_in_parent(self) -> None:
        """Lets the next ones in."""
        thread = threading.get_ident()
        # One call again, which uses the note up: each lock is released once.
        deque(map(_RELEASE, self._resting.get(thread, ())), maxlen=0)
        self._resting.pop(thread, None)

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone and opens own ones at the next use.

        They must be to the parent's files: a child is one of the processes that have them in use.
        Its `-shm`, too, because SQLite's library in the child goes on with the one that it has open
        for the parent's connections. Once that is deleted, as the parent's `close` does, nobody
        else sees the locks that the child takes on it, by way of this store or of another one.
        """
        forks.park((self.writer, self.reader))
        self.file.after_fork_in_child()
        self.writer = self.reader = None
        self._lock, self._reading_lock = threading.Lock(), threading.Lock()
        self._turn, self._renewing = threading.Lock(), threading.Lock()
        self._next_thread = self._renewing_thread = None
        self._writing_thread = self._reading_thread = None
        self._resting = {}
