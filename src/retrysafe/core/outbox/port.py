"""The outbox port: what a relay and an operator need from a store. Optional for a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
from retrysafe.core.ports import Store
from retrysafe.errors import InvalidInput


class Outbox(Protocol):
    """The entries of a store; `retrysafe.testing.StoreSuite` is its definition.

    Entries come in by `Settlement.entries` and by `Transaction.stage`. Every method may raise
    `StoreUnavailable`; repeating it with the same token is always safe.
    """

    @property
    def hints(self) -> Hints:
        """Told after every commit of this store object that staged something."""

    async def claim(self, claim: EntryClaim) -> ClaimedEntries:
        """Takes due entries for one relay: free ones, and heads of aggregates.

        A try is counted of those alone that begin with the claim.
        """

    async def write(self, writes: Sequence[EntryWrite]) -> list[Decision]:
        """Writes durably, in one go, what became of entries and which deliveries begin now.

        APPLY, or LOST when the token is not the entry's. A start counts the try and extends the
        lease, which never gets shorter.
        """

    async def extend(self, token: bytes, ids: Sequence[int], lease_ms: int) -> list[Decision]:
        """Extends the leases of claimed entries: APPLY or LOST for each."""

    async def read(self, number: int) -> StoredEntry | None:
        """One entry."""

    async def list_entries(self, query: EntryQuery) -> list[StoredEntry]:
        """Entries for an operator, newest first."""

    async def operate(self, number: int, command: EntryCommand) -> Decision:
        """Applies an operator's command: APPLY or REFUSE."""


def outbox_of(store: Store) -> Outbox:
    """The outbox of a store; raises `InvalidInput` for a store that has none."""
    if not store.capabilities.has_outbox:
        raise InvalidInput(f"{type(store).__name__} has no outbox")
    # Asked by name: a store without an outbox is a store all the same.
    found: Outbox = getattr(store, "outbox")  # noqa: B009
    return found
