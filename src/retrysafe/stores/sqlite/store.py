"""Records in one SQLite file: durable, shared by many threads and many processes.

Owns one connection per process, and the mapping between rows and records. Decisions are the
core's, made while the file's single write lock is held. Every commit reaches the disk before it
is answered (`synchronous=FULL`): a claim that the disk forgot would be run twice.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys import Key
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    OperatorCommand,
    Payload,
    RecordQuery,
    Settlement,
    Step,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult, Waits
from retrysafe.errors import StoreError, StoreRejected
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.diagnosis import Finding
from retrysafe.stores.migrations import Migration
from retrysafe.stores.sqlite import batches, connecting, diagnosis, recovery, rows, schema, steps
from retrysafe.stores.sqlite.atomic import SqliteTransaction, plain_connection
from retrysafe.stores.sqlite.outbox import SqliteOutbox
from retrysafe.stores.sqlite.own_lock import require_outside
from retrysafe.stores.sqlite.place import Place
from retrysafe.stores.sqlite.schema import SQL
from retrysafe.stores.sqlite.sweeping import Sweeping

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
_SQLITE_ERRORS: Final = (*_ROW_ERRORS, sqlite3.DatabaseError)


# How long a fork waits for each of what is under way; a process that is stuck must be able to fork.
_FORK_WAIT_SECONDS: Final = 5.0


class SqliteStore:
    """A store in one SQLite file."""

    def __init__(
        self,
        path: str | Path,
        *,
        create: bool = True,
        migrate: bool = True,
        busy_timeout: timedelta = timedelta(seconds=10),
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        """Opens nothing yet; the first use does.

        `create` makes a missing file, `migrate` brings its schema up to date; without them a
        missing file raises `StoreMissing`, a missing or old schema `SchemaMissing`.
        """
        # Absolute from the start: the file must stay the same when the working directory changes
        # before a fork or a second open.
        self.path = Path(path).absolute()
        self._create = create
        self._migrate = migrate
        self._busy_seconds = busy_timeout.total_seconds()
        self._now_ms = now_ms
        self._place = Place(self.path, self.location)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._reading_lock = threading.Lock()
        self._reader: sqlite3.Connection | None = None
        # What is held while this process forks.
        self._resting: list[threading.Lock] = []
        self.outbox = SqliteOutbox(writing=self._transaction, reading=self._reading, now_ms=now_ms)
        self._sweeping = self._new_sweeping()
        forks.guard(self)

    @property
    def location(self) -> str:
        """The store's URL."""
        return f"sqlite:///{self.path}"

    @property
    def capabilities(self) -> Capabilities:
        """One writer at a time, so one batch at a time; it may be large, the disk is the cost."""
        return Capabilities(
            Waits.BLOCKING,
            batch_limit=128,
            batches_in_flight=1,
            has_outbox=True,
            has_one_writer=True,
        )

    # The hot path.

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Applies a batch in one transaction, or row by row when one of them is refused."""
        try:
            answers = self._commit(claims, settlements)
            for item in settlements:
                if item.entries:
                    self.outbox.hints.tell()
                    break
            return answers
        except StoreRejected as rejected:
            if len(claims) + len(settlements) == 1:
                return ([rejected], []) if claims else ([], [rejected])
        claim_results: list[ClaimResult] = []
        for request in claims:
            claim_results += (await self.commit([request], []))[0]
        settle_results: list[SettleResult] = []
        for settlement in settlements:
            settle_results += (await self.commit([], [settlement]))[1]
        return claim_results, settle_results

    def _commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        # `_transaction` spelled out: two generators cost as much as a statement.
        require_outside(self.path)
        try:
            with self._lock:
                connection = self._connection
                if connection is None or connection.in_transaction:
                    connection = self._connected()
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    self._place.require()
                    # Read under the write lock: the wait for it must not count against a lease.
                    now_ms = self._now_ms()
                    # Endings first: an outcome that is there must not lose to a claim beside it.
                    settled = batches.settle(connection, settlements, now_ms) if settlements else []
                    claimed = batches.claim(connection, claims, now_ms) if claims else []
                    connection.execute("COMMIT")
                except BaseException:
                    connecting.roll_back(connection)
                    raise
        except _SQLITE_ERRORS as error:
            raise self._told(error) from error
        return claimed, settled

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases in one transaction, or one by one when a row is refused."""
        try:
            with self._transaction() as connection:
                return batches.extend(connection, extensions, self._now_ms())
        except StoreRejected as rejected:
            if len(extensions) == 1:
                return [rejected]
        answers: list[ExtendResult] = []
        for item in extensions:
            answers += await self.extend([item], timeout_seconds)
        return answers

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result while the token holds the key."""
        with self._transaction() as connection:
            return steps.record(connection, write, self._now_ms())

    def join(self, connection: object) -> SqliteTransaction:
        """The open transaction of a user's connection to this file; raises `InvalidInput`."""
        return SqliteTransaction(
            plain_connection(connection),
            path=self.path,
            require_place=self._place.require,
            now_ms=self._now_ms,
            prepare=self._prepare,
            has_outcome=self._has_outcome,
            has_step=self._has_step,
        )

    def _prepare(self) -> None:
        with self._translated_errors(), self._lock:
            self._connected()

    def _has_outcome(self, settlement: Settlement) -> bool:
        with self._reading() as connection:
            row = connection.execute(
                SQL["count_outcomes"], (settlement.key.digest, settlement.token)
            ).fetchone()
            return bool(row[0])

    def _has_step(self, write: StepWrite) -> bool:
        with self._reading() as connection:
            return steps.is_there(connection, write)

    # For operators.

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key with its steps and the outcome to replay, or its whole audit."""
        with self._reading() as connection:
            record = rows.select_of(connection, key)
            if record is None:
                return None
            now_ms = self._now_ms()
            found = [
                Step(name, position, Payload(form, head, body))
                for name, position, form, head, body in connection.execute(
                    SQL["select_steps"], (key.digest,)
                )
            ]
            outcomes = self._outcomes(
                connection, "select_outcomes" if with_audit else "select_standing", key
            )
            return StoredKey(
                record,
                condition_of(record, now_ms),
                now_ms,
                found,
                outcomes,
                recovery.arguments_of(connection, record),
            )

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of the key's present life."""
        with self._reading() as connection:
            found = connection.execute(
                SQL["select_last_outcome"], (key.digest, key.caller, key.text)
            ).fetchone()
            return None if found is None else rows.outcome(found)

    async def read_audit(self, key: Key) -> list[StoredOutcome]:
        """Every stored outcome of a key, also when a sweep has removed its record."""
        with self._reading() as connection:
            return self._outcomes(connection, "select_outcomes", key)

    @staticmethod
    def _outcomes(connection: sqlite3.Connection, block: str, key: Key) -> list[StoredOutcome]:
        return [rows.outcome(row) for row in connection.execute(SQL[block], (key.digest,))]

    async def list_records(self, query: RecordQuery) -> list[StoredKey]:
        """Records for an operator, newest claim first."""
        with self._reading() as connection:
            now_ms = self._now_ms()
            found = connection.execute(
                SQL["select_keys"],
                {
                    "caller": query.caller,
                    "prefix": query.text_prefix,
                    "any_condition": not query.conditions,
                    "conditions": json.dumps([item.value for item in query.conditions]),
                    "now_ms": now_ms,
                    "limit": query.limit,
                },
            )
            records = map(rows.record, found)
            return [StoredKey(item, condition_of(item, now_ms), now_ms) for item in records]

    # Recovery.

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, longest ended first."""
        with self._reading() as connection:
            return recovery.abandoned(connection, limit, self._now_ms())

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of operations behind a digest that have arguments."""
        with self._reading() as connection:
            return recovery.resumable(connection, limit, after, operations, self._now_ms())

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of that token."""
        with self._transaction() as connection:
            return recovery.take_over(connection, request, held, self._now_ms())

    async def operate(self, key: Key, command: OperatorCommand) -> Decision:
        """Applies an operator's command."""
        with self._transaction() as connection:
            record = rows.select_of(connection, key)
            changed, decision = transitions.operate(record, command, self._now_ms())
            if changed is not None:
                rows.update(connection, changed)
            return decision

    async def sweep(self, limit: int) -> SweepReport:
        """Removes a bounded number of outlived keys and of outcomes past their audit window.

        One call looks at a bounded number of rows as well: `has_more` tells that the walk over the
        file has not ended. The next call goes on where this one stopped.
        """
        return self._sweeping.sweep(limit)

    async def close(self) -> None:
        """Closes this process's connection; the next use opens a new one."""
        with self._reading_lock, self._lock:
            for connection in (self._connection, self._reader):
                if connection is not None:
                    connection.close()
            self._connection = self._reader = None
            self._place.forget()

    # The schema.

    async def migrate(self) -> list[Migration]:
        """Applies what is missing and says what it was."""
        with self._translated_errors(), self._lock:
            connection, _ = self._place.connect(self._create, self._busy_seconds)
            try:
                return self._migrated(connection)
            finally:
                connection.close()

    async def pending_migrations(self) -> list[Migration]:
        """What `migrate` would apply."""
        with self._translated_errors(), self._lock:
            connection, _ = self._place.connect(self._create, self._busy_seconds)
            try:
                return schema.pending_migrations(connection)
            finally:
                connection.close()

    def migration_script(self) -> str:
        """The schema as SQL; the file is not touched."""
        return schema.script()

    async def diagnose(self) -> list[Finding]:
        """What is wrong with the file, and what is worth knowing; raises `StoreError`."""
        with self._translated_errors():
            return diagnosis.look(self.path, self._busy_seconds)

    # The connection.

    def before_fork(self) -> None:
        """Waits for the commit and for the reading under way.

        Else SQLite's library would believe for ever in the child that their locks are taken, by a
        connection that is not its own: nobody could write there, or the log could not be cut back.
        """
        # In the order in which a reading takes them.
        for lock in (self._reading_lock, self._lock):
            if lock.acquire(timeout=_FORK_WAIT_SECONDS):
                self._resting.append(lock)

    def after_fork_in_parent(self) -> None:
        """Lets the next ones in."""
        # Taken away first: another thread that forks holds the locks as soon as they are free.
        resting, self._resting = self._resting, []
        for lock in resting:
            lock.release()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone and opens own ones at the next use.

        They must be to the parent's files: a child is one of the processes that have them in use.
        Its `-shm`, too, because SQLite's library in the child goes on with the one that it has open
        for the parent's connections. Once that is deleted, as the parent's `close` does, nobody
        else sees the locks that the child takes on it, by way of this store or of another one.
        """
        forks.park((self._connection, self._reader))
        self._place.after_fork_in_child()
        self._connection = self._reader = None
        self._lock, self._reading_lock = threading.Lock(), threading.Lock()
        self._sweeping = self._new_sweeping()
        self._resting = []

    def _new_sweeping(self) -> Sweeping:
        return Sweeping(writing=self._transaction, reading=self._reading, now_ms=self._now_ms)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        require_outside(self.path)
        with self._translated_errors(), self._lock:
            connection = self._connected()
            try:
                # Inside the try: a signal that raises while this waits for the write lock is
                # noticed only after it was got, and the lock would stay taken for everybody.
                connection.execute("BEGIN IMMEDIATE")
                self._place.require()
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connecting.roll_back(connection)
                raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own for operators, whose scans must not hold up a commit."""
        with self._translated_errors(), self._reading_lock:
            with self._lock:
                self._connected()  # The schema is there, or this raises.
            if self._reader is None:
                self._reader, _ = self._place.connect(False, self._busy_seconds)
            connection = self._reader
            try:
                connecting.roll_back(connection)
                connection.execute("BEGIN")
                # An operator must not be shown for ever what nobody else can see.
                self._place.require()
                yield connection
            finally:
                connecting.roll_back(connection)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            connection, file = self._place.connect(self._create, self._busy_seconds)
            try:
                if self._migrate:
                    self._migrated(connection)
                else:
                    # Before anything is changed: somebody else's database must stay as it is.
                    schema.require_current(connection, self.location)
                    connecting.make_durable(connection, self._busy_seconds)
                self._place.remember(connection, file)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        # An interrupted rollback leaves its transaction open; nothing of it may go on.
        connecting.roll_back(self._connection)
        return self._connection

    def _migrated(self, connection: sqlite3.Connection) -> list[Migration]:
        schema.pending_migrations(connection)  # Raises for a schema that is not to be touched.
        connecting.make_durable(connection, self._busy_seconds)
        return schema.migrate(connection, self._now_ms)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except _SQLITE_ERRORS as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> StoreError:
        """The error in retrysafe's words."""
        lost = self._place.loss()
        if lost is not None:
            return lost  # SQLite's own words for files that do not belong together are of no help.
        if isinstance(error, sqlite3.OperationalError):
            return connecting.translated(error, self.location)
        if isinstance(error, _ROW_ERRORS):
            return StoreRejected(f"SQLite cannot take what it was given: {error}")
        return StoreError(f"{self.location} cannot be used: {error}")
