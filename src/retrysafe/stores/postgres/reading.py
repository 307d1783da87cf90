"""How records are read: for decisions, many by one statement, and for operators.

Owns the guess in which partitions the payloads to replay are. A statement over all of them sets
each of them up, and the keys of one service mostly have theirs in the same few. Owns also what a
lease means that was renewed beside its row, while a user's transaction has that row (`leases`):
whoever reads a record must see it, on the store's connections and on users' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from retrysafe.core.keys.key import Key
from retrysafe.core.machine import condition_of
from retrysafe.core.model import (
    Condition,
    Payload,
    Record,
    State,
    Step,
    StoredKey,
    StoredOutcome,
)
from retrysafe.stores.postgres.partitions import DAY_MS
from retrysafe.stores.postgres.rows import (
    EVERY_DAY,
    NO_DAY,
    RECORD_COLUMNS,
    found_row,
    outcome_of,
    payload_of,
    record_of,
)
from retrysafe.stores.postgres.statements import Fetch, Statements

# A record, the payload to replay, and the instant of the reading.
Found = tuple[Record, Payload | None, int]

# Nothing was read, and nobody asks when.
NO_RECORD: Final = (None, 0)

_REPLAYED: Final = frozenset({Condition.SUCCEEDED, Condition.FAILED})


async def read_records(fetch: Fetch, digests: Sequence[bytes]) -> dict[bytes, tuple[Record, int]]:
    """Records and the instant of the reading, by digest; leases are as the rows alone have them."""
    rows = await fetch("read_records", digests, *NO_DAY)
    return {record.digest: (record, now_ms) for record, _, now_ms in map(found_row, rows)}


async def look_beside(fetch: Fetch, records: Iterable[Record]) -> None:
    """Completes pending records that were just read by what was renewed beside their rows."""
    pending = {item.digest: item for item in records if item.state is State.PENDING}
    if not pending:
        return
    for digest, token, ends_at_ms in await fetch("read_renewals", list(pending)):
        record = pending[bytes(digest)]
        # A renewal counts for the claim that made it; one of another token is left over.
        if bytes(token) == record.token:
            record.lease_ends_at_ms = max(record.lease_ends_at_ms, ends_at_ms)


async def look_before_takeovers(fetch: Fetch, found: Iterable[Found]) -> None:
    """The same where a lease has ended by its row alone: other claims do not pay for it."""
    await look_beside(
        fetch, [record for record, _, now_ms in found if record.lease_ends_at_ms <= now_ms]
    )


class Reader:
    """Reads records of one schema."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        # How far ahead the audits of replayed keys end, counted from the reading: that stays the
        # same from day to day. Nothing is known before the first replay.
        self._nearest_ms, self._farthest_ms = NO_DAY
        self._now_ms = 0

    # For decisions.

    async def read(self, digest: bytes) -> tuple[Record, int] | None:
        """The record of a digest, and the instant of the reading."""
        found = (await self.read_all([digest])).get(digest)
        if found is not None:
            await look_beside(self._statements.fetch, [found[0]])
        return found

    async def read_of(self, key: Key) -> tuple[Record, int] | None:
        """The same of exactly this key: a row of another key with the same digest is not it."""
        found = await self.read(key.digest)
        if found is None or found[0].text != key.text or found[0].caller != key.caller:
            return None
        return found

    async def read_all(self, digests: Sequence[bytes]) -> dict[bytes, tuple[Record, int]]:
        """The same for several digests, by digest; leases are as the rows alone have them."""
        return await read_records(self._statements.fetch, digests)

    async def read_payload(self, digest: bytes) -> Found | None:
        """The same with the payload to replay."""
        return (await self.read_payloads([digest])).get(digest)

    async def read_payloads(self, digests: Sequence[bytes]) -> dict[bytes, Found]:
        """The records of several digests with the payloads to replay, by digest."""
        first_ms, last_ms = self._now_ms + self._nearest_ms, self._now_ms + self._farthest_ms
        rows = await self._statements.fetch("read_records", digests, first_ms, last_ms)
        found = {item[0].digest: item for item in map(found_row, rows)}
        if rows:
            self._now_ms = rows[0][0]
        # Of a row without a payload, the end of its audit tells whether anybody looked for one.
        passed = [
            (bytes(row[1]), row[-4])
            for row in rows
            if row[-3] is None and row[-4] is not None and not first_ms <= row[-4] <= last_ms
        ]
        missed = []
        for digest, audit_ends_at_ms in passed:
            record, _, now_ms = found[digest]
            # Of a key for ever whose audit is over, nothing is left: a look at every day would not
            # find it, and would widen the look of all replays after it.
            if audit_ends_at_ms > now_ms and condition_of(record, now_ms) in _REPLAYED:
                missed.append(digest)
                self._reach(audit_ends_at_ms - now_ms)
        if missed:
            for digest in missed:
                del found[digest]  # Read anew, it may be gone.
            rows = await self._statements.fetch("read_records", missed, *EVERY_DAY)
            found |= {item[0].digest: item for item in map(found_row, rows)}
        await look_before_takeovers(self._statements.fetch, found.values())
        return found

    def _reach(self, ahead_ms: int) -> None:
        """Looks that far ahead from now on, and a day around it: keys grow older."""
        if self._nearest_ms > self._farthest_ms:
            self._nearest_ms = self._farthest_ms = ahead_ms
        self._nearest_ms = min(self._nearest_ms, ahead_ms - DAY_MS)
        self._farthest_ms = max(self._farthest_ms, ahead_ms + DAY_MS)

    # For operators and workers.

    async def read_key(self, key: Key, *, with_audit: bool) -> StoredKey | None:
        """The record of a key with its steps and the outcome to replay, or its whole audit."""
        fetch = self._statements.fetch
        found = await self.read_of(key)
        if found is None:
            return None
        record, now_ms = found
        steps = [
            Step(name, position, payload_of(payload))
            for name, position, *payload in await fetch("read_steps", key.digest)
        ]
        endings: Sequence[Sequence[Any]] = ()
        if with_audit:
            endings = await fetch("read_outcomes", key.digest)
        elif record.state in (State.SUCCEEDED, State.FAILED):
            endings = await fetch("read_standing", key.digest, record.token)
            if not endings and await self._has_changed(record):
                # Freed or claimed anew in between: what was read is of a life that is over.
                return await self.read_key(key, with_audit=False)
        outcomes = [outcome_of(row) for row in endings]
        kept = await fetch("read_arguments", key.digest, record.first_claimed_at_ms)
        arguments = payload_of(kept[0]) if kept else None
        return StoredKey(record, condition_of(record, now_ms), now_ms, steps, outcomes, arguments)

    async def _has_changed(self, record: Record) -> bool:
        found = await self.read(record.digest)
        return found is None or found[0] != record

    async def read_audit(self, key: Key) -> list[StoredOutcome]:
        """Every stored outcome of a key, also when a sweep has removed its record."""
        rows = await self._statements.fetch("read_outcomes", key.digest)
        return [outcome_of(row) for row in rows]

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of the key's present life."""
        found = await self._statements.fetch("read_last_outcome", key.digest, key.caller, key.text)
        return outcome_of(found[0]) if found else None

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """At most `limit` abandoned records of operations behind a digest that have arguments."""
        found = []
        rows = await self._statements.fetch("list_resumable", after, limit, list(operations))
        for row in rows:
            item = stored_of(row)
            item.arguments = payload_of(tuple(row)[RECORD_COLUMNS + 1 :])
            found.append(item)
        return found


def stored_of(row: Sequence[Any]) -> StoredKey:
    """The record of a row that begins with the instant of the reading."""
    now_ms, record = row[0], record_of(tuple(row)[1 : RECORD_COLUMNS + 1])
    return StoredKey(record, condition_of(record, now_ms), now_ms)
