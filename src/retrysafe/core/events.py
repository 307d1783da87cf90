"""What happened, for logs, metrics and traces. Owns the names; it must not know who listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from retrysafe.core.keys.key import Key
from retrysafe.core.model import SettleKind, plain_members


@plain_members
class EventKind(StrEnum):
    """Everything that the engine reports."""

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
    KEY_IGNORED = "key_ignored"
    ABANDONED = "abandoned"
    POSTPONED = "postponed"


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


Emit = Callable[[Event], None]
# What is shown where an operation has no name, as a lambda has none.
UNNAMED: Final = "(unnamed)"
ALL_KINDS: Final = frozenset(EventKind)
# What is told of an ending, whoever wrote it.
ENDING_KINDS: Final = {
    SettleKind.COMPLETE: EventKind.COMPLETED,
    SettleKind.FAIL: EventKind.FAILED,
    SettleKind.RELEASE: EventKind.RELEASED,
}


class Reporter:
    """Tells the listener what it wants to hear; what nobody wants costs one look-up."""

    __slots__ = ("_emit", "kinds")

    def __init__(self, emit: Emit | None, kinds: frozenset[EventKind] = ALL_KINDS) -> None:
        self._emit = emit
        # What somebody wants to hear of. For those who have no time for a call that does nothing.
        self.kinds = frozenset() if emit is None else kinds

    def __call__(
        self,
        kind: EventKind,
        key: Key,
        operation: str = "",
        attempt: int = 0,
        detail: str = "",
        source: str = "store",
    ) -> None:
        """Reports one event."""
        if kind in self.kinds and self._emit is not None:
            self._emit(Event(kind, key, operation, attempt, detail, source))
