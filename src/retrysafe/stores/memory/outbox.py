"""The outbox of the memory store: entries in a dictionary, under the store's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, StagedEntry
from retrysafe.core.outbox.entries import (
    ClaimedEntries,
    Entry,
    EntryClaim,
    EntryCommand,
    EntryQuery,
    EntryStart,
    EntryState,
    EntryWrite,
    Hints,
    StoredEntry,
    beginning,
    begun,
    claimed,
    condition_of,
    extended,
    holds_back,
    is_claimable,
    new_entry,
    operated,
    written,
)
from retrysafe.core.size import COUNT_LIMIT
from retrysafe.reentry import ReentrantLock


class MemoryOutbox:
    """Entries by their number."""

    def __init__(self, lock: Callable[[], ReentrantLock], now_ms: Callable[[], int]) -> None:
        self.hints = Hints()
        # Asked for each time: a forked child has a lock of its own.
        self._lock = lock
        self._now_ms = now_ms
        self._entries: dict[int, Entry] = {}
        self._last_number = 0
        self._is_staged = False

    # Under the store's lock.

    def insert(self, entries: Sequence[StagedEntry], key: Key, now_ms: int) -> None:
        """Adds what a settlement brought; the store holds the lock."""
        for staged in entries:
            self._last_number += 1
            self._entries[self._last_number] = new_entry(staged, self._last_number, key, now_ms)
            self._is_staged = True

    def sweep(self, limit: int, now_ms: int) -> int:
        """Removes at most `limit` entries that are over and kept long enough."""
        past = [
            number
            for number, entry in self._entries.items()
            if entry.expires_at_ms is not None and entry.expires_at_ms <= now_ms
        ]
        for number in past[:limit]:
            del self._entries[number]
        return min(limit, len(past))

    def notify_staged(self) -> None:
        """Wakes relays if something was added; without the lock, which they need."""
        if self._is_staged:
            self._is_staged = False
            self.hints.tell()

    def __len__(self) -> int:
        return len(self._entries)

    async def measure(self) -> tuple[int, int, float]:
        """How many wait, how many are dead, and how late the first is, in seconds."""
        with self._lock():
            entries, now_ms = list(self._entries.values()), self._now_ms()
        waiting = [entry for entry in entries if entry.state is EntryState.WAITING]
        dead = sum(entry.state is EntryState.DEAD for entry in entries)
        due_at_ms = min((entry.due_at_ms for entry in waiting), default=now_ms)
        return min(len(waiting), COUNT_LIMIT), dead, max(0, now_ms - due_at_ms) / 1000

    # The port.

    async def claim(self, claim: EntryClaim) -> ClaimedEntries:
        """Takes free entries and heads; there are few enough to look at all of them."""
        with self._lock():
            now_ms = self._now_ms()
            free: list[Entry] = []
            heads: dict[str, Entry] = {}
            for entry in self._entries.values():
                if entry.aggregate is None:
                    free.append(entry)
                elif holds_back(entry, dead_blocks=claim.dead_blocks):
                    heads.setdefault(entry.aggregate, entry)
            free.sort(key=lambda entry: (entry.due_at_ms, entry.id))
            lanes = [heads[name] for name in sorted(heads) if name > claim.after]
            chosen: list[Entry] = []
            for candidates in (free, lanes):
                due = [entry for entry in candidates if is_claimable(entry, now_ms)]
                chosen += due[: claim.limit]
            for entry in chosen:
                self._entries[entry.id] = claimed(entry, claim, now_ms)
            names = [entry.aggregate for entry in chosen if entry.aggregate is not None]
            # Copies: a relay notes in them what it does.
            entries = sorted((replace(self._entries[e.id]) for e in chosen), key=lambda e: e.id)
            starting = beginning(entries, claim)
            for entry in starting:
                start = EntryStart(entry.id, claim.token, entry.attempts + 1, claim.lease_ms)
                self._changed(begun(entry, start, now_ms))
            after = max(names) if len(names) == claim.limit else None
            return ClaimedEntries(entries, after, frozenset(entry.id for entry in starting))

    async def write(self, writes: Sequence[EntryWrite]) -> list[Decision]:
        """Writes what became of entries, and what begins."""
        with self._lock():
            now_ms = self._now_ms()
            return [
                self._changed(written(self._entries.get(write.id), write, now_ms))
                for write in writes
            ]

    async def extend(self, token: bytes, ids: Sequence[int], lease_ms: int) -> list[Decision]:
        """Extends leases."""
        with self._lock():
            now_ms = self._now_ms()
            return [
                self._changed(extended(self._entries.get(number), token, lease_ms, now_ms))
                for number in ids
            ]

    def _changed(self, entry: Entry | None) -> Decision:
        if entry is None:
            return Decision.LOST
        self._entries[entry.id] = entry
        return Decision.APPLY

    async def read(self, number: int) -> StoredEntry | None:
        """One entry."""
        with self._lock():
            entry, now_ms = self._entries.get(number), self._now_ms()
        return None if entry is None else StoredEntry(entry, condition_of(entry, now_ms), now_ms)

    async def list_entries(self, query: EntryQuery) -> list[StoredEntry]:
        """Entries for an operator, newest first."""
        with self._lock():
            now_ms = self._now_ms()
            found = [
                StoredEntry(entry, condition, now_ms)
                for entry in reversed(self._entries.values())
                if query.topic is None or entry.topic == query.topic
                if query.aggregate is None or entry.aggregate == query.aggregate
                if (condition := condition_of(entry, now_ms)) in query.conditions
                or not query.conditions
            ]
        return found[: query.limit]

    async def operate(self, number: int, command: EntryCommand) -> Decision:
        """Applies an operator's command."""
        with self._lock():
            changed, decision = operated(self._entries.get(number), command, self._now_ms())
            if changed is not None:
                self._entries[number] = changed
        if decision is Decision.APPLY:
            self.hints.tell()
        return decision
