"""Claims of keys, and the extension of their leases.

Owns how a batch of claims is written: keys without a row in one statement, all others one by one,
as `core.transitions` decides. Everything here runs under the file's write lock, so what was read
stays true until the transaction ends.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core import transitions
from retrysafe.core.model import (
    ClaimRequest,
    Decision,
    Extension,
    Payload,
    Record,
)
from retrysafe.core.ports import ClaimResult, ExtendResult
from retrysafe.errors import StoreError
from retrysafe.stores.sqlite import recovery, rows
from retrysafe.stores.sqlite.grace import Grace
from retrysafe.stores.sqlite.schema import SQL
from retrysafe.stores.sqlite.statements import BatchStatement

_SELECT_EXISTING: Final = BatchStatement("select_existing", 1)
_INSERT_KEYS: Final = BatchStatement("insert_keys", 11)


def claim(
    connection: sqlite3.Connection,
    requests: Sequence[ClaimRequest],
    now_ms: int,
    grace: Grace | None = None,
) -> list[ClaimResult]:
    """Claims keys, as if one after the other; some owners are given a grace."""
    if len(requests) == 1:
        return [_claim_one(connection, requests[0], now_ms, grace)]
    digests: list[Any] = [request.key.digest for request in requests]
    existing: set[bytes] = {row[0] for row in _SELECT_EXISTING.run(connection, digests).fetchall()}
    fresh: list[Any] = []
    others: list[int] = []
    answers: list[ClaimResult | None] = [None] * len(requests)
    for position, request in enumerate(requests):
        digest = request.key.digest
        if digest in existing:
            others.append(position)
        else:
            # A second claim of this key in the same batch must meet the first one's record.
            existing.add(digest)
            fresh += _key_row(request, now_ms)
            answers[position] = transitions.admitted(request, now_ms)
            if request.arguments is not None:
                recovery.keep(connection, digest, now_ms, request.arguments)
    if fresh:
        _INSERT_KEYS.run(connection, fresh)
    for position in others:
        request = requests[position]
        found = rows.select(connection, request.key.digest)
        answers[position] = _decide(connection, found, request, now_ms, grace)
    return [answer for answer in answers if answer is not None]


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


def _claim_one(
    connection: sqlite3.Connection, request: ClaimRequest, now_ms: int, grace: Grace | None
) -> ClaimResult:
    inserted = connection.execute(SQL["insert_key"], _key_row(request, now_ms))
    if inserted.rowcount == 1:
        if request.arguments is not None:
            recovery.keep(connection, request.key.digest, now_ms, request.arguments)
        return transitions.admitted(request, now_ms)
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
