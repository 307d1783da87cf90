"""The hot path of the SQLite store: many claims and settlements in few statements.

Owns how a batch is merged. Python's binding gives up the interpreter lock around every statement,
and every other thread may take it: a batch of 64 rows in 192 statements spends more time getting
the lock back than working. Merged, the same batch is a handful of statements. Everything here
runs under the file's write lock, so what was read stays true until the transaction ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core import transitions
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Extension,
    Payload,
    Record,
    SettleAnswer,
    Settlement,
    State,
)
from retrysafe.core.ports import ClaimResult, ExtendResult, SettleResult
from retrysafe.errors import StoreError
from retrysafe.stores.sql import repeated
from retrysafe.stores.sqlite import outbox, recovery, rows
from retrysafe.stores.sqlite.grace import Grace
from retrysafe.stores.sqlite.schema import SQL

# A statement is prepared per number of rows, and filled up with rows of zeros to the next of these
# sizes: no digest is a number. So few keep all of them in the connection's statement cache.
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
# What the binding takes as it is. For every other type, bytes and None too, it first looks for an
# adapter, and finding none takes longer than binding the value.
_blob: Final = bytearray


class _Rows:
    """One statement in all its sizes."""

    __slots__ = ("columns", "statements")

    def __init__(self, name: str, columns: int) -> None:
        self.statements = {size: repeated(SQL[name], size) for size in _SIZES}
        self.columns = columns

    def run(self, connection: sqlite3.Connection, values: list[Any]) -> sqlite3.Cursor:
        """Executes it once for all rows, whose values are in one list; at most 128 rows."""
        count = len(values) // self.columns
        # The next power of two.
        size = 1 << (count - 1).bit_length()
        values += [0] * ((size - count) * self.columns)
        return connection.execute(self.statements[size], values)


_SELECT_EXISTING: Final = _Rows("select_existing", 1)
_INSERT_KEYS: Final = _Rows("insert_keys", 11)
_COUNT_HELD: Final = _Rows("count_held", 2)
_SETTLE_KEYS: Final = _Rows("settle_keys", 6)
_INSERT_OUTCOMES: Final = _Rows("insert_outcomes", 8)
_INSERT_KEY: Final = SQL["insert_key"]
_SETTLE_KEY: Final = SQL["settle_key"]
_INSERT_OUTCOME: Final = SQL["insert_outcome"]
_APPLIED: Final = SettleAnswer(Decision.APPLY)


# Claims.


def claim(
    connection: sqlite3.Connection,
    requests: Sequence[ClaimRequest],
    now_ms: int,
    grace: Grace | None = None,
) -> list[ClaimResult]:
    """Claims keys, as if one after the other; some owners are given a grace."""
    if len(requests) == 1:
        return [_claim_one(connection, requests[0], now_ms, grace)]
    digests: list[Any] = [_blob(request.key.digest) for request in requests]
    existing: set[bytes] = {row[0] for row in _SELECT_EXISTING.run(connection, digests).fetchall()}
    fresh: list[Any] = []
    others: list[int] = []
    answers: list[ClaimResult | None] = [None] * len(requests)
    for place, request in enumerate(requests):
        digest = request.key.digest
        if digest in existing:
            others.append(place)
        else:
            # A second claim of this key in the same batch must meet the first one's record.
            existing.add(digest)
            fresh += _key_row(request, now_ms)
            answers[place] = _admitted(request, now_ms)
            if request.arguments is not None:
                recovery.keep(connection, digest, now_ms, request.arguments)
    if fresh:
        _INSERT_KEYS.run(connection, fresh)
    for place in others:
        request = requests[place]
        found = rows.select(connection, request.key.digest)
        answers[place] = _decide(connection, found, request, now_ms, grace)
    return [answer for answer in answers if answer is not None]


def _key_row(request: ClaimRequest, now_ms: int) -> tuple[Any, ...]:
    key, fingerprint = request.key, request.fingerprints[0]
    return (
        _blob(key.digest),
        key.caller,
        key.text,
        request.operation,
        fingerprint.rule,
        _blob(fingerprint.digest),
        _blob(request.token),
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


def _claim_one(
    connection: sqlite3.Connection, request: ClaimRequest, now_ms: int, grace: Grace | None
) -> ClaimResult:
    inserted = connection.execute(_INSERT_KEY, _key_row(request, now_ms))
    if inserted.rowcount == 1:
        if request.arguments is not None:
            recovery.keep(connection, request.key.digest, now_ms, request.arguments)
        return _admitted(request, now_ms)
    record = rows.select(connection, request.key.digest)
    return _decide(connection, record, request, now_ms, grace)


def _decide(
    connection: sqlite3.Connection,
    record: Record | None,
    request: ClaimRequest,
    now_ms: int,
    grace: Grace | None,
) -> ClaimResult:
    try:
        changed, answer = transitions.claim(record, request, now_ms)
    except StoreError as error:
        return error
    # Not for a claim that is refused: it would extend a lease that nobody wants to take.
    if grace is not None and record is not None and answer.decision is Decision.TAKE_OVER:
        spared = grace.spared(record, request, now_ms)
        if spared is not None:
            rows.update(connection, spared)
            return transitions.claim(spared, request, now_ms)[1]
    digest = request.key.digest
    if changed is not None:
        rows.update(connection, changed)
        if record is None or transitions.is_new_request(record, changed, answer.decision):
            # A new life of the key must not resume from the steps of an earlier one, nor with
            # its arguments; neither must a corrected request.
            connection.execute(SQL["delete_steps"], (digest,))
            connection.execute(SQL["delete_arguments"], (digest,))
        if request.arguments is not None:
            recovery.keep(connection, digest, changed.first_claimed_at_ms, request.arguments)
    elif answer.decision is Decision.REPLAY:
        row = connection.execute(SQL["select_outcome"], (digest,)).fetchone()
        answer.payload = None if row is None else Payload(*row)
    return answer


# Settlements.


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
        claims += (_blob(item.key.digest), _blob(item.token))
    digests = claims[::2]
    held, outcome_id = _COUNT_HELD.run(connection, claims).fetchone()
    if held != len(settlements):
        return False
    wishes: list[Any] = []
    outcomes: list[Any] = []
    for digest, item in zip(digests, settlements, strict=True):
        number, payload = int(item.kind), item.payload
        assert payload is not None  # Looked at above.
        mark = int(item.nothing_happened)
        wishes += (number, now_ms, now_ms + item.active_ms, outcome_id, mark, digest)
        ending = (number, payload.form, payload.head, payload.body)
        outcomes += (outcome_id, digest, *ending, now_ms, now_ms + item.audit_ms)
        outcome_id += 1
    _INSERT_OUTCOMES.run(connection, outcomes)
    _SETTLE_KEYS.run(connection, wishes)
    return True


def _settle_one(
    connection: sqlite3.Connection, settlement: Settlement, now_ms: int
) -> SettleAnswer:
    kind, payload, digest = settlement.kind, settlement.payload, settlement.key.digest
    if payload is not None:
        blob = _blob(digest)
        audit_ends_at_ms = now_ms + settlement.audit_ms
        number = int(kind)
        ending = (number, payload.form, payload.head, payload.body, now_ms, audit_ends_at_ms)
        stored = connection.execute(_INSERT_OUTCOME, (*ending, blob, _blob(settlement.token)))
        if stored.rowcount == 1:
            expires_at_ms = now_ms + settlement.active_ms
            mark = int(settlement.nothing_happened)
            ended = (number, now_ms, expires_at_ms, stored.lastrowid, mark, blob)
            connection.execute(_SETTLE_KEY, ended)
            return SettleAnswer(Decision.APPLY)
    record = rows.select(connection, digest)
    changed, answer = transitions.settle(record, settlement, now_ms)
    if changed is not None:
        rows.update(connection, changed)
    return answer


# Leases.


def extend(
    connection: sqlite3.Connection, extensions: Sequence[Extension], now_ms: int
) -> list[ExtendResult]:
    """Extends leases, as if one after the other."""
    answers: list[ExtendResult] = []
    for item in extensions:
        record = rows.select(connection, item.key.digest)
        changed, answer = transitions.extend(record, item, now_ms)
        if changed is not None:
            rows.update(connection, changed)
        answers.append(answer)
    return answers
