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
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Final, TypeVar

from retrysafe import forks
from retrysafe.core.stop_iteration import raisable

T = TypeVar("T")

# How long the end of the process waits for what is under way, as a loop's end and `close` do: a
# file that is locked for longer has failed the write by then, and what hangs is left behind.
EXIT_SECONDS: Final = 30.0
# With the process that it is under way in: a forked child has a copy, and waits for none of it.
_under_way: Final[dict[Future[Any], int]] = {}


@atexit.register
def _finish() -> None:
    """Called when the last thread that is no daemon has ended."""
    here = os.getpid()
    wait([future for future, process in _under_way.items() if process == here], EXIT_SECONDS)


def _forget(future: Future[Any]) -> None:
    _under_way.pop(future, None)


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
        return await asyncio.wrap_future(self._submit(partial(work, *args)))

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        job = _Job(work)
        with self._lock:
            self._start_thread()
            _under_way[job.future] = os.getpid()
            job.future.add_done_callback(_forget)
            self._jobs.put(job)
        return job.future

    def _start_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) == self._size:
            return
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        # Before it starts: a signal in between must not leave one that nobody counts.
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            # The system gives no more of them. The others take the work, if there are any.
            self._threads.remove(thread)
            if not self._threads:
                raise

    def end(self) -> list[threading.Thread]:
        """Has the threads end with what is queued, without waiting for them."""
        with self._lock:
            threads, self._threads = self._threads, []
            jobs, self._jobs = self._jobs, queue.SimpleQueue()
            for _ in threads:
                jobs.put(None)
        return threads

    def close(self) -> None:
        """Waits until what was submitted is done, and the threads have ended."""
        for thread in self.end():
            thread.join()

    def __del__(self) -> None:
        """Nobody is left to end them; without the lock, as any thread may collect garbage."""
        for _ in self._threads:
            self._jobs.put(None)


class _Job:
    __slots__ = ("_work", "future")

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def do(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            value = self._work()
        except BaseException as error:
            self.future.set_exception(raisable(error))
        else:
            self.future.set_result(value)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    # It holds no pool: one that is lost has to end its threads.
    while (job := jobs.get()) is not None:
        job.do()
        # Not kept until the next one comes: it may hold much, and a traceback too.
        del job
