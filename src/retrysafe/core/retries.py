"""Asking a store again before anything has run: how often, and for how long.

Owns the difference between a store that is down, which is reported quickly, and one whose server
takes no writes for a moment, which is waited for a little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from retrysafe.errors import StoreNotWritable, StoreUnavailable

RETRY_PAUSE_SECONDS: Final = 0.05
# A failover by an address that moves shows as a server that takes no writes. Most are over soon,
# and callers who are refused meanwhile come back all at once.
FAILOVER_SECONDS: Final = 2.0
_PAUSE_MAXIMUM_SECONDS: Final = 0.5


class Retries:
    """Says how long to pause before the next try, and when there is none."""

    __slots__ = ("_give_up", "_monotonic", "_pause", "_tries_left")

    def __init__(self, tries: int, monotonic: Callable[[], float]) -> None:
        """`tries` counts those that got no answer, the first included."""
        self._tries_left = tries
        self._monotonic = monotonic
        self._pause = RETRY_PAUSE_SECONDS
        self._give_up = monotonic() + FAILOVER_SECONDS

    def pause_after(self, error: StoreUnavailable) -> float | None:
        """The pause after a try that failed like this; None after the last one."""
        pause = self._pause
        if error.is_reentry:
            return None
        if isinstance(error, StoreNotWritable):
            if self._monotonic() + pause > self._give_up:
                return None
        else:
            self._tries_left -= 1
            if not self._tries_left:
                return None
        self._pause = min(pause * 2, _PAUSE_MAXIMUM_SECONDS)
        return pause
