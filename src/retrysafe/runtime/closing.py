"""Ending within a limit.

Owns the time that `close` may take, and the thread in which something ends that cannot be hurried,
a store that waits for a locked file for one. Such a thread goes on when the limit is over. It holds
nothing that anybody waits for, and it does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final

from retrysafe.errors import InvalidInput

_logger: Final = logging.getLogger("retrysafe")

# What is left for the ending when operations have used up the whole limit: enough for a thread to
# wake up and for a file to be closed, and nothing that anybody would call a wait.
_LAST_SECONDS: Final = 0.25


class Limit:
    """The time that is left of a limit."""

    __slots__ = ("_until", "seconds")

    def __init__(self, wait: timedelta) -> None:
        """Starts now; raises `InvalidInput` for anything but a time."""
        if not isinstance(wait, timedelta):
            raise InvalidInput(
                f"close takes a timedelta, got {wait!r}: write timedelta(seconds=5), for example"
            )
        self.seconds = wait.total_seconds()
        self._until = time.monotonic() + self.seconds

    def spare_the_ending(self) -> None:
        """Called when nobody waits for operations any more: what follows is short."""
        self._until = max(self._until, time.monotonic() + _LAST_SECONDS)

    @property
    def left_seconds(self) -> float:
        """Never below zero, nor more than a thread can wait for."""
        return min(max(0.0, self._until - time.monotonic()), threading.TIMEOUT_MAX)


class _Ending(threading.Thread):
    """Ends something, and tells what it raised to whoever still waits, or else to the log."""

    def __init__(self, work: Callable[[], None], tell: Callable[[], None]) -> None:
        super().__init__(name="retrysafe-ending", daemon=True)
        self._work = work
        self._tell = tell
        self._lock = threading.Lock()
        self._is_left_alone = False
        self._error: BaseException | None = None
        self.has_ended = False

    def run(self) -> None:
        error: BaseException | None = None
        try:
            self._work()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._error, self.has_ended = error, True
            is_left_alone = self._is_left_alone
        if error is not None and is_left_alone:
            _logger.error("closing failed after its limit", exc_info=error)
        self._tell()

    def leave(self) -> None:
        """Ends the wait; raises what the work raised if it has ended."""
        with self._lock:
            self._is_left_alone = not self.has_ended
        if self.has_ended:
            self.join()
        if self._error is not None and not self._is_left_alone:
            raise self._error


def _is_started(ending: _Ending) -> bool:
    """Whether there still are threads to be had: at the end of the process there are none."""
    try:
        ending.start()
    except RuntimeError:
        return False
    return True


def end_within(work: Callable[[], None], limit: Limit) -> None:
    """Returns when the work has ended, or the limit; the work goes on then."""
    ending = _Ending(work, lambda: None)
    if not _is_started(ending):
        work()
        return
    ending.join(limit.left_seconds)
    ending.leave()


async def end_aside_within(work: Callable[[], None], limit: Limit) -> None:
    """The same, without stopping the event loop."""
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # The loop may have ended before.
            loop.call_soon_threadsafe(has_ended.set)

    ending = _Ending(work, tell)
    if not _is_started(ending):
        work()
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(limit.left_seconds):
            await has_ended.wait()
    ending.leave()
