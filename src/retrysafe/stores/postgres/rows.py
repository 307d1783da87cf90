"""Rows of the key table as records, and the parameters that replace one record by the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    Payload,
    Record,
    State,
    StoredOutcome,
)

# Between which instants an audit must end for its payload to be read: any, and none.
EVERY_DAY: Final = (0, 2**62)
NO_DAY: Final = (1, 0)

# How many columns a record has; where one is read, the instant of the reading comes before it.
RECORD_COLUMNS: Final = len(Record.__slots__)

# Nobody knows when a user's transaction ends. Most are shorter than this.
RETRY_AFTER_MS: Final = 1000

# Looked up once: members of an enum are dear to look up per row.
_ADMIT: Final = Decision.ADMIT
_ABSENT: Final = Condition.ABSENT
_PENDING: Final = State.PENDING
_STATES: Final = {state.value: state for state in State}


def record_of(row: Sequence[Any]) -> Record:
    """The record of a row."""
    made = Record(*row)
    made.state = _STATES[made.state]
    if type(made.token) is not bytes:
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
    return StoredOutcome(bytes(token), attempt, _STATES[state], payload, at_ms, ends_at_ms)


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


def admitted(request: ClaimRequest, now_ms: int) -> ClaimAnswer:
    """The answer to the claim of a key that had no row."""
    lease_ms = request.lease_ms
    return ClaimAnswer(_ADMIT, _ABSENT, 1, lease_ms, now_ms + lease_ms, _PENDING)


def in_flight() -> ClaimAnswer:
    """The answer to the claim of a key that an open transaction holds."""
    return ClaimAnswer(
        Decision.IN_FLIGHT,
        Condition.RUNNING,
        1,
        RETRY_AFTER_MS,
        state=State.PENDING,
        is_locked=True,
    )
