"""Every error that retrysafe raises, under one root.

    RetrysafeError
    ├── InvalidInput (also a ValueError)
    │   ├── KeyInvalid             the key is empty, too long or not text
    │   ├── CallerMissing          nobody said whose key it is
    │   ├── SecretMissing          a keyed hash was asked for, and there is no secret
    │   ├── PolicyInvalid          a limit or a window makes no sense
    │   ├── FingerprintImpossible  the request has no canonical form, or a closure hides it
    │   ├── StoreUrlInvalid        no store is meant by that URL
    │   ├── TransactionMissing     there is no open transaction to join
    │   ├── StepReused             two steps of one operation have the same name
    │   └── ArgumentsNotStorable   a resumable operation cannot be stored with its arguments
    ├── KeyReused                  the key belongs to another request
    ├── OperationInFlight          the first run has not ended yet
    ├── OperationFailed            the first run failed for good; this is its failure
    │   └── AttemptsExhausted      every allowed attempt died or failed
    ├── AwaitForgotten             the operation ran, and a part of it was never awaited
    ├── CommitHookFailed           a hook raised after the view's transaction had committed
    ├── OutcomeUnavailable         the first run is done, and its outcome cannot be shown
    ├── OutcomeNotStored           the operation ran, and the store could not be told
    ├── StepsChanged               the code asks for other steps than an earlier attempt recorded
    ├── StepUnavailable            the step is done, and its result cannot be shown
    ├── StepNotStored              the step ran, and the store could not be told
    ├── CompensationFailed         the operation failed for good, and a step could not be undone
    ├── OperationUndone            an earlier attempt failed for good; its steps are being undone
    ├── ClaimLost                  another owner has the key now; nothing was written
    ├── OutcomeMissing             an atomic block ended without an outcome; nothing is kept
    ├── StoreError
    │   ├── StoreUnavailable       the store did not answer
    │   │   └── StoreNotWritable   its server takes no writes now, as a standby does not
    │   ├── StoreRejected          the store refuses this one row
    │   ├── StoreMissing           the database is not there, or cannot be opened or written
    │   ├── SchemaMissing          the database has no retrysafe schema, or an old one
    │   ├── SchemaTooNew           the database was migrated by a newer release
    │   ├── SchemaChanged          an applied migration is not the one that this release has
    │   └── DigestCollision        two keys share one digest; neither is served for the other
    ├── DeliveryFailed             a target did not take an outbox entry
    ├── ResumedRequestRefused      a worker's request got an answer that is never kept
    ├── OperatorRefused            an operator's command would be unsafe in this state
    ├── Closed                     the object was closed
    └── FlowSuspended              a blocking flow met a port that needs an event loop

This module owns the words for what can go wrong. It must not know how any of it is detected.
"""

from __future__ import annotations

from datetime import timedelta
from types import BuiltinFunctionType
from typing import Any, TypeVar

E = TypeVar("E", bound="RetrysafeError")


class RetrysafeError(Exception):
    """The root of all errors; `retryable` says whether the same call may succeed later."""

    retryable = False

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses take keyword arguments, which the default way of pickling forgets. An error
        # that cannot be unpickled breaks the process pool that it is sent through.
        return _unpickled, (type(self), self.args, vars(self))


