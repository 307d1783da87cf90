"""The nouns: record, claim, settlement, outcome, step, and what a store answers.

Owns plain data that crosses the store port. It must not decide anything: `machine` does that.
Instants are milliseconds since the epoch by the store's clock, and end in `_at_ms`. These classes
are not frozen because they are built on the hot path; nothing changes one after it was built.
The enums are texts or numbers because those hash in C, and decisions are looked up per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Final, NamedTuple, TypeVar

from retrysafe.core.keys.key import Key

# Tokens are random, so that no two claims in the whole history of all keys share one.
TOKEN_BYTES: Final = 16
# What a keyed fingerprint begins with: the tag of its secret. Long enough that two secrets of a
# fleet never share one by chance; the rest of the 16 bytes that a store keeps, 104 bits, cannot be
# guessed without the secret.
TAG_BYTES: Final = 3


E = TypeVar("E", bound=type[Enum])


def plain_members(kind: E) -> E:
    """Makes the members of an enum plain attributes of its class, as Python 3.12 does.

    In Python 3.11 a function looks each of them up. With all that a call names that is a tenth of
    its time under load, and at the entry of a function a signal may raise (decision 31).
    """
    for name, member in kind.__members__.items():
        type.__setattr__(kind, name, member)
    return kind


@plain_members
class State(IntEnum):
    """What is stored of a record's progress; the numbers are in databases and never change."""

    PENDING = 1
    SUCCEEDED = 2
    FAILED = 3
    RELEASED = 4


@plain_members
class Ending(IntEnum):
    """How an attempt ended, as judged by the policy."""

    SUCCEEDED = State.SUCCEEDED
    FAILED = State.FAILED
    RELEASED = State.RELEASED


@plain_members
class Condition(StrEnum):
    """What a record amounts to at one instant: its state, seen through lease and window."""

    ABSENT = "absent"
    RUNNING = "running"
    ABANDONED = "abandoned"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RELEASED = "released"
    OUTLIVED = "outlived"


@plain_members
class Decision(StrEnum):
    """What is to be done about an event; `machine` holds the table."""

    ADMIT = "admit"
    TAKE_OVER = "take over"
    IN_FLIGHT = "in flight"
    REPLAY = "replay"
    MISMATCH = "mismatch"
    APPLY = "apply"
    CONFIRM = "confirm"
    LOST = "lost"
    REFUSE = "refuse"
    KEEP = "keep"
    DELETE = "delete"


@dataclass(slots=True)
class Fingerprint:
    """What a request asks for, in 16 bytes, and the version of the rule that made them.

    A negative version says that they are keyed: they begin with the tag of the secret.
    """

    rule: int
    digest: bytes


@dataclass(slots=True)
class Payload:
    """A stored outcome: the form says how to read head and body, and carries its version."""

    form: str
    head: bytes
    body: bytes

    @property
    def size_bytes(self) -> int:
        """What the payload weighs against the policy's limit."""
        return len(self.head) + len(self.body)


@dataclass(slots=True)
class Record:
    """One row of the key table: everything that decisions need, and no payload."""

    digest: bytes
    caller: str
    text: str
    operation: str
    rule: int
    fingerprint: bytes
    state: State
    token: bytes
    attempt: int
    first_claimed_at_ms: int
    claimed_at_ms: int
    lease_ends_at_ms: int
    settled_at_ms: int | None
    expires_at_ms: int | None
    owner: str
    # How many of the attempts before this one ended with a word; the others crashed. It is counted
    # by the claim that follows, so an ending that a crash has swallowed counts as a crash.
    releases: int = 0
    # Whether an attempt of this life before this one may have left effects behind: it crashed, or
    # ended in a way of which its rule does not say that nothing happened.
    is_uncertain: bool = False
    # Whether nothing happened in this life, by the rule's word for every attempt of it, and no step
    # is stored: then the key may take a corrected request.
    nothing_happened: bool = False
    # When the request was replaced by a corrected one, in this life of the key.
    corrected_at_ms: int | None = None


@dataclass(slots=True)
class ClaimRequest:
    """The wish to run an operation; the token makes repeating the request harmless."""

    key: Key
    # The current rule's fingerprint first, then those of earlier rules that are still known.
    fingerprints: tuple[Fingerprint, ...]
    token: bytes
    lease_ms: int
    operation: str = ""
    owner: str = ""
    # What the operation is called with, stored with the claim so that a worker can run it again;
    # None for an operation that is not resumable, of which nothing is stored.
    arguments: Payload | None = None
    # Whether it may be a corrected one: never under a key that its client has sent.
    takes_corrections: bool = False


@dataclass(slots=True)
class ClaimAnswer:
    """What became of a claim.

    `remaining_ms` is the lease that is left (granted or in flight) or the active window that is
    left (replay), measured by the store's clock, so that no caller compares clocks.
    """

    decision: Decision
    condition: Condition
    attempt: int = 0
    remaining_ms: int = 0
    lease_ends_at_ms: int = 0
    state: State | None = None
    payload: Payload | None = None
    # Of which operation the record is; told with a mismatch only.
    operation: str = ""
    # How long ago the record was claimed; told of one that is in flight.
    elapsed_ms: int = 0
    # Whether an open transaction holds the record: then only its end frees it, and no lease.
    is_locked: bool = False
    # How many of the attempts before a granted one ended with a word, see `Record`.
    releases: int = 0
    # The record's own, of a grant that goes on with what an earlier attempt began; None for a
    # grant that begins, whose record has the first fingerprint of the request.
    fingerprint: Fingerprint | None = None
    # What tells the request of a granted claim from the one that it has corrected; empty when none
    # was corrected in this life of the key.
    correction: bytes = b""
    # Whether a corrected request may take the place of the one that is replayed.
    nothing_happened: bool = False
    # Who made what is replayed; told with a replay only.
    owner: str = ""


