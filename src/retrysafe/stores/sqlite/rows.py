"""Rows of the key table as records, and back; rows of the outcomes as the audit shows them."""

from __future__ import annotations

import json
import sqlite3
from typing import Any, Final

from retrysafe.core.keys.key import Key
from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Payload, Record, State, StoredOutcome
from retrysafe.stores.sqlite.schema import SQL

# Later than any claim.
_NEVER_MS: Final = 2**62


def record(row: tuple[Any, ...]) -> Record:
    """The record of a row."""
    made = Record(*row)
    made.state = State(made.state)
    made.is_uncertain = bool(made.is_uncertain)
    made.nothing_happened = bool(made.nothing_happened)
    return made


def outcome(row: tuple[Any, ...]) -> StoredOutcome:
    """An ending in the audit of a key."""
    token, attempt, state, form, head, body, settled_at_ms, audit_ends_at_ms = row
    payload = Payload(form, head, body)
    return StoredOutcome(token, attempt, State(state), payload, settled_at_ms, audit_ends_at_ms)


def outcomes(connection: sqlite3.Connection, block: str, key: Key) -> list[StoredOutcome]:
    """Endings of a key: all that are kept, or the one that stands."""
    found = connection.execute(SQL[block], (key.digest,)).fetchall()
    return [outcome(row) for row in found]


def select(connection: sqlite3.Connection, digest: bytes) -> Record | None:
    """The record under a digest, whosever it is."""
    row = connection.execute(SQL["select_key"], (digest,)).fetchone()
    return None if row is None else record(row)


def select_of(connection: sqlite3.Connection, key: Key) -> Record | None:
    """The record of exactly this key: a row of another key with the same digest is not it."""
    found = select(connection, key.digest)
    if found is None or found.text != key.text or found.caller != key.caller:
        return None
    return found


def listed(connection: sqlite3.Connection, query: RecordQuery, now_ms: int) -> list[Record]:
    """The records that a query means, newest claim first."""
    claimed_at_ms, digest = query.after or (_NEVER_MS, b"")
    newer, older = query.newer_than_ms, query.older_than_ms
    found = connection.execute(
        SQL["select_keys"],
        {
            "caller": query.caller,
            "prefix": query.text_prefix,
            "any_condition": not query.conditions,
            "conditions": json.dumps([item.value for item in query.conditions]),
            "operation": query.operation,
            "first_ms": -_NEVER_MS if newer is None else now_ms - newer,
            "last_ms": _NEVER_MS if older is None else now_ms - older,
            "after_ms": claimed_at_ms,
            "after_digest": digest,
            "now_ms": now_ms,
            "limit": query.limit,
        },
    ).fetchall()
    return [record(row) for row in found]


def sampled(connection: sqlite3.Connection, size: int) -> list[Record]:
    """Records at ids that are spread evenly; ids that are gone stand for the next one."""
    first, last = connection.execute(SQL["bounds_of_keys"]).fetchone()
    if first is None:
        return []
    steps = min(size, last - first + 1)
    ids = [first + (last - first) * step // max(1, steps - 1) for step in range(steps)]
    found = {
        row[0]: row
        for number in ids
        for row in connection.execute(SQL["select_key_from"], (number,)).fetchall()
    }
    return [record(row) for row in found.values()]


def update(connection: sqlite3.Connection, changed: Record) -> None:
    """Writes a decided transition."""
    connection.execute(
        SQL["update_key"],
        (
            changed.operation,
            changed.rule,
            changed.fingerprint,
            changed.state,
            changed.token,
            changed.attempt,
            changed.first_claimed_at_ms,
            changed.claimed_at_ms,
            changed.lease_ends_at_ms,
            changed.settled_at_ms,
            changed.expires_at_ms,
            changed.owner,
            changed.releases,
            changed.is_uncertain,
            changed.token if changed.nothing_happened else None,
            changed.corrected_at_ms,
            changed.digest,
        ),
    )
