"""The ledger: what was really executed, one entry for every execution, in the store's database.

Operations write it themselves, on a connection that they are given. Whoever opened the transaction
decides whether an entry stays.
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

# More than anybody reads; a list without a limit would be a way to stop the demo.
ENTRIES_LIMIT: Final = 10_000

# The same words for both databases; only the marks of the parameters differ.
INSERT: Final = """
INSERT INTO {table} AS made
    (id, operation, customer, key, attempt, outcome, details, process, executed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
"""
# As a provider does that is sent a key: what it has done under that key is not done again, but it
# knows how often it was asked.
INSERT_ONCE: Final = INSERT + "ON CONFLICT (id) DO UPDATE SET asked = made.asked + 1"
SELECT: Final = """
SELECT id, operation, customer, key, attempt, outcome, details, process, executed_at, asked
FROM {table}
WHERE ($1 = '' OR operation = $1) AND ($2 = '' OR customer = $2)
ORDER BY position LIMIT $3
"""
SELECT_ONE: Final = """
SELECT id, operation, customer, key, attempt, outcome, details, process, executed_at, asked
FROM {table}
WHERE id = $1 AND operation = $2
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One execution of one operation."""

    id: str
    operation: str
    customer: str
    key: str
    attempt: int
    outcome: str
    # What was asked for, such as the amount.
    details: dict[str, Any]
    process: int
    executed_at: str
    # How often this was asked for under its key; all but the first time it was known and left.
    asked: int = 1

    def shape(self) -> dict[str, Any]:
        """The entry as JSON, with the details beside the rest."""
        fields = asdict(self)
        del fields["details"]
        return self.details | fields

    def row(self) -> tuple[Any, ...]:
        """The entry as it is stored."""
        return (
            self.id,
            self.operation,
            self.customer,
            self.key,
            self.attempt,
            self.outcome,
            json.dumps(self.details),
            self.process,
            self.executed_at,
        )


def new_entry(
    operation: str, *, customer: str, key: str, attempt: int, outcome: str, details: dict[str, Any]
) -> Entry:
    """The entry of an execution in this process, now."""
    return Entry(
        id=f"{operation}_{uuid.uuid4().hex}",
        operation=operation,
        customer=customer,
        key=key,
        attempt=attempt,
        outcome=outcome,
        details=details,
        process=os.getpid(),
        executed_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


def effect_entry(
    operation: str, *, customer: str, key: str, attempt: int, details: dict[str, Any]
) -> Entry:
    """The entry of an effect that was asked for under a key of its own: equal keys, equal ids."""
    entry = new_entry(
        operation, customer=customer, key=key, attempt=attempt, outcome="ok", details=details
    )
    return replace(entry, id=f"{operation}_{key.rpartition(':')[2]}")


def entry_of(row: tuple[Any, ...]) -> Entry:
    """The entry that was stored as this row."""
    fields = list(row)
    fields[6] = json.loads(fields[6])
    return Entry(*fields)


class Ledger(Protocol):
    """The ledger in one kind of database."""

    async def open(self) -> None:
        """Makes it ready for use in this event loop."""

    async def prepare(self) -> None:
        """Makes the table, or brings an earlier demo's up to date; raises `StoreError`."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """A connection with an open transaction: committed at the end, rolled back on errors."""

    async def add(self, connection: Any, entry: Entry) -> None:
        """Writes an entry in the connection's transaction."""

    async def add_once(self, connection: Any, entry: Entry) -> None:
        """Writes an entry; if its id is there already, this is a repetition, and is counted."""

    async def entries(self, operation: str = "", customer: str = "") -> list[Entry]:
        """What was executed, in order; an empty text stands for all."""

    async def entry(self, entry_id: str, operation: str) -> Entry | None:
        """One entry."""

    async def close(self) -> None:
        """Gives the connections back."""
