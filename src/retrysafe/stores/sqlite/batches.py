"""The hot path of the SQLite store: many claims and settlements in few statements.

Owns how a batch is merged. Python's binding gives up the interpreter lock around every statement,
and every other thread may take it: a batch of 64 rows in 192 statements spends more time getting
the lock back than working. Merged, the same batch is a handful of statements. Everything here
runs under the file's write lock, so what was read stays true until the transaction ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from retrysafe.core import transitions
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Payload,
    Record,
    SettleAnswer,
    SettleKind,
    Settlement,
    State,
)
from retrysafe.core.ports import ClaimResult, SettleResult
from retrysafe.errors import StoreError
from retrysafe.stores.sql import repeated
from retrysafe.stores.sqlite import outbox, rows
from retrysafe.stores.sqlite.schema import SQL

T = TypeVar("T")

# A statement is prepared per number of rows. These few sizes keep all of them in the connection's
# statement cache, and make any batch of up to 128 rows out of at most ten statements.
_SIZES: Final = (64, 16, 4, 1)


def _by_size(name: str) -> dict[int, str]:
    return {size: repeated(SQL[name], size) for size in _SIZES}


_SELECT_EXISTING: Final = _by_size("select_existing")
_INSERT_KEYS: Final = _by_size("insert_keys")
_SETTLE_KEYS: Final = _by_size("settle_keys")
_INSERT_OUTCOMES: Final = _by_size("insert_outcomes")
_INSERT_KEY: Final = SQL["insert_key"]
_SETTLE_KEY: Final = SQL["settle_key"]
_NEXT_OUTCOME_ID: Final = SQL["next_outcome_id"]
_APPLIED: Final = SettleAnswer(Decision.APPLY)


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    start = 0
    while start < len(items):
        left = len(items) - start
        size = next(size for size in _SIZES if size <= left)
        yield items[start : start + size]
        start += size


# Claims.


def claim(
    connection: sqlite3.Connection, requests: Sequence[ClaimRequest], now_ms: int
) -> list[ClaimResult]:
    """Claims keys, as if one after the other."""
    if len(requests) == 1:
        return [_claim_one(connection, requests[0], now_ms)]
    existing = _existing(connection, requests)
    fresh: list[ClaimRequest] = []
    others: list[int] = []
    answers: list[ClaimResult | None] = [None] * len(requests)
    for place, request in enumerate(requests):
        digest = request.key.digest
        if digest in existing:
            others.append(place)
        else:
            # A second claim of this key in the same batch must meet the first one's record.
            existing.add(digest)
            fresh.append(request)
            answers[place] = _admitted(request, now_ms)
    for chunk in _chunks(fresh):
        values: list[Any] = []
        for request in chunk:
            values += _key_row(request, now_ms)
        connection.execute(_INSERT_KEYS[len(chunk)], values)
    for place in others:
        request = requests[place]
        found = rows.select(connection, request.key.digest)
        answers[place] = _decide(connection, found, request, now_ms)
    return [answer for answer in answers if answer is not None]


def _existing(connection: sqlite3.Connection, requests: Sequence[ClaimRequest]) -> set[bytes]:
    found: set[bytes] = set()
    for chunk in _chunks([request.key.digest for request in requests]):
        found.update(row[0] for row in connection.execute(_SELECT_EXISTING[len(chunk)], chunk))
    return found


def _key_row(request: ClaimRequest, now_ms: int) -> tuple[Any, ...]:
    key, fingerprint = request.key, request.fingerprints[0]
    return (
        key.digest,
        key.caller,
        key.text,
        request.operation,
        fingerprint.rule,
        fingerprint.digest,
        request.token,
        now_ms,
        now_ms,
        now_ms + request.lease_ms,
        request.owner,
    )


def _admitted(request: ClaimRequest, now_ms: int) -> ClaimAnswer:
    return ClaimAnswer(
        Decision.ADMIT,
        Condition.ABSENT,
        1,
        request.lease_ms,
        now_ms + request.lease_ms,
        State.PENDING,
    )


def _claim_one(connection: sqlite3.Connection, request: ClaimRequest, now_ms: int) -> ClaimResult:
    inserted = connection.execute(_INSERT_KEY, _key_row(request, now_ms))
    if inserted.rowcount == 1:
        return _admitted(request, now_ms)
    return _decide(connection, rows.select(connection, request.key.digest), request, now_ms)


def _decide(
    connection: sqlite3.Connection, record: Record | None, request: ClaimRequest, now_ms: int
) -> ClaimResult:
    try:
        changed, answer = transitions.claim(record, request, now_ms)
    except StoreError as error:
        return error
    digest = request.key.digest
    if changed is not None:
        rows.update(connection, changed)
        if answer.decision is Decision.ADMIT:
            # A new life of the key must not resume from the steps of an earlier one.
            connection.execute(SQL["delete_steps"], (digest,))
    elif answer.decision is Decision.REPLAY:
        row = connection.execute(SQL["select_outcome"], (digest,)).fetchone()
        answer.payload = None if row is None else Payload(*row)
    return answer


# Settlements.


def settle(
    connection: sqlite3.Connection, settlements: Sequence[Settlement], now_ms: int
) -> list[SettleResult]:
    """Ends or extends attempts, as if one after the other."""
    answers: list[SettleResult]
    if len(settlements) > 1 and _settle_all(connection, settlements, now_ms):
        answers = [SettleAnswer(Decision.APPLY) for _ in settlements]
    else:
        answers = [_settle_one(connection, settlement, now_ms) for settlement in settlements]
    for item, answer in zip(settlements, answers, strict=True):
        # Not when it only confirms: the entries came with the ending that it confirms.
        if item.entries and answer == _APPLIED:
            outbox.insert(connection, item.entries, item.key, now_ms)
    return answers


def _settle_all(
    connection: sqlite3.Connection, settlements: Sequence[Settlement], now_ms: int
) -> bool:
    """Ends all attempts at once, or changes nothing when one of them cannot be ended."""
    if any(item.kind is SettleKind.EXTEND or item.payload is None for item in settlements):
        return False
    if len({item.key.digest for item in settlements}) != len(settlements):
        return False  # Two endings of one key: the order matters, so one after the other.
    connection.execute("SAVEPOINT settle_all")
    (outcome_id,) = connection.execute(_NEXT_OUTCOME_ID).fetchone()
    settled = 0
    for chunk in _chunks(settlements):
        wishes: list[Any] = []
        outcomes: list[Any] = []
        for item in chunk:
            wishes += _wish_row(item, outcome_id, now_ms)
            outcomes += _outcome_row(item, outcome_id, now_ms)
            outcome_id += 1
        settled += connection.execute(_SETTLE_KEYS[len(chunk)], wishes).rowcount
        connection.execute(_INSERT_OUTCOMES[len(chunk)], outcomes)
    if settled != len(settlements):
        connection.execute("ROLLBACK TO settle_all")
    connection.execute("RELEASE settle_all")
    return settled == len(settlements)


def _wish_row(settlement: Settlement, outcome_id: int, now_ms: int) -> tuple[Any, ...]:
    """The parameters of `settle_key`, and of one row of `settle_keys`."""
    return (
        settlement.kind.value,
        now_ms,
        now_ms + settlement.active_ms,
        outcome_id,
        settlement.key.digest,
        settlement.token,
    )


def _outcome_row(settlement: Settlement, outcome_id: int, now_ms: int) -> tuple[Any, ...]:
    payload = settlement.payload
    assert payload is not None  # Only endings come here, and every ending has a payload.
    digest = settlement.key.digest
    return (
        outcome_id,
        digest,
        settlement.token,
        digest,
        settlement.kind.value,
        payload.form,
        payload.head,
        payload.body,
        now_ms,
        now_ms + settlement.audit_ms,
    )


def _settle_one(
    connection: sqlite3.Connection, settlement: Settlement, now_ms: int
) -> SettleAnswer:
    if settlement.kind is not SettleKind.EXTEND and settlement.payload is not None:
        (outcome_id,) = connection.execute(_NEXT_OUTCOME_ID).fetchone()
        updated = connection.execute(_SETTLE_KEY, _wish_row(settlement, outcome_id, now_ms))
        if updated.rowcount == 1:
            row = _outcome_row(settlement, outcome_id, now_ms)
            connection.execute(_INSERT_OUTCOMES[1], row)
            return SettleAnswer(Decision.APPLY)
    record = rows.select(connection, settlement.key.digest)
    changed, answer = transitions.settle(record, settlement, now_ms)
    if changed is not None:
        rows.update(connection, changed)
    return answer
