"""The outbox in SQLite: entries beside the records, written in the same transactions.

Owns the statements of the outbox and their order. Looking for entries takes no lock, so a relay
with nothing to do holds nobody up; claiming takes the file's write lock and checks again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Final

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
    OpenTry,
    StoredEntry,
    condition_of,
    operated,
)
from retrysafe.stores.sqlite.connections import Connections
from retrysafe.stores.sqlite.schema import SQL

# Aggregates that one look may visit for each entry that is wanted. The heads of many may be waiting
# for their time, and a look must stay short.
VISITS_PER_ENTRY: Final = 4


def insert(
    connection: sqlite3.Connection, entries: Sequence[StagedEntry], key: Key | None, now_ms: int
) -> None:
    """Stages entries in the open transaction, in their order."""
    caller, origin = (None, None) if key is None else (key.caller, key.text)
    connection.executemany(
        SQL["insert_entry"],
        [
            (
                item.key,
                item.topic,
                item.aggregate,
                item.content_type,
                item.body,
                caller,
                origin,
                max(item.deliver_at_ms, now_ms),
                now_ms,
            )
            for item in entries
        ],
    )


def _entry(row: tuple[Any, ...]) -> Entry:
    made = Entry(*row)
    made.state = EntryState(made.state)
    made.open_try = OpenTry(made.open_try)
    return made


class SqliteOutbox:
    """The entries of one file."""

    def __init__(self, connections: Connections, now_ms: Callable[[], int]) -> None:
        self.hints = Hints()
        self._write, self._read = connections.write, connections.read
        self._now_ms = now_ms

    async def claim(self, claim: EntryClaim) -> ClaimedEntries:
        """Takes free entries and heads."""
        found, after = self._read(lambda connection: self._found(connection, claim))
        if not found:
            return ClaimedEntries([], after)
        ready = sorted(number for number, open_try in found if not open_try)[: claim.begins]
        begins_to = ready[-1] if ready else 0
        chosen = {
            "token": claim.token,
            "ids": json.dumps([number for number, _ in found]),
            "suspects": json.dumps([number for number, open_try in found if open_try]),
            "begins_to": begins_to,
        }

        def take(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            now_ms = self._now_ms()
            lease = {"lease_ends_at_ms": now_ms + claim.lease_ms, "now_ms": now_ms}
            return connection.execute(SQL["claim_entries"], chosen | lease).fetchall()

        entries = sorted(map(_entry, self._write(take)), key=lambda entry: entry.id)
        begins = frozenset(ready)
        begun = [entry for entry in entries if entry.id in begins]
        for entry in begun:
            entry.attempts -= 1
            entry.open_try = OpenTry.NONE
        return ClaimedEntries(entries, after, frozenset(entry.id for entry in begun))

    def _found(
        self, connection: sqlite3.Connection, claim: EntryClaim
    ) -> tuple[list[tuple[int, int]], str | None]:
        """The entries to claim with their open tries, and where the look stopped."""
        now_ms = self._now_ms()
        free = connection.execute(SQL["free_entries"], (now_ms, claim.limit)).fetchall()
        visits = claim.limit * VISITS_PER_ENTRY
        heads = connection.execute(
            SQL["heads"],
            {
                "after": claim.after,
                "dead_blocks": claim.dead_blocks,
                "visits": visits,
                "now_ms": now_ms,
            },
        ).fetchall()
        due = [head for head in heads if head[-1]]
        after: str | None = heads[-1][0] if len(heads) == visits else None
        if len(due) > claim.limit:
            due = due[: claim.limit]
            after = due[-1][0]
        return free + [(number, open_try) for _, number, open_try, _ in due], after

    async def write(self, writes: Sequence[EntryWrite]) -> list[Decision]:
        """Writes what became of entries, and what begins, all in one transaction."""

        def write_all(connection: sqlite3.Connection) -> list[Decision]:
            now_ms = self._now_ms()
            return [_decision(_written(connection, write, now_ms)) for write in writes]

        return self._write(write_all)

    async def extend(self, token: bytes, ids: Sequence[int], lease_ms: int) -> list[Decision]:
        """Extends leases."""

        def write(connection: sqlite3.Connection) -> list[Decision]:
            ends_at_ms = self._now_ms() + lease_ms
            return [
                _decision(connection.execute(SQL["extend_entry"], (ends_at_ms, number, token)))
                for number in ids
            ]

        return self._write(write)

    async def read(self, number: int) -> StoredEntry | None:
        """One entry."""
        entry = self._read(lambda connection: _select(connection, number))
        now_ms = self._now_ms()
        if entry is None:
            return None
        return StoredEntry(entry, condition_of(entry, now_ms), now_ms)

    async def list_entries(self, query: EntryQuery) -> list[StoredEntry]:
        """Entries for an operator, newest first."""
        now_ms = self._now_ms()
        sought = {
            "topic": query.topic,
            "aggregate": query.aggregate,
            "any_condition": not query.conditions,
            "conditions": json.dumps([item.value for item in query.conditions]),
            "now_ms": now_ms,
            "limit": query.limit,
        }
        rows = self._read(
            lambda connection: connection.execute(SQL["select_entries"], sought).fetchall()
        )
        found = map(_entry, rows)
        return [StoredEntry(item, condition_of(item, now_ms), now_ms) for item in found]

    async def operate(self, number: int, command: EntryCommand) -> Decision:
        """Applies an operator's command."""

        def write(connection: sqlite3.Connection) -> Decision:
            found = _select(connection, number)
            changed, decision = operated(found, command, self._now_ms())
            if changed is not None:
                connection.execute(
                    SQL["update_entry"],
                    (
                        changed.state,
                        changed.token,
                        changed.attempts,
                        changed.open_try,
                        changed.due_at_ms,
                        changed.settled_at_ms,
                        changed.expires_at_ms,
                        number,
                    ),
                )
            return decision

        decision = self._write(write)
        if decision is Decision.APPLY:
            self.hints.tell()
        return decision


def _written(connection: sqlite3.Connection, write: EntryWrite, now_ms: int) -> sqlite3.Cursor:
    if isinstance(write, EntryStart):
        return connection.execute(
            SQL["begin_entry"],
            {
                "id": write.id,
                "token": write.token,
                "attempt": write.attempt,
                "open_try": int(OpenTry.ALONE if write.is_alone else OpenTry.SHARED),
                "lease_ends_at_ms": now_ms + write.lease_ms,
            },
        )
    return connection.execute(
        SQL["settle_entry"],
        {
            "id": write.id,
            "token": write.token,
            "state": int(write.state),
            "attempts": write.attempts,
            "open_try": int(write.open_try),
            "wait_ms": write.wait_ms,
            "keep_ms": write.keep_ms,
            "error": write.error,
            "now_ms": now_ms,
        },
    )


def _select(connection: sqlite3.Connection, number: int) -> Entry | None:
    row = connection.execute(SQL["select_entry"], (number,)).fetchone()
    return None if row is None else _entry(row)


def _decision(cursor: sqlite3.Cursor) -> Decision:
    return Decision.APPLY if cursor.rowcount == 1 else Decision.LOST
