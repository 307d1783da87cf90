"""How often, how long and for which answers a client tries again; checked once, when it is made.

Owns every limit of the client side. It must not know HTTP libraries or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from retrysafe.errors import PolicyInvalid

_ZERO: Final = timedelta(0)
_SECOND: Final = timedelta(seconds=1)
# Whoever retries for longer wants a queue, and an unbounded number would overflow the timers.
TIME_LIMIT_MAXIMUM: Final = timedelta(days=1)
# Of the answers below 500 only these say "the same request, later"; the others would be the same
# for ever. 409 is judged by what it says, and by whether its request has a key.
_RETRYABLE_BELOW_500: Final = frozenset({408, 425, 429})
RETRYABLE_STATUSES: Final = _RETRYABLE_BELOW_500 | {500, 502, 503, 504}
# They change nothing, so that sending one twice needs no key, and a key would mean nothing.
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How one client retries; raises `PolicyInvalid` when it makes no sense."""

    # How often a request is sent at most, the first time included. Enough for an operation of ten
    # seconds of which the server knows nothing yet: the pauses that it tells double.
    tries_limit: int = 6
    # No try begins later than this after the first one began.
    time_limit: timedelta = timedelta(seconds=60)
    # The wait before a retry is drawn between zero and a bound. The bound starts here, doubles
    # with every try, and ends at the limit.
    backoff: timedelta = timedelta(milliseconds=200)
    backoff_limit: timedelta = timedelta(seconds=20)
    # How long a server may hold a request back whose first sending it is still at work on, in whole
    # seconds: `Prefer: wait=N`. The answer comes as soon as there is one, instead of a 409 that is
    # retried after a pause. At zero nothing is asked for.
    wait: timedelta = _ZERO
    # Requests of these methods get a key when the caller sent none.
    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    # Answers that are worth another try, besides a 409 to a request with a key.
    statuses: frozenset[int] = RETRYABLE_STATUSES
    # Whether a 409 that says neither `retryable` nor `Retry-After` is retried as well, if the
    # request has a key. So the draft answers while the first request is at work; but an
    # application may mean a conflict that stays, and is then asked a few times for nothing.
    retries_silent_conflicts: bool = True
    # Whether GET, HEAD, OPTIONS and TRACE are retried as well; they need no key.
    retries_safe_methods: bool = True
    # A body that can be read only once is read into memory up to this size, so that it can be sent
    # again. At zero such a request is sent once.
    request_buffer_bytes: int = 0
    # An answer whose stated length is within this is read before it counts as received, so that
    # a connection that breaks in its middle is retried too.
    response_buffer_bytes: int = 1024 * 1024

    time_seconds: float = field(init=False, repr=False, compare=False)
    backoff_seconds: float = field(init=False, repr=False, compare=False)
    backoff_limit_seconds: float = field(init=False, repr=False, compare=False)
    # The value of the header `Prefer`; None when nothing is asked for.
    prefer: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_durations()
        methods = frozenset(method.upper() for method in _members(self.methods, str, "methods"))
        if methods & SAFE_METHODS:
            raise PolicyInvalid(
                f"{', '.join(sorted(methods & SAFE_METHODS))} changes nothing and takes no key: "
                "leave it out of methods"
            )
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "statuses", _checked_statuses(self.statuses))
        # Numbers are precomputed: timedelta arithmetic does not belong into every request.
        object.__setattr__(self, "time_seconds", self.time_limit.total_seconds())
        object.__setattr__(self, "backoff_seconds", self.backoff.total_seconds())
        object.__setattr__(self, "backoff_limit_seconds", self.backoff_limit.total_seconds())
        wait_seconds = int(self.wait.total_seconds())
        object.__setattr__(self, "prefer", f"wait={wait_seconds}" if wait_seconds else None)

    def _check_numbers(self) -> None:
        for name in ("retries_silent_conflicts", "retries_safe_methods"):
            if not isinstance(getattr(self, name), bool):
                raise PolicyInvalid(f"{name} is True or False, got {getattr(self, name)!r}")
        for name, least in (
            ("tries_limit", 1),
            ("request_buffer_bytes", 0),
            ("response_buffer_bytes", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PolicyInvalid(f"{name} is a whole number from {least} up, got {value!r}")

    def _check_durations(self) -> None:
        for name in ("time_limit", "backoff", "backoff_limit", "wait"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or not _ZERO <= value <= TIME_LIMIT_MAXIMUM:
                raise PolicyInvalid(
                    f"{name} is a timedelta from zero to {TIME_LIMIT_MAXIMUM}, got {value!r}"
                )
        if self.backoff_limit < self.backoff:
            raise PolicyInvalid("backoff_limit must not be shorter than backoff")
        if self.wait % _SECOND:
            raise PolicyInvalid(f"wait is in whole seconds, as HTTP has it, got {self.wait}")


def _members(value: object, kind: type, name: str) -> list[str]:
    """The members of a set; a bare text is a set of letters, and never what was meant."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise PolicyInvalid(f"{name} is a set, got {value!r}")
    members = list(value)
    if not all(isinstance(member, kind) for member in members):
        raise PolicyInvalid(f"{name} holds {kind.__name__} only, got {value!r}")
    return members


def _checked_statuses(value: object) -> frozenset[int]:
    statuses = frozenset(map(int, _members(value, int, "statuses")))
    wrong = sorted(
        status
        for status in statuses
        if status not in _RETRYABLE_BELOW_500 and not 500 <= status <= 599
    )
    if wrong:
        raise PolicyInvalid(
            f"{', '.join(map(str, wrong))} is never retried: below 500 only 408, 425 and 429 ask "
            "for the same request again; for a 409 there is retries_silent_conflicts"
        )
    return statuses
