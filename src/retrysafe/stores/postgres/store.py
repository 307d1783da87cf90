"""Records in PostgreSQL: durable, shared by many processes on many machines.

Owns the order of a batch: what is read, what is written, who answers. The rest of the hot path is
in `claims`, `settlements` and, where somebody else is in the way, `contended`. Nothing here keeps
state in a session or holds a lock between two statements.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Final

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.listing import RecordPage, RecordQuery
from retrysafe.core.model import (
    NO_NOTE,
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    OperatorAction,
    OperatorCommand,
    OperatorNote,
    Record,
    Settlement,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult
from retrysafe.core.size import StoreSize
from retrysafe.errors import StoreError, StoreNotWritable, StoreRejected, StoreUnavailable
from retrysafe.stores.audit import AuditPart
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.diagnosis import Checkup, Finding
from retrysafe.stores.migrations import Migration
from retrysafe.stores.postgres import audit, diagnosis, leases, rows, schema, size
from retrysafe.stores.postgres.atomic import PostgresTransaction
from retrysafe.stores.postgres.claims import Claims
from retrysafe.stores.postgres.contended import ROUNDS_LIMIT, Contended, kept_changing
from retrysafe.stores.postgres.drivers.port import Conflict, Connector, Locked, Session
from retrysafe.stores.postgres.listing import Listing
from retrysafe.stores.postgres.naming import checked_schema_name
from retrysafe.stores.postgres.outbox import PostgresOutbox
from retrysafe.stores.postgres.partitions import Partitions
from retrysafe.stores.postgres.reading import NO_RECORD, Found, Reader
from retrysafe.stores.postgres.rows import Written
from retrysafe.stores.postgres.settlements import Settlements
from retrysafe.stores.postgres.statements import Statements, given_up
from retrysafe.stores.postgres.sweep import Sweeping
from retrysafe.stores.postgres.user_connections import adapted

# How long an operator's command waits for a row that a user's transaction holds. Most end sooner.
_OPERATOR_LOCK_WAIT: Final = "5s"


class PostgresStore:
    """A store in one schema of a PostgreSQL database."""

    def __init__(
        self, connector: Connector, *, location: str, schema_name: str = "retrysafe"
    ) -> None:
        self._connector = connector
        self.location = location
        self.schema_name = checked_schema_name(schema_name)
        self._capabilities = Capabilities(
            connector.waits,
            batch_limit=128,
            batches_in_flight=2,
            small_batches_in_flight=3,
            has_outbox=True,
        )
        self._statements = Statements(connector, schema_name=self.schema_name, location=location)
        self._reader = Reader(self._statements)
        self._listing = Listing(self._statements.fetch)
        self.outbox = PostgresOutbox(self._statements.fetch)
        self._contended = Contended(self._statements, self.outbox)
        self._claims = Claims(self._statements, self._reader, self._contended)
        self._settlements = Settlements(self._reader, self._contended)
        self._sweeping = Sweeping(self._statements.fetch, self.outbox, self.tend_partitions)
        forks.register(self)

    @property
    def capabilities(self) -> Capabilities:
        """Two full batches in flight keep the server and the client busy at the same time."""
        return self._capabilities

    # The hot path.

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Applies a batch; when a row is refused, the batch is halved until it stands alone."""
        try:
            return await self._commit(claims, settlements)
        except StoreRejected as error:
            if len(claims) + len(settlements) == 1:
                return ([error], []) if claims else ([], [error])
        if claims and settlements:
            _, settled = await self.commit([], settlements)
            return (await self.commit(claims, []))[0], settled
        middle = max(len(claims), len(settlements)) // 2
        first = await self.commit(claims[:middle], settlements[:middle])
        second = await self.commit(claims[middle:], settlements[middle:])
        return first[0] + second[0], first[1] + second[1]

    async def _commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Writes first, which is all that new keys and endings need; replays are read first.

        Raises `StoreRejected` when a row of it cannot be taken.
        """
        found: dict[bytes, Found] = {}
        # An ending does not wait for a look that it does not need.
        if not settlements and self._claims.mostly_meet_rows:
            found = await self._claims.read(claims)
        # A key that gets its row after it was read is found out by the write, as ever.
        new = [request for request in claims if request.key.digest not in found]
        written = await self._write(new, settlements)
        settled = await self._settlements.answered(settlements, written.ended)
        return await self._claims.answered(claims, written.admissions, found), settled

    async def _write(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> Written:
        """Writes new keys and ends attempts, as far as nobody is in the way."""
        if not claims and not settlements:
            return Written({}, set())
        if not self._contended.is_plain(claims, settlements):
            return await self._contended.write(claims, settlements)
        try:
            return await rows.write(self._statements.fetch, claims, settlements)
        except Locked:
            return await self._contended.write(claims, settlements, is_locked=True)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases; a row that somebody else is writing is not waited for."""
        until = time.monotonic() + timeout_seconds

        async def fetch(name: str, *params: Any) -> Sequence[Sequence[Any]]:
            # Without a look at the schema, which goes over the pool: what is extended was claimed.
            seconds = until - time.monotonic()
            if seconds <= 0:
                raise StoreUnavailable(f"{self.location} did not answer in time")
            text = self._statements.text(name)
            return await self._connector.fetch_renewal(seconds, text, params)

        try:
            return await leases.extend(fetch, extensions)
        except Conflict as error:
            raise given_up(1, error) from error

    async def end_extending(self) -> None:
        """Closes the connections of renewals in the running loop."""
        await self._connector.close_renewals()

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result while the token holds the key."""
        step, payload = write.step, write.step.payload
        result = (payload.form, payload.head, payload.body)
        fetch = self._statements.fetch
        ((is_held, is_first),) = await fetch(
            "record_step", write.key.digest, write.token, step.name, step.position, *result
        )
        if is_held and not is_first:
            ((is_held,),) = await fetch("has_step", write.key.digest, step.name, *result)
        return Decision.APPLY if is_held else Decision.LOST

    def join(self, connection: object) -> PostgresTransaction:
        """The open transaction of a user's connection; raises `InvalidInput` for unknown kinds."""
        return PostgresTransaction(
            adapted(connection),
            connector=self._connector,
            same_database=self._statements.same_database,
            statements=self._statements.texts,
            schema_name=self.schema_name,
            location=self.location,
        )

    # For operators.

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key with its steps and the outcome to replay, or its whole audit."""
        return await self._reader.read_key(key, with_audit=with_audit)

    async def read_audit(
        self, key: Key, seconds: float | None = None
    ) -> tuple[list[StoredOutcome], str]:
        """Every stored outcome of a key, also when a sweep has removed its record; by an index."""
        return await self._reader.read_audit(key), ""

    async def audit_part(self, first_ms: int, past_ms: int, start: tuple[int, int]) -> AuditPart:
        """Outcomes that were settled between two instants, from a position on."""
        return await audit.part(self._statements, first_ms, past_ms, start)

    async def actions_between(
        self, first_ms: int, past_ms: int, after_id: int, limit: int
    ) -> list[tuple[int, Key, OperatorAction]]:
        """What operators did between two instants, behind a number."""
        asked = (first_ms, past_ms, after_id, limit)
        found = await self._statements.fetch("actions_between", *asked)
        return [
            (number, Key(text, caller=caller or GLOBAL), OperatorAction(*action))
            for number, caller, text, *action in found
        ]

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of the key's present life."""
        return await self._reader.last_outcome(key)

    async def list_records(self, query: RecordQuery) -> RecordPage:
        """Records for an operator, newest claim first."""
        return await self._listing.list_records(query)

    async def sample(self, size: int) -> list[StoredKey]:
        """About so many records, spread over all of them."""
        return await self._listing.sample(size)

    async def operate(
        self, key: Key, command: OperatorCommand, note: OperatorNote = NO_NOTE
    ) -> Decision:
        """Applies an operator's command."""
        for _ in range(ROUNDS_LIMIT):
            record, now_ms = await self._reader.read_of(key) or NO_RECORD
            changed, decision = transitions.operate(record, command, now_ms, note.seen)
            if changed is None or record is None:
                return decision
            try:
                action = transitions.action_of(record, command, note, now_ms)
                if await self._operated(key, record, changed, action):
                    return decision
            except Locked as error:
                raise StoreUnavailable(
                    f"an open transaction holds {key.text!r}, and only the end of that "
                    "transaction frees it: pg_stat_activity shows it",
                    key=key.text,
                ) from error
        raise kept_changing(key)

    async def _operated(self, key: Key, old: Record, new: Record, action: OperatorAction) -> bool:
        """Writes the change and who made it, or neither; False when the row is another by now."""
        change = rows.replacement(old, new, is_new_request=False, lock_wait=_OPERATOR_LOCK_WAIT)

        async def write(session: Session) -> bool:
            ((count,),) = await session.fetch(self._statements.text("replace_record"), change)
            if count:
                made = (key.digest, key.caller, key.text, *astuple(action))
                await session.fetch(self._statements.text("keep_action"), made)
            return bool(count)

        return await self._statements.transacted(write)

    async def read_actions(self, key: Key) -> list[OperatorAction]:
        """What operators did to a key, oldest first."""
        found = await self._statements.fetch("read_actions", key.digest, key.caller, key.text)
        return [OperatorAction(*row) for row in found]

    # Retention.

    async def sweep(self, limit: int) -> SweepReport:
        """Removes at most `limit` outlived keys; drops the days whose audit is over.

        The sweep walks over the table's pages and goes on where the last call stopped, because an
        index on the expiry would cost every completion more than all sweeps together. A call ends
        early, so that claims do not wait for what it writes: `has_more` asks for the next one.
        """
        return await self._sweeping.sweep(limit)

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, longest ended first."""
        return await self._listing.list_abandoned(limit)

    # Recovery.

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of operations behind a digest that have arguments."""
        return await self._reader.list_resumable(limit, after, operations)

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of that token."""
        return await self._claims.take_over(request, held)

    async def tend_partitions(self) -> list[str]:
        """Makes the partitions of the coming days; drops those that are over and names them.

        What needs a lock that somebody holds is left for the next time.
        """
        await self._statements.require_current()
        text = self._statements.text
        tended = await Partitions(self._connector, self.schema_name, text).tend()
        return tended.dropped

    # The schema and the connection.

    async def migrate(self) -> list[Migration]:
        """Applies what is missing, makes the coming partitions, and says what was applied."""
        applied = await schema.migrate(self._connector, self.schema_name)
        await self.tend_partitions()
        return applied

    async def pending_migrations(self) -> list[Migration]:
        """What `migrate` would apply."""
        return await schema.pending_migrations(self._connector, self.schema_name)

    def migration_script(self) -> str:
        """All migrations as one SQL script; opens no connection."""
        return schema.script(self.schema_name)

    async def measure(self) -> StoreSize:
        """How large the store is, by the server's estimates; raises `StoreUnavailable`."""
        return await size.measure(self._statements.fetch, self.schema_name)

    async def diagnose(self) -> list[Finding]:
        """What is wrong with the server's settings, and what is worth knowing."""
        return (await self.check_up()).findings

    async def check_up(self) -> Checkup:
        """The same, with what was looked at."""
        checkup = Checkup()
        try:
            await self._check(checkup)
        except StoreNotWritable as error:
            checkup.add(
                "takes writes", [diagnosis.not_writable(error)]
            )  # Nothing else is answered.
        return checkup

    async def _check(self, checkup: Checkup) -> None:
        if checkup.add("pooler mode", await self._statements.pooler_findings()):
            return  # Every other statement may fail for that very reason.
        # Asked without the schema: whether it is there is one of the questions.
        text, ask = self._statements.text, self._connector.fetch
        settings = await ask(text("read_settings"))
        checkup.add("version and durability", diagnosis.settings_findings(settings[0]))
        limits = {row[0]: row[1] for row in await ask(text("read_dead_host_settings"))}
        checkup.add("time-outs and keepalives", diagnosis.dead_host_findings(limits))
        replication = await ask(text("read_replication"))
        checkup.add("replication", diagnosis.replication_findings(replication[0]))
        asked_ms = wall_clock_ms()
        ((now_ms,),) = await ask(text("now_ms"))
        checkup.add("clock", diagnosis.clock_finding(now_ms, asked_ms, wall_clock_ms()))
        try:
            pending: list[Migration] | StoreError = await self.pending_migrations()
        except StoreError as error:
            pending = error
        if checkup.add("schema", diagnosis.schema_findings(pending, self.schema_name)):
            return
        fetch = self._statements.fetch
        options = await fetch("read_table_options", self.schema_name)
        checkup.add("tables and autovacuum", diagnosis.table_findings(options))
        indexes = {row[0] for row in await fetch("read_indexes", self.schema_name)}
        checkup.add("indexes", diagnosis.index_findings(indexes, self.schema_name))
        existing = {row[0] for row in await fetch("list_partitions")}
        checkup.add("partitions", diagnosis.partition_findings(existing, now_ms))

    def refuse_reentry(self) -> None:
        """Raises `StoreUnavailable` where a signal's handler would wait for its own thread."""
        self._connector.refuse_reentry()

    async def close(self) -> None:
        """Closes the connections; the next use opens new ones."""
        await self._connector.close()

    def after_fork_in_child(self) -> None:
        """Opens own connections at the next use."""
        self._connector.after_fork_in_child()
