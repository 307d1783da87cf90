"""Recovery in SQLite: arguments of operations, and claims that nobody holds any more."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Final

from retrysafe.core import transitions
from retrysafe.core.machine import condition_of
from retrysafe.core.model import ClaimAnswer, ClaimRequest, Decision, Payload, Record, StoredKey
from retrysafe.stores.sqlite import rows
from retrysafe.stores.sqlite.grace import Grace
from retrysafe.stores.sqlite.schema import SQL

_KEEP: Final = SQL["keep_arguments"]


def keep(
    connection: sqlite3.Connection, digest: bytes, first_claimed_at_ms: int, arguments: Payload
) -> None:
    """Stores arguments, unless this life of the key has some; runs under the file's write lock."""
    connection.execute(
        _KEEP, (digest, first_claimed_at_ms, arguments.form, arguments.head, arguments.body)
    )


def arguments_of(connection: sqlite3.Connection, record: Record) -> Payload | None:
    """What the operation of this life of the key was called with."""
    row = connection.execute(
        SQL["select_arguments"], (record.digest, record.first_claimed_at_ms)
    ).fetchone()
    return None if row is None else Payload(*row)


def abandoned(connection: sqlite3.Connection, limit: int, now_ms: int) -> list[StoredKey]:
    """Pending records whose lease has ended, longest ended first."""
    found = connection.execute(SQL["select_abandoned"], (now_ms, limit)).fetchall()
    records = map(rows.record, found)
    return [StoredKey(item, condition_of(item, now_ms), now_ms) for item in records]


def resumable(
    connection: sqlite3.Connection,
    limit: int,
    after: bytes,
    operations: Sequence[str],
    now_ms: int,
) -> list[StoredKey]:
    """Those of the operations that have arguments, by their digests."""
    found = []
    sought = {
        "after": after,
        "now_ms": now_ms,
        "limit": limit,
        "operations": json.dumps(operations),
    }
    for row in connection.execute(SQL["select_resumable"], sought).fetchall():
        record = rows.record(row[:-3])
        item = StoredKey(record, condition_of(record, now_ms), now_ms)
        item.arguments = Payload(*row[-3:])
        found.append(item)
    return found


def take_over(
    connection: sqlite3.Connection,
    request: ClaimRequest,
    held: bytes,
    now_ms: int,
    grace: Grace,
) -> ClaimAnswer:
    """Claims a key that is abandoned by the owner of that token; runs under the write lock."""
    record = rows.select(connection, request.key.digest)
    changed, answer = transitions.take_over(record, request, held, now_ms)
    if record is not None and answer.decision is Decision.TAKE_OVER:
        spared = grace.spared(record, request, now_ms)
        if spared is not None:
            changed, answer = spared, transitions.take_over(spared, request, held, now_ms)[1]
    if changed is not None:
        rows.update(connection, changed)
    return answer
