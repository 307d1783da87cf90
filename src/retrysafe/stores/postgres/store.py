"""Records in PostgreSQL: durable, shared by many processes on many machines.

Owns the schema, the connections and everything that is not the hot path, which is in `batches`.
Nothing here keeps state in a session or holds a lock between two statements.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    OperatorCommand,
    Payload,
    Record,
    RecordQuery,
    Settlement,
    State,
    Step,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import Capabilities, ClaimResult, ExtendResult, SettleResult
from retrysafe.errors import StoreError, StoreNotWritable, StoreRejected, StoreUnavailable
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.diagnosis import Finding
from retrysafe.stores.migrations import Migration
from retrysafe.stores.postgres import diagnosis, leases, schema
from retrysafe.stores.postgres.atomic import PostgresTransaction
from retrysafe.stores.postgres.batches import Batches
from retrysafe.stores.postgres.busy_keys import BusyKeys, Fetch, Written
from retrysafe.stores.postgres.drivers.port import Conflict, Connector, Locked, RowRefused, Session
from retrysafe.stores.postgres.naming import checked_schema_name
from retrysafe.stores.postgres.outbox import PostgresOutbox
from retrysafe.stores.postgres.partitions import Partitions
from retrysafe.stores.postgres.reading import Reader
from retrysafe.stores.postgres.rows import RECORD_COLUMNS, outcome_of, payload_of, record_of
from retrysafe.stores.postgres.same_database import SameDatabase
from retrysafe.stores.postgres.sweep import Sweeping
from retrysafe.stores.postgres.unsettled import ROUNDS_LIMIT
from retrysafe.stores.postgres.user_connections import adapted

_logger = logging.getLogger("retrysafe")

# A deadlock or serialization failure means that nothing happened; the next try usually goes well.
_CONFLICT_TRIES: Final = 10
# How long an operator's command waits for a row that a user's transaction holds. Most end sooner.
_OPERATOR_LOCK_WAIT: Final = "5s"
# Pages per statement of the search for abandoned keys. It changes nothing, so it reads many.
_LOOK_PAGES: Final = 2048


def _given_up(conflicts: int, error: Conflict) -> StoreUnavailable:
    noun = "conflict" if conflicts == 1 else "conflicts"
    return StoreUnavailable(f"gave up after {conflicts} serialization {noun}: {error}")


class PostgresStore:
    """A store in one schema of a PostgreSQL database."""

    def __init__(
        self, connector: Connector, *, location: str, schema_name: str = "retrysafe"
    ) -> None:
        self._connector = connector
        self.location = location
        self.schema_name = checked_schema_name(schema_name)
        self._sql = schema.statements(self.schema_name)
        self._is_current = False
        self._capabilities = Capabilities(
            connector.waits,
            batch_limit=128,
            batches_in_flight=2,
            small_batches_in_flight=3,
            has_outbox=True,
        )
        self.outbox = PostgresOutbox(self._fetch)
        self._sweeping = Sweeping(self._fetch, self.outbox, self.tend_partitions)
        busy_keys = BusyKeys(self._transact, self.schema_name)
        self._reader = Reader(self._fetch)
        self._batches = Batches(self._fetch, self._reader, self.outbox, busy_keys)
        self._same_database = SameDatabase(
            connector, statements=self._sql, location=location, doubt=self._doubt
        )
        forks.register(self)

    @property
    def capabilities(self) -> Capabilities:
        """Two full batches in flight keep the server and the client busy at the same time."""
        return self._capabilities

    def _statement(self, name: str) -> str:
        return self._sql[name]

    # The hot path.

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Applies a batch; when a row is refused, the batch is halved until it stands alone."""
        try:
            return await self._batches.commit(claims, settlements)
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
            return await self._connector.fetch_renewal(seconds, self._statement(name), params)

        try:
            return await leases.extend(fetch, extensions)
        except Conflict as error:
            raise _given_up(1, error) from error

    async def end_extending(self) -> None:
        """Closes the connections of renewals in the running loop."""
        await self._connector.close_renewals()

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result while the token holds the key."""
        step, payload = write.step, write.step.payload
        result = (payload.form, payload.head, payload.body)
        ((is_held, is_first),) = await self._fetch(
            "record_step", write.key.digest, write.token, step.name, step.position, *result
        )
        if is_held and not is_first:
            ((is_held,),) = await self._fetch("has_step", write.key.digest, step.name, *result)
        return Decision.APPLY if is_held else Decision.LOST

    def join(self, connection: object) -> PostgresTransaction:
        """The open transaction of a user's connection; raises `InvalidInput` for unknown kinds."""
        return PostgresTransaction(
            adapted(connection),
            connector=self._connector,
            same_database=self._same_database,
            statements=self._sql,
            schema_name=self.schema_name,
            location=self.location,
        )

    # For operators.

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key with its steps and the outcome to replay, or its whole audit."""
        found = await self._reader.read(key.digest)
        if found is None or found[0].text != key.text or found[0].caller != key.caller:
            return None
        record, now_ms = found
        steps = [
            Step(name, position, Payload(form, bytes(head), bytes(body)))
            for name, position, form, head, body in await self._fetch("read_steps", key.digest)
        ]
        endings: Sequence[Sequence[Any]] = ()
        if with_audit:
            endings = await self._fetch("read_outcomes", key.digest)
        elif record.state in (State.SUCCEEDED, State.FAILED):
            endings = await self._fetch("read_standing", key.digest, record.token)
            if not endings and await self._has_changed(record):
                # Freed or claimed anew in between: what was read is of a life that is over.
                return await self.read(key)
        outcomes = [outcome_of(row) for row in endings]
        kept = await self._fetch("read_arguments", key.digest, record.first_claimed_at_ms)
        arguments = payload_of(kept[0]) if kept else None
        return StoredKey(record, condition_of(record, now_ms), now_ms, steps, outcomes, arguments)

    async def read_audit(self, key: Key) -> list[StoredOutcome]:
        """Every stored outcome of a key, also when a sweep has removed its record."""
        return [outcome_of(row) for row in await self._fetch("read_outcomes", key.digest)]

    async def _has_changed(self, record: Record) -> bool:
        found = await self._reader.read(record.digest)
        return found is None or found[0] != record

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of the key's present life."""
        found = await self._fetch("read_last_outcome", key.digest, key.caller, key.text)
        return outcome_of(found[0]) if found else None

    async def list_records(self, query: RecordQuery) -> list[StoredKey]:
        """Records for an operator, newest claim first."""
        rows = await self._fetch(
            "list_records",
            query.caller,
            query.text_prefix,
            [item.value for item in query.conditions],
            query.limit,
        )
        found = [(row[0], record_of(tuple(row)[1:])) for row in rows]
        return [StoredKey(item, condition_of(item, now), now) for now, item in found]

    async def operate(self, key: Key, command: OperatorCommand) -> Decision:
        """Applies an operator's command."""
        for _ in range(ROUNDS_LIMIT):
            record, now_ms = await self._reader.read(key.digest) or (None, 0)
            if record is not None and (record.text != key.text or record.caller != key.caller):
                record = None
            changed, decision = transitions.operate(record, command, now_ms)
            if changed is None or record is None:
                return decision
            try:
                if await self._batches.replace(record, changed, lock_wait=_OPERATOR_LOCK_WAIT):
                    return decision
            except Locked as error:
                raise StoreUnavailable(
                    f"an open transaction holds {key.text!r}, and only the end of that "
                    "transaction frees it: pg_stat_activity shows it",
                    key=key.text,
                ) from error
        raise StoreUnavailable("the record changed under us again and again", key=key.text)

    # Retention.

    async def sweep(self, limit: int) -> SweepReport:
        """Removes at most `limit` outlived keys; drops the days whose audit is over.

        The sweep walks over the table's pages and goes on where the last call stopped, because an
        index on the expiry would cost every completion more than all sweeps together. A call ends
        early, so that claims do not wait for what it writes: `has_more` asks for the next one.
        """
        return await self._sweeping.sweep(limit)

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, longest ended first.

        Walks over the table's pages in short statements and stops at the limit, so it is cheap for
        the server even where it takes a while, and may see a record that was settled meanwhile.
        """
        ((pages,),) = await self._fetch("table_pages")
        found: dict[bytes, StoredKey] = {}
        for page in range(0, pages, _LOOK_PAGES):
            rows = await self._fetch(
                "abandoned_in_pages", f"({page},0)", f"({page + _LOOK_PAGES},0)", limit - len(found)
            )
            for row in rows:
                record, now_ms = record_of(tuple(row)[1:]), row[0]
                # A row that moved to a later page meanwhile is met twice; the later one counts.
                found[record.digest] = StoredKey(record, condition_of(record, now_ms), now_ms)
            if len(found) >= limit:
                break
        return sorted(found.values(), key=lambda item: item.record.lease_ends_at_ms)

    # Recovery.

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of operations behind a digest that have arguments."""
        found = []
        for row in await self._fetch("list_resumable", after, limit, list(operations)):
            now_ms, record = row[0], record_of(tuple(row)[1 : RECORD_COLUMNS + 1])
            item = StoredKey(record, condition_of(record, now_ms), now_ms)
            item.arguments = payload_of(tuple(row)[RECORD_COLUMNS + 1 :])
            found.append(item)
        return found

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims a key that is abandoned by the owner of that token."""
        return await self._batches.take_over(request, held)

    async def tend_partitions(self) -> list[str]:
        """Makes the partitions of the coming days; drops those that are over and names them.

        What needs a lock that somebody holds is left for the next time.
        """
        await self._require_current()
        tended = await Partitions(self._connector, self.schema_name, self._statement).tend()
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

    async def diagnose(self) -> list[Finding]:
        """What is wrong with the server's settings, and what is worth knowing."""
        try:
            return await self._diagnosed()
        except StoreNotWritable as error:
            return [diagnosis.not_writable(error)]  # No question would be answered.

    async def _diagnosed(self) -> list[Finding]:
        pooler = await self._pooler_findings()
        if pooler:
            return pooler  # Every other statement may fail for that very reason.
        # Asked without the schema: whether it is there is one of the questions.
        settings = await self._connector.fetch(self._statement("read_settings"))
        found = diagnosis.settings_findings(settings[0])
        limits = await self._connector.fetch(self._statement("read_dead_host_settings"))
        found += diagnosis.dead_host_findings({row[0]: row[1] for row in limits})
        replication = await self._connector.fetch(self._statement("read_replication"))
        found += diagnosis.replication_findings(replication[0])
        try:
            pending: list[Migration] | StoreError = await self.pending_migrations()
        except StoreError as error:
            pending = error
        asked_ms = wall_clock_ms()
        ((now_ms,),) = await self._connector.fetch(self._statement("now_ms"))
        found += diagnosis.clock_finding(now_ms, asked_ms, wall_clock_ms())
        missing = diagnosis.schema_findings(pending, self.schema_name)
        if missing:
            return found + missing
        found += diagnosis.table_findings(await self._fetch("read_table_options", self.schema_name))
        existing = {row[0] for row in await self._fetch("list_partitions")}
        return found + diagnosis.partition_findings(existing, now_ms)

    async def close(self) -> None:
        """Closes the connections; the next use opens new ones."""
        await self._connector.close()

    def after_fork_in_child(self) -> None:
        """Opens own connections at the next use."""
        self._connector.after_fork_in_child()

    async def _require_current(self) -> None:
        """Raises once, and until somebody migrates, when the schema is not this release's.

        The first use also warns of settings that would break a promise. They are not refused: a
        pooler that keeps prepared statements looks just like one that loses them.
        """
        if not self._is_current:
            findings = await self._pooler_findings()
            for finding in findings:
                _logger.warning("%s: %s", self.location, finding.text)
            await schema.require_current(self._connector, self.schema_name, self.location)
            await self._same_database.learn()
            if not findings:
                settings = await self._connector.fetch(self._statement("read_settings"))
                for finding in diagnosis.settings_findings(settings[0]):
                    _logger.warning("%s: %s", self.location, finding.text)
            self._is_current = True

    def _doubt(self) -> None:
        """Has the next use look again where the store is: its server may have been replaced."""
        self._is_current = False

    async def _pooler_findings(self) -> list[Finding]:
        return [diagnosis.POOLER] if await self._connector.has_forgetful_pooler() else []

    async def _fetch(self, name: str, *params: Any) -> Sequence[Sequence[Any]]:
        """Runs a statement, again after a deadlock or a serialization failure."""
        if not self._is_current:
            await self._require_current()
        connector = self._connector
        fetch = connector.fetch_patiently if name in schema.PATIENT else connector.fetch
        conflicts = 0
        for tries_left in range(_CONFLICT_TRIES - 1, -1, -1):
            try:
                return await fetch(self._statement(name), params)
            except StoreNotWritable:
                # Nothing happened, and the connection is discarded. A new one may lead to a
                # primary already; if not, it is for the caller to be patient.
                if tries_left < _CONFLICT_TRIES - 1:
                    raise
            except RowRefused as error:
                raise StoreRejected(f"PostgreSQL refuses this row: {error}") from error
            except Conflict as error:
                conflicts += 1
                if not tries_left:
                    raise _given_up(conflicts, error) from error
        raise AssertionError("unreachable: the last try returns or raises")

    async def _transact(self, flow: Callable[[Fetch], Awaitable[Written]]) -> Written:
        """Runs statements in one transaction, which waits for locks; again as `_fetch` does."""

        async def work(session: Session) -> Written:
            async def fetch(name: str, *params: Any) -> Sequence[Sequence[Any]]:
                patient = name if name == "skip_locked" else f"{name}_patiently"
                return await session.fetch(self._statement(patient), params)

            return await flow(fetch)

        conflicts = 0
        for tries_left in range(_CONFLICT_TRIES - 1, -1, -1):
            try:
                return await self._connector.transact(work)
            except StoreNotWritable:
                if tries_left < _CONFLICT_TRIES - 1:
                    raise
            except RowRefused as error:
                raise StoreRejected(f"PostgreSQL refuses this row: {error}") from error
            except Conflict as error:
                conflicts += 1
                if not tries_left:
                    raise _given_up(conflicts, error) from error
        raise AssertionError("unreachable: the last try returns or raises")
