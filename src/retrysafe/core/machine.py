"""The state machine: everything that decides what may happen to a record lives here.

A record's *condition* is its state seen at one instant; a *trigger* is somebody's wish. The table
answers every pair. Stores only make an answer atomic: the in-memory and SQLite stores call
`decide` under their write lock, a store that decides in SQL is held to this table by the tests.

The rules that the table spells out:

- A different request under the same key is refused before anything else is looked at. One row is
  the exception: under a key that was made from the request, after a life in which nothing happened,
  it is a corrected request and takes the place of the first.
- Pending never runs again while its lease holds; a pending record never expires.
- Only the holder of the record's token writes; everybody else has lost the claim. The holder of
  an *expired* lease still holds the token until somebody takes over, so its outcome is kept.
- Repeating a write that already stands is confirmed, so an ambiguous commit can be retried.
- A settled or released record past its active window counts as absent.
- A worker that recovers an operation takes over the very claim that it saw abandoned, or nothing:
  it never starts a new life, and never runs what a caller was told has failed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from retrysafe.core.model import (
    TAG_BYTES,
    ClaimRequest,
    Condition,
    Decision,
    Fingerprint,
    OperatorCommand,
    Record,
    SettleKind,
    State,
    plain_members,
)


@plain_members
class Trigger(StrEnum):
    """Somebody's wish about a record, with what identifies them already compared."""

    CLAIM = "claim"
    CLAIM_MISMATCHED = "claim, other request"
    CLAIM_CORRECTED = "claim, corrected request"
    CLAIM_AGAIN = "claim, same token"
    RECOVER = "recover"
    COMPLETE = "complete"
    FAIL = "fail"
    RELEASE = "release"
    EXTEND = "extend"
    RECORD_STEP = "record step"
    WRITE_UNHELD = "any write, other token"
    OPERATOR_RELEASE = "operator release"
    OPERATOR_FORCE_RELEASE = "operator force release"
    OPERATOR_EXPIRE = "operator expire"
    SWEEP = "sweep"


_C = Condition
_D = Decision

# One row per trigger; the columns are the conditions in the order of this tuple.
CONDITIONS: Final = (
    _C.ABSENT,
    _C.RUNNING,
    _C.ABANDONED,
    _C.SUCCEEDED,
    _C.FAILED,
    _C.RELEASED,
    _C.OUTLIVED,
)

# fmt: off
# The grid is read by column; the formatter would stack it into 105 lines.
_ROWS: Final[dict[Trigger, tuple[Decision, ...]]] = {
    #                              absent      running       abandoned     succeeded     failed        released      outlived
    Trigger.CLAIM:                  (_D.ADMIT,   _D.IN_FLIGHT, _D.TAKE_OVER, _D.REPLAY,    _D.REPLAY,    _D.TAKE_OVER, _D.ADMIT),
    Trigger.CLAIM_MISMATCHED:       (_D.ADMIT,   _D.MISMATCH,  _D.MISMATCH,  _D.MISMATCH,  _D.MISMATCH,  _D.MISMATCH,  _D.ADMIT),
    Trigger.CLAIM_CORRECTED:        (_D.ADMIT,   _D.MISMATCH,  _D.MISMATCH,  _D.MISMATCH,  _D.TAKE_OVER, _D.TAKE_OVER, _D.ADMIT),
    Trigger.CLAIM_AGAIN:            (_D.ADMIT,   _D.CONFIRM,   _D.TAKE_OVER, _D.REPLAY,    _D.REPLAY,    _D.TAKE_OVER, _D.ADMIT),
    Trigger.RECOVER:                (_D.LOST,    _D.IN_FLIGHT, _D.TAKE_OVER, _D.LOST,      _D.LOST,      _D.LOST,      _D.LOST),
    Trigger.COMPLETE:               (_D.LOST,    _D.APPLY,     _D.APPLY,     _D.CONFIRM,   _D.LOST,      _D.LOST,      _D.LOST),
    Trigger.FAIL:                   (_D.LOST,    _D.APPLY,     _D.APPLY,     _D.LOST,      _D.CONFIRM,   _D.LOST,      _D.LOST),
    Trigger.RELEASE:                (_D.LOST,    _D.APPLY,     _D.APPLY,     _D.LOST,      _D.LOST,      _D.CONFIRM,   _D.LOST),
    Trigger.EXTEND:                 (_D.LOST,    _D.APPLY,     _D.APPLY,     _D.LOST,      _D.LOST,      _D.LOST,      _D.LOST),
    Trigger.RECORD_STEP:            (_D.LOST,    _D.APPLY,     _D.APPLY,     _D.LOST,      _D.LOST,      _D.LOST,      _D.LOST),
    Trigger.WRITE_UNHELD:           (_D.LOST,    _D.LOST,      _D.LOST,      _D.LOST,      _D.LOST,      _D.LOST,      _D.LOST),
    Trigger.OPERATOR_RELEASE:       (_D.REFUSE,  _D.REFUSE,    _D.APPLY,     _D.REFUSE,    _D.APPLY,     _D.APPLY,     _D.CONFIRM),
    Trigger.OPERATOR_FORCE_RELEASE: (_D.REFUSE,  _D.APPLY,     _D.APPLY,     _D.REFUSE,    _D.APPLY,     _D.APPLY,     _D.CONFIRM),
    Trigger.OPERATOR_EXPIRE:        (_D.REFUSE,  _D.REFUSE,    _D.REFUSE,    _D.APPLY,     _D.APPLY,     _D.APPLY,     _D.CONFIRM),
    Trigger.SWEEP:                  (_D.KEEP,    _D.KEEP,      _D.KEEP,      _D.KEEP,      _D.KEEP,      _D.KEEP,      _D.DELETE),
}
# fmt: on