def _unpickled(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    # Not through a `__new__` in Python, which a subclass may have changed along with its
    # constructor. A class that is an OSError too is only made by that one's own.
    made = (vars(ancestor).get("__new__") for ancestor in kind.__mro__)
    new: Any = next(item for item in made if isinstance(item, BuiltinFunctionType))
    error: E = new(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def error_like(error: E) -> E:
    """A fresh error that says the same, for somebody else to raise."""
    return _unpickled(type(error), error.args, vars(error))


class InvalidInput(RetrysafeError, ValueError):
    """What was passed in cannot be used; nothing was claimed and nothing ran."""


class KeyInvalid(InvalidInput):
    """The key is empty, too long or cannot be stored as text."""


class CallerMissing(InvalidInput):
    """A key was given without saying whose it is."""


class SecretMissing(InvalidInput):
    """A keyed hash was asked for, and no secret was configured."""


class PolicyInvalid(InvalidInput):
    """A policy contradicts itself or leaves a limit open."""


class FingerprintImpossible(InvalidInput):
    """Two requests cannot be compared: a value has no canonical form, or a closure hides it.

    Pass the values as arguments, or what identifies the request as `request=`.
    """


class StoreUrlInvalid(InvalidInput):
    """The URL names no store that retrysafe has."""


class TransactionMissing(InvalidInput):
    """There is no open transaction to join, or it ended before retrysafe was done with it."""


class StepReused(InvalidInput):
    """Two steps of one attempt have the same name, so their results could not be told apart."""


class ArgumentsNotStorable(InvalidInput):
    """The arguments of a resumable operation have no stored form, or are over the limit."""


class KeyReused(RetrysafeError):
    """The key was first used with a different request; the stored outcome is not shown.

    `first_operation` is what it was used for, when that is another operation; else None.
    """

    # Whether the process knew it by itself, so that it says nothing of the store.
    is_known_here = False

    def __init__(
        self, message: str, *, key: str | None = None, first_operation: str | None = None
    ) -> None:
        super().__init__(message, key=key)
        self.first_operation = first_operation


class OperationInFlight(RetrysafeError):
    """The first run of this key has not ended; `retry_after` says when to ask again.

    It comes from how long the operation usually takes in this process, and from how long this run
    has taken. It is never beyond what is left of the lease.

    With `is_locked` an open transaction holds the record: only the end of that transaction frees
    it, and no lease.
    """

    retryable = True
    is_locked = False
    # Whether the process knew it by itself, so that it says nothing of the store.
    is_known_here = False
    # Whether this caller has waited for the run as long as it may.
    has_waited = False
    # Whether the run has a record, which can be looked at while it runs.
    has_record = True

    def __init__(self, message: str, *, key: str, retry_after: timedelta) -> None:
        super().__init__(message, key=key)
        self.retry_after = retry_after


class OperationFailed(RetrysafeError):
    """The first run failed; carries the type name and the message of its exception.

    It is stored and final, unless `retryable` says otherwise: then this caller waited for a run
    whose failure has freed the key.
    """

    def __init__(self, message: str, *, key: str, type_name: str) -> None:
        super().__init__(message, key=key)
        self.type_name = type_name


class AttemptsExhausted(OperationFailed):
    """As many attempts as allowed crashed, or freed the key, so the operation is not run again.

    The message names the limit, and the last failure that an attempt has left in the store.
    """


class AwaitForgotten(RetrysafeError):
    """The operation ran, and a part of it did not, because its coroutine was never awaited.

    A forgotten step is judged by the policy as any other exception: by default the key is freed,
    and the mended operation goes on behind its finished steps. A coroutine as the result
    (`is_final`) is a failure for good: nobody knows what ran before it, and every further run would
    do that again. Mend the code; an operator may release the key then.
    """

    def __init__(self, message: str, *, key: str | None = None, is_final: bool = False) -> None:
        super().__init__(message, key=key)
        self.is_final = is_final


class CommitHookFailed(RetrysafeError):
    """A hook of Django's `transaction.on_commit` raised after the transaction had committed.

    Its rows are there, and a second run would write them again, so this is a failure for good,
    whatever the policy says of the hook's own exception, which is the cause. Register hooks with
    `robust=True`, or store the response inside the transaction with `complete_in`.
    """

    is_final = True


class OutcomeUnavailable(RetrysafeError):
    """The operation is done and will not run again, but its outcome cannot be shown."""


class OutcomeNotStored(RetrysafeError):
    """The operation ran, and its ending could not be stored in time.

    `value` is what it returned (None if it raised; the exception is then the cause). The key
    stays pending until its lease ends, and a retry after that runs the operation again: that is
    why it is not called retryable.
    """

    def __init__(self, message: str, *, key: str, value: object = None) -> None:
        super().__init__(message, key=key)
        self.value = value


class StepsChanged(RetrysafeError):
    """The operation does not ask for the steps that an earlier attempt recorded, or not in order.

    Its code has changed while the key was under way; results must not be mixed.
    """


class StepUnavailable(RetrysafeError):
    """The step is done and will not run again, but its result cannot be shown."""


class StepNotStored(RetrysafeError):
    """The step ran, and its result could not be stored in time; a later attempt runs it again.

    `value` is what it returned.
    """

    def __init__(self, message: str, *, key: str, value: object = None) -> None:
        super().__init__(message, key=key)
        self.value = value


class CompensationFailed(RetrysafeError):
    """The operation failed for good, and a finished step could not be undone yet.

    The key is free, and the next attempt goes on undoing.
    """

    retryable = True


class OperationUndone(RetrysafeError):
    """An earlier attempt failed for good; this one only undoes its steps and starts no new one."""


class ClaimLost(RetrysafeError):
    """Another owner holds the key; what this one wanted to write was refused."""


class OutcomeMissing(RetrysafeError):
    """An atomic block was left without an outcome, so everything in it was undone."""


class StoreError(RetrysafeError):
    """The store could not do what it was asked to do."""


class StoreUnavailable(StoreError):
    """The store did not answer; a write may or may not have happened."""

    retryable = True
    # Whether the key had been found in flight before the store fell silent.
    is_in_flight = False
    # Whether its own thread is at work in the store, which a signal's handler waits for in vain.
    is_reentry = False


class StoreNotWritable(StoreUnavailable):
    """The server takes no writes now: a standby, one that was demoted, or one that starts up.

    A failover is under way, most likely, so the store is asked for a little longer.
    """


class StoreRejected(StoreError):
    """The store refuses this one row; its neighbours in the batch are not affected."""


class StoreMissing(StoreError):
    """There is no database where the URL points, or it cannot be opened or written.

    So is a SQLite file that was removed or replaced while it was in use.
    """


class SchemaMissing(StoreError):
    """The database has no retrysafe schema, or an older one."""


class SchemaTooNew(StoreError):
    """The database was migrated by a newer release than this one."""


class SchemaChanged(StoreError):
    """A migration that was applied differs from the one that this release ships."""


class DigestCollision(StoreError):
    """Two different keys have the same digest; the second one is refused."""


class DeliveryFailed(RetrysafeError):
    """A target did not take an outbox entry; raised by targets, and seen by the relay.

    `retry_after` is the least time until the next try. `is_final` says that trying again is of no
    use: the entry is dead at once.
    """

    retryable = True

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        retry_after: timedelta | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message, key=key)
        self.retry_after = retry_after
        self.is_final = is_final
        self.retryable = not is_final


class ResumedRequestRefused(RetrysafeError):
    """A request that a worker has sent again got an answer that is never kept, such as 401.

    Its key stays with its lease, and the next attempt comes after the worker's back-off. Where
    something that no rule protects has answered it with success, the key has failed instead.
    """

    retryable = True
    # Whether it may have run without a claim: sent again, it would run once more.
    is_final = False


class OperatorRefused(RetrysafeError):
    """An operator's command would be unsafe in the record's present state."""


class Closed(RetrysafeError):
    """The object was closed; it starts nothing new."""


class FlowSuspended(RetrysafeError):
    """A blocking flow met a port that only an event loop can drive."""
