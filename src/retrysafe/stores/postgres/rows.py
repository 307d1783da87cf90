"""Rows of the key table as records, and claims and endings as the parameters of statements.

Owns the statements that write a batch in one go: new keys, and endings whose tokens hold theirs.
What they skip is told by `Written`, and answered in `claims` and `settlements`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from retrysafe.core.keys.canonical import DIGEST_BYTES
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Payload,
    Record,
    Settlement,
    State,
    StoredOutcome,
)
from retrysafe.stores.postgres.statements import Fetch

# Between which instants an audit must end for its payload to be read: any, and none.
EVERY_DAY: Final = (0, 2**62)
NO_DAY: Final = (1, 0)

# How many columns a record has; where one is read, the instant of the reading comes before it.
RECORD_COLUMNS: Final = len(Record.__slots__)

# Nobody knows when a user's transaction ends. Most are shorter than this.
RETRY_AFTER_MS: Final = 1000

_digest_of: Final = attrgetter("key.digest")


class Written(NamedTuple):
    """What became of a batch: the first row of each key that a statement wrote."""

    # When keys were admitted, by digest.
    admissions: dict[bytes, int]
    # The digests whose attempts were ended.
    ended: set[bytes]


def record_of(row: Sequence[Any]) -> Record:
    """The record of a row."""
    made = Record(*row)
    made.state = State(made.state)
    # A user's driver may give memory views; digests and tokens are compared and looked up.
    made.digest, made.token = bytes(made.digest), bytes(made.token)
    made.fingerprint = bytes(made.fingerprint)
    return made


def payload_of(row: Sequence[Any]) -> Payload:
    """The payload of a row's last three columns."""
    form, head, body = row
    return Payload(form, bytes(head), bytes(body))


def outcome_of(row: Sequence[Any]) -> StoredOutcome:
    """One ending of the audit."""
    token, attempt, state, form, head, body, at_ms, ends_at_ms = row
    payload = Payload(form, bytes(head), bytes(body))
    return StoredOutcome(bytes(token), attempt, State(state), payload, at_ms, ends_at_ms)


def claim_row(request: ClaimRequest) -> tuple[Any, ...]:
    """A claim as the statements take it that insert a single new key."""
    key, fingerprint = request.key, request.fingerprints[0]
    return (
        key.digest,
        key.caller,
        key.text,
        request.operation,
        fingerprint.rule,
        fingerprint.digest,
        request.token,
        request.lease_ms,
        request.owner,
    )


def found_row(row: Sequence[Any]) -> tuple[Record, Payload | None, int]:
    """A row of `read_records`: the record, the payload to replay, and the instant of reading."""
    form = row[-3]
    payload = None if form is None else Payload(form, bytes(row[-2]), bytes(row[-1]))
    return record_of(row[1 : RECORD_COLUMNS + 1]), payload, row[0]


def replacement(
    old: Record,
    new: Record,
    *,
    is_new_request: bool,
    arguments: Payload | None = None,
    lock_wait: str | None = None,
) -> tuple[Any, ...]:
    """The parameters of `replace_record`: what is written, and what must still be there.

    Without a limit for the lock, that of the transaction holds.
    """
    form = head = body = None
    if arguments is not None:
        form, head, body = arguments.form, arguments.head, arguments.body
    return (
        new.operation,
        new.rule,
        new.fingerprint,
        new.state.value,
        new.token,
        new.attempt,
        new.first_claimed_at_ms,
        new.claimed_at_ms,
        new.lease_ends_at_ms,
        new.settled_at_ms,
        new.expires_at_ms,
        new.owner,
        old.digest,
        old.token,
        old.state.value,
        old.attempt,
        old.lease_ends_at_ms,
        old.expires_at_ms,
        is_new_request,
        form,
        head,
        body,
        lock_wait,
        new.releases,
        new.is_uncertain,
        new.nothing_happened,
        new.corrected_at_ms,
        old.nothing_happened,
    )


