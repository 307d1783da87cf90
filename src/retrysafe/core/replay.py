"""What callers are told of a run that is not theirs: its outcome, or why there is none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from retrysafe.core.call import Call
from retrysafe.core.model import Payload, State
from retrysafe.core.values import codec
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import (
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeUnavailable,
    RetrysafeError,
)


def replayed_value(call: Call, payload: Payload) -> Any:
    """The first run's value; raises its failure, or `OutcomeUnavailable`."""
    form = payload.form
    if form == codec.WITHHELD:
        raise codec.unavailable(payload, call.key.text)
    if form in codec.FAILURE_FORMS:
        policy = call.policy
        declared = (*policy.terminal, *policy.retryable) if call.rebuilds_failures else ()
        raise codec.decode_failure(payload, declared, call.key.text)
    try:
        return call.codec.decode(payload)
    except NotReadable as error:
        raise OutcomeUnavailable(
            f"the operation is done and will not run again, but its outcome cannot be read "
            f"here: {error}",
            key=call.key.text,
        ) from error


def reused(call: Call, operation: str) -> KeyReused:
    """The refusal of a different request under a key that was first used for this operation."""
    first, first_operation = "a different request", None
    # A nameless operation, and a store that does not tell it, leave the name empty.
    if operation and operation != call.operation:
        first, first_operation = f"the operation {operation!r}", operation
    return KeyReused(
        f"the key {call.key.text!r} was first used for {first}: use a new key for a new request, "
        "and the same request for a retry",
        key=call.key.text,
        first_operation=first_operation,
    )


def gone(call: Call, state: State | None) -> RetrysafeError:
    """The answer for a run that has ended, and whose outcome the store no longer has."""
    if state is State.FAILED:
        # Never told as done: nobody would pay the invoice again whose payment was declined.
        return OperationFailed(
            "the operation failed for good, and its failure is no longer stored",
            key=call.key.text,
            type_name="",
        )
    return OutcomeUnavailable(
        "the operation is done, but its outcome is no longer stored", key=call.key.text
    )


def in_flight(
    call: Call, message: str, seconds: float, *, is_locked: bool = False
) -> OperationInFlight:
    """The refusal while the first run has not ended, with the time after which to ask again."""
    if is_locked:
        # No lease frees such a key, so the message must not promise one.
        message += ": an open transaction holds it, and only the end of that transaction frees it"
    error = OperationInFlight(message, key=call.key.text, retry_after=timedelta(seconds=seconds))
    error.is_locked = is_locked
    return error
