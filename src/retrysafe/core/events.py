"""What happened, for logs, metrics and traces. Owns the names; it must not know who listens.

Every protected call ends in exactly one `Result`. Its parts note what became of it in the call's
`Progress`, and whoever began the call ends it with one last event: `ANSWERED`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.core.model import SettleKind, plain_members
from retrysafe.errors import ClaimLost, StoreError

if TYPE_CHECKING:
    from retrysafe.core.call import Call


@plain_members
class EventKind(StrEnum):
    """Everything that the engine reports."""

    # The first and the last event of every protected call.
    CALLED = "called"
    ANSWERED = "answered"
    CLAIMED = "claimed"
    TAKEN_OVER = "taken over"
    REPLAYED = "replayed"
    MISMATCHED = "mismatched"
    IN_FLIGHT = "in flight"
    WAIT_TIMED_OUT = "wait timed out"
    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    EXHAUSTED = "exhausted"
    WITHHELD = "withheld"
    LOST = "lost"
    RENEWAL_FAILED = "renewal failed"
    SETTLE_FAILED = "settle failed"
    STORE_UNAVAILABLE = "store unavailable"
    UNPROTECTED = "unprotected"
    UNMATCHED = "unmatched"
    KEY_IGNORED = "key ignored"
    ABANDONED = "abandoned"
    POSTPONED = "postponed"
    # One try of a step; the detail is its name.
    STEP_BEGAN = "step began"
    STEP_ENDED = "step ended"
    # A worker has looked for abandoned claims, and has swept all there was; both say how many.
    LOOKED = "looked"
    SWEPT = "swept"


@plain_members
class Result(StrEnum):
    """What came of a protected call: each counts under exactly one of these."""

    EXECUTED = "executed"
    REPLAYED = "replayed"
    IN_FLIGHT = "in_flight"
    MISMATCHED = "mismatched"
    WAIT_TIMED_OUT = "wait_timed_out"
    FAILED = "failed"
    RELEASED = "released"
    # Its claim was gone when it ended, or it was cut off: no outcome of this call stands.
    LOST = "lost"
    WITHHELD = "withheld"
    EXHAUSTED = "exhausted"
    STORE_UNAVAILABLE = "store_unavailable"
    UNPROTECTED = "unprotected"
    UNMATCHED = "unmatched"


# What is told of an ending, whoever wrote it.
ENDING_KINDS: Final = {
    SettleKind.COMPLETE: EventKind.COMPLETED,
    SettleKind.FAIL: EventKind.FAILED,
    SettleKind.RELEASE: EventKind.RELEASED,
}
_ENDINGS: Final = {
    EventKind.COMPLETED: "succeeded",
    EventKind.FAILED: "failed",
    EventKind.RELEASED: "released",
    EventKind.POSTPONED: "released",
}
# The last of these that is noted of a call is its result.
_RESULTS: Final = {
    EventKind.REPLAYED: Result.REPLAYED,
    EventKind.MISMATCHED: Result.MISMATCHED,
    EventKind.IN_FLIGHT: Result.IN_FLIGHT,
    EventKind.WAIT_TIMED_OUT: Result.WAIT_TIMED_OUT,
    EventKind.COMPLETED: Result.EXECUTED,
    EventKind.FAILED: Result.FAILED,
    EventKind.RELEASED: Result.RELEASED,
    EventKind.POSTPONED: Result.RELEASED,
    EventKind.EXHAUSTED: Result.EXHAUSTED,
    EventKind.WITHHELD: Result.WITHHELD,
    EventKind.LOST: Result.LOST,
    EventKind.SETTLE_FAILED: Result.STORE_UNAVAILABLE,
    EventKind.STORE_UNAVAILABLE: Result.STORE_UNAVAILABLE,
    EventKind.UNPROTECTED: Result.UNPROTECTED,
    EventKind.UNMATCHED: Result.UNMATCHED,
}
# These are noted before the ending is written, and say more of it than the ending does.
_REASONS: Final = frozenset({Result.EXHAUSTED, Result.WITHHELD})
# All of it in one look-up: a call notes several things on its way.
_NOTED: Final = {
    kind: (result, _ENDINGS.get(kind, ""), result in _REASONS) for kind, result in _RESULTS.items()
}

Monotonic = Callable[[], float]


def _no_time() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class MessageFacts:
    """The message that a call handles, for traces."""

    # The consumer's name, which begins with the kind of broker: `sqs:payments`.
    destination: str
    identity: str | None
    headers: Mapping[str, str]


def trace_of(owner: str) -> str:
    """The trace context that a claim's owner was stored with; empty for none.

    It stands behind the host and the process, which have no spaces.
    """
    return owner.partition(" ")[2]


class Progress:
    """What is known of one call so far; its last event tells all of it."""

    # Values of the class until something happens: most of them never do, and a call that had to set
    # all of them would take a good part longer for it.
    has_told_begin = False
    is_ended = False
    result: Result | None = None
    _reason: Result | None = None
    # How its operation ended: succeeded, failed or released; empty where it did not run.
    ending = ""
    attempt = 0
    source = "store"
    # The class of what the caller was raised.
    error = ""
    # The whole call, and its parts as far as there were any.
    seconds = 0.0
    claim_seconds: float | None = None
    operation_seconds: float | None = None
    settle_seconds: float | None = None
    wait_seconds: float | None = None
    # When the operation began that is now running, and when the call began to wait.
    operation_began_monotonic: float | None = None
    wait_began_monotonic: float | None = None
    _settle_began_monotonic = 0.0
    # The message that it handles, if it handles one.
    message: MessageFacts | None = None
    # The trace context that is stored with its claim, and that of the run that it replays: the ids
    # of trace and span, in hexadecimal, with a dash between them.
    trace = ""
    first_trace = ""
    # What observers remember of the call until it ends, such as its span.
    notes: dict[object, Any] | None = None

    def __init__(self, monotonic: Monotonic) -> None:
        self.monotonic = monotonic
        self.began_monotonic = monotonic()

    def note(self, kind: EventKind) -> None:
        """Takes note of what happened."""
        noted = _NOTED.get(kind)
        if noted is None:
            # Claimed or taken over: from here on the operation runs, whatever it took to get here.
            self.end_wait()
            self.result = None
            self.operation_began_monotonic = self.monotonic()
            return
        result, ending, is_reason = noted
        if ending:
            self.ending = ending
            result = self._reason or result
        elif is_reason:
            self._reason = result
        self.result = result

    def owner(self, owner: str) -> str:
        """Who claims, with the trace in which it does."""
        return f"{owner} {self.trace}" if self.trace else owner

    def replays(self, trace: str) -> None:
        """The call gets the outcome of a run with this trace."""
        self.first_trace = trace

    def end_claim(self, asked_monotonic: float) -> None:
        """The store has answered a claim."""
        self.claim_seconds = self.monotonic() - asked_monotonic

    def begin_settle(self) -> None:
        """The ending is on its way to the store."""
        self._settle_began_monotonic = self.monotonic()

    def end_settle(self) -> None:
        """The ending stands."""
        self.settle_seconds = self.monotonic() - self._settle_began_monotonic

    def begin_wait(self) -> None:
        """The call waits for another run."""
        if self.wait_began_monotonic is None:
            self.wait_began_monotonic = self.monotonic()

    def end_wait(self) -> None:
        """The wait is over, if there was one."""
        if self.wait_began_monotonic is not None and self.wait_seconds is None:
            self.wait_seconds = self.monotonic() - self.wait_began_monotonic

    def end_operation(self) -> None:
        """The operation has ended, well or not."""
        if self.operation_began_monotonic is not None and self.operation_seconds is None:
            self.operation_seconds = self.monotonic() - self.operation_began_monotonic

    def end(self, error: BaseException | None) -> None:
        """The call leaves, with what it raises."""
        self.is_ended = True
        self.end_operation()
        self.end_wait()
        self.seconds = self.monotonic() - self.began_monotonic
        self.result = self.result_with(error)
        if error is not None:
            self.error = type(error).__name__

    def result_with(self, error: BaseException | None) -> Result:
        """The result, if the call leaves now with what it raises."""
        if self.result is not None:
            return self.result
        if error is None:
            return Result.EXECUTED
        if isinstance(error, StoreError):
            return Result.STORE_UNAVAILABLE
        if isinstance(error, ClaimLost) or not isinstance(error, Exception):
            return Result.LOST
        return Result.RELEASED


class _Unfollowed(Progress):
    """Of a call that nobody hears of: nothing is noted, and no clock is read."""

    def __init__(self) -> None:
        super().__init__(_no_time)
        self.is_ended = self.has_told_begin = True

    def note(self, kind: EventKind) -> None:
        pass

    def replays(self, trace: str) -> None:
        pass

    def end_claim(self, asked_monotonic: float) -> None:
        pass

    def begin_settle(self) -> None:
        pass

    def end_settle(self) -> None:
        pass

    def begin_wait(self) -> None:
        pass

    def end_operation(self) -> None:
        pass


UNFOLLOWED: Final[Progress] = _Unfollowed()


@dataclass(slots=True)
class Event:
    """One thing that happened to one key."""

    kind: EventKind
    key: Key
    operation: str = ""
    attempt: int = 0
    detail: str = ""
    # Where the answer came from: "store", or "process" when no store call was needed.
    source: str = "store"
    # The call that it belongs to, if it does.
    call: Progress = UNFOLLOWED
    # How many there were, of what a worker has done for the whole store.
    count: int = 0
    # The class of what a step has raised.
    error: str = ""

    @property
    def caller(self) -> str:
        """A digest of the key's caller; empty for GLOBAL. `key.caller` is the caller itself."""
        return caller_digest(self.key.caller)

    @property
    def result(self) -> Result | None:
        """What came of the call; None before it was answered."""
        return self.call.result if self.call.is_ended else None


