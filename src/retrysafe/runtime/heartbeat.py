"""The heartbeat: one thread, or one timer, that renews the leases of all running attempts.

The only true twin of the code base: waiting for the next renewal is all that a thread and a loop
do differently here.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from contextlib import suppress

from retrysafe.core.events import Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.ports import Store
from retrysafe.core.renewing import due_leases, next_renewal, renew
from retrysafe.runtime.drive import run_sync


class ThreadHeartbeat:
    """Renews from one daemon thread, started with the first attempt.

    No condition variable on the callers' side: its lock is taken in Python code, and a signal that
    raises in there would leave it taken. A plain lock and a simple queue cannot be left half-way.
    """

    def __init__(self, store: Store, report: Reporter) -> None:
        self._store = store
        self._report = report
        self._lock = threading.Lock()
        self._leases: dict[bytes, Lease] = {}
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        # Kept by the thread itself: asking a thread whether it lives is dear.
        self._is_beating = False
        self._is_stopped = False

    def add(self, lease: Lease) -> None:
        """Starts renewing; wakes the thread only when it would wake too late."""
        self._leases[lease.token] = lease
        if not self._is_beating:
            self._start()
        elif lease.renew_monotonic < self._wakes_at:
            self._news.put(None)

    def _start(self) -> None:
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running or self._is_stopped:
                return
            thread = threading.Thread(target=self._beat, name="retrysafe-heartbeat", daemon=True)
            # Kept only once it runs: a start that fails must be tried again by the next one.
            thread.start()
            self._thread = thread

    def remove(self, lease: Lease) -> None:
        """Stops renewing."""
        # One dictionary operation is atomic; the thread copies before it looks.
        self._leases.pop(lease.token, None)

    def stop(self, wait_seconds: float) -> None:
        """Ends the thread, and waits for it that long.

        A renewal that is under way goes on and then ends the thread, which keeps nobody waiting.
        """
        with self._lock:
            self._is_stopped = True
            thread = self._thread
        self._news.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_seconds)

    def _beat(self) -> None:
        self._is_beating = True
        try:
            self._renew_when_due()
        finally:
            self._is_beating = False

    def _renew_when_due(self) -> None:
        while not self._is_stopped:
            # While this looks, every new lease is announced: none can fall in between.
            self._wakes_at = math.inf
            leases = list(self._leases.values())
            now = time.monotonic()
            due = due_leases(leases, now)
            if due:
                run_sync(renew(self._store, due, time.monotonic, self._report))
                continue
            upcoming = next_renewal(leases, now)
            if upcoming is not None:
                self._wakes_at = upcoming
            # Without a lease it sleeps until one is added.
            with suppress(queue.Empty):
                self._news.get(timeout=None if upcoming is None else max(0.0, upcoming - now))


class TaskHeartbeat:
    """Renews from a timer of the event loop; nothing is pending while nothing runs."""

    def __init__(self, store: Store, report: Reporter) -> None:
        self._store = store
        self._report = report
        self._leases: dict[bytes, Lease] = {}
        self._timer: asyncio.Handle | None = None
        # When the timer fires. Not asked of the timer: uvloop's has no instant once it is due.
        self._wakes_at = math.inf
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def add(self, lease: Lease) -> None:
        """Starts renewing; sets the timer only when it would fire too late."""
        self._leases[lease.token] = lease
        if self._timer is None or lease.renew_monotonic < self._wakes_at:
            self._schedule()

    def remove(self, lease: Lease) -> None:
        """Stops renewing; the timer stays, and finds nothing to do."""
        self._leases.pop(lease.token, None)

    async def stop(self, wait_seconds: float) -> None:
        """Ends the timer and the renewal that is under way, and waits that long for its end."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=wait_seconds)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A copy: an operation in a thread may end its own renewal at any time.
        upcoming = next_renewal(list(self._leases.values()), time.monotonic())
        if upcoming is not None and not self._is_stopped:
            # The loop's clock is time.monotonic, the same that leases are counted by.
            self._timer = asyncio.get_running_loop().call_at(upcoming, self._fire)
            self._wakes_at = upcoming

    def _fire(self) -> None:
        self._timer = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._renew())
            self._task.add_done_callback(self._renewed)

    async def _renew(self) -> None:
        due = due_leases(list(self._leases.values()), time.monotonic())
        if due:
            await renew(self._store, due, time.monotonic, self._report)

    def _renewed(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            # Perhaps by somebody who cancels all tasks: what runs on all the same needs its lease.
            now = time.monotonic()
            for lease in due_leases(list(self._leases.values()), now):
                lease.put_off(now)
        self._schedule()
