"""The steps of keys in SQLite, for the store's own connection and for a user's."""

from __future__ import annotations

import sqlite3

from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, Payload, Step, StepWrite
from retrysafe.stores.sqlite import rows
from retrysafe.stores.sqlite.schema import SQL


def record(connection: sqlite3.Connection, write: StepWrite, now_ms: int) -> Decision:
    """Stores a step's result while the token holds the key; runs under the file's write lock."""
    digest = write.key.digest
    found = connection.execute(SQL["select_step"], (digest, write.step.name)).fetchone()
    stored = None if found is None else Payload(*found)
    decision = transitions.record_step(rows.select(connection, digest), write, stored, now_ms)
    if stored is None and decision is Decision.APPLY:
        step, payload = write.step, write.step.payload
        row = (digest, step.name, step.position, payload.form, payload.head, payload.body)
        connection.execute(SQL["insert_step"], (*row, now_ms))
    return decision


def of(connection: sqlite3.Connection, key: Key) -> list[Step]:
    """The steps of a key, in their order."""
    found = connection.execute(SQL["select_steps"], (key.digest,)).fetchall()
    return [
        Step(name, position, Payload(form, head, body))
        for name, position, form, head, body in found
    ]


def is_there(connection: sqlite3.Connection, write: StepWrite) -> bool:
    """Whether the step is recorded, as the connection sees it."""
    found = connection.execute(SQL["count_steps"], (write.key.digest, write.step.name))
    return bool(found.fetchone()[0])
