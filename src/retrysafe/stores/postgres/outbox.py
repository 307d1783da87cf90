"""The outbox in PostgreSQL: entries beside the records, claimed by many relays at once.

Owns the statements of the outbox. Nothing here holds a lock between two statements; a claim is one
statement, and an operator's command compares with what it was decided from.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, Settlement, StagedEntry
from retrysafe.core.outbox.entries import (
    ClaimedEntries,
    Entry,
    EntryClaim,
    EntryCommand,
    EntryEnding,
    EntryQuery,
    EntryStart,
    EntryState,
    EntryWrite,
    Hints,
    OpenTry,
    StoredEntry,
    condition_of,
    operated,
)
from retrysafe.errors import StoreUnavailable
from retrysafe.stores.postgres.drivers.port import Rows

# Aggregates that one look may visit for each entry that is wanted. The heads of many may be waiting
# for their time, and a statement must stay short.
VISITS_PER_ENTRY: Final = 4
# Each round means that somebody else made progress, so a bound only guards against a bug.
_ROUNDS_LIMIT: Final = 50

Fetch = Callable[..., Awaitable[Rows]]


def entry_columns(entries: Sequence[StagedEntry]) -> tuple[list[Any], ...]:
    """Entries as the arrays that the statements take, without the columns that they share."""
    return (
        [item.key for item in entries],
        [item.topic for item in entries],
        [item.aggregate for item in entries],
        [item.content_type for item in entries],
        [item.body for item in entries],
        [item.deliver_at_ms for item in entries],
    )


def stage_parameters(entries: Sequence[StagedEntry], key: Key | None) -> tuple[Any, ...]:
    """The parameters of `stage_entries`."""
    origin = (None, None) if key is None else (key.caller, key.text)
    return (*entry_columns(entries), *origin)


def _entry(row: Sequence[Any]) -> Entry:
    made = Entry(*row)
    made.state = EntryState(made.state)
    made.open_try = OpenTry(made.open_try)
    # Drivers may give memory views for bytes.
    made.body = bytes(made.body)
    made.token = None if made.token is None else bytes(made.token)
    return made


def _stored(row: Sequence[Any]) -> StoredEntry:
    now_ms, *columns = row
    entry = _entry(columns)
    return StoredEntry(entry, condition_of(entry, now_ms), now_ms)


class PostgresOutbox:
    """The entries of one schema."""

    def __init__(self, fetch: Fetch) -> None:
        self.hints = Hints()
        self._fetch = fetch

    async def settle_staged(self, fetch: Fetch, endings: Iterable[Settlement]) -> set[bytes]:
        """Ends attempts with their entries and arguments; the digests whose row was written.

        Whoever calls it tells the hints, once the entries are committed.
        """
        # In the order of the digests, as every batch is.
        ends = sorted(endings, key=lambda item: item.key.digest)
        payloads = [item.payload for item in ends]
        entries = [entry for item in ends for entry in item.entries]
        rows = await fetch(
            "settle_staged",
            [item.key.digest for item in ends],
            [item.token for item in ends],
            [int(item.kind) for item in ends],
            [item.active_ms for item in ends],
            [item.audit_ms for item in ends],
            [None if payload is None else payload.form for payload in payloads],
            [None if payload is None else payload.head for payload in payloads],
            [None if payload is None else payload.body for payload in payloads],
            [item.key.digest for item in ends for _ in item.entries],
            *entry_columns(entries),
            [item.nothing_happened for item in ends],
            [item.drops_arguments for item in ends],
        )
        return {bytes(digest) for (digest,) in rows}

    async def claim(self, claim: EntryClaim) -> ClaimedEntries:
        """Takes free entries and heads in one statement."""
        rows = await self._fetch(
            "claim_entries",
            claim.token,
            claim.lease_ms,
            claim.limit,
            claim.after,
            claim.dead_blocks,
            claim.limit * VISITS_PER_ENTRY,
            claim.begins,
        )
        # One row says where the walk stopped, even when nothing was claimed.
        entries, begun = [], set()
        for _, is_begun, *columns in rows:
            if columns[0] is None:
                continue
            entry = _entry(columns)
            if is_begun:
                begun.add(entry.id)
                entry.attempts -= 1
                entry.open_try = OpenTry.NONE
            entries.append(entry)
        return ClaimedEntries(entries, rows[0][0], frozenset(begun))

    async def write(self, writes: Sequence[EntryWrite]) -> list[Decision]:
        """Writes what became of entries, and what begins, in one statement."""
        ends = [write for write in writes if isinstance(write, EntryEnding)]
        starts = [write for write in writes if isinstance(write, EntryStart)]
        rows = await self._fetch(
            "write_entries",
            [ending.id for ending in ends],
            [ending.token for ending in ends],
            [int(ending.state) for ending in ends],
            [ending.attempts for ending in ends],
            [int(ending.open_try) for ending in ends],
            [ending.wait_ms for ending in ends],
            [ending.keep_ms for ending in ends],
            [ending.error for ending in ends],
            [start.id for start in starts],
            [start.token for start in starts],
            [start.attempt for start in starts],
            [int(OpenTry.ALONE if start.is_alone else OpenTry.SHARED) for start in starts],
            [start.lease_ms for start in starts],
        )
        return _decisions([write.id for write in writes], rows)

    async def extend(self, token: bytes, ids: Sequence[int], lease_ms: int) -> list[Decision]:
        """Extends leases in one statement."""
        rows = await self._fetch("extend_entries", token, sorted(ids), lease_ms)
        return _decisions(ids, rows)

    async def read(self, number: int) -> StoredEntry | None:
        """One entry."""
        rows = await self._fetch("read_entry", number)
        return _stored(rows[0]) if rows else None

    async def list_entries(self, query: EntryQuery) -> list[StoredEntry]:
        """Entries for an operator, newest first."""
        rows = await self._fetch(
            "list_entries",
            query.topic,
            query.aggregate,
            [item.value for item in query.conditions],
            query.limit,
        )
        return [_stored(row) for row in rows]

    async def operate(self, number: int, command: EntryCommand) -> Decision:
        """Applies an operator's command."""
        for _ in range(_ROUNDS_LIMIT):
            found = await self.read(number)
            before = None if found is None else found.entry
            now_ms = 0 if found is None else found.now_ms
            changed, decision = operated(before, command, now_ms)
            if changed is None or before is None:
                return decision
            written = await self._fetch(
                "replace_entry",
                int(changed.state),
                changed.attempts,
                changed.due_at_ms,
                changed.settled_at_ms,
                changed.expires_at_ms,
                number,
                int(before.state),
                before.attempts,
                before.due_at_ms,
                before.token,
            )
            if written:
                self.hints.tell()
                return decision
        raise StoreUnavailable(f"entry {number} changed under us again and again")

    async def sweep(self, limit: int) -> int:
        """Removes at most `limit` entries that are over and were kept long enough."""
        ((count,),) = await self._fetch("sweep_entries", limit)
        return int(count)


def _decisions(ids: Sequence[int], rows: Rows) -> list[Decision]:
    written = {row[0] for row in rows}
    return [Decision.APPLY if number in written else Decision.LOST for number in ids]
