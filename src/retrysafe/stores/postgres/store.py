"""Records in PostgreSQL: durable, shared by many processes on many machines.

Owns the statements and their order. A batch of new keys and endings is one statement; what it
skipped is read, decided by the core's table with the server's clock, and written by comparing with
what was read. Nothing here keeps state in a session or holds a lock between two statements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

from retrysafe import forks
from retrysafe.core import transitions
from retrysafe.core.keys import Key
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    ClaimRequest,
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
from retrysafe.errors import DigestCollision, StoreError, StoreRejected, StoreUnavailable
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.diagnosis import Finding
from retrysafe.stores.migrations import Migration
from retrysafe.stores.postgres import diagnosis, schema
from retrysafe.stores.postgres.atomic import PostgresTransaction
from retrysafe.stores.postgres.connections import adapted
from retrysafe.stores.postgres.connector import Conflict, Connector, RowRefused
from retrysafe.stores.postgres.outbox import PostgresOutbox
from retrysafe.stores.postgres.partitions import Partitions
from retrysafe.stores.postgres.rows import admitted, found_row, record_of, replacement

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

# A record, the payload to replay, and the instant of the reading.
_Found = tuple[Record, Payload | None, int]
_digest_of: Final = attrgetter("key.digest")
# Looked up once: members of an enum are dear to look up per row.
_EXTEND: Final = SettleKind.EXTEND
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
            connector.waits,
            batch_limit=128,
            batches_in_flight=2,
            small_batches_in_flight=4,
            has_outbox=True,
        )
        self.outbox = PostgresOutbox(self._fetch)
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
            return await self._commit_all(claims, settlements)
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

    async def _commit_all(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Writes at most one row per key at once; further rows for a key follow one by one.

        Settlements come first: an outcome that is there must not lose to a claim beside it.
        """
        endings: dict[bytes, Settlement] = {}
        extends: dict[bytes, Settlement] = {}
        for item in settlements:
            digest = item.key.digest
            if digest not in endings and digest not in extends:
                (extends if item.kind is _EXTEND else endings)[digest] = item
        wishes: dict[bytes, ClaimRequest] = {}
        for request in claims:
            digest = request.key.digest
            if digest not in endings and digest not in extends:
                wishes.setdefault(digest, request)
        written: dict[bytes, int] = {}
        if wishes or endings:
            written = await self._write_batch(wishes.values(), endings.values())
        extended: dict[bytes, SettleAnswer] = {}
        if extends:
            extended = await self._extend(extends.values())
        together = len(extends)
        inserted = {digest: at for digest, at in written.items() if digest in wishes}
        settled: list[SettleResult] = []
        for item in settlements:
            digest = item.key.digest
            # Each write is told to the first row of its key; a second one asks for itself.
            is_extended = extends.pop(digest, None) is not None
            if endings.pop(digest, None) is not None and digest in written:
                settled.append(_APPLIED)
            elif is_extended and digest in extended:
                settled.append(extended[digest])
            else:
                settled.append(await self._settle(item, may_wait=not is_extended or together == 1))
        return await self._answer_claims(claims, inserted), settled

    async def _write_batch(
        self, claims: Iterable[ClaimRequest], endings: Collection[Settlement]
    ) -> dict[bytes, int]:
        """As `_write`; endings that stage entries are written apart, each with its entries."""
        staged = [item for item in endings if item.entries]
        if not staged:
            return await self._write(claims, endings)
        written = dict.fromkeys(await self.outbox.settle_staged(staged), 0)
        plain = [item for item in endings if not item.entries]
        return written | await self._write(claims, plain)

    async def _write(
        self, claims: Iterable[ClaimRequest], endings: Iterable[Settlement]
    ) -> dict[bytes, int]:
        """Inserts new keys and ends attempts; the digests whose row was written."""
        # In the order of the digests: two batches over the same keys cannot deadlock.
        wishes = sorted(claims, key=_digest_of)
        ends = sorted(endings, key=_digest_of)
        payloads = [item.payload for item in ends]
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
            [None if payload is None else payload.form for payload in payloads],
            [None if payload is None else payload.head for payload in payloads],
            [None if payload is None else payload.body for payload in payloads],
        )
        return {bytes(digest): lease_ends_at_ms for digest, lease_ends_at_ms in rows}

    async def _extend(self, extends: Collection[Settlement]) -> dict[bytes, SettleAnswer]:
        # One row may wait for whoever writes it; several must not, see the statement.
        rows = await self._fetch(
            "extend" if len(extends) == 1 else "extend_many",
            [item.key.digest for item in extends],
            [item.token for item in extends],
            [item.lease_ms for item in extends],
        )
        return {
            bytes(digest): SettleAnswer(Decision.APPLY, remaining_ms, ends_at_ms)
            for digest, ends_at_ms, remaining_ms in rows
        }

    async def _answer_claims(
        self, claims: Sequence[ClaimRequest], written: dict[bytes, int]
    ) -> list[ClaimResult]:
        """Admits the keys that were written, and looks at the others together."""
        results: list[ClaimResult | None] = []
        for request in claims:
            ends_at_ms = written.pop(request.key.digest, None)
            results.append(None if ends_at_ms is None else admitted(request, ends_at_ms))
        digests = [
            request.key.digest
            for request, result in zip(claims, results, strict=True)
            if result is None
        ]
        found = await self._read_records(digests) if digests else {}
        return [
            await self._claim_existing(request, found.get(request.key.digest))
            if result is None
            else result
            for request, result in zip(claims, results, strict=True)
        ]

    async def _claim_existing(self, request: ClaimRequest, found: _Found | None) -> ClaimResult:
        """Claims a key that has a row: by the table, and by comparing what is replaced."""
        for _ in range(_ROUNDS_LIMIT):
            try:
                if found is None:
                    # Swept away in between, so the key is free again.
                    written = await self._write([request], [])
                    if written:
                        return admitted(request, written[request.key.digest])
                else:
                    record, payload, now_ms = found
                    changed, answer = transitions.claim(record, request, now_ms)
                    if changed is None:
                        answer.payload = payload if answer.decision is Decision.REPLAY else None
                        return answer
                    is_new_life = answer.decision is Decision.ADMIT
                    if await self._replace(record, changed, is_new_life=is_new_life):
                        return answer
            except (StoreRejected, DigestCollision) as error:
                return error
            found = await self._read_record(request.key.digest)
        raise StoreUnavailable("the record changed under us again and again", key=request.key.text)

    async def _settle(self, settlement: Settlement, *, may_wait: bool) -> SettleResult:
        """An ending or an extend of its own, until the row was written or says why not."""
        digest = settlement.key.digest
        is_extend = settlement.kind is SettleKind.EXTEND
        for _ in range(_ROUNDS_LIMIT):
            found = await self._read_record(digest)
            record, now_ms = (None, 0) if found is None else (found[0], found[2])
            _, answer = transitions.settle(record, settlement, now_ms)
            if answer.decision is not Decision.APPLY:
                return answer
            # Held by this token, and yet not written: somebody else was at the row.
            try:
                if not is_extend:
                    if await self._write_batch([], [settlement]):
                        return SettleAnswer(Decision.APPLY)
                elif may_wait:
                    extended = await self._extend([settlement])
                    if extended:
                        return extended[digest]
                else:
                    # The other leases of the batch must not wait for this row's lock.
                    return StoreUnavailable("the record is being written", key=settlement.key.text)
            except StoreRejected as error:
                return error
        raise StoreUnavailable(
            "the record changed under us again and again", key=settlement.key.text
        )

    async def _read_record(self, digest: bytes) -> _Found | None:
        return (await self._read_records([digest])).get(digest)

    async def _read_records(self, digests: Sequence[bytes]) -> dict[bytes, _Found]:
        found = map(found_row, await self._fetch("read_records", digests))
        return {item[0].digest: item for item in found}

    async def _replace(self, old: Record, new: Record, *, is_new_life: bool = False) -> bool:
        ((count,),) = await self._fetch(
            "replace_record", *replacement(old, new, is_new_life=is_new_life)
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

    def join(self, connection: object) -> PostgresTransaction:
        """The open transaction of a user's connection; raises `InvalidInput` for unknown kinds."""
        return PostgresTransaction(
            adapted(connection),
            connector=self._connector,
            statements=self._sql,
            schema_name=self.schema_name,
            location=self.location,
        )

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
        found = [(row[0], record_of(tuple(row)[1:])) for row in rows]
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
        entries = await self.outbox.sweep(limit)
        has_more = has_more or limit in (outcomes, entries)
        return SweepReport(removed, outcomes, has_more, len(dropped), entries)

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
        if await self._connector.has_forgetful_pooler():
            # Every other statement may fail for that very reason.
            return [diagnosis.POOLER]
        # Asked without the schema: whether it is there is one of the questions.
        settings = await self._connector.fetch(self._statement("read_settings"))
        found = diagnosis.settings_findings(settings[0])
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
            except RowRefused as error:
                raise StoreRejected(f"PostgreSQL refuses this row: {error}") from error
            except Conflict as error:
                if not tries_left:
                    raise StoreUnavailable(f"rivals kept winning: {error}") from error
        raise AssertionError("unreachable: the last try returns or raises")
