"""Whether what a caller was told fits what happened."""

from __future__ import annotations

from typing import Any

from retrysafe.core.call import Answer
from retrysafe.core.model import SettleKind
from retrysafe.core.values import codec
from retrysafe.errors import (
    AttemptsExhausted,
    ClaimLost,
    KeyReused,
    OperationInFlight,
    OutcomeNotStored,
    OutcomeUnavailable,
    StoreMissing,
    StoreUnavailable,
)
from tests.simulation.invariants import Close, Invariant, Ledger


class Declined(Exception):
    """What a simulated operation raises when it fails for good."""


class Busy(Exception):
    """What a simulated operation raises when it may be tried again."""


class Unstorable:
    """A result that no codec can store."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        # Without an address: the trace of a seed is the same in every process.
        return f"Unstorable({self.text!r})"


def text_of(value: object) -> str:
    """Which run a value is from."""
    return value.text if isinstance(value, Unstorable) else str(value)


def judge_answer(ledger: Ledger, *, key: str, request: int, caller: object, result: Any) -> None:
    """Notes a violation when the answer to this caller's call is not true."""
    if isinstance(result, Answer):
        _judge_outcome(
            ledger,
            key,
            request,
            caller,
            text_of(result.value),
            result.replayed,
            SettleKind.COMPLETE,
        )
    elif isinstance(result, Declined):
        text = str(result)
        run = ledger.by_text.get(text)
        is_replay = run is None or run.caller is not caller
        _judge_outcome(ledger, key, request, caller, text, is_replay, SettleKind.FAIL)
    elif isinstance(result, Busy):
        run = ledger.by_text.get(str(result))
        if run is None or run.key != key or run.grant.request != request:
            ledger.violated(Invariant.OWN_OUTCOME, f"{key}: the failure of another request")
        elif run.caller is not caller and run.token in ledger.lost_tokens:
            ledger.violated(Invariant.ZOMBIE, f"{key}: a zombie's failure was passed on")
        elif run.token in ledger.lost_tokens:
            ledger.violated(Invariant.ZOMBIE, f"{key}: the zombie was not told")
    else:
        reason = _untrue(ledger, key, request, caller, result)
        if reason is not None:
            ledger.violated(Invariant.HONEST_ANSWER, f"{key}: {result!r}, but {reason}")


def _judge_outcome(
    ledger: Ledger,
    key: str,
    request: int,
    caller: object,
    text: str,
    is_replay: bool,
    kind: SettleKind,
) -> None:
    run = ledger.by_text.get(text)
    if run is None or run.key != key or run.grant.request != request:
        ledger.violated(Invariant.OWN_OUTCOME, f"{key}: request {request} was given {text}")
        return
    if not is_replay and run.caller is not caller:
        ledger.violated(Invariant.OWN_OUTCOME, f"{key}: {text} is not the caller's own run")
    stored = ledger.stored.get(run.token)
    if stored is None:
        told = Invariant.ZOMBIE if run.token in ledger.lost_tokens else Invariant.STORED_FIRST
        ledger.violated(told, f"{key}: {text} was shown and is not stored")
    elif stored.kind is not kind:
        ledger.violated(Invariant.REPLAY_EXACT, f"{key}: {text} is stored as {stored.kind.name}")


def _untrue(ledger: Ledger, key: str, request: int, caller: object, error: object) -> str | None:
    """Why this error cannot be true; None when it can."""
    mine = [run for run in ledger.executions if run.key == key and run.caller is caller]
    forms = {
        stored.payload.form
        for stored in ledger.stored.values()
        if stored.key == key and stored.request == request
    }
    if isinstance(error, OperationInFlight):
        return "the time to wait is negative" if error.retry_after.total_seconds() < 0 else None
    if isinstance(error, (StoreUnavailable, StoreMissing)):
        # After the run it must be `OutcomeNotStored`: only that says that the operation ran.
        return "the operation ran" if mine else None
    if isinstance(error, KeyReused):
        has_rivals = any(other != request for other in ledger.admitted[key])
        return None if has_rivals else "the key was never admitted for another request"
    if isinstance(error, ClaimLost):
        has_left = any(run.close is Close.CUT for run in mine)
        was_told = any(run.token in ledger.lost_renewals for run in mine)
        is_true = ledger.lost_tokens or was_told or has_left
        return None if is_true else "no write and no renewal was refused"
    if isinstance(error, OutcomeNotStored):
        if error.value is not None and all(run.text != text_of(error.value) for run in mine):
            return "the value is not from this caller's run"
        return None
    if isinstance(error, OutcomeUnavailable):
        return None if codec.WITHHELD in forms else "nothing was withheld"
    if isinstance(error, AttemptsExhausted):
        return None if codec.EXHAUSTED in forms else "attempts are left"
    return "no such error can come"