@dataclass(slots=True)
class StagedEntry:
    """An outbox entry as it is written: what is to be delivered, and under which key."""

    # The key that receivers tell repetitions by.
    key: str
    topic: str
    content_type: str
    body: bytes
    # Entries of one aggregate are delivered in their order; those without one in any order.
    aggregate: str | None = None
    # Not delivered before this instant; 0 means at once.
    deliver_at_ms: int = 0


@plain_members
class SettleKind(IntEnum):
    """How a claim's owner ends its attempt."""

    COMPLETE = State.SUCCEEDED
    FAIL = State.FAILED
    RELEASE = State.RELEASED


@dataclass(slots=True)
class Settlement:
    """An owner's ending of its attempt; it counts only while the token is the record's."""

    kind: SettleKind
    key: Key
    token: bytes
    payload: Payload | None = None
    active_ms: int = 0
    audit_ms: int = 0
    # Outbox entries that become deliverable with this ending, written in its transaction.
    entries: tuple[StagedEntry, ...] = ()
    # Whether the rule lists this ending as one with which nothing happened.
    nothing_happened: bool = False
    # Whether the stored arguments go with it: nobody needs them after an ending for good.
    drops_arguments: bool = False


@dataclass(slots=True)
class SettleAnswer:
    """APPLY and CONFIRM mean that the ending stands; LOST means that nothing was written."""

    decision: Decision


@dataclass(slots=True)
class Extension:
    """A longer lease for a running attempt; it counts only while the token is the record's."""

    key: Key
    token: bytes
    lease_ms: int
    # Whether its operation writes in a transaction of the user's, which may hold the record for
    # longer than the lease lasts, or has read it before it was extended.
    is_joined: bool = False


@dataclass(slots=True)
class ExtendAnswer:
    """APPLY means that the lease is extended, and for how long; LOST that nothing was written."""

    decision: Decision
    remaining_ms: int = 0
    lease_ends_at_ms: int = 0


@dataclass(slots=True)
class Step:
    """The stored result of one finished step of an operation."""

    name: str
    position: int
    payload: Payload


@dataclass(slots=True)
class StepWrite:
    """A step's result to be stored, if the token still holds the key."""

    key: Key
    token: bytes
    step: Step
    # Of the claim that records it.
    lease_ms: int = 0


@dataclass(slots=True)
class StoredOutcome:
    """One ending in the audit of a key, kept for the audit window."""

    token: bytes
    attempt: int
    state: State
    payload: Payload
    settled_at_ms: int
    audit_ends_at_ms: int


@dataclass(slots=True)
class StoredKey:
    """A record as an operator sees it: with its condition now, its steps and its audit."""

    record: Record
    condition: Condition
    now_ms: int
    steps: list[Step] = field(default_factory=list)
    outcomes: list[StoredOutcome] = field(default_factory=list)
    # What a resumable operation was called with, until it has ended.
    arguments: Payload | None = None

    @property
    def seen(self) -> Seen:
        """What somebody has seen who looked at this."""
        return Seen(self.record.token, self.condition)

    def was_so(self, at_ms: int) -> bool:
        """Whether it was in this condition at an earlier instant already."""
        record = self.record
        since_ms = {
            Condition.RUNNING: record.claimed_at_ms,
            Condition.ABANDONED: record.lease_ends_at_ms,
        }.get(self.condition, record.settled_at_ms)
        return since_ms is not None and since_ms <= at_ms


class OperatorCommand(StrEnum):
    """What an operator may do to one key."""

    RELEASE = "release"
    FORCE_RELEASE = "force release"
    EXPIRE = "expire"


class Seen(NamedTuple):
    """Which claim of a key somebody has looked at, and how that was."""

    token: bytes
    condition: Condition


@dataclass(frozen=True, slots=True)
class OperatorNote:
    """Who changes a key by a command, and why; kept with the change."""

    operator: str = ""
    reason: str = ""
    # What they saw of it: a key that has changed since is left. None for one that nobody looked at.
    seen: Seen | None = None


NO_NOTE: Final = OperatorNote()


@dataclass(slots=True)
class OperatorAction:
    """A command that changed a key, as it is kept."""

    command: str
    # What the key was before.
    condition: str
    attempt: int
    operator: str
    reason: str
    acted_at_ms: int


@dataclass(slots=True)
class SweepReport:
    """What one bounded sweep removed; `has_more` asks for another round."""

    keys: int = 0
    outcomes: int = 0
    has_more: bool = False
    # Whole partitions of outcomes that were dropped, by stores that have them.
    partitions: int = 0
    # Outbox entries that were delivered or discarded, and are past the time that they are kept.
    entries: int = 0
