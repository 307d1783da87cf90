"""Pools of deliveries: threads that block, and tasks that suspend, with the same few methods."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from contextlib import suppress
from functools import partial

from retrysafe.core.outbox.entries import Entry
from retrysafe.errors import DeliveryFailed
from retrysafe.relay.ports import Deliver, Finished, MayBegin, NotBegun, delivery_of, look
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.thread_ports import ThreadSignal


class ThreadDeliveryPool:
    """Delivers in threads, which are started with the first entries."""

    def __init__(self, target: Deliver, size: int) -> None:
        self.size = size
        self._target = target
        # None ends the thread that finds it.
        self._waiting: queue.SimpleQueue[tuple[Entry, MayBegin] | None] = queue.SimpleQueue()
        self._ended: deque[Finished] = deque()
        self._news = ThreadSignal()
        self._threads: list[threading.Thread] = []

    def start(self, entry: Entry, may_begin: MayBegin) -> None:
        """Queues the entry."""
        self._waiting.put((entry, may_begin))
        if len(self._threads) < self.size:
            # Daemons: a delivery that hangs must not keep a process that wants to end.
            name = f"retrysafe-relay-{len(self._threads) + 1}"
            thread = threading.Thread(target=self._deliver_all, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _deliver_all(self) -> None:
        while (queued := self._waiting.get()) is not None:
            entry, may_begin = queued
            error: BaseException | None = None
            # Here and not where it was queued: the process may have stood still in between.
            is_begun = may_begin(entry)
            if is_begun:
                try:
                    run_sync(self._target.deliver(delivery_of(entry)))
                except BaseException as raised:
                    error = raised
            self._ended.append(Finished(entry, error, is_begun))
            self._news.set()

    def finished(self) -> list[Finished]:
        """What has ended since the last question."""
        ended = []
        with suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        return ended

    def withdraw(self) -> list[Entry]:
        """Empties the queue."""
        taken = []
        with suppress(queue.Empty):
            while True:
                queued = self._waiting.get_nowait()
                if queued is not None:
                    taken.append(queued[0])
        return taken

    async def wait(self, seconds: float) -> None:
        """Blocks."""
        await self._news.wait(seconds)

    def wake(self) -> None:
        """Ends the rest."""
        self._news.set()

    async def close(self) -> None:
        """Ends the threads; one whose delivery hangs is left behind."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(1.0)
        self._threads = [thread for thread in self._threads if thread.is_alive()]


class TaskDeliveryPool:
    """Delivers in tasks of the running loop, each within a time limit."""

    def __init__(self, target: Deliver, size: int, timeout_seconds: float) -> None:
        self.size = size
        self._target = target
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[Entry, MayBegin]] = deque()
        self._ended: list[Finished] = []
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, entry: Entry, may_begin: MayBegin) -> None:
        """Queues the entry; a task is made for it unless all of them are busy."""
        self._waiting.append((entry, may_begin))
        if len(self._tasks) < self.size:
            task = self._loop.create_task(self._deliver_all())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _deliver_all(self) -> None:
        while self._waiting:
            entry, may_begin = self._waiting.popleft()
            error: BaseException | None = None
            is_begun = may_begin(entry)
            if is_begun:
                look.set(partial(may_begin, entry))
                try:
                    await self._deliver(entry)
                except NotBegun:
                    is_begun = False
                except Exception as raised:
                    error = raised
            self._ended.append(Finished(entry, error, is_begun))
            self._news.set()

    async def _deliver(self, entry: Entry) -> None:
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                await self._target.deliver(delivery_of(entry))
        except TimeoutError as error:
            if limit.expired():
                raise DeliveryFailed(
                    f"no answer within {self._timeout_seconds:g} s", key=entry.key
                ) from error
            raise

    def finished(self) -> list[Finished]:
        """What has ended since the last question."""
        ended, self._ended = self._ended, []
        return ended

    def withdraw(self) -> list[Entry]:
        """Empties the queue."""
        taken = [entry for entry, _ in self._waiting]
        self._waiting.clear()
        return taken

    async def wait(self, seconds: float) -> None:
        """Suspends."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()

    def wake(self) -> None:
        """Ends the rest; hints come from other threads."""
        with suppress(RuntimeError):  # The loop has ended, and the relay with it.
            self._loop.call_soon_threadsafe(self._news.set)

    async def close(self) -> None:
        """Ends the tasks; those under way are cancelled, and only the leases free their entries."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
