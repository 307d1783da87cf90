"""Operators in SQLite: who released or expired a key, and why."""

from __future__ import annotations

import sqlite3
from dataclasses import astuple

from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.model import OperatorAction
from retrysafe.stores.sqlite.schema import SQL


def keep(connection: sqlite3.Connection, key: Key, action: OperatorAction) -> None:
    """Stores an action, in the transaction of the change that it tells of."""
    connection.execute(SQL["insert_action"], (key.digest, key.caller, key.text, *astuple(action)))


def actions_of(connection: sqlite3.Connection, key: Key) -> list[OperatorAction]:
    """What operators did to a key, oldest first."""
    sought = (key.digest, key.caller, key.text)
    return [OperatorAction(*row) for row in connection.execute(SQL["select_actions"], sought)]


def actions_between(
    connection: sqlite3.Connection, first_ms: int, past_ms: int, after_id: int, limit: int
) -> list[tuple[int, Key, OperatorAction]]:
    """What operators did between two instants, behind a number."""
    sought = {"after": after_id, "first_ms": first_ms, "past_ms": past_ms, "limit": limit}
    found = connection.execute(SQL["select_actions_between"], sought).fetchall()
    return [
        (number, Key(text, caller=caller or GLOBAL), OperatorAction(*action))
        for number, caller, text, *action in found
    ]
