"""The gate in front of a face: counts the calls inside, and closes without cutting any short."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import Final

from retrysafe.errors import Closed

# How often those who close a gate look by themselves whether somebody is inside.
_LOOK_SECONDS: Final = 0.25


def _closed() -> Closed:
    return Closed("this object was closed and starts nothing new: make another one")


class ThreadGate:
    """Counts threads.

    A call is a token in a dictionary, because one dictionary operation cannot be interrupted: a
    signal that raises between any two lines leaves neither a lock taken nor a count too high. So
    whoever leaves takes its token out of `inside` by itself, and then calls `tell`.
    """

    def __init__(self) -> None:
        self.inside: dict[object, None] = {}
        # Where those wait who close it: plain locks, because an event's own lock is taken in Python
        # code, and a thread that a signal interrupts in there would leave it taken.
        self._closers: dict[threading.Lock, None] = {}
        self.is_closed = False

    def require_open(self) -> None:
        """Raises `Closed`; for what is over before anybody could wait for it."""
        if self.is_closed:
            raise _closed()

    def enter(self, token: object) -> None:
        """Lets a call in; raises `Closed`. The caller takes its token out in any case."""
        # In this order: `close` sets its mark before it looks, so one of the two sees the other.
        self.inside[token] = None
        if self.is_closed:
            raise _closed()

    def tell(self) -> None:
        """Has those who close it look again, if there are any."""
        if self.is_closed:
            for closer in self._closers.copy():
                with suppress(RuntimeError):  # Told before, and not looked at yet.
                    closer.release()

    def close(self, wait_seconds: float) -> bool:
        """Lets nobody in any more, and waits for those inside; False when the time ran out."""
        until = time.monotonic() + wait_seconds
        self.is_closed = True
        closer = threading.Lock()
        closer.acquire()
        try:
            self._closers[closer] = None
            while self.inside:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                # Not to the end: a signal may have kept the last one from telling.
                closer.acquire(timeout=min(left, _LOOK_SECONDS))
            return True
        finally:
            self._closers.pop(closer, None)


class TaskGate:
    """Counts tasks of one loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._empty: asyncio.Event | None = None
        self.is_closed = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody is inside."""
        return not self._inside

    def require_open(self) -> None:
        """Raises `Closed`; for what is over before anybody could wait for it."""
        if self.is_closed:
            raise _closed()

    def enter(self) -> None:
        """Lets a call in; raises `Closed`."""
        if self.is_closed:
            raise _closed()
        self._inside += 1

    def leave(self) -> None:
        """Lets a call out."""
        self._inside -= 1
        if self._empty is not None and not self._inside:
            self._empty.set()

    async def close(self, wait_seconds: float) -> bool:
        """Lets nobody in any more, and waits for those inside; False when the time ran out."""
        self.is_closed = True
        if not self._inside:
            return True
        # Shared by several calls: each must hear of the end.
        self._empty = self._empty or asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), wait_seconds)
        except TimeoutError:
            return False
        return True
