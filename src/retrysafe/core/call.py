"""A call: one request to run an operation once, and the answer to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from retrysafe.core.events import UNFOLLOWED, MessageFacts, Progress
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import Ending, Fingerprint, Payload
from retrysafe.core.permits import Permits
from retrysafe.core.policy import Policy
from retrysafe.core.values.codec import OutcomeCodec


@dataclass(slots=True)
class Nest:
    """What a level of a nested call knows of the others, see `nested_claims`."""

    # All keys of the request, by the tags of the secrets that made them.
    keys: Mapping[bytes, Key]
    # The claims around this level's.
    held: tuple[Lease, ...] = ()
    # Of the nearest record around that an earlier attempt has begun.
    fingerprint: Fingerprint | None = None
    # What tells the request from one that it has corrected, where a record around says so.
    correction: bytes = b""
    # Whether an earlier attempt has begun a record around.
    is_later: bool = False
    # How many attempts of a record around ended without a word, at the most. This level's own count
    # may have begun later, with the list of several secrets.
    crashes: int = 0
    # What came of this level's claim: its token where it was granted, or a replay.
    token: bytes | None = None
    is_replay: bool = False
    # What is left of the active window where this level's outcome is an earlier run's: the levels
    # around end with it, else a replay would make the window longer.
    active_ms: int | None = None


@dataclass(slots=True)
class Call:
    """Everything that was decided before the engine is asked."""

    key: Key
    fingerprints: tuple[Fingerprint, ...]
    policy: Policy
    operation: str
    codec: OutcomeCodec
    # How a returned value ends the attempt; None when every value is a success.
    judge: Callable[[Any], Ending] | None = None
    # Makes what `complete_in` is given into such a value; None when it is one as it stands.
    outcome_of: Callable[[Any], Any] | None = None
    # What a resumable operation is called with; stored with the claim.
    arguments: Payload | None = None
    # The token of the abandoned claim that a worker wants to take over. Its call admits nothing,
    # and a failure that would free the key leaves it to the lease: no caller hears of it.
    recovers: bytes | None = None
    # Whether a stored failure is raised as the type that the policy declares. A caller that cannot
    # catch it, such as a client of an API, is told of `OperationFailed` instead.
    rebuilds_failures: bool = True
    # Who may wait for another run, when the policy says so; None for everybody.
    waiters: Permits | None = None
    # Whether an ending, by a value or an exception, is listed as one with which nothing happened.
    # None under a key that its client has sent, which belongs to one request for good, and where
    # nothing is listed: then no corrected request is taken.
    nothing_happened: Callable[[Any], bool] | None = None
    # The same request under another of its keys, which is claimed and run inside this claim.
    inner: Call | None = None
    # None for a request with one key, as nearly all have.
    nest: Nest | None = None
    # Whether it may run without a claim when the store is down: then that is its result.
    fails_open: bool = False
    # What observers will be told of it. Shared by all of its levels.
    progress: Progress = UNFOLLOWED
    # The message that it handles, if it handles one.
    message: MessageFacts | None = None


T = TypeVar("T")


@dataclass(slots=True)
class Answer(Generic[T]):
    """What the caller gets: the outcome, whether an earlier run made it, and which attempt."""

    value: T
    replayed: bool
    attempt: int
