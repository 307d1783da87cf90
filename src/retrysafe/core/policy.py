"""Policy: how long, how often and how much, per operation; checked once, when it is made.

Owns every limit and the judgement of exceptions. It must not know stores or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Final

from retrysafe.core.machine import exhausted_limit
from retrysafe.core.model import Ending, plain_members
from retrysafe.core.stop_iteration import is_listed, kinds_of
from retrysafe.errors import (
    AwaitForgotten,
    CommitHookFailed,
    OperationInFlight,
    PolicyInvalid,
    ResumedRequestRefused,
    RetrysafeError,
    SecretMissing,
)

_ZERO: Final = timedelta(0)
# After a time-out, or a connection that broke, the other side may have done what it was sent.
_NO_ANSWER: Final = (TimeoutError, ConnectionError)
# Of a group one member may be listed and another not; and where one task of several failed, the
# others were cancelled halfway.
_UNCERTAIN: Final = (RetrysafeError, BaseExceptionGroup, *_NO_ANSWER)
# Renewal comes three times per lease; below this a busy machine would lose healthy claims.
LEASE_MINIMUM: Final = timedelta(milliseconds=100)
# A lease is how long a crash blocks its key; renewal makes longer ones pointless.
LEASE_MAXIMUM: Final = timedelta(days=1)
# Nobody holds a connection open longer; an unbounded number would overflow the clocks' timers.
WAIT_LIMIT_MAXIMUM: Final = timedelta(days=1)
# A hundred years: what lies beyond cannot be shown as a date any more.
WINDOW_MAXIMUM: Final = timedelta(days=36_500)
# The window of a key that is never used for anything else, such as the payment of invoice 42. It is
# longer than any retry, and a plain window: stores, sweeps and views need not know of it.
FOREVER: Final = WINDOW_MAXIMUM
# An outcome larger than this belongs in object storage, with a reference as the outcome.
OUTCOME_LIMIT_MAXIMUM_BYTES: Final = 64 * 1024 * 1024


@plain_members
class InFlight(Enum):
    """What a duplicate of a running operation does."""

    FAIL = "fail"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Policy:
    """How one kind of operation is run once; raises `PolicyInvalid` when it makes no sense."""

    # How long a claim lasts without renewal: after a crash, the key is blocked this long.
    lease: timedelta = timedelta(seconds=30)
    # How long a settled key is recognised; it should cover the longest retry of any client.
    active_window: timedelta = timedelta(hours=24)
    # How long stored outcomes are kept for audit; never shorter than the active window, unless that
    # is FOREVER: then the key stays, and says that it is done, after its outcome is gone.
    audit_window: timedelta = timedelta(days=30)
    # How many attempts may end without a word, mostly with their worker, before the operation is
    # given up.
    attempt_limit: int = 10
    # How many attempts may free the key, by an exception or a value that says so, before the
    # operation is given up. None for any number: an outage must not end a key for good.
    release_limit: int | None = None
    in_flight: InFlight = InFlight.FAIL
    # How long a waiting duplicate waits; then it is told that the operation is in flight.
    wait_limit: timedelta = timedelta(seconds=10)
    outcome_limit_bytes: int = 1024 * 1024
    # How large the stored arguments of a resumable operation may be; more is refused.
    arguments_limit_bytes: int = 64 * 1024
    # How long storing the outcome is tried when the store does not answer.
    settle_patience: timedelta = timedelta(seconds=10)
    # After this the lease of a running attempt is no longer renewed. None: as long as it runs,
    # because ending the renewal of a healthy operation would let a retry run it a second time.
    run_limit: timedelta | None = None
    # Exceptions that end the operation for good (stored and replayed), and those that free the
    # key. The nearest class in the exception's ancestry decides.
    terminal: tuple[type[Exception], ...] = ()
    retryable: tuple[type[Exception], ...] = ()
    # What an exception in neither list does. Freeing the key is the default because most unknown
    # errors are outages; an operation that must never run twice says Ending.FAILED here.
    unlisted: Ending = Ending.RELEASED
    # Exceptions after which nothing has happened, such as a card that was declined: a key that
    # `once` makes from the arguments then takes a corrected request. Whether the failure is kept or
    # frees the key is said above.
    nothing_happened: tuple[type[Exception], ...] = ()

    lease_ms: int = field(init=False, repr=False, compare=False)
    active_ms: int = field(init=False, repr=False, compare=False)
    audit_ms: int = field(init=False, repr=False, compare=False)
    wait_seconds: float = field(init=False, repr=False, compare=False)
    run_limit_seconds: float | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_durations()
        self._check_numbers()
        self._check_exceptions()
        # Numbers are precomputed: the hot path must not do timedelta arithmetic.
        for name, duration in (
            ("lease_ms", self.lease),
            ("active_ms", self.active_window),
            ("audit_ms", self.audit_window),
        ):
            object.__setattr__(self, name, duration // timedelta(milliseconds=1))
        object.__setattr__(self, "wait_seconds", self.wait_limit.total_seconds())
        limit = self.run_limit
        object.__setattr__(
            self, "run_limit_seconds", None if limit is None else limit.total_seconds()
        )

    def with_changes(self, **changes: Any) -> Policy:
        """The same policy with some settings changed; raises `PolicyInvalid` for unknown ones."""
        known = {item.name for item in fields(self) if item.init}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise PolicyInvalid(
                f"a policy has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        return replace(self, **changes)

    def with_window(self, window: object, *, of: str) -> Policy:
        """The same policy for keys that are recognised for that long; raises `PolicyInvalid`."""
        if not isinstance(window, timedelta):
            raise PolicyInvalid(
                f"the window of {of} must be a timedelta, such as timedelta(minutes=5), or "
                f"FOREVER, got {window!r}"
            )
        if window < self.lease:
            raise PolicyInvalid(
                f"the window of {of} ({window}) must not be shorter than the lease "
                f"({self.lease}): choose a longer window, or a policy with a shorter lease"
            )
        kept = self.audit_window if window == FOREVER else max(window, self.audit_window)
        return self.with_changes(active_window=window, audit_window=kept)

    def exhausted_limit(self, attempt: int, releases: int) -> str | None:
        """The name of the limit that forbids an attempt, after so many that freed the key."""
        return exhausted_limit(
            attempt,
            releases,
            attempt_limit=self.attempt_limit,
            release_limit=self.release_limit,
        )

    def judge(self, error: Exception) -> Ending:
        """How an attempt that raised this exception ended."""
        if isinstance(error, AwaitForgotten | CommitHookFailed) and error.is_final:
            # Running it again would do again what it did, whatever was declared for others.
            return Ending.FAILED
        if isinstance(error, OperationInFlight) and not error.has_record:
            # The key runs without a claim, and nothing has run under this one.
            return Ending.RELEASED
        if isinstance(error, ResumedRequestRefused):
            # Kept, it would tell a client that asked with its credentials that it had none.
            return Ending.FAILED if error.is_final else Ending.RELEASED
        if isinstance(error, SecretMissing):
            # Another process knows the secret, or this one after its next start: kept, it would end
            # an operation for good that only the wrong process had taken over.
            return Ending.RELEASED
        for ancestor in kinds_of(error):
            if ancestor in self.terminal:
                return Ending.FAILED
            if ancestor in self.retryable:
                return Ending.RELEASED
        return self.unlisted

    def is_nothing_happened(self, error: object) -> bool:
        """Whether an attempt that raised this exception is listed as one that left no effects."""
        # What retrysafe itself raises, such as `StepNotStored`, may come after effects; and an
        # exception of a listed class may be of an uncertain one as well.
        return (
            isinstance(error, Exception)
            and is_listed(error, self.nothing_happened)
            and not isinstance(error, _UNCERTAIN)
        )

    def _check_durations(self) -> None:
        for name in ("lease", "active_window", "audit_window", "wait_limit", "settle_patience"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise PolicyInvalid(f"{name} must be a timedelta, got {value!r}")
        if not LEASE_MINIMUM <= self.lease <= LEASE_MAXIMUM:
            raise PolicyInvalid(
                f"lease must be between {LEASE_MINIMUM} and {LEASE_MAXIMUM}, got {self.lease}: "
                "it is the time that a crash blocks the key; longer operations are renewed"
            )
        if self.audit_window > WINDOW_MAXIMUM:
            raise PolicyInvalid(
                f"audit_window must be at most {WINDOW_MAXIMUM.days:,} days, "
                f"got {self.audit_window}"
            )
        if self.active_window < self.lease:
            raise PolicyInvalid(
                f"active_window ({self.active_window}) must not be shorter than the lease "
                f"({self.lease}): a retry after a crash would not find its record"
            )
        if self.audit_window < self.active_window != FOREVER:
            raise PolicyInvalid(
                f"audit_window ({self.audit_window}) must not be shorter than active_window "
                f"({self.active_window}): an outcome must be there as long as it is replayed"
            )
        if not _ZERO <= self.wait_limit <= WAIT_LIMIT_MAXIMUM:
            raise PolicyInvalid(
                f"wait_limit must be between {_ZERO} and {WAIT_LIMIT_MAXIMUM}, "
                f"got {self.wait_limit}"
            )
        if self.settle_patience < _ZERO:
            raise PolicyInvalid(f"settle_patience must not be negative, got {self.settle_patience}")
        if self.run_limit is not None and not (
            isinstance(self.run_limit, timedelta) and self.run_limit >= self.lease
        ):
            raise PolicyInvalid(
                f"run_limit must be None or a timedelta of at least the lease ({self.lease}), "
                f"got {self.run_limit!r}"
            )

    def _check_numbers(self) -> None:
        for name, allowed in (("attempt_limit", ""), ("release_limit", "None or ")):
            limit = getattr(self, name)
            if limit is None and allowed:
                continue
            if not _is_count(limit) or not 1 <= limit <= 1_000_000:
                raise PolicyInvalid(
                    f"{name} must be {allowed}a whole number from 1 to 1,000,000, got {limit!r}"
                )
        for name in ("outcome_limit_bytes", "arguments_limit_bytes"):
            limit = getattr(self, name)
            if not _is_count(limit) or not 1 <= limit <= OUTCOME_LIMIT_MAXIMUM_BYTES:
                raise PolicyInvalid(
                    f"{name} must be a whole number from 1 to {OUTCOME_LIMIT_MAXIMUM_BYTES:,}, "
                    f"got {limit!r}"
                )
        if not isinstance(self.in_flight, InFlight):
            raise PolicyInvalid(
                f"in_flight must be InFlight.FAIL or InFlight.WAIT, got {self.in_flight!r}"
            )
        # By identity: a plain 4 equals Ending.RELEASED and would still be taken for an ending
        # that is kept and replayed.
        if self.unlisted is not Ending.FAILED and self.unlisted is not Ending.RELEASED:
            raise PolicyInvalid(
                f"unlisted must be Ending.FAILED or Ending.RELEASED, got {self.unlisted!r}"
            )

    def _check_exceptions(self) -> None:
        for name in ("terminal", "retryable", "nothing_happened"):
            types = getattr(self, name)
            if isinstance(types, str) or not isinstance(types, Iterable):
                # One class alone is what people write first; anything else is refused below.
                types = (types,)
            types = tuple(types)
            for item in types:
                if not (isinstance(item, type) and issubclass(item, Exception)):
                    raise PolicyInvalid(
                        f"{name} takes classes of exceptions, such as {name}=(ValueError,), got "
                        f"{item!r}: no texts, and no cancellation or process exit, which are never "
                        "an outcome"
                    )
            object.__setattr__(self, name, types)
        for item in self.nothing_happened:
            if issubclass(item, BaseExceptionGroup):
                raise PolicyInvalid(
                    f"nothing_happened must not list {item.__name__}: in a group of exceptions one "
                    "may have come after an effect; catch the group in the operation, and raise "
                    "what says that nothing happened"
                )
            for kind in _NO_ANSWER:
                if issubclass(kind, item) or issubclass(item, kind):
                    raise PolicyInvalid(
                        f"nothing_happened must not list {item.__name__}: after a "
                        f"{kind.__name__} nobody knows what happened, and it is one or takes it "
                        "in; list what says so, such as a declined card"
                    )
        both = set(self.terminal) & set(self.retryable)
        if both:
            names = ", ".join(sorted(item.__name__ for item in both))
            raise PolicyInvalid(f"{names} cannot be both terminal and retryable")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
