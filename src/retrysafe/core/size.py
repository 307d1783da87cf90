"""How large a store is, by estimates that cost no scan. Optional for a store.

Owns the nouns. What they are compared with, such as the projection from rate and window, is the
observers' affair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

# Entries are counted up to here: a relay that is so far behind needs a person, not a number.
COUNT_LIMIT: Final = 10_000


@dataclass(frozen=True, slots=True)
class TableSize:
    """One table: about how many rows it has, and how many bytes with its indexes."""

    rows: int
    # None where the store knows only its whole size.
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoreSize:
    """A store at one instant."""

    # By their names: keys, outcomes, steps, outbox; SQLite's file is `file`.
    tables: dict[str, TableSize] = field(default_factory=dict)
    # How many keys were ever inserted; it may start over. None where nobody counts.
    keys_inserted: int | None = None
    # Entries of the outbox that wait for delivery, and that are dead; at most `COUNT_LIMIT` each.
    outbox_waiting: int = 0
    outbox_dead: int = 0
    # For how long the entry that waits longest could have been delivered.
    outbox_oldest_seconds: float = 0.0


@runtime_checkable
class Measurable(Protocol):
    """A store that knows its size."""

    async def measure(self) -> StoreSize:
        """The size now, without a scan; raises `StoreUnavailable`."""
