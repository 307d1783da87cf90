"""The outbox: entries that are stored with an outcome and delivered after it.

Owns the nouns that cross the outbox port, and what may happen to an entry. It must not
know who makes or delivers them, and what a target is.

An entry that is due may be claimed; a claim moves the instant from which it is due to the end of
the claim's lease, so that waiting for its time, for another try and for a dead relay are one and
the same. Only the head of an aggregate may be claimed: its earliest entry that is not delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum, StrEnum
from itertools import islice
from typing import Final

from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, StagedEntry
from retrysafe.errors import InvalidInput

ERROR_LIMIT_CHARACTERS: Final = 1_000
# How long a discarded entry can still be looked at.
DISCARDED_KEEP_MS: Final = 7 * 86_400_000


class EntryState(IntEnum):
    """What is stored of an entry's progress; the numbers are in databases and never change.

    The first two hold their aggregate back; the others are over.
    """

    WAITING = 1
    DEAD = 2
    DELIVERED = 3
    DISCARDED = 4


class OpenTry(IntEnum):
    """A try that has begun and whose end nobody has told; the numbers are in databases.

    After its relay has died, it says under what suspicion the entry is.
    """

    NONE = 0
    # Among other deliveries of the relay: any of them may be what ended it.
    SHARED = 1
    # As the only delivery of the relay.
    ALONE = 2


class EntryCondition(StrEnum):
    """What an entry amounts to at one instant."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    DEAD = "dead"
    DELIVERED = "delivered"
    DISCARDED = "discarded"


@dataclass(slots=True)
class Entry:
    """One row of the outbox."""

    id: int
    key: str
    topic: str
    aggregate: str | None
    content_type: str
    body: bytes
    # The operation that staged it; both None for one that was staged outside of any.
    caller: str | None
    origin: str | None
    state: EntryState
    # The claim's token while a relay has it.
    token: bytes | None
    # How many deliveries of it have begun.
    attempts: int
    # From when on it may be claimed: its time, the end of its back-off or of its lease.
    due_at_ms: int
    staged_at_ms: int
    settled_at_ms: int | None = None
    expires_at_ms: int | None = None
    last_error: str | None = None
    open_try: OpenTry = OpenTry.NONE


@dataclass(slots=True)
class StoredEntry:
    """An entry as an operator sees it: with its condition at the instant of the reading."""

    entry: Entry
    condition: EntryCondition
    now_ms: int


def tries_text(count: int) -> str:
    """How often an entry was tried, in words."""
    return "1 try" if count == 1 else f"{count} tries"


@dataclass(slots=True)
class EntryClaim:
    """A relay's wish for entries to deliver.

    At most `limit` free entries and `limit` heads of aggregates are claimed. A store looks at a
    bounded number of aggregates behind `after`, in its own order of their names. Of what it claims,
    the first `begins` that have no open try begin with the claim: they are delivered at once, and
    need no other write before it.
    """

    token: bytes
    limit: int
    lease_ms: int
    after: str = ""
    # Whether a dead entry holds the later ones of its aggregate back.
    dead_blocks: bool = True
    begins: int = 0


@dataclass(slots=True)
class ClaimedEntries:
    """What a relay got, and where the walk over the aggregates stopped; None at its end.

    The entries are as they were before those began that began with the claim.
    """

    entries: list[Entry]
    after: str | None
    # The numbers of those that began.
    begun: frozenset[int] = frozenset()


@dataclass(slots=True)
class EntryStart:
    """The beginning of a delivery, written before it; valid only while the token is the entry's.

    Which try it is, is said and not counted up, so that repeating a start whose answer was lost
    changes nothing.
    """

    id: int
    token: bytes
    attempt: int
    lease_ms: int
    is_alone: bool = False


