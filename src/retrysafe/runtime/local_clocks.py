"""Local waiting, for threads and for tasks."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

from retrysafe.runtime import local_time


class ThreadSignal:
    """Wakes one waiting thread.

    A plain lock, not an event: an event's own lock is taken in Python code, and a waiter that a
    signal interrupts in there would leave it taken for whoever wants to wake it.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes the waiter."""
        with suppress(RuntimeError):  # Set before, and not waited for yet.
            self._lock.release()

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Blocks until `set`, or until the time is over."""
        if timeout_seconds is None:
            return self._lock.acquire()
        return self._lock.acquire(timeout=min(timeout_seconds, threading.TIMEOUT_MAX))


class ThreadClock:
    """Blocks the calling thread."""

    monotonic = staticmethod(local_time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Blocks."""
        time.sleep(seconds)  # noqa: ASYNC251 — a blocking port blocks; no loop drives it.

    def signal(self) -> ThreadSignal:
        """A fresh signal."""
        return ThreadSignal()


class TaskSignal:
    """Wakes one waiting task of the same loop."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        """Wakes the waiter."""
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Suspends until `set`, or until the time is over."""
        if timeout_seconds is None:
            await self._future
            return True
        done, _ = await asyncio.wait((self._future,), timeout=timeout_seconds)
        return bool(done)


class TaskClock:
    """Suspends the calling task."""

    monotonic = staticmethod(local_time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Suspends."""
        await asyncio.sleep(seconds)

    def signal(self) -> TaskSignal:
        """A fresh signal."""
        return TaskSignal()
