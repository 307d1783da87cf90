"""A store clock that moves only when a test says so."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Final

# An ordinary instant with round digits, so that a failing assertion is easy to read.
START_MS: Final = 1_700_000_000_000
_MILLISECOND: Final = timedelta(milliseconds=1)


class ManualClock:
    """Gives the same instant until it is moved; pass it as a store's `now_ms`.

    Safe to read and to move from several threads.
    """

    def __init__(self, now_ms: int = START_MS) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Milliseconds since the epoch."""
        with self._lock:
            return self._now_ms

    def advance(self, by: timedelta) -> int:
        """Moves forward and gives the new instant.

        Raises `ValueError` for a negative duration, and for one that is not whole milliseconds:
        rounding it would move a lease's boundary behind the test's back.
        """
        return self._move(_whole_milliseconds(by))

    def jump_back(self, by: timedelta) -> int:
        """Moves back, as a wall clock does when it is corrected; raises what `advance` raises."""
        return self._move(-_whole_milliseconds(by))

    def _move(self, by_ms: int) -> int:
        with self._lock:
            self._now_ms += by_ms
            return self._now_ms

    def __repr__(self) -> str:
        return f"ManualClock({self()})"


def _whole_milliseconds(duration: timedelta) -> int:
    count, rest = divmod(duration, _MILLISECOND)
    if rest or count < 0:
        raise ValueError(f"a clock moves by whole, non-negative milliseconds, got {duration!r}")
    return count
