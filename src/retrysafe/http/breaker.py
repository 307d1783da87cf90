"""A circuit breaker: a store that is down is left alone for a while.

Owns the count of failures and when to ask again. It has no clock; the caller brings the time.
"""

from __future__ import annotations

import threading
from typing import Final

# A dropped connection or a restart behind a pool fails a few requests at once; that is no outage.
FAILURES_LIMIT: Final = 5
# Short: the store is usually back soon, and one request at a time finds out.
OPEN_SECONDS: Final = 2.0


class Breaker:
    """Closed while the store answers; after failures in a row it opens for a time.

    While it is open nothing is let through. When the time is over one request may try; its
    success closes the breaker, its failure opens it anew.
    """

    __slots__ = (
        "_failures_limit",
        "_lock",
        "_open_seconds",
        "_open_until",
        "failed_monotonic",
        "failures",
        "is_open",
    )

    def __init__(
        self, *, failures_limit: int = FAILURES_LIMIT, open_seconds: float = OPEN_SECONDS
    ) -> None:
        if failures_limit < 1 or open_seconds <= 0:
            raise ValueError("a breaker needs at least one failure and some time to be open")
        # How often in a row the store did not answer; every request looks at it.
        self.failures = 0
        # When it did not answer for the last time.
        self.failed_monotonic = float("-inf")
        # Whether the store is being left alone.
        self.is_open = False
        self._failures_limit = failures_limit
        self._open_seconds = open_seconds
        self._open_until = 0.0
        self._lock = threading.Lock()

    def seconds_closed_off(self, monotonic: float) -> float:
        """0 when a request may ask the store; else how long nobody should."""
        if not self.is_open:
            return 0.0
        with self._lock:
            left = self._open_until - monotonic
            if left > 0:
                return left
            # This one tries. The others wait for its news for as long again, which also bounds
            # the harm when it is cancelled and never brings any.
            self._open_until = monotonic + self._open_seconds
            return 0.0

    def succeeded(self) -> None:
        """The store answered."""
        if self.failures:
            with self._lock:
                self.failures = 0
                self.is_open = False
                self._open_until = 0.0

    def failed(self, monotonic: float) -> None:
        """The store did not answer."""
        with self._lock:
            self.failures += 1
            self.failed_monotonic = monotonic
            if self.failures >= self._failures_limit:
                self._open_until = monotonic + self._open_seconds
                self.is_open = True
