"""Local waiting, for threads and for tasks."""

from __future__ import annotations

import asyncio
import threading
import time


class ThreadSignal:
    """Wakes one waiting thread."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Wakes the waiter."""
        self._event.set()

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Blocks until `set`, or until the time is over."""
        return self._event.wait(timeout_seconds)


class ThreadWaiting:
    """Blocks the calling thread."""

    monotonic = staticmethod(time.monotonic)

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


class TaskWaiting:
    """Suspends the calling task."""

    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Suspends."""
        await asyncio.sleep(seconds)

    def signal(self) -> TaskSignal:
        """A fresh signal."""
        return TaskSignal()
