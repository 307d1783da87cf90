"""A budget of retries for all requests of a client, so that an outage does not multiply its load.

A limit per request is not enough: with six tries each, every client sends six times its load at
the moment when the server can bear least. Here retries are a small share of all requests.
Owns the arithmetic and a lock; it is told what time it is.
"""

from __future__ import annotations

import threading
from typing import Any

from retrysafe.errors import PolicyInvalid


class RetryBudget:
    """A bucket of tokens. Requests and time fill it, every retry takes one.

    Over any span, the retries are at most `capacity`, plus `per_request` for each request, plus
    `per_second` for each second. One object may serve several clients of one server, in any number
    of threads.
    """

    __slots__ = ("_lock", "_refilled_at", "_tokens", "capacity", "per_request", "per_second")

    def __init__(
        self, *, capacity: float = 20.0, per_request: float = 0.1, per_second: float = 1.0
    ) -> None:
        """Raises `PolicyInvalid` for a negative number.

        The defaults allow a burst of 20 retries, then one in ten requests; the one per second is
        for clients that hardly send anything, whose every failure is the first for a long time.
        """
        for name, value in (
            ("capacity", capacity),
            ("per_request", per_request),
            ("per_second", per_second),
        ):
            # Not a number compares false, so that it is refused as well.
            if not value >= 0:
                raise PolicyInvalid(f"{name} of a retry budget is a number from 0 up, got {value}")
        self.capacity = capacity
        self.per_request = per_request
        self.per_second = per_second
        self._tokens = capacity
        self._refilled_at: float | None = None
        # One that a signal's handler, which sends a request as well, may take again.
        self._lock = threading.RLock()

    def note_request(self) -> None:
        """Counts a request that is sent for the first time."""
        with self._lock:
            # What is over the capacity is cut off when it is asked for.
            self._tokens += self.per_request

    def take(self, now: float) -> bool:
        """Whether a retry is allowed; if it is, it is counted. `now` is a monotonic instant."""
        with self._lock:
            since = now if self._refilled_at is None else self._refilled_at
            # Another thread may have read the clock later and come first: time never runs back.
            self._refilled_at = max(now, since)
            passed_seconds = self._refilled_at - since
            self._tokens = min(self.capacity, self._tokens + passed_seconds * self.per_second)
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def __reduce__(self) -> tuple[Any, ...]:
        # A lock cannot be pickled, and the instants of another process mean nothing there.
        return _unpickled, (self.capacity, self.per_request, self.per_second)

    def __repr__(self) -> str:
        return (
            f"RetryBudget(capacity={self.capacity}, per_request={self.per_request}, "
            f"per_second={self.per_second})"
        )


def _unpickled(capacity: float, per_request: float, per_second: float) -> RetryBudget:
    return RetryBudget(capacity=capacity, per_request=per_request, per_second=per_second)
