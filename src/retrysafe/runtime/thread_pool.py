"""Worker threads for an event loop, which work until the process really ends.

Owns the threads. Those of `concurrent.futures` take no more work once the main thread has ended,
although a loop in another thread may go on for as long as it likes: the outcomes of what it runs
could not be stored.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from retrysafe import forks
from retrysafe.core.stop_iteration import raisable

T = TypeVar("T")

# How long the end of the process waits for what is under way, as a loop's end and `close` do: a
# file that is locked for longer has failed the write by then, and what hangs is left behind.
EXIT_SECONDS: Final = 30.0
# With the process that it is under way in: a forked child has a copy, and waits for none of it.
_under_way: Final[dict[_Job, int]] = {}
# How often the end of some work is looked for. It is told as well; but in a loop whose thread runs
# the handlers of signals, one that raises breaks off the callback that tells it.
LOOK_SECONDS: Final = 1.0
_EXIT_LOOK_SECONDS: Final = 0.01


@atexit.register
def _finish() -> None:
    """Called when the last thread that is no daemon has ended."""
    here, until = os.getpid(), time.monotonic() + EXIT_SECONDS
    while here in list(_under_way.values()) and time.monotonic() < until:
        time.sleep(_EXIT_LOOK_SECONDS)


class ThreadPool:
    """At most `size` threads, started when there is work; the next use after `close` starts others.

    Daemons: those of a loop that nobody closed would keep the process for ever.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._begin()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """The threads stayed in the parent, and so did their work."""
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """What the work returns, or raises; cancelled, work that has begun goes on."""
        job = _Job(partial(work, *args), asyncio.get_running_loop())
        try:
            self._submit(job)
            value: T = await job.result()
            return value
        finally:
            job.cancel()

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._start_thread()
            _under_way[job] = os.getpid()
            self._jobs.put(job)

    def _start_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) == self._size:
            return
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system gives no more of them. The others take the work, if there are any.
            if not self._threads:
                raise
        else:
            # Not one whose start a signal's handler has interrupted: Python may have broken it. If
            # not, it works beside the others, and ends with them.
            self._threads.append(thread)

    def end(self) -> list[threading.Thread]:
        """Has the threads end with what is queued, without waiting for them."""
        with self._lock:
            fresh: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            # One statement without a call: threads of two queues would wait for each other's end.
            threads, jobs, self._threads, self._jobs = self._threads, self._jobs, [], fresh
            jobs.put(None)
        return threads

    def close(self) -> None:
        """Waits until what was submitted is done, and the threads have ended."""
        for thread in self.end():
            thread.join()

    def __del__(self) -> None:
        """Nobody is left to end them; without the lock, as any thread may collect garbage."""
        self._jobs.put(None)


class _Job:
    """Some work, and what came of it.

    No future of `concurrent.futures`: its condition stays taken when a signal's handler raises in
    it (decision 31), and the thread that has done the work would wait for it.
    """

    __slots__ = ("_error", "_loop", "_permit", "_value", "_waiter", "_work", "is_over")

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop | None) -> None:
        self._work = work
        self._loop = loop
        # Whoever takes it out decides: the thread does the work, or nobody does.
        self._permit = [None]
        self._waiter: asyncio.Future[None] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self.is_over = False

    def cancel(self) -> None:
        """Has it not begun, if it has not; else it goes on."""
        with suppress(IndexError):
            self._permit.pop()
            _under_way.pop(self, None)

    def do(self) -> None:
        """In a thread."""
        try:
            self._permit.pop()
        except IndexError:
            return
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = raisable(error)
        self.is_over = True
        _under_way.pop(self, None)
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop has ended.
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def result(self) -> Any:
        """What came of it, in the loop."""
        loop = self._loop
        assert loop is not None
        while not self.is_over:
            self._waiter = loop.create_future()
            lookout = loop.call_later(LOOK_SECONDS, self._wake)
            try:
                await self._waiter
            finally:
                lookout.cancel()
        if self._error is None:
            return self._value
        # Not kept here as well: its traceback holds whoever holds this.
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    # It holds no pool: one that is lost has to end its threads.
    while (job := jobs.get()) is not None:
        job.do()
        # Not kept until the next one comes: it may hold much, and a traceback too.
        del job
    jobs.put(None)  # For the next of them, however many there are.