TABLE: Final[dict[tuple[Trigger, Condition], Decision]] = {
    (trigger, condition): decision
    for trigger, row in _ROWS.items()
    for condition, decision in zip(CONDITIONS, row, strict=True)
}

_SETTLE_TRIGGERS: Final = {
    SettleKind.COMPLETE: Trigger.COMPLETE,
    SettleKind.FAIL: Trigger.FAIL,
    SettleKind.RELEASE: Trigger.RELEASE,
}

_OPERATOR_TRIGGERS: Final = {
    OperatorCommand.RELEASE: Trigger.OPERATOR_RELEASE,
    OperatorCommand.FORCE_RELEASE: Trigger.OPERATOR_FORCE_RELEASE,
    OperatorCommand.EXPIRE: Trigger.OPERATOR_EXPIRE,
}

# What is known of an operation whose key has several forms, from the least to the most.
_REACHED: Final = (
    Condition.ABSENT,
    Condition.OUTLIVED,
    Condition.RELEASED,
    Condition.ABANDONED,
    Condition.RUNNING,
    Condition.FAILED,
    Condition.SUCCEEDED,
)

_SETTLED_CONDITIONS: Final = {
    State.SUCCEEDED: Condition.SUCCEEDED,
    State.FAILED: Condition.FAILED,
    State.RELEASED: Condition.RELEASED,
}


def condition_of(record: Record | None, now_ms: int) -> Condition:
    """What the record amounts to at this instant."""
    if record is None:
        return Condition.ABSENT
    if record.state is State.PENDING:
        # A pending record has no expiry on purpose: only its lease frees it.
        return Condition.RUNNING if now_ms < record.lease_ends_at_ms else Condition.ABANDONED
    if record.expires_at_ms is not None and now_ms >= record.expires_at_ms:
        return Condition.OUTLIVED
    return _SETTLED_CONDITIONS[record.state]


def is_mismatch(record: Record, fingerprints: tuple[Fingerprint, ...], operation: str) -> bool:
    """Whether the request is known to differ from the one that the record was made for.

    Only fingerprints of one rule and one secret can be compared. A record made under a rule or
    with a secret that this process does not know counts as a match when it is of the same
    operation: during a deploy that changes either, an honest retry must not be refused. Another
    operation is another request anyway.
    """
    for fingerprint in fingerprints:
        if fingerprint.rule == record.rule and is_comparable(fingerprint, record.fingerprint):
            return fingerprint.digest != record.fingerprint
    return record.operation != operation


def is_comparable(fingerprint: Fingerprint, digest: bytes) -> bool:
    """Whether a digest of the same rule was made as this fingerprint was: plain, or by its secret.

    Negative rules are keyed, and begin with the tag of their secret.
    """
    return fingerprint.rule > 0 or fingerprint.digest[:TAG_BYTES] == digest[:TAG_BYTES]


def claim_trigger(record: Record | None, request: ClaimRequest) -> Trigger:
    """Which kind of claim this is; the request is compared before the state is looked at."""
    if record is not None:
        if is_mismatch(record, request.fingerprints, request.operation):
            if (
                record.nothing_happened
                and request.takes_corrections
                # Another operation is no correction of this one.
                and record.operation == request.operation
            ):
                return Trigger.CLAIM_CORRECTED
            return Trigger.CLAIM_MISMATCHED
        if record.token == request.token:
            return Trigger.CLAIM_AGAIN
    return Trigger.CLAIM


def held_trigger(record: Record | None, trigger: Trigger, token: bytes) -> Trigger:
    """The trigger itself when the token is the record's, else `WRITE_UNHELD`: this is the fence."""
    if record is None or record.token != token:
        return Trigger.WRITE_UNHELD
    return trigger


def recover_trigger(record: Record | None, *, held: bytes, token: bytes) -> Trigger:
    """Which kind of claim a worker makes that saw the key held by that token, and brings its own.

    It compares no fingerprint: the request is the record's own. Its own token is a claim that is
    asked for again, as long as nobody has ended it.
    """
    if record is not None and record.token == token and record.state is State.PENDING:
        return Trigger.CLAIM_AGAIN
    return held_trigger(record, Trigger.RECOVER, held)


def settle_trigger(record: Record | None, kind: SettleKind, token: bytes) -> Trigger:
    """The trigger of an owner's ending."""
    return held_trigger(record, _SETTLE_TRIGGERS[kind], token)


def operator_trigger(command: OperatorCommand) -> Trigger:
    """The trigger of an operator's command."""
    return _OPERATOR_TRIGGERS[command]


def decide(trigger: Trigger, condition: Condition) -> Decision:
    """The table's answer."""
    return TABLE[trigger, condition]


def how_far(condition: Condition) -> int:
    """How far an operation has come, for comparing the records of several forms of its key.

    A process that knows one secret writes one form alone, and what gave way to it leaves another
    form outlived or released: the furthest one says what has become of the operation.
    """
    return _REACHED.index(condition)


def exhausted_limit(
    attempt: int, releases: int, *, attempt_limit: int, release_limit: int | None
) -> str | None:
    """Which limit of the policy forbids this attempt, by its name; None when it may run.

    An attempt over a limit settles the record as failed and runs nothing. What ended without a word
    may have killed its worker and counts against `attempt_limit`; what ended with one freed the key
    as its policy says, and counts only where that is limited.
    """
    if attempt - 1 - releases >= attempt_limit:
        return "attempt_limit"
    if release_limit is not None and releases >= release_limit:
        return "release_limit"
    return None
