"""The gate in front of a face: counts the calls inside, and closes without cutting any short."""

from __future__ import annotations

import asyncio
import threading
import time

from retrysafe.errors import Closed


def _closed() -> Closed:
    return Closed("this object was closed and starts nothing new: make another one")


class ThreadGate:
    """Counts threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._inside = 0
        self.is_closed = False

    def enter(self) -> None:
        """Lets a call in; raises `Closed`."""
        with self._condition:
            if self.is_closed:
                raise _closed()
            self._inside += 1

    def leave(self) -> None:
        """Lets a call out."""
        with self._condition:
            self._inside -= 1
            if self.is_closed and not self._inside:
                self._condition.notify_all()

    def close(self, wait_seconds: float) -> bool:
        """Lets nobody in any more, and waits for those inside; False when the time ran out."""
        until = time.monotonic() + wait_seconds
        with self._condition:
            self.is_closed = True
            while self._inside:
                left = until - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    return not self._inside
        return True


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
        self._empty = asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), wait_seconds)
        except TimeoutError:
            return False
        return True
