"""Verdicts: what becomes of a message, by how its handling ended.

Everything that decides about a message lives in this file, as one table of errors. The document of
the consumers is generated from it. It must not know brokers: each of them says in its own module
how it carries a verdict out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from retrysafe import errors
from retrysafe.consumers.engine import Answer
from retrysafe.consumers.message import PayloadInvalid


class Action(StrEnum):
    """What becomes of a message."""

    # It is done: the broker forgets it.
    ACK = "ack"
    # Another owner has its key: it comes back later, and nothing is counted against it.
    LEAVE = "leave"
    # It comes back after a pause that grows with every attempt.
    RETRY = "retry"
    # A duplicate that the configuration does not wait for: the broker forgets it.
    DROP = "drop"
    # Nobody can handle it: it goes where people look, with the reason.
    DEAD_LETTER = "dead_letter"


class Outage(StrEnum):
    """Whether a failure is the message's own, so that it counts against the message."""

    # Everything fails now: the message is held here, and no new one is taken, until it is over.
    OURS = "the consumer pauses"
    # Something that the handler needs is away: the message is retried without a limit.
    DOWNSTREAM = "retried without a limit"
    # The failure may be the message's own: retried up to the limit of tries, then dead-lettered.
    NONE = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    action: Action
    because: str
    outage: Outage = Outage.NONE


_ACK: Final = Action.ACK
_LEAVE: Final = Action.LEAVE
_RETRY: Final = Action.RETRY
_DEAD: Final = Action.DEAD_LETTER
_OURS: Final = Outage.OURS
_DOWNSTREAM: Final = Outage.DOWNSTREAM