def in_flight() -> ClaimAnswer:
    """The answer to the claim of a key that an open transaction holds."""
    return ClaimAnswer(
        Decision.IN_FLIGHT,
        Condition.RUNNING,
        attempt=1,
        remaining_ms=RETRY_AFTER_MS,
        state=State.PENDING,
        is_locked=True,
    )


# A batch.


def split(digests: bytes) -> set[bytes]:
    """The digests that the server strung together."""
    return {digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)}


def columns_of(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Rows as the arrays that a statement takes."""
    return [list(column) for column in zip(*rows, strict=True)]


async def write(
    fetch: Fetch, claims: Collection[ClaimRequest], endings: Collection[Settlement]
) -> Written:
    """Inserts new keys and ends attempts, by one statement; no key may be in it twice."""
    if len(claims) + len(endings) == 1:
        # What most batches are while there is little to do.
        for request in claims:
            rows = await fetch("claim_one", *claim_row(request))
            return Written({request.key.digest: rows[0][0]} if rows else {}, set())
        for item in endings:
            if item.payload is not None:
                rows = await fetch("settle_one", *_ending_row(item, item.payload))
                return Written({}, {item.key.digest} if rows else set())
    ((now_ms, claimed, ended),) = await fetch("commit", *_packed(claims, endings))
    return Written(dict.fromkeys(split(bytes(claimed)), int(now_ms)), split(bytes(ended)))


async def write_resumable(fetch: Fetch, claims: Iterable[ClaimRequest]) -> Written:
    """Inserts new keys with their arguments."""
    rows = []
    for request in sorted(claims, key=_digest_of):
        arguments = request.arguments
        assert arguments is not None  # Chosen for having some.
        rows.append((*claim_row(request), arguments.form, arguments.head, arguments.body))
    ((now_ms, claimed),) = await fetch("claim_resumable", *columns_of(rows))
    return Written(dict.fromkeys(split(bytes(claimed)), int(now_ms)), set())


def _ending_row(item: Settlement, payload: Payload) -> Sequence[Any]:
    return (
        item.key.digest,
        item.token,
        int(item.kind),
        item.active_ms,
        item.audit_ms,
        payload.form,
        payload.head,
        payload.body,
        item.nothing_happened,
    )


def _packed(claims: Iterable[ClaimRequest], endings: Iterable[Settlement]) -> Sequence[Any]:
    """The arrays of a batch, in the order of the digests: so two batches cannot deadlock.

    The identities of a row travel as one value, and what many rows have in common travels once
    as their manner or way: for the client a batch costs by the number of its values. A batch has at
    most 128 rows, so the number of a row's manner fits into one byte.
    """
    claimed: list[tuple[bytes, str, str]] = []
    manners: dict[tuple[str, int, int, str], int] = {}
    for request in sorted(claims, key=_digest_of):
        key, fingerprint = request.key, request.fingerprints[0]
        manner = (request.operation, fingerprint.rule, request.lease_ms, request.owner)
        mark = bytes((manners.setdefault(manner, len(manners)),))
        ids = key.digest + fingerprint.digest + request.token + mark
        claimed.append((ids, key.caller, key.text))
    ended: list[tuple[bytes, bytes | None, bytes | None]] = []
    ways: dict[tuple[int, int, int, str | None, bool], int] = {}
    for item in sorted(endings, key=_digest_of):
        payload = item.payload
        form = head = body = None
        if payload is not None:
            form, head, body = payload.form, payload.head, payload.body
        way = (int(item.kind), item.active_ms, item.audit_ms, form, item.nothing_happened)
        mark = bytes((ways.setdefault(way, len(ways)),))
        ended.append((item.key.digest + item.token + mark, head, body))
    identities, callers, keys = columns_of(claimed) or [[]] * 3
    operations, rules, leases, owners = columns_of(manners) or [[]] * 4
    endings_ids, heads, bodies = columns_of(ended) or [[]] * 3
    kinds, actives, audits, forms, marks = columns_of(ways) or [[]] * 5
    return (
        identities,
        callers,
        keys,
        operations,
        rules,
        leases,
        owners,
        endings_ids,
        heads,
        bodies,
        kinds,
        actives,
        audits,
        forms,
        marks,
    )
