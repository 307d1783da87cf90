"""Pools for recovery: a few threads that block, or a few tasks that suspend."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine
from typing import Any

from retrysafe.runtime.drive import run_sync


class ThreadWorkerPool:
    """Runs each flow in a thread of its own, at most `size` at a time.

    Permits are tokens in a queue: giving one back, and waking who waits for one, is a single call
    that is safe in a signal's function.
    """

    # Threads cannot be cancelled.
    has_given_up = False

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: queue.SimpleQueue[bool] = queue.SimpleQueue()
        for _ in range(size):
            self._slots.put(True)
        self._is_stopping = False

    async def wait_for_room(self, timeout_seconds: float) -> bool:
        """Blocks until a slot is free or the pool is being stopped, or until the time is over."""
        try:
            slot = self._slots.get(timeout=min(timeout_seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            return False
        self._slots.put(slot)
        return True

    async def has_room(self) -> bool:
        """Blocks until a slot is free; False when the pool is being stopped."""
        if self._slots.get():
            if not self._is_stopping:
                return True
            self._slots.put(True)
        return False

    def start(self, flow: Coroutine[Any, Any, None]) -> None:
        """Runs the flow in a thread; raises when the system gives no more threads."""
        # A daemon: an operation that hangs must not keep a process that has to end. Its lease
        # then frees the key, as after a crash.
        thread = threading.Thread(
            target=self._run, args=(flow,), name="retrysafe-recovery", daemon=True
        )
        try:
            thread.start()
        except Exception:
            # Nobody else gives the slot back, and whoever drains the pool would wait for ever.
            flow.close()
            self._slots.put(True)
            raise

    def _run(self, flow: Coroutine[Any, Any, None]) -> None:
        try:
            run_sync(flow)
        except BaseException as error:
            # An operation may end its own thread, and that is told by now; nothing else may.
            if isinstance(error, Exception):
                raise
        finally:
            self._slots.put(True)

    def stop(self) -> None:
        """Starts nothing more; safe in a signal's function."""
        self._is_stopping = True
        self._slots.put(False)

    def give_up(self) -> None:
        """Does nothing: what is under way goes on."""

    async def drain(self) -> None:
        """Blocks until everything that was started has ended."""
        free = 0
        while free < self.size:
            free += self._slots.get()
        for _ in range(free):
            self._slots.put(True)


class TaskWorkerPool:
    """Runs each flow in a task of the running loop, at most `size` at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._is_stopping = False
        self.has_given_up = False

    async def wait_for_room(self, timeout_seconds: float) -> bool:
        """Suspends until a slot is free or the pool is being stopped, or until time is over."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.has_room()
        except TimeoutError:
            return False
        return True

    async def has_room(self) -> bool:
        """Suspends until a slot is free; False when the pool is being stopped."""
        while len(self._tasks) >= self.size and not self._is_stopping:
            self._news.clear()
            await self._news.wait()
        return not self._is_stopping

    def start(self, flow: Coroutine[Any, Any, None]) -> None:
        """Runs the flow in a task."""
        task = asyncio.get_running_loop().create_task(flow)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._news.set()

    def stop(self) -> None:
        """Starts nothing more."""
        self._is_stopping = True
        self._news.set()

    def give_up(self) -> None:
        """Cancels what is under way."""
        self.has_given_up = True
        for task in self._tasks:
            task.cancel()

    async def drain(self) -> None:
        """Suspends until everything that was started has ended; cancelled, it takes that along."""
        try:
            while self._tasks:
                await asyncio.wait(set(self._tasks))
        except asyncio.CancelledError:
            self.give_up()
            raise
