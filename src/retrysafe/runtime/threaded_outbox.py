"""An async outbox over a blocking one: every call is one hop to a worker thread of its store."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from retrysafe.core.model import Decision
from retrysafe.core.outbox.entries import (
    ClaimedEntries,
    EntryClaim,
    EntryCommand,
    EntryQuery,
    EntryWrite,
    Hints,
    StoredEntry,
)
from retrysafe.core.outbox.port import Outbox

Hop = Callable[..., Coroutine[Any, Any, Any]]


class ThreadedOutbox:
    """The same outbox, for event loops."""

    def __init__(self, outbox: Outbox, hop: Hop) -> None:
        self._outbox = outbox
        self._hop = hop

    @property
    def hints(self) -> Hints:
        """Those of the outbox; they come from a worker thread."""
        return self._outbox.hints

    async def claim(self, claim: EntryClaim) -> ClaimedEntries:
        """Takes due entries."""
        found: ClaimedEntries = await self._hop(self._outbox.claim, claim)
        return found

    async def write(self, writes: Sequence[EntryWrite]) -> list[Decision]:
        """Writes what became of entries, and what begins."""
        decisions: list[Decision] = await self._hop(self._outbox.write, writes)
        return decisions

    async def extend(self, token: bytes, ids: Sequence[int], lease_ms: int) -> list[Decision]:
        """Extends leases."""
        decisions: list[Decision] = await self._hop(self._outbox.extend, token, ids, lease_ms)
        return decisions

    async def read(self, number: int) -> StoredEntry | None:
        """One entry."""
        found: StoredEntry | None = await self._hop(self._outbox.read, number)
        return found

    async def list_entries(self, query: EntryQuery) -> list[StoredEntry]:
        """Entries for an operator."""
        found: list[StoredEntry] = await self._hop(self._outbox.list_entries, query)
        return found

    async def operate(self, number: int, command: EntryCommand) -> Decision:
        """Applies an operator's command."""
        decision: Decision = await self._hop(self._outbox.operate, number, command)
        return decision
