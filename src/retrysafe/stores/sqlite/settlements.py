"""Settlements: the endings of attempts.

Owns how a batch of endings is written: all at once when every token still holds its key, else one
by one, as `core.transitions` decides. Everything here runs under the file's write lock, so what was
read stays true until the transaction ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core import transitions
from retrysafe.core.model import Decision, SettleAnswer, Settlement
from retrysafe.core.ports import SettleResult
from retrysafe.stores.sqlite import outbox, rows
from retrysafe.stores.sqlite.schema import SQL
from retrysafe.stores.sqlite.statements import BatchStatement

_COUNT_HELD: Final = BatchStatement("count_held", 2)
_SETTLE_KEYS: Final = BatchStatement("settle_keys", 6)
_INSERT_OUTCOMES: Final = BatchStatement("insert_outcomes", 8)
_APPLIED: Final = SettleAnswer(Decision.APPLY)


def settle(
    connection: sqlite3.Connection, settlements: Sequence[Settlement], now_ms: int
) -> list[SettleResult]:
    """Ends attempts, as if one after the other."""
    answers: list[SettleResult]
    if len(settlements) > 1 and _settle_all(connection, settlements, now_ms):
        answers = [SettleAnswer(Decision.APPLY) for _ in settlements]
    else:
        answers = [_settle_one(connection, settlement, now_ms) for settlement in settlements]
    for item, answer in zip(settlements, answers, strict=True):
        # Not when it only confirms: the entries came with the ending that it confirms.
        if item.entries and answer == _APPLIED:
            outbox.insert(connection, item.entries, item.key, now_ms)
        if item.drops_arguments and answer == _APPLIED:
            connection.execute(SQL["delete_arguments"], (item.key.digest,))
    return answers


def _settle_all(
    connection: sqlite3.Connection, settlements: Sequence[Settlement], now_ms: int
) -> bool:
    """Ends all attempts at once, or changes nothing when one of them cannot be ended."""
    if any(item.payload is None for item in settlements):
        return False
    if len({item.key.digest for item in settlements}) != len(settlements):
        return False  # Two endings of one key: the order matters, so one after the other.
    claims: list[Any] = []
    for item in settlements:
        claims += (item.key.digest, item.token)
    digests = claims[::2]
    held, outcome_id = _COUNT_HELD.run(connection, claims).fetchone()
    if held != len(settlements):
        return False
    ended: list[Any] = []
    outcomes: list[Any] = []
    for digest, item in zip(digests, settlements, strict=True):
        number, payload = int(item.kind), item.payload
        assert payload is not None  # Looked at above.
        mark = int(item.nothing_happened)
        ended += (number, now_ms, now_ms + item.active_ms, outcome_id, mark, digest)
        ending = (number, payload.form, payload.head, payload.body)
        outcomes += (outcome_id, digest, *ending, now_ms, now_ms + item.audit_ms)
        outcome_id += 1
    _INSERT_OUTCOMES.run(connection, outcomes)
    _SETTLE_KEYS.run(connection, ended)
    return True


def _settle_one(
    connection: sqlite3.Connection, settlement: Settlement, now_ms: int
) -> SettleAnswer:
    kind, payload, digest = settlement.kind, settlement.payload, settlement.key.digest
    if payload is not None:
        audit_ends_at_ms = now_ms + settlement.audit_ms
        number = int(kind)
        ending = (number, payload.form, payload.head, payload.body, now_ms, audit_ends_at_ms)
        sought = (digest, settlement.token)
        stored = connection.execute(SQL["insert_outcome"], (*ending, *sought))
        if stored.rowcount == 1:
            expires_at_ms = now_ms + settlement.active_ms
            mark = int(settlement.nothing_happened)
            ended = (number, now_ms, expires_at_ms, stored.lastrowid, mark, digest)
            connection.execute(SQL["settle_key"], ended)
            return SettleAnswer(Decision.APPLY)
    record = rows.select(connection, digest)
    changed, answer = transitions.settle(record, settlement, now_ms)
    if changed is not None:
        rows.update(connection, changed)
    return answer