@dataclass(slots=True)
class EntryEnding:
    """What a relay writes about an entry; it counts only while the token is the entry's."""

    id: int
    token: bytes
    state: EntryState
    # For another try: how long it waits.
    wait_ms: int = 0
    # For a delivered one: how long it can still be looked at.
    keep_ms: int = 0
    error: str | None = None
    # For one that is given back undelivered: its tries and its open try as they were before. Of any
    # other, the tries stand, and none is open any more.
    attempts: int | None = None
    open_try: OpenTry = OpenTry.NONE


# What a relay writes in one go.
EntryWrite = EntryEnding | EntryStart


@dataclass(slots=True)
class EntryQuery:
    """Which entries an operator wants to see, newest first."""

    conditions: frozenset[EntryCondition] = frozenset()
    topic: str | None = None
    aggregate: str | None = None
    limit: int = 50


class EntryCommand(StrEnum):
    """What an operator may do to one entry."""

    RETRY = "retry"
    DISCARD = "discard"


# Everything that an operator may do is here; what is missing is refused. A claimed entry is being
# delivered by somebody, and what is delivered cannot be taken back.
_COMMANDS: Final = frozenset(
    {
        (EntryCommand.RETRY, EntryCondition.WAITING),
        (EntryCommand.RETRY, EntryCondition.DEAD),
        (EntryCommand.DISCARD, EntryCondition.WAITING),
        (EntryCommand.DISCARD, EntryCondition.DEAD),
    }
)


def condition_of(entry: Entry, now_ms: int) -> EntryCondition:
    """What the entry amounts to now."""
    if entry.state is EntryState.WAITING:
        is_claimed = entry.token is not None and entry.due_at_ms > now_ms
        return EntryCondition.CLAIMED if is_claimed else EntryCondition.WAITING
    return EntryCondition[entry.state.name]


def holds_back(entry: Entry, *, dead_blocks: bool) -> bool:
    """Whether the later entries of its aggregate have to wait for it."""
    return entry.state is EntryState.WAITING or (dead_blocks and entry.state is EntryState.DEAD)


def is_claimable(entry: Entry, now_ms: int) -> bool:
    """Whether a relay may have it, if it is free or the head of its aggregate."""
    return entry.state is EntryState.WAITING and entry.due_at_ms <= now_ms


def claimed(entry: Entry, claim: EntryClaim, now_ms: int) -> Entry:
    """The entry in the hands of a relay. No try is counted: its delivery may never begin."""
    return replace(entry, token=claim.token, due_at_ms=now_ms + claim.lease_ms)


def beginning(entries: Iterable[Entry], claim: EntryClaim) -> list[Entry]:
    """Which of the claimed entries, in the order of their numbers, begin with their claim."""
    ready = (entry for entry in entries if entry.open_try is OpenTry.NONE)
    return list(islice(ready, claim.begins))


def begun(entry: Entry | None, start: EntryStart, now_ms: int) -> Entry | None:
    """The entry whose delivery begins, with a new lease; None when the relay has lost it."""
    if entry is None or entry.state is not EntryState.WAITING or entry.token != start.token:
        return None
    return replace(
        entry,
        attempts=start.attempt,
        open_try=OpenTry.ALONE if start.is_alone else OpenTry.SHARED,
        due_at_ms=max(entry.due_at_ms, now_ms + start.lease_ms),
    )


def written(entry: Entry | None, write: EntryWrite, now_ms: int) -> Entry | None:
    """The entry after a relay's word about it; None when the relay has lost it."""
    if isinstance(write, EntryStart):
        return begun(entry, write, now_ms)
    return settled(entry, write, now_ms)


def settled(entry: Entry | None, ending: EntryEnding, now_ms: int) -> Entry | None:
    """The entry after a relay's ending; None when the relay has lost it."""
    if entry is None or entry.state is not EntryState.WAITING or entry.token != ending.token:
        return None
    is_over = ending.state is not EntryState.WAITING
    is_delivered = ending.state is EntryState.DELIVERED
    return replace(
        entry,
        state=ending.state,
        token=None,
        attempts=entry.attempts if ending.attempts is None else ending.attempts,
        open_try=ending.open_try,
        due_at_ms=entry.due_at_ms if is_over else now_ms + ending.wait_ms,
        settled_at_ms=now_ms if is_over else None,
        expires_at_ms=now_ms + ending.keep_ms if is_delivered else None,
        last_error=entry.last_error if ending.error is None else ending.error,
    )


