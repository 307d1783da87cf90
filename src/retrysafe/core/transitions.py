"""What a decision does to a record, as pure functions: old record in, new record and answer out.

Owns the fields that each transition writes. It is the model that every store is tested against;
stores that hold a write lock while they decide apply these functions as they are.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final

from retrysafe.core.machine import (
    Trigger,
    claim_trigger,
    condition_of,
    decide,
    held_trigger,
    operator_trigger,
    recover_trigger,
    settle_trigger,
)
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    ExtendAnswer,
    Extension,
    Fingerprint,
    OperatorAction,
    OperatorCommand,
    OperatorNote,
    Payload,
    Record,
    Seen,
    SettleAnswer,
    SettleKind,
    Settlement,
    State,
    StepWrite,
)
from retrysafe.core.policy import FOREVER
from retrysafe.errors import DigestCollision

# An operator's release keeps at least a day: the fingerprint and the steps are for the retries that
# the release was made for.
OPERATOR_RELEASE_KEPT_MS: Final = 24 * 60 * 60 * 1000
_FOREVER_MS: Final = FOREVER // timedelta(milliseconds=1)

_STATES: Final = {kind: State(kind) for kind in SettleKind}


def claim(
    record: Record | None, request: ClaimRequest, now_ms: int
) -> tuple[Record | None, ClaimAnswer]:
    """Claims a key; the new record is None when nothing is to be written.

    Raises `DigestCollision` when the row belongs to another key.
    """
    if record is not None and (
        record.text != request.key.text or record.caller != request.key.caller
    ):
        raise DigestCollision(
            "another key with the same digest exists; use a different key", key=request.key.text
        )
    condition = condition_of(record, now_ms)
    trigger = claim_trigger(record, request)
    decision = decide(trigger, condition)
    if decision is Decision.ADMIT:
        granted = _granted(request, None, condition, now_ms)
        return granted, _grant(decision, condition, granted)
    assert record is not None  # Only an absent record has no row, and absent is always admitted.
    is_corrected = trigger is Trigger.CLAIM_CORRECTED
    return _claimed(record, request, decision, condition, now_ms, is_corrected=is_corrected)


def admitted(request: ClaimRequest, now_ms: int) -> ClaimAnswer:
    """What `claim` answers where there is no record, for stores whose statement has decided that.

    `insert_key`, `claim_one` and their like insert what `claim` would give.
    """
    return ClaimAnswer(
        Decision.ADMIT,
        Condition.ABSENT,
        attempt=1,
        remaining_ms=request.lease_ms,
        lease_ends_at_ms=now_ms + request.lease_ms,
        state=State.PENDING,
    )


def is_new_request(record: Record, changed: Record, decision: Decision) -> bool:
    """Whether a claim starts a new life of the key, or brings a corrected request.

    What is stored beside the record, its steps and its arguments, is of the earlier request then.
    """
    return decision is Decision.ADMIT or changed.fingerprint != record.fingerprint


def take_over(
    record: Record | None, request: ClaimRequest, held: bytes, now_ms: int
) -> tuple[Record | None, ClaimAnswer]:
    """Claims a key for a worker that saw it abandoned by the owner of that token.

    LOST when anything happened to the key since, so that a worker never runs an operation that
    somebody else has ended, that an operator has stopped, or that is of another life of the key.
    """
    if record is not None and (
        record.text != request.key.text or record.caller != request.key.caller
    ):
        record = None  # A row of another key with the same digest is not what the worker saw.
    condition = condition_of(record, now_ms)
    decision = decide(recover_trigger(record, held=held, token=request.token), condition)
    if record is None or decision is Decision.LOST:
        return None, ClaimAnswer(Decision.LOST, condition)
    return _claimed(record, request, decision, condition, now_ms)


def _claimed(
    record: Record,
    request: ClaimRequest,
    decision: Decision,
    condition: Condition,
    now_ms: int,
    *,
    is_corrected: bool = False,
) -> tuple[Record | None, ClaimAnswer]:
    """What a claim does to a record that is there and not outlived."""
    if decision is Decision.TAKE_OVER:
        granted = _granted(request, record, condition, now_ms)
        if is_corrected:
            current = request.fingerprints[0]
            granted.rule, granted.fingerprint = current.rule, current.digest
            # Not before the life's first claim, also when the clock was set back since.
            granted.corrected_at_ms = max(now_ms, granted.first_claimed_at_ms)
        told = _grant(decision, condition, granted)
        told.fingerprint = Fingerprint(granted.rule, granted.fingerprint)
        return granted, told
    ends_at_ms = record.expires_at_ms if decision is Decision.REPLAY else record.lease_ends_at_ms
    remaining_ms = max(0, (ends_at_ms or now_ms) - now_ms)
    if decision is not Decision.REPLAY:
        # No lease lasts longer than that. A clock that was set back by hours would have callers
        # come back in hours, and the key may be free as soon as the clock is right again.
        remaining_ms = min(remaining_ms, request.lease_ms)
    return None, ClaimAnswer(
        decision,
        condition,
        record.attempt,
        remaining_ms,
        record.lease_ends_at_ms,
        record.state,
        operation=record.operation if decision is Decision.MISMATCH else "",
        # A clock that was set back may be behind the claim.
        elapsed_ms=max(0, now_ms - record.claimed_at_ms) if decision is Decision.IN_FLIGHT else 0,
        releases=record.releases,
        fingerprint=(
            Fingerprint(record.rule, record.fingerprint) if decision is Decision.CONFIRM else None
        ),
        correction=correction_of(record) if decision is Decision.CONFIRM else b"",
        owner=record.owner if decision is Decision.REPLAY else "",
        nothing_happened=record.nothing_happened and decision is Decision.REPLAY,
    )


def correction_of(record: Record) -> bytes:
    """What tells the request from the one that it has corrected; empty when there is none.

    Taken from the record, so that it is the same in every attempt, whatever rules their processes
    know. An instant before this life is left over from an earlier one, by a release of retrysafe
    that does not know of corrections.
    """
    corrected_at_ms = record.corrected_at_ms
    if corrected_at_ms is None or corrected_at_ms < record.first_claimed_at_ms:
        return b""
    return b"%d:" % record.rule + record.fingerprint


def _grant(decision: Decision, condition: Condition, granted: Record) -> ClaimAnswer:
    ends_at_ms = granted.lease_ends_at_ms
    return ClaimAnswer(
        decision,
        condition,
        granted.attempt,
        ends_at_ms - granted.claimed_at_ms,
        ends_at_ms,
        State.PENDING,
        releases=granted.releases,
        correction=correction_of(granted),
    )


def _granted(
    request: ClaimRequest, previous: Record | None, condition: Condition, now_ms: int
) -> Record:
    """The pending record of a claim; a takeover keeps the birth and the judged fingerprint.

    Keeping the first fingerprint matters during a change of rule: the record stays comparable to
    the request that it was made for.
    """
    current = request.fingerprints[0]
    attempt, releases, is_uncertain = 1, 0, False
    corrected_at_ms = None
    if previous is not None:
        attempt, releases, is_uncertain = _counted(previous, request, condition)
        corrected_at_ms = previous.corrected_at_ms
    key = request.key
    ends_at_ms = now_ms + request.lease_ms
    # A pending record has no expiry, also when the settled one before it had one.
    settled_at_ms, expires_at_ms = None, None
    if previous is None:
        born, rule, fingerprint = now_ms, current.rule, current.digest
    else:
        born, rule, fingerprint = (
            previous.first_claimed_at_ms,
            previous.rule,
            previous.fingerprint,
        )
    return Record(
        digest=key.digest,
        caller=key.caller,
        text=key.text,
        operation=request.operation,
        rule=rule,
        fingerprint=fingerprint,
        state=State.PENDING,
        token=request.token,
        attempt=attempt,
        first_claimed_at_ms=born,
        claimed_at_ms=now_ms,
        lease_ends_at_ms=ends_at_ms,
        settled_at_ms=settled_at_ms,
        expires_at_ms=expires_at_ms,
        owner=request.owner,
        releases=releases,
        is_uncertain=is_uncertain,
        corrected_at_ms=corrected_at_ms,
    )


def _counted(
    previous: Record, request: ClaimRequest, condition: Condition
) -> tuple[int, int, bool]:
    """The number of the attempt after this record, and how those before it ended.

    That is how many of them ended with a word, and whether any of them may have left effects.
    """
    is_uncertain = previous.is_uncertain or not previous.nothing_happened
    if condition is not Condition.ABANDONED:
        # An operator's release starts the numbers over, and so may a release of retrysafe that
        # does not know this count: it is never more than the attempts that there were.
        return previous.attempt + 1, min(previous.releases + 1, previous.attempt), is_uncertain
    if previous.token == request.token:
        # Asked for again by the same owner, whose lease ended before it could start: an attempt
        # that ran nothing must not count towards the limit.
        return previous.attempt, previous.releases, previous.is_uncertain
    return previous.attempt + 1, min(previous.releases, previous.attempt), is_uncertain


def settle(
    record: Record | None, settlement: Settlement, now_ms: int
) -> tuple[Record | None, SettleAnswer]:
    """Ends an attempt; the new record is None when nothing is to be written."""
    trigger = settle_trigger(record, settlement.kind, settlement.token)
    decision = decide(trigger, condition_of(record, now_ms))
    if decision is not Decision.APPLY:
        return None, SettleAnswer(decision)
    assert record is not None  # Nothing is applied to an absent record.
    return _settled(record, settlement, now_ms), SettleAnswer(decision)


def extend(
    record: Record | None, extension: Extension, now_ms: int
) -> tuple[Record | None, ExtendAnswer]:
    """Extends a lease; the new record is None when nothing is to be written."""
    trigger = held_trigger(record, Trigger.EXTEND, extension.token)
    decision = decide(trigger, condition_of(record, now_ms))
    if decision is not Decision.APPLY:
        return None, ExtendAnswer(decision)
    assert record is not None  # Nothing is applied to an absent record.
    # A lease never gets shorter: an extension that was delayed on its way must not cut it.
    ends_at_ms = max(record.lease_ends_at_ms, now_ms + extension.lease_ms)
    return (
        replace(record, lease_ends_at_ms=ends_at_ms),
        ExtendAnswer(decision, ends_at_ms - now_ms, ends_at_ms),
    )


def _settled(record: Record, settlement: Settlement, now_ms: int) -> Record:
    """The record after its attempt ended."""
    return replace(
        record,
        state=_STATES[settlement.kind],
        settled_at_ms=now_ms,
        expires_at_ms=now_ms + settlement.active_ms,
        # Of a life in which anything else happened before, one harmless ending proves nothing.
        nothing_happened=settlement.nothing_happened and not record.is_uncertain,
    )


def record_step(
    record: Record | None, write: StepWrite, stored: Payload | None, now_ms: int
) -> Decision:
    """Whether a step's result may be stored; `stored` is the result that stands already.

    LOST when that is another one. An owner skips what is stored and writes each step once, so this
    is a former owner whose token a late copy of its claim has brought back: it must not go on with
    a result that nobody else will ever see.
    """
    trigger = held_trigger(record, Trigger.RECORD_STEP, write.token)
    decision = decide(trigger, condition_of(record, now_ms))
    if stored is not None and stored != write.step.payload:
        return Decision.LOST
    return decision


def operate(
    record: Record | None, command: OperatorCommand, now_ms: int, seen: Seen | None = None
) -> tuple[Record | None, Decision]:
    """Applies an operator's command; the new record is None when nothing is to be written.

    One that was meant for what somebody has seen is refused for anything else: a failure that is to
    expire may have become a success, and an abandoned claim may have an owner again.
    """
    condition = condition_of(record, now_ms)
    decision = decide(operator_trigger(command), condition)
    if decision is not Decision.APPLY:
        return None, decision
    assert record is not None  # Nothing is applied to an absent record.
    # A lease that has run out meanwhile makes the command only safer.
    conditions = (
        (condition, Condition.RUNNING) if condition is Condition.ABANDONED else (condition,)
    )
    if seen is not None and seen not in [Seen(record.token, each) for each in conditions]:
        return None, Decision.REFUSE
    if command is OperatorCommand.EXPIRE:
        return replace(record, expires_at_ms=now_ms), decision
    # The attempts start over, else an exhausted record would be exhausted again at once. The
    # state is no longer pending, which is what refuses every later write of the old owner.
    window_ms = max(_window_ms(record), OPERATOR_RELEASE_KEPT_MS)
    # Not before the end that it has, also when the clock was set back since.
    expires_at_ms = max(record.expires_at_ms or 0, now_ms + window_ms)
    released = replace(
        record,
        state=State.RELEASED,
        attempt=0,
        releases=0,
        settled_at_ms=now_ms,
        expires_at_ms=expires_at_ms,
    )
    return released, decision


def action_of(
    record: Record, command: OperatorCommand, note: OperatorNote, now_ms: int
) -> OperatorAction:
    """What is kept of a command that is applied to a record."""
    condition = condition_of(record, now_ms)
    return OperatorAction(
        command.value, condition.value, record.attempt, note.operator, note.reason, now_ms
    )


def _window_ms(record: Record) -> int:
    """How long the last attempt's ending is remembered; for ever where that is not known.

    A pending record does not say it. Of a key that is meant for ever, a shorter time would forget
    the steps of a crashed attempt, and the next claim would run them again.
    """
    if record.expires_at_ms is None or record.settled_at_ms is None:
        return _FOREVER_MS
    return record.expires_at_ms - record.settled_at_ms
