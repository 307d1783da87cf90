"""An outbox under test, with verbs that read as what happens to an entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest

from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, SettleKind, StagedEntry
from retrysafe.core.outbox.entries import (
    ClaimedEntries,
    Entry,
    EntryClaim,
    EntryCommand,
    EntryCondition,
    EntryEnding,
    EntryQuery,
    EntryStart,
    EntryState,
    OpenTry,
    StoredEntry,
)
from retrysafe.core.outbox.port import Outbox, outbox_of
from retrysafe.runtime.identity import mint_token
from retrysafe.testing.suite.base import SuiteBase
from retrysafe.testing.suite.probe import (
    KEY,
    LEASE_MS,
    Probe,
    key_of,
    settlement,
)

KEEP_MS: Final = 60_000
WAIT_MS: Final = 5_000

OVER: Final = (EntryState.WAITING, EntryState.DELIVERED, EntryState.DEAD)


def staged(
    name: str, aggregate: str | None = None, *, body: bytes = b"{}", deliver_at_ms: int = 0
) -> StagedEntry:
    """An entry in the usual words."""
    return StagedEntry(
        f"entry:{name}", "orders.paid", "application/json", body, aggregate, deliver_at_ms
    )


class OutboxProbe:
    """A store's outbox, with verbs that read as what happens to an entry."""

    def __init__(self, probe: Probe, run: Callable[[Any], Any]) -> None:
        self.probe = probe
        self._run = run

    @property
    def outbox(self) -> Outbox:
        """The entries."""
        return outbox_of(self.probe.store)

    def stage(self, *entries: StagedEntry, key: Key | None = None) -> None:
        """Runs an operation that stages these entries."""
        key = key or key_of(f"stages {mint_token().hex()}")
        token = self.probe.hold(key)
        assert self.end(token, entries, key) is Decision.APPLY

    def end(
        self,
        token: bytes,
        entries: Sequence[StagedEntry],
        key: Key = KEY,
        kind: SettleKind = SettleKind.COMPLETE,
    ) -> Decision:
        """Ends an attempt with entries."""
        wish = settlement(kind, key, token)
        wish.entries = tuple(entries)
        return self.probe.settle(wish).decision

    def take(
        self,
        limit: int = 100,
        *,
        after: str = "",
        dead_blocks: bool = True,
        lease_ms: int = LEASE_MS,
        begins: int = 0,
    ) -> ClaimedEntries:
        """One claim of a relay."""
        wish = EntryClaim(mint_token(), limit, lease_ms, after, dead_blocks, begins)
        found: ClaimedEntries = self._run(self.outbox.claim(wish))
        assert all(entry.token == wish.token for entry in found.entries)
        return found

    def taken(self, limit: int = 100, *, dead_blocks: bool = True) -> list[Entry]:
        """What one claim gives."""
        return self.take(limit, dead_blocks=dead_blocks).entries

    def names(self, limit: int = 100, *, dead_blocks: bool = True) -> list[str]:
        """The names of what one claim gives."""
        found = self.taken(limit, dead_blocks=dead_blocks)
        return [entry.key.removeprefix("entry:") for entry in found]

    def settle(
        self,
        entry: Entry,
        state: EntryState,
        *,
        error: str | None = None,
        wait_ms: int = 0,
    ) -> Decision:
        """What became of a delivery."""
        assert entry.token is not None
        ending = EntryEnding(entry.id, entry.token, state, wait_ms, KEEP_MS, error)
        (decision,) = self._run(self.outbox.write([ending]))
        assert isinstance(decision, Decision)
        return decision

    def begin(self, entry: Entry, *, is_alone: bool = False, lease_ms: int = LEASE_MS) -> Decision:
        """The next delivery of an entry begins."""
        start = EntryStart(entry.id, entry.token or b"", entry.attempts + 1, lease_ms, is_alone)
        (decision,) = self._run(self.outbox.write([start]))
        assert isinstance(decision, Decision)
        return decision

    def give_back(self, entry: Entry) -> Decision:
        """A relay lets an entry go that it has not begun to deliver."""
        ending = EntryEnding(
            entry.id,
            entry.token or b"",
            EntryState.WAITING,
            attempts=entry.attempts,
            open_try=entry.open_try,
        )
        (decision,) = self._run(self.outbox.write([ending]))
        assert isinstance(decision, Decision)
        return decision

    def tries(self, number: int) -> tuple[int, OpenTry]:
        """How many have begun, and what is known of the last one's end."""
        entry = self.read(number).entry
        return entry.attempts, entry.open_try

    def deliver(self, *entries: Entry) -> None:
        """Marks entries as delivered, together."""
        endings = [
            EntryEnding(entry.id, entry.token or b"", EntryState.DELIVERED, keep_ms=KEEP_MS)
            for entry in entries
        ]
        assert self._run(self.outbox.write(endings)) == [Decision.APPLY] * len(entries)

    def extend(self, entry: Entry, lease_ms: int = LEASE_MS) -> Decision:
        """Extends a relay's lease."""
        (decision,) = self._run(self.outbox.extend(entry.token or b"", [entry.id], lease_ms))
        assert isinstance(decision, Decision)
        return decision

    def operate(self, command: EntryCommand, number: int) -> Decision:
        """An operator's command."""
        decision: Decision = self._run(self.outbox.operate(number, command))
        return decision

    def find(self, number: int) -> StoredEntry | None:
        """What is stored of an entry, if anything."""
        found: StoredEntry | None = self._run(self.outbox.read(number))
        return found

    def read(self, number: int) -> StoredEntry:
        """What is stored of an entry that is there."""
        found = self.find(number)
        assert found is not None
        return found

    def listed(self, **query: Any) -> list[StoredEntry]:
        """The entries of a query."""
        found: list[StoredEntry] = self._run(self.outbox.list_entries(EntryQuery(**query)))
        return found

    def one(self, aggregate: str | None = None) -> Entry:
        """Stages one entry and takes it."""
        self.stage(staged("one", aggregate))
        (entry,) = self.taken()
        return entry

    def arrange(self, condition: EntryCondition) -> Entry:
        """An entry that is in this condition."""
        entry = self.one()
        if condition is EntryCondition.WAITING:
            self.settle(entry, EntryState.WAITING, wait_ms=WAIT_MS)
        elif condition is EntryCondition.DISCARDED:
            self.settle(entry, EntryState.DEAD)
            assert self.operate(EntryCommand.DISCARD, entry.id) is Decision.APPLY
        elif condition is not EntryCondition.CLAIMED:
            self.settle(entry, EntryState[condition.name])
        assert self.read(entry.id).condition is condition
        return entry


def keys_of(entries: Sequence[Entry]) -> list[str]:
    """The names of entries, as `staged` was given them."""
    return [entry.key.removeprefix("entry:") for entry in entries]


class OutboxBase(SuiteBase):
    """For cases of stores that have an outbox, as their capabilities say."""

    @pytest.fixture
    def outbox(self, probe: Probe) -> OutboxProbe:
        """The outbox of the store under test."""
        if not probe.store.capabilities.has_outbox:
            pytest.skip("this store has no outbox")
        return OutboxProbe(probe, self.run)