def extended(entry: Entry | None, token: bytes, lease_ms: int, now_ms: int) -> Entry | None:
    """The entry with a new lease, never a shorter one; None when the relay has lost it."""
    if entry is None or entry.state is not EntryState.WAITING or entry.token != token:
        return None
    return replace(entry, due_at_ms=max(entry.due_at_ms, now_ms + lease_ms))


def operated(
    entry: Entry | None, command: EntryCommand, now_ms: int
) -> tuple[Entry | None, Decision]:
    """The entry after an operator's command, and APPLY or REFUSE.

    A retry starts the count of tries over, and the entry is under no suspicion any more. The token
    is dropped: a relay whose lease has ended must not settle what an operator has decided since.
    """
    if entry is None or (command, condition_of(entry, now_ms)) not in _COMMANDS:
        return None, Decision.REFUSE
    if command == EntryCommand.RETRY:
        changed = replace(
            entry,
            state=EntryState.WAITING,
            token=None,
            attempts=0,
            open_try=OpenTry.NONE,
            due_at_ms=now_ms,
            settled_at_ms=None,
        )
    else:
        changed = replace(
            entry,
            state=EntryState.DISCARDED,
            token=None,
            settled_at_ms=now_ms,
            expires_at_ms=now_ms + DISCARDED_KEEP_MS,
        )
    return changed, Decision.APPLY


def new_entry(staged: StagedEntry, number: int, key: Key | None, now_ms: int) -> Entry:
    """The row of a staged entry."""
    return Entry(
        number,
        staged.key,
        staged.topic,
        staged.aggregate,
        staged.content_type,
        staged.body,
        None if key is None else key.caller,
        None if key is None else key.text,
        EntryState.WAITING,
        None,
        0,
        max(staged.deliver_at_ms, now_ms),
        now_ms,
    )


def error_text(error: BaseException) -> str:
    """What is stored of a failed delivery: short, and text that every store can hold."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    text = text.replace("\x00", "�").encode("utf-8", "replace").decode()
    return text[:ERROR_LIMIT_CHARACTERS]


# Trying again.


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long an entry waits after a failed delivery: longer each time, and never in step."""

    first: timedelta = timedelta(seconds=1)
    longest: timedelta = timedelta(minutes=10)
    growth: float = 2.0

    def __post_init__(self) -> None:
        if not timedelta(0) < self.first <= self.longest or not 1 <= self.growth <= 100:
            raise InvalidInput(f"a back-off grows from a first wait to a longest one, got {self!r}")

    def wait_ms(self, attempts: int, random: Callable[[], float]) -> int:
        """The wait after that many tries, between half of it and all of it."""
        first, longest = self.first.total_seconds(), self.longest.total_seconds()
        # Bounded before the power: it would overflow after some hundreds of tries.
        steps = min(max(0, attempts - 1), 64)
        seconds = min(longest, first * self.growth**steps)
        return max(1, round(seconds * (0.5 + random() / 2) * 1000))


class Hints:
    """Wakes relays of this process when something was staged; a hint, never a need."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[], None], ...] = ()

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls the listener after every commit that staged something, from any thread."""
        self._listeners = (*self._listeners, listener)

    def forget(self, listener: Callable[[], None]) -> None:
        """Stops calling it; unknown ones are ignored."""
        self._listeners = tuple(item for item in self._listeners if item != listener)

    def tell(self) -> None:
        """Something can be claimed that could not be claimed before."""
        for listener in self._listeners:
            listener()
