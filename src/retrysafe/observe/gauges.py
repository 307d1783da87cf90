"""What is known of a whole store, for gauges: its size, against what rate and window project.

Owns how often a store is asked: at most every 15 seconds, and never while somebody waits for a
scrape longer than a second. A store that is down leaves the last figures as they were.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from retrysafe import forks
from retrysafe.core.policy import FOREVER, Policy
from retrysafe.core.size import StoreSize
from retrysafe.observe.windows import KeyRate

CACHED_SECONDS: Final = 15.0
# An answer that does not come is asked for again after this.
LOST_SECONDS: Final = 60.0
PATIENCE_SECONDS: Final = 1.0

Measure = Callable[[Callable[[StoreSize | None], None]], None]


class Watched(Protocol):
    """What an observer is given of the object that it observes."""

    @property
    def policy(self) -> Policy:
        """The policy of calls that bring none of their own."""

    def measure(self, tell: Callable[[StoreSize | None], None]) -> None:
        """Has the size of the store told, later; returns at once."""


class StoreGauges:
    """The last figures of one store."""

    def __init__(self, watched: Watched, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._watched = watched
        self._monotonic = monotonic
        self._rate = KeyRate()
        self._size: StoreSize | None = None
        self._rows_projected: dict[str, float] = {}
        self._asked: float | None = None
        self._is_answered = True
        self._told = threading.Event()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Asks anew: the thread that would be told is the parent's."""
        self._told = threading.Event()
        self._asked, self._is_answered = None, True

    def size(self) -> StoreSize | None:
        """The last size that was heard of; asks for a new one when it is old."""
        now = self._monotonic()
        limit = CACHED_SECONDS if self._is_answered else LOST_SECONDS
        if self._asked is None or now - self._asked >= limit:
            is_first = self._asked is None
            self._asked, self._is_answered = now, False
            self._told.clear()
            self._watched.measure(self._tell)
            # Never on a loop, which may be the one that has to answer: its next scrape shows it.
            if is_first and not _is_on_loop():
                self._told.wait(PATIENCE_SECONDS)
        return self._size

    def rows_projected(self) -> dict[str, float]:
        """How many rows there would be for good at the present rate, by table."""
        return self._rows_projected

    def _tell(self, size: StoreSize | None) -> None:
        if size is not None:
            self._size = size
            if size.keys_inserted is not None:
                rate = self._rate.per_second(self._monotonic(), size.keys_inserted)
                if rate is not None:
                    self._rows_projected = projected(rate, self._watched.policy)
        elif self._size is None:
            self._asked = None  # Nobody could tell yet; the next scrape asks again.
        self._is_answered = True
        self._told.set()


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def projected(keys_per_second: float, policy: Policy) -> dict[str, float]:
    """Rate times window: keys for the active one, outcomes for the audit; none for ever."""
    windows = {"keys": policy.active_window, "outcomes": policy.audit_window}
    return {
        table: keys_per_second * window.total_seconds()
        for table, window in windows.items()
        if window < FOREVER
    }
