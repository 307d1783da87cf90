"""Records in one SQLite file: durable, shared by many threads and many processes.

Owns what is read and written in which transaction. Decisions are the core's, made while the file's
single write lock is held. Every commit reaches the disk before it is answered (`synchronous=FULL`):
a claim that the disk forgot would be run twice.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    NO_NOTE,
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    OperatorAction,
    OperatorCommand,
    OperatorNote,
    Settlement,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult, Waits
from retrysafe.core.size import StoreSize
from retrysafe.errors import StoreRejected
from retrysafe.stores.audit import AuditPart
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.diagnosis import Checkup, Finding
from retrysafe.stores.migrations import Migration
from retrysafe.stores.sqlite import (
    audit,
    diagnosis,
    operators,
    recovery,
    rows,
    schema,
    size,
    steps,
)
from retrysafe.stores.sqlite.atomic import SqliteTransaction
from retrysafe.stores.sqlite.claims import claim, extend
from retrysafe.stores.sqlite.connections import SQLITE_ERRORS, Connections
from retrysafe.stores.sqlite.outbox import SqliteOutbox
from retrysafe.stores.sqlite.schema import SQL
from retrysafe.stores.sqlite.settlements import settle
from retrysafe.stores.sqlite.sweep import Sweeping


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
        self._busy_seconds = busy_timeout.total_seconds()
        self._now_ms = now_ms
        self._connections = Connections(
            self.path,
            self.location,
            create=create,
            migrate=migrate,
            busy_seconds=self._busy_seconds,
            now_ms=now_ms,
        )
        self._write, self._read = self._connections.write, self._connections.read
        self.outbox = SqliteOutbox(self._connections, now_ms)
        self._sweeping = Sweeping(self._connections, now_ms)
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
            answers = self._write(partial(self._apply, claims, settlements))
        except StoreRejected as rejected:
            if len(claims) + len(settlements) == 1:
                return ([rejected], []) if claims else ([], [rejected])
            # Endings first here as well, see `_apply`.
            settled = [(await self.commit([], [item]))[1][0] for item in settlements]
            return [(await self.commit([item], []))[0][0] for item in claims], settled
        if any(item.entries for item in settlements):
            self.outbox.hints.tell()
        return answers

    def _apply(
        self,
        claims: Sequence[ClaimRequest],
        settlements: Sequence[Settlement],
        connection: sqlite3.Connection,
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        # Read under the write lock: the wait for it must not count against a lease.
        now_ms = self._now_ms()
        # Endings first: an outcome that is there must not lose to a claim beside it.
        settled = settle(connection, settlements, now_ms) if settlements else []
        claimed = claim(connection, claims, now_ms, self._connections.grace) if claims else []
        return claimed, settled

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases in one transaction, or one by one when a row is refused.

        What it waits for is the file itself, which nobody else could write to in that time; so the
        time limit is the one that the store waits for the file.
        """
        try:
            return self._connections.write_first(
                lambda connection: extend(connection, extensions, self._now_ms())
            )
        except StoreRejected as rejected:
            if len(extensions) == 1:
                return [rejected]
        answers: list[ExtendResult] = []
        for item in extensions:
            answers += await self.extend([item], timeout_seconds)
        return answers

    def refuse_reentry(self) -> None:
        """Raises `StoreUnavailable` where a signal's handler would wait for its own thread."""
        self._connections.refuse_reentry()

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result while the token holds the key."""
        return self._write(lambda connection: steps.record(connection, write, self._now_ms()))

    def join(self, connection: object) -> SqliteTransaction:
        """The open transaction of a user's connection to this file; raises `InvalidInput`."""
        return SqliteTransaction(
            connection,
            store=self,
            path=self.path,
            require_unmoved=self._connections.file.require_unmoved,
            now_ms=self._now_ms,
            prepare=self._connections.prepare,
            has_outcome=self._has_outcome,
            has_step=self._has_step,
        )

    def _has_outcome(self, settlement: Settlement) -> bool:
        sought = {"digest": settlement.key.digest, "token": settlement.token}
        (count,) = self._read(
            lambda connection: connection.execute(SQL["count_outcomes"], sought).fetchone()
        )
        return bool(count)

    def _has_step(self, write: StepWrite) -> bool:
        return self._read(lambda connection: steps.is_there(connection, write))

    # For operators.

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key with its steps and the outcome to replay, or its whole audit."""
        block = "select_outcomes" if with_audit else "select_standing"

        def look(connection: sqlite3.Connection) -> StoredKey | None:
            record = rows.select_of(connection, key)
            if record is None:
                return None
            now_ms = self._now_ms()
            return StoredKey(
                record,
                condition_of(record, now_ms),
                now_ms,
                steps.of(connection, key),
                rows.outcomes(connection, block, key),
                recovery.arguments_of(connection, record),
            )

        return self._read(look)

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of the key's present life."""
        sought = (key.digest, key.caller, key.text)
        found = self._read(
            lambda connection: connection.execute(SQL["select_last_outcome"], sought).fetchone()
        )
        return None if found is None else rows.outcome(found)

    async def read_audit(
        self, key: Key, seconds: float | None = None
    ) -> tuple[list[StoredOutcome], str]:
        """Stored outcomes of a key, the newest first to be searched, with or without a record."""
        return audit.searched(self._read, key, seconds)

    async def audit_part(self, first_ms: int, past_ms: int, start: tuple[int, int]) -> AuditPart:
        """Outcomes that were settled between two instants, from a position on."""
        return self._read(lambda connection: audit.part(connection, first_ms, past_ms, start))

    async def actions_between(
        self, first_ms: int, past_ms: int, after_id: int, limit: int
    ) -> list[tuple[int, Key, OperatorAction]]:
        """What operators did between two instants, behind a number."""
        return self._read(
            lambda connection: operators.actions_between(
                connection, first_ms, past_ms, after_id, limit
            )
        )

    async def list_records(self, query: RecordQuery) -> RecordPage:
        """Records for an operator, newest claim first."""

        def look(connection: sqlite3.Connection) -> RecordPage:
            now_ms = self._now_ms()
            found = rows.listed(connection, query, now_ms)
            listed = [StoredKey(item, condition_of(item, now_ms), now_ms) for item in found]
            return RecordPage.of(listed, query.limit)

        return self._read(look)

    async def sample(self, size: int) -> list[StoredKey]:
        """About so many records, spread over all of them."""

        def look(connection: sqlite3.Connection) -> list[StoredKey]:
            now_ms = self._now_ms()
            found = rows.sampled(connection, size)
            return [StoredKey(item, condition_of(item, now_ms), now_ms) for item in found]

        return self._read(look)

    # Recovery.

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, longest ended first."""
        return self._read(lambda connection: recovery.abandoned(connection, limit, self._now_ms()))

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of operations behind a digest that have arguments."""
        return self._read(
            lambda connection: recovery.resumable(
                connection, limit, after, operations, self._now_ms()
            )
        )

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of that token."""
        return self._write(
            lambda connection: recovery.take_over(
                connection, request, held, self._now_ms(), self._connections.grace
            )
        )

    async def operate(
        self, key: Key, command: OperatorCommand, note: OperatorNote = NO_NOTE
    ) -> Decision:
        """Applies an operator's command."""

        def apply(connection: sqlite3.Connection) -> Decision:
            record = rows.select_of(connection, key)
            now_ms = self._now_ms()
            changed, decision = transitions.operate(record, command, now_ms, note.seen)
            if changed is not None and record is not None:
                rows.update(connection, changed)
                action = transitions.action_of(record, command, note, now_ms)
                operators.keep(connection, key, action)
            return decision

        return self._write(apply)

    async def read_actions(self, key: Key) -> list[OperatorAction]:
        """What operators did to a key, oldest first."""
        return self._read(lambda connection: operators.actions_of(connection, key))

    async def sweep(self, limit: int) -> SweepReport:
        """Removes a bounded number of outlived keys and of outcomes past their audit window.

        One call looks at a bounded number of rows as well: `has_more` tells that the walk over the
        file has not ended. The next call goes on where this one stopped.
        """
        return self._sweeping.sweep(limit)

    async def close(self) -> None:
        """Closes this process's connections; the next use opens new ones."""
        self._connections.close()

    # The schema.

    async def migrate(self) -> list[Migration]:
        """Applies what is missing and says what it was."""
        return self._connections.migrate()

    async def pending_migrations(self) -> list[Migration]:
        """What `migrate` would apply."""
        return self._connections.pending_migrations()

    def migration_script(self) -> str:
        """The schema as SQL; the file is not touched."""
        return schema.script()

    async def measure(self) -> StoreSize:
        """How large the file is, without a scan; raises `StoreUnavailable`."""
        return self._read(lambda connection: size.measure(connection, self._now_ms()))

    async def diagnose(self) -> list[Finding]:
        """What is wrong with the file, and what is worth knowing; raises `StoreError`."""
        return (await self.check_up()).findings

    async def check_up(self) -> Checkup:
        """The same, with what was looked at."""
        try:
            return diagnosis.look(self.path, self._busy_seconds)
        except SQLITE_ERRORS as error:
            raise self._connections.store_error(error) from error

    # Forks.

    def before_fork(self) -> None:
        """Waits for the commit and for the reading under way."""
        self._connections.before_fork()

    def after_fork_in_parent(self) -> None:
        """Lets the next ones in."""
        self._connections.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone and opens own ones at the next use."""
        self._connections.after_fork_in_child()
        self._sweeping = Sweeping(self._connections, self._now_ms)
