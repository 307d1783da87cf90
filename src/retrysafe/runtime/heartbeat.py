"""The heartbeat: one thread, or one timer, that renews the leases of all running attempts.

The only true twin of the code base: waiting for the next renewal is all that a thread and a loop
do differently here.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time

from retrysafe.core.events import Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.ports import Store
from retrysafe.core.renewing import due_leases, next_renewal, renew
from retrysafe.runtime.drive import run_sync


class ThreadHeartbeat:
    """Renews from one daemon thread, started with the first attempt."""

    def __init__(self, store: Store, report: Reporter) -> None:
        self._store = store
        self._report = report
        self._condition = threading.Condition()
        self._leases: dict[bytes, Lease] = {}
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def add(self, lease: Lease) -> None:
        """Starts renewing; wakes the thread only when it would wake too late."""
        with self._condition:
            self._leases[lease.token] = lease
            if self._thread is None and not self._is_stopped:
                self._thread = threading.Thread(
                    target=self._beat, name="retrysafe-heartbeat", daemon=True
                )
                self._thread.start()
            elif lease.renew_monotonic < self._wakes_at:
                self._condition.notify()

    def remove(self, lease: Lease) -> None:
        """Stops renewing."""
        # One dictionary operation is atomic; the thread copies before it looks.
        self._leases.pop(lease.token, None)

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _beat(self) -> None:
        while True:
            with self._condition:
                while True:
                    if self._is_stopped:
                        return
                    leases = list(self._leases.values())
                    now = time.monotonic()
                    due = due_leases(leases, now)
                    if due:
                        break
                    upcoming = next_renewal(leases, now)
                    # Without a lease it sleeps until one is added.
                    self._wakes_at = math.inf if upcoming is None else upcoming
                    self._condition.wait(None if upcoming is None else max(0.0, upcoming - now))
            run_sync(renew(self._store, due, time.monotonic, self._report))


class TaskHeartbeat:
    """Renews from a timer of the event loop; nothing is pending while nothing runs."""

    def __init__(self, store: Store, report: Reporter) -> None:
        self._store = store
        self._report = report
        self._leases: dict[bytes, Lease] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def add(self, lease: Lease) -> None:
        """Starts renewing; sets the timer only when it would fire too late."""
        self._leases[lease.token] = lease
        if self._timer is None or lease.renew_monotonic < self._timer.when():
            self._schedule()

    def remove(self, lease: Lease) -> None:
        """Stops renewing; the timer stays, and finds nothing to do."""
        self._leases.pop(lease.token, None)

    async def stop(self) -> None:
        """Ends the timer and the renewal that is under way."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._task = None

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        upcoming = next_renewal(self._leases.values(), time.monotonic())
        if upcoming is not None and not self._is_stopped:
            # The loop's clock is time.monotonic, the same that leases are counted by.
            self._timer = asyncio.get_running_loop().call_at(upcoming, self._fire)

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
        if not task.cancelled():
            self._schedule()