# Every error that can end the handling of a message. The nearest class in an error's ancestry
# decides, and a test demands a row for every error that retrysafe has. An outage never dead-letters
# a good message: only rows that blame the message itself do that.
TABLE: Final[Mapping[type[BaseException], Rule]] = MappingProxyType(
    {
        # The message itself.
        PayloadInvalid: Rule(_DEAD, "the message cannot be read; no retry mends it"),
        errors.KeyInvalid: Rule(_DEAD, "the message brings no usable key"),
        errors.FingerprintImpossible: Rule(_DEAD, "its key fields have no stable form"),
        errors.KeyReused: Rule(_DEAD, "its key belongs to another payload, which is not run"),
        errors.DigestCollision: Rule(_DEAD, "another key has the same digest"),
        errors.OperationFailed: Rule(_DEAD, "it failed for good, and the failure is stored"),
        errors.AttemptsExhausted: Rule(_DEAD, "too many attempts died with their process"),
        errors.AwaitForgotten: Rule(_RETRY, "a part of the handler was never awaited: mend it"),
        errors.CommitHookFailed: Rule(_DEAD, "its rows are committed; a second run repeats them"),
        # Done, whatever else is wrong.
        errors.OutcomeUnavailable: Rule(_ACK, "it is done; only its outcome cannot be shown"),
        # Somebody else has the key, or may have it.
        errors.OperationInFlight: Rule(_LEAVE, "it runs elsewhere"),
        errors.ClaimLost: Rule(_LEAVE, "another owner has its key now"),
        errors.OutcomeNotStored: Rule(_LEAVE, "it ran, and only its lease frees the key"),
        errors.Closed: Rule(_LEAVE, "the consumer is stopping"),
        # The store, or how this process was set up: every message would meet the same.
        errors.StoreUnavailable: Rule(_RETRY, "the store did not answer", _OURS),
        errors.StoreNotWritable: Rule(_RETRY, "the store's server takes no writes now", _OURS),
        errors.StoreMissing: Rule(_RETRY, "the store is not there", _OURS),
        errors.SchemaMissing: Rule(_RETRY, "the store has no schema, or an old one", _OURS),
        errors.SchemaTooNew: Rule(_RETRY, "the store was migrated by a newer release", _OURS),
        errors.SchemaChanged: Rule(_RETRY, "the store's migrations are not this release's", _OURS),
        errors.StoreError: Rule(_RETRY, "the store could not do what it was asked to do", _OURS),
        errors.InvalidInput: Rule(_RETRY, "the consumer is set up wrongly", _OURS),
        errors.CallerMissing: Rule(_RETRY, "the consumer has no name to claim keys under", _OURS),
        errors.SecretMissing: Rule(_RETRY, "a secret is missing in this process", _OURS),
        errors.PolicyInvalid: Rule(_RETRY, "the consumer's policy makes no sense", _OURS),
        errors.StoreUrlInvalid: Rule(_RETRY, "the URL names no store", _OURS),
        errors.TransactionMissing: Rule(_RETRY, "there is no open transaction to join", _OURS),
        errors.FlowSuspended: Rule(_RETRY, "a blocking consumer met an async store", _OURS),
        # The handler failed, or its steps did: the key is free, or its lease frees it.
        errors.StoreRejected: Rule(_RETRY, "the store refuses this one row"),
        errors.StepReused: Rule(_RETRY, "two steps have one name: mend the handler"),
        errors.StepsChanged: Rule(_RETRY, "the handler's steps changed under way"),
        errors.StepUnavailable: Rule(_RETRY, "a stored step cannot be shown"),
        errors.StepNotStored: Rule(_RETRY, "a step ran and could not be stored", _DOWNSTREAM),
        errors.ArgumentsNotStorable: Rule(_RETRY, "its arguments have no stored form"),
        errors.CompensationFailed: Rule(_RETRY, "a step could not be undone yet", _DOWNSTREAM),
        errors.OperationUndone: Rule(_RETRY, "its steps are being undone", _DOWNSTREAM),
        errors.OutcomeMissing: Rule(_RETRY, "its transaction ended without an outcome"),
        errors.DeliveryFailed: Rule(_RETRY, "a target did not take an entry", _DOWNSTREAM),
        errors.OperatorRefused: Rule(_RETRY, "an operator's command was refused"),
        errors.ResumedRequestRefused: Rule(_RETRY, "a request that was sent again was refused"),
        errors.RetrysafeError: Rule(_RETRY, "retrysafe could not finish it"),
        ConnectionError: Rule(_RETRY, "a connection of the handler broke", _DOWNSTREAM),
        TimeoutError: Rule(_RETRY, "something did not answer the handler in time", _DOWNSTREAM),
        Exception: Rule(_RETRY, "the handler raised"),
    }
)


def rule_of(error: BaseException) -> Rule:
    """The row that decides about an error; raises it when it is no reason to settle a message."""
    for ancestor in type(error).__mro__:
        rule = TABLE.get(ancestor)
        if rule is not None:
            return rule
    raise error


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one message, why, and how long it stays away."""

    action: Action
    reason: str
    delay: timedelta = timedelta(0)
    outage: Outage = Outage.NONE
    # For the counts: whether the handler ran for this delivery.
    has_run: bool = False
    # What the handler returned, now or in an earlier delivery; None where it cannot be shown.
    answer: Answer[Any] | None = None

    @property
    def is_final(self) -> bool:
        """Whether the broker is rid of the message."""
        return self.action in FINAL


FINAL: Final = frozenset({Action.ACK, Action.DROP, Action.DEAD_LETTER})


@dataclass(frozen=True, slots=True)
class BackOff:
    """The pause before the next try: doubled with each one, up to a limit."""

    first: timedelta = timedelta(seconds=1)
    # Long enough that an outage of hours stays far from the limit of tries.
    longest: timedelta = timedelta(minutes=15)

    def after(self, tries: int) -> timedelta:
        """The pause after that many tries."""
        # The exponent is bounded: a count of thousands must not make a number of thousands of bits.
        return min(self.first * (1 << min(max(tries, 1) - 1, 20)), self.longest)
