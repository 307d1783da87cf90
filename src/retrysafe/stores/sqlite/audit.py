"""The audit in SQLite, where no index leads to a key's own: every operation would pay for that.

Owns the search through the outcomes, the newest first, and the way through all of them, in short
transactions.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from retrysafe.core.keys.key import Key
from retrysafe.core.model import StoredOutcome
from retrysafe.stores.audit import AuditEntry, AuditPart
from retrysafe.stores.sqlite import rows
from retrysafe.stores.sqlite.schema import SQL

# Outcomes of an export at a time; each may be large.
_OUTCOMES_PER_PART: Final = 200
# Outcomes that one statement reads, in a few milliseconds; a long one would keep the log from being
# written back.
_OUTCOMES_PER_LOOK: Final = 20_000
_LAST_ID: Final = 2**63 - 1

Read = Callable[[Callable[[sqlite3.Connection], Any]], Any]


def searched(read: Read, key: Key, seconds: float | None) -> tuple[list[StoredOutcome], str]:
    """The outcomes of a key, oldest first, and what was not searched for them in the time."""
    until = None if seconds is None else time.monotonic() + seconds
    found: list[tuple[Any, ...]] = []
    before = _LAST_ID
    while True:
        first, listed = read(partial(_looked, key=key, before=before))
        found += listed
        if first is None:
            return _outcomes(found), ""
        before = first
        if until is not None and time.monotonic() > until:
            return _outcomes(found), f"the oldest outcomes, about {before:,} of them"


def _looked(
    connection: sqlite3.Connection, key: Key, before: int
) -> tuple[int | None, list[tuple[Any, ...]]]:
    """The first id of the outcomes before one, and those of them that are the key's."""
    bounds = {"before": before, "rows": _OUTCOMES_PER_LOOK}
    (first,) = connection.execute(SQL["first_outcome_before"], bounds).fetchone()
    if first is None:
        return None, []
    sought = {"digest": key.digest, "first": first, "before": before}
    return first, connection.execute(SQL["select_outcomes_between"], sought).fetchall()


def _outcomes(found: list[tuple[Any, ...]]) -> list[StoredOutcome]:
    return [rows.outcome(row[1:]) for row in sorted(found)]


def part(
    connection: sqlite3.Connection, first_ms: int, past_ms: int, start: tuple[int, int]
) -> AuditPart:
    """The outcomes of the next stretch of ids that were settled between two instants."""
    _, after = start
    bounds = {"after": after, "rows": _OUTCOMES_PER_PART}
    last, end = connection.execute(SQL["last_outcome_after"], bounds).fetchone()
    if last is None:
        return AuditPart([], None, 1.0)
    sought = {"after": after, "last": last, "first_ms": first_ms, "past_ms": past_ms}
    found = connection.execute(SQL["select_audit_between"], sought).fetchall()
    entries = [AuditEntry(row[0], row[1], row[2], row[3], rows.outcome(row[4:])) for row in found]
    return AuditPart(entries, (0, last), last / end)
