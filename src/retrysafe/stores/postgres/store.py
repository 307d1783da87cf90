"""Records in PostgreSQL: durable, shared by many processes on many machines.

Owns the statements and their order. A batch of new keys and endings is one statement; what it
skipped is read, decided by the core's table with the server's clock, and written by comparing with
what was read. Nothing here keeps state in a session or holds a lock between two statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys import Key
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    OperatorCommand,
    Payload,
    Record,
    RecordQuery,
    SettleAnswer,
    SettleKind,
    Settlement,
    State,
    Step,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.ports import Capabilities, ClaimResult, SettleResult
from retrysafe.errors import StoreError, StoreRejected, StoreUnavailable
from retrysafe.stores.migrations import Migration
from retrysafe.stores.postgres import schema
from retrysafe.stores.postgres.connector import Conflict, Connector, RowRefused
from retrysafe.stores.postgres.partitions import Partitions

# Rivals that keep changing a row between our read and our write make us read again. Each round
# means that somebody else made progress, so a bound only guards against a bug.
_ROUNDS_LIMIT: Final = 50
# A deadlock or serialization failure means that nothing happened; the next try usually goes well.
_CONFLICT_TRIES: Final = 10
# Pages per statement of the sweep: 2 MB are read in a few milliseconds.
_SWEEP_PAGES: Final = 256
# Statements per call of the sweep: a large table in which nothing is outlived is walked over in
# many calls, so that whoever calls can pause in between.
_SWEEP_STATEMENTS: Final = 8
# Looking for abandoned keys changes nothing, so it may read more at a time.
_LOOK_PAGES: Final = 2048

# A record, the payload to replay, and the instant they were read at.
_Found = tuple[Record, Payload | None, int]
_digest_of: Final = attrgetter("key.digest")
# Looked up once: members of an enum are dear to look up per row.
_EXTEND: Final = SettleKind.EXTEND
_ADMIT: Final = Decision.ADMIT
_ABSENT: Final = Condition.ABSENT
_PENDING: Final = State.PENDING
# Nobody changes an answer, so that all rows that were applied can share one.
_APPLIED: Final = SettleAnswer(Decision.APPLY)


class PostgresStore:
    """A store in one schema of a PostgreSQL database."""

    def __init__(
        self, connector: Connector, *, location: str, schema_name: str = "retrysafe"
    ) -> None:
        self._connector = connector
        self.location = location
        self.schema_name = schema.checked_schema_name(schema_name)
        self._sql = schema.statements(self.schema_name)
        self._is_current = False
        self._sweep_page = 0
        self._capabilities = Capabilities(
            connector.waits, batch_limit=128, batches_in_flight=2, small_batches_in_flight=4
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
        """Applies a batch, or row by row when one of them is refused."""
        try:
            return await self._commit_all(claims, settlements)
        except RowRefused as error:
            if len(claims) + len(settlements) == 1:
                rejected = StoreRejected(f"PostgreSQL refuses this row: {error}")
                return ([rejected], []) if claims else ([], [rejected])
        claim_results: list[ClaimResult] = []
        for request in claims:
            claim_results += (await self.commit([request], []))[0]
        settle_results: list[SettleResult] = []
        for settlement in settlements:
            settle_results += (await self.commit([], [settlement]))[1]
        return claim_results, settle_results

    async def _commit_all(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        extends = [item for item in settlements if item.kind is _EXTEND]
        endings = settlements
        if extends:
            endings = [item for item in settlements if item.kind is not _EXTEND]
        written: dict[bytes, int] = {}
        if claims or endings:
            written = await self._write(claims, endings)
        extended = await self._extend(extends) if extends else {}
        # What was skipped is read in one statement, for a batch of replays is nothing else.
        skipped = [request.key.digest for request in claims if request.token not in written]
        skipped += [item.key.digest for item in endings if item.token not in written]
        skipped += [item.key.digest for item in extends if item.token not in extended]
        found = await self._read_records(skipped) if skipped else {}
        claim_results: list[ClaimResult] = [
            _admitted(request, written[request.token])
            if request.token in written
            else await self._claim_existing(request, found.get(request.key.digest))
            for request in claims
        ]
        settle_results: list[SettleResult] = []
        for item in settlements:
            answer = extended.get(item.token) if item.kind is _EXTEND else None
            if answer is None and item.kind is not _EXTEND and item.token in written:
                answer = _APPLIED
            settle_results.append(answer or _explanation(item, found.get(item.key.digest)))
        return claim_results, settle_results

    async def _write(
        self, claims: Sequence[ClaimRequest], endings: Sequence[Settlement]
    ) -> dict[bytes, int]:
        """Inserts new keys and ends attempts; the tokens whose row was written."""
        # In the order of the digests: two batches over the same keys cannot deadlock.
        wishes = sorted(claims, key=_digest_of)
        ends = sorted(endings, key=_digest_of)
        payloads = [item.payload for item in ends if item.payload is not None]
        rows = await self._fetch(
            "commit",
            [request.key.digest for request in wishes],
            [request.key.caller for request in wishes],
            [request.key.text for request in wishes],
            [request.operation for request in wishes],
            [request.fingerprints[0].rule for request in wishes],
            [request.fingerprints[0].digest for request in wishes],
            [request.token for request in wishes],
            [request.lease_ms for request in wishes],
            [request.owner for request in wishes],
            [item.key.digest for item in ends],
            [item.token for item in ends],
            [int(item.kind) for item in ends],
            [item.active_ms for item in ends],
            [item.audit_ms for item in ends],
            [payload.form for payload in payloads],
            [payload.head for payload in payloads],
            [payload.body for payload in payloads],
        )
        return {bytes(token): lease_ends_at_ms for token, lease_ends_at_ms in rows}

    async def _extend(self, extends: Sequence[Settlement]) -> dict[bytes, SettleAnswer]:
        wishes = sorted(extends, key=_digest_of)
        rows = await self._fetch(
            "extend",
            [item.key.digest for item in wishes],
            [item.token for item in wishes],
            [item.lease_ms for item in wishes],
        )
        return {
            bytes(token): SettleAnswer(Decision.APPLY, remaining_ms, ends_at_ms)
            for token, ends_at_ms, remaining_ms in rows
        }

    async def _claim_existing(self, request: ClaimRequest, found: _Found | None) -> ClaimResult:
        """Claims a key that has a row: by the table, and by comparing what is replaced."""
        for _ in range(_ROUNDS_LIMIT):
            if found is None:
                # Swept away in between, so the key is free again.
                written = await self._write([request], [])
                if request.token in written:
                    return _admitted(request, written[request.token])
            else:
                record, payload, now_ms = found
                try:
                    changed, answer = transitions.claim(record, request, now_ms)
                except StoreError as error:
                    return error
                if changed is None:
                    answer.payload = payload if answer.decision is Decision.REPLAY else None
                    return answer
                is_new_life = answer.decision is Decision.ADMIT
                if await self._replace(record, changed, is_new_life=is_new_life):
                    return answer
            found = await self._read_record(request.key.digest)
        raise StoreUnavailable("the record changed under us again and again", key=request.key.text)

    async def _read_record(self, digest: bytes) -> _Found | None:
        return (await self._read_records([digest])).get(digest)

    async def _read_records(self, digests: list[bytes]) -> dict[bytes, _Found]:
        found: dict[bytes, _Found] = {}
        for row in await self._fetch("read_records", digests):
            now_ms, *columns, form, head, body = row
            record = _record(columns)
            payload = None if form is None else Payload(form, bytes(head), bytes(body))
            found[record.digest] = (record, payload, now_ms)
        return found

    async def _replace(self, old: Record, new: Record, *, is_new_life: bool = False) -> bool:
        ((count,),) = await self._fetch(
            "replace_record",
            new.operation,
            new.rule,
            new.fingerprint,
            new.state.value,
            new.token,
            new.attempt,
            new.first_claimed_at_ms,
            new.claimed_at_ms,
            new.lease_ends_at_ms,
            new.settled_at_ms,
            new.expires_at_ms,
            new.owner,
            old.digest,
            old.token,
            old.state.value,
            old.attempt,
            old.lease_ends_at_ms,
            old.expires_at_ms,
            is_new_life,
        )
        return bool(count)

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result while the token holds the key."""
        step, payload = write.step, write.step.payload
        ((count,),) = await self._fetch(
            "record_step",
            write.key.digest,
            write.token,
            step.name,
            step.position,
            payload.form,
            payload.head,
            payload.body,
        )
        return Decision.APPLY if count else Decision.LOST

    # For operators.

    async def read(self, key: Key) -> StoredKey | None:
        """The record of a key with its steps and its audit."""
        found = await self._read_record(key.digest)
        if found is None or found[0].text != key.text or found[0].caller != key.caller:
            return None
        record, _, now_ms = found
        steps = [
            Step(name, position, Payload(form, bytes(head), bytes(body)))
            for name, position, form, head, body in await self._fetch("read_steps", key.digest)
        ]
        outcomes = [
            StoredOutcome(
                bytes(token),
                attempt,
                State(state),
                Payload(form, bytes(head), bytes(body)),
                at,
                ends,
            )
            for token, attempt, state, form, head, body, at, ends in await self._fetch(
                "read_outcomes", key.digest
            )
        ]
        return StoredKey(record, condition_of(record, now_ms), now_ms, steps, outcomes)

    async def list_records(self, query: RecordQuery) -> list[StoredKey]:
        """Records for an operator, newest claim first."""
        rows = await self._fetch(
            "list_records",
            query.caller,
            query.text_prefix,
            [item.value for item in query.conditions],
            query.limit,
        )
        found = [(row[0], _record(tuple(row)[1:])) for row in rows]
        return [StoredKey(item, condition_of(item, now), now) for now, item in found]

    async def operate(self, key: Key, command: OperatorCommand) -> Decision:
        """Applies an operator's command."""
        for _ in range(_ROUNDS_LIMIT):
            found = await self._read_record(key.digest)
            record = None if found is None else found[0]
            if record is not None and (record.text != key.text or record.caller != key.caller):
                record = None
            now_ms = 0 if found is None else found[2]
            changed, decision = transitions.operate(record, command, now_ms)
            if changed is None or record is None or await self._replace(record, changed):
                return decision
        raise StoreUnavailable("the record changed under us again and again", key=key.text)

    # Retention.

    async def sweep(self, limit: int) -> SweepReport:
        """Removes at most `limit` outlived keys; drops the days whose audit is over.

        The sweep walks over the table's pages and goes on where the last call stopped, because an
        index on the expiry would cost every completion more than all sweeps together.
        """
        # Once in a walk: making and dropping partitions takes locks.
        dropped = await self.tend_partitions() if not self._sweep_page else []
        removed = 0
        ((pages,),) = await self._fetch("table_pages")
        for _ in range(_SWEEP_STATEMENTS):
            if self._sweep_page >= pages:
                break
            upto = self._sweep_page + _SWEEP_PAGES
            ((count,),) = await self._fetch(
                "sweep_pages", f"({self._sweep_page},0)", f"({upto},0)", limit - removed
            )
            removed += count
            if removed >= limit:
                break  # These pages may hold more; the next call looks at them again.
            self._sweep_page = upto
        has_more = self._sweep_page < pages
        if not has_more:
            self._sweep_page = 0
        ((outcomes,),) = await self._fetch("sweep_default_outcomes", limit)
        return SweepReport(removed, outcomes, has_more or outcomes == limit, len(dropped))

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
                record, now_ms = _record(tuple(row)[1:]), row[0]
                # A row that moved to a later page meanwhile is met twice; the later one counts.
                found[record.digest] = StoredKey(record, condition_of(record, now_ms), now_ms)
            if len(found) >= limit:
                break
        return sorted(found.values(), key=lambda item: item.record.lease_ends_at_ms)

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

    async def close(self) -> None:
        """Closes the connections; the next use opens new ones."""
        await self._connector.close()

    def after_fork_in_child(self) -> None:
        """Opens own connections at the next use."""
        self._connector.after_fork_in_child()

    async def _require_current(self) -> None:
        """Raises once, and until somebody migrates, when the schema is not this release's."""
        if not self._is_current:
            await schema.require_current(self._connector, self.schema_name, self.location)
            self._is_current = True

    async def _fetch(self, name: str, *params: Any) -> Sequence[Sequence[Any]]:
        """Runs a statement, again after a deadlock or a serialization failure."""
        if not self._is_current:
            await self._require_current()
        for tries_left in range(_CONFLICT_TRIES - 1, -1, -1):
            try:
                return await self._connector.fetch(self._statement(name), params)
            except Conflict as error:
                if not tries_left:
                    raise StoreUnavailable(f"rivals kept winning: {error}") from error
        raise AssertionError("unreachable: the last try returns or raises")


def _explanation(settlement: Settlement, found: _Found | None) -> SettleAnswer:
    """Why an ending or an extend touched no row: lost, or standing already."""
    record, now_ms = (None, 0) if found is None else (found[0], found[2])
    _, answer = transitions.settle(record, settlement, now_ms)
    if answer.decision is Decision.APPLY:
        # Not held a moment ago, so not ours now: a token never comes back.
        return SettleAnswer(Decision.LOST)
    return answer


def _record(row: Sequence[Any]) -> Record:
    made = Record(*row)
    made.state = State(made.state)
    # Drivers may give memory views for bytes; tokens are compared and used as dictionary keys.
    made.digest, made.token = bytes(made.digest), bytes(made.token)
    made.fingerprint = bytes(made.fingerprint)
    return made


def _admitted(request: ClaimRequest, lease_ends_at_ms: int) -> ClaimAnswer:
    return ClaimAnswer(_ADMIT, _ABSENT, 1, request.lease_ms, lease_ends_at_ms, _PENDING)