def caller_digest(caller: str) -> str:
    """What tells a caller from others without its name; empty for GLOBAL."""
    return hashlib.sha256(caller.encode()).hexdigest()[:16] if caller else ""


Emit = Callable[[Event], None]
# The key of events that are about none.
NO_KEY: Final = Key("(no key)", caller=GLOBAL)
# What is shown where an operation has no name, as a lambda has none.
UNNAMED: Final = "(unnamed)"
ALL_KINDS: Final = frozenset(EventKind)
_OF_CALLS: Final = frozenset({EventKind.CALLED, EventKind.ANSWERED})


class Reporter:
    """Tells the listener what it wants to hear; what nobody wants costs one look-up."""

    __slots__ = ("_emit", "hears_calls", "kinds")

    def __init__(self, emit: Emit | None, kinds: frozenset[EventKind] = ALL_KINDS) -> None:
        self._emit = emit
        # What somebody wants to hear of. For those who have no time for a call that does nothing.
        self.kinds = frozenset() if emit is None else kinds
        # Whether anything is to be noted of calls.
        self.hears_calls = bool(self.kinds & _OF_CALLS)

    def __call__(
        self,
        kind: EventKind,
        call: Call,
        attempt: int = 0,
        detail: str = "",
        source: str = "store",
    ) -> None:
        """Reports what became of a call."""
        progress = call.progress
        if progress is not UNFOLLOWED and self._emit is not None:
            progress.note(kind)
            progress.source = source
            progress.attempt = attempt or progress.attempt
        if kind in self.kinds and self._emit is not None:
            self._emit(Event(kind, call.key, call.operation, attempt, detail, source, progress))

    def beside(
        self,
        kind: EventKind,
        key: Key,
        operation: str = "",
        attempt: int = 0,
        detail: str = "",
        call: Progress = UNFOLLOWED,
        error: str = "",
    ) -> None:
        """Reports what says nothing of how a call ends: a renewal, a step, an abandoned claim."""
        if kind in self.kinds and self._emit is not None:
            self._emit(Event(kind, key, operation, attempt, detail, call=call, error=error))

    def worked(self, kind: EventKind, count: int) -> None:
        """Reports a worker's pass over the whole store, which is about no key."""
        if kind in self.kinds and self._emit is not None:
            self._emit(Event(kind, NO_KEY, count=count))

    def passed_by(self, key: Key, operation: str) -> None:
        """Reports a key that was sent where no rule fits: all that retrysafe has of the call."""
        progress = Progress(_no_time)
        progress.note(EventKind.UNMATCHED)
        progress.end(None)
        self.beside(EventKind.UNMATCHED, key, operation, call=progress)
        self.beside(EventKind.ANSWERED, key, operation, call=progress)

    # A call, from its first event to its last.

    def begins(self, call: Call, monotonic: Monotonic) -> bool:
        """Begins to follow a call, unless nobody listens or it is followed already.

        Whoever hears True ends it.
        """
        if not self.hears_calls or not call.progress.is_ended:
            return False
        call.progress = progress = Progress(monotonic)
        if call.message is not None:
            progress.message = call.message
        return True

    def tell_begin(self, call: Call) -> None:
        """The first event of a call; told once."""
        progress = call.progress
        if progress.has_told_begin:
            return
        progress.has_told_begin = True
        if EventKind.CALLED in self.kinds and self._emit is not None:
            self._emit(Event(EventKind.CALLED, call.key, call.operation, call=progress))

    def leave(self, call: Call, error: BaseException | None = None) -> None:
        """As `end`, but a call whose store is down stays open if it may run unprotected."""
        result = call.progress.result_with(error)
        if not call.fails_open or result is not Result.STORE_UNAVAILABLE:
            self.end(call, error)

    def end(self, call: Call, error: BaseException | None = None) -> None:
        """The last event of a call; told once, and never for a call that nobody follows."""
        progress = call.progress
        if progress.is_ended:
            return
        self.tell_begin(call)
        progress.end(error)
        if EventKind.ANSWERED in self.kinds and self._emit is not None:
            self._emit(
                Event(
                    EventKind.ANSWERED,
                    call.key,
                    call.operation,
                    progress.attempt,
                    source=progress.source,
                    call=progress,
                )
            )
