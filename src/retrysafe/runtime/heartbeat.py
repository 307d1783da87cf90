"""The heartbeat: renews the leases of all running attempts, apart from everything else.

Owns when a lease is renewed and in which thread. A renewal that comes late gives a healthy owner's
key away, so it stands in no queue with claims, steps and settlements: it has a thread of its own
wherever the store allows that, and the store has a connection of its own for it. Only a store that
must be used in the event loop of its user is renewed there, by a timer.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, Generic, Protocol, TypeVar

from retrysafe.core.events import Event, EventKind, Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.ports import ExtendsAnywhere, Store, Waits
from retrysafe.core.renewal import due_leases, held_leases, next_renewal, renew
from retrysafe.runtime import local_time
from retrysafe.runtime.drive import run_sync

# How long a thread that could not renew at all rests, for example because the process had no
# descriptor left for its loop. Less than the twelfth of a lease after which a renewal comes again.
_FAILED_SECONDS: Final = 0.1
# A thread without a lease ends after this time. It is started anew in less than a millisecond, and
# a loop that ended without `close` leaves none behind for longer.
IDLE_SECONDS: Final = 30.0

Drive = Callable[[Coroutine[Any, Any, None]], None]
Monotonic = Callable[[], float]


def _rest(seconds: float) -> float:
    """How long to wait for an instant, on a timer that does not count a suspension."""
    return min(max(0.0, seconds), local_time.REST_MAXIMUM_SECONDS)


class _Beat(Protocol):
    leases: dict[bytes, Lease]

    def add(self, lease: Lease) -> None: ...

    def end(self) -> None: ...


B = TypeVar("B", bound=_Beat)


class _Heartbeat(Generic[B]):
    """Leases of about the same length share one beat, those of other lengths have their own.

    A renewal may wait for a part of its lease, and that part of a long one is all of a short one.
    """

    def __init__(self) -> None:
        self._beats: dict[int, B] = {}
        self.is_stopped = False

    def _new_beat(self) -> B:
        raise NotImplementedError

    @property
    def leases(self) -> list[Lease]:
        """What is renewed now."""
        return [
            lease for beat in list(self._beats.values()) for lease in list(beat.leases.values())
        ]

    def add(self, lease: Lease) -> None:
        """Starts renewing."""
        # Within a factor of two.
        length = lease.lease_ms.bit_length()
        beat = self._beats.get(length)
        if beat is None:
            beat = self._beats.setdefault(length, self._new_beat())
            if self.is_stopped:
                beat.end()
        beat.add(lease)

    def remove(self, lease: Lease) -> None:
        """Stops renewing; who renews finds nothing to do."""
        beat = self._beats.get(lease.lease_ms.bit_length())
        if beat is not None:
            # One dictionary operation is atomic; who renews copies before it looks.
            beat.leases.pop(lease.token, None)

    def end(self) -> None:
        """Renews nothing more; a renewal that is under way is not waited for."""
        self.is_stopped = True
        for beat in list(self._beats.values()):
            beat.end()


class ThreadHeartbeat(_Heartbeat["_ThreadBeat"]):
    """Renews from daemon threads, started with the first attempt."""

    def __init__(
        self,
        store: Store,
        report: Reporter,
        monotonic: Monotonic,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """For attempts of any thread, or for those of an event loop."""
        super().__init__()
        self._store = store
        self._monotonic = monotonic
        self._loop = loop
        self._report = report if loop is None else Reporter(_told_in(loop, report), report.kinds)

    def _new_beat(self) -> _ThreadBeat:
        return _ThreadBeat(self._store, self._report, self._monotonic, self._loop)

    def stop(self, wait_seconds: float) -> None:
        """Ends the threads, and waits for them that long.

        A renewal that is under way goes on and then ends its thread, which keeps nobody waiting.
        """
        until = time.monotonic() + wait_seconds
        self.end()
        for beat in list(self._beats.values()):
            beat.join(max(0.0, until - time.monotonic()))


class _ThreadBeat:
    """One daemon thread.

    No condition variable on the callers' side, but a plain lock and a simple queue: decision 31.
    """

    def __init__(
        self,
        store: Store,
        report: Reporter,
        monotonic: Monotonic,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._store = store
        self._report = report
        self._monotonic = monotonic
        self._loop = loop
        self._lock = threading.RLock()
        self.leases: dict[bytes, Lease] = {}
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        # Kept by the thread itself: asking a thread whether it lives is dear.
        self._is_beating = False
        self._is_starting = False
        self._is_stopped = False

    def add(self, lease: Lease) -> None:
        """Starts renewing; wakes the thread only when it would wake too late."""
        self.leases[lease.token] = lease
        if not self._is_beating:
            self._start()
        elif lease.renew_monotonic < self._wakes_at:
            self._news.put(None)

    def _start(self) -> None:
        with self._lock:
            is_running = self._thread is not None and self._thread.is_alive()
            # One that this thread is just starting, when a signal's handler came in between, will
            # find the lease.
            if is_running or self._is_stopped or self._is_starting:
                return
            try:
                self._is_starting = True
                self._thread = threading.Thread(
                    target=self._beat, name="retrysafe-heartbeat", daemon=True
                )
                self._thread.start()
            except BaseException:
                # The next lease starts another one. Python breaks a thread whose start a signal's
                # handler has interrupted, and it seems to live until it comes to that.
                self._thread = None
                raise
            finally:
                self._is_starting = False

    def end(self) -> None:
        """Has the thread end."""
        with self._lock:
            self._is_stopped = True
        self._news.put(None)

    def join(self, wait_seconds: float) -> None:
        """Waits for the thread's end that long."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return  # Perhaps it was never started, because the system had no more threads.
        if thread is not threading.current_thread():
            thread.join(wait_seconds)

    def _beat(self) -> None:
        self._is_beating = True
        is_over = False
        try:
            while not is_over and not self._is_stopped and self._goes_on():
                try:
                    with self._driving() as drive:
                        while not self._is_stopped and self._goes_on():
                            self._renew_when_due(drive)
                        is_over = True
                except Exception as error:
                    # Whatever it is: with this thread all leases would end, one after the other,
                    # while their operations run.
                    if not is_over:
                        self._put_off(error)
        finally:
            with self._lock:
                # Not another thread's, which may have been started since this one began to end.
                if self._thread is threading.current_thread():
                    self._thread, self._is_beating = None, False

    def _put_off(self, error: Exception) -> None:
        """Has the due leases renewed a little later, and says why."""
        now = self._monotonic()
        for lease in due_leases(list(self.leases.values()), now):
            lease.put_off(now)
            with suppress(Exception):
                self._report.beside(
                    EventKind.RENEWAL_FAILED, lease.key, detail=f"{type(error).__name__}: {error}"
                )
        time.sleep(_FAILED_SECONDS)

    def _driving(self) -> AbstractContextManager[Drive]:
        store = self._store
        if store.capabilities.waits is not Waits.SUSPENDING:
            return nullcontext(run_sync)
        assert isinstance(store, ExtendsAnywhere)  # Else its own loop's timer renews.
        return _in_own_loop(store)

    def _goes_on(self) -> bool:
        """Whether there is a lease, or somebody adds one while this waits."""
        # Before it looks: every lease that is added from now on is announced.
        self._wakes_at = math.inf
        if self.leases:
            return True
        with suppress(queue.Empty):
            self._news.get(timeout=IDLE_SECONDS)
        with self._lock:
            if self.leases or self._is_stopped:
                return True
            # Under the lock: who adds a lease from now on starts another thread.
            self._thread, self._is_beating = None, False
            return False

    def _renew_when_due(self, drive: Drive) -> None:
        # While this looks, every new lease is announced: none can fall in between.
        self._wakes_at = math.inf
        leases = held_leases(self.leases)
        now = self._monotonic()
        due = due_leases(leases, now)
        if due:
            if self._is_owner_at_work():
                drive(renew(self._store, due, self._monotonic, self._report))
            else:
                for lease in due:
                    lease.put_off(now)
            return
        upcoming = next_renewal(leases, now)
        if upcoming is not None:
            self._wakes_at = upcoming
            with suppress(queue.Empty):
                self._news.get(timeout=_rest(upcoming - now))
        elif leases:
            # All that is left is lost or past its run limit, and not removed yet.
            with suppress(queue.Empty):
                self._news.get(timeout=IDLE_SECONDS)

    def _is_owner_at_work(self) -> bool:
        """Whether what holds the leases may still be running.

        A loop that only is busy, or blocked, is; one that was stopped has left its operations where
        they are, and nobody knows whether it will ever run again. Their leases must end.
        """
        if self._loop is None or self._loop.is_running():
            return True
        if self._loop.is_closed():
            self.leases.clear()
        return False


@contextmanager
def _in_own_loop(store: ExtendsAnywhere) -> Iterator[Drive]:
    """Drives the flows of a suspending store in a loop that nobody else can keep busy."""
    with asyncio.Runner() as runner:
        try:
            yield runner.run
        finally:
            runner.run(store.end_extending())


def _told_in(loop: asyncio.AbstractEventLoop, report: Reporter) -> Callable[[Event], None]:
    """Tells the listeners where they hear of everything else: in the loop's own thread."""

    def tell(event: Event) -> None:
        report.beside(event.kind, event.key, detail=event.detail)

    def emit(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(tell, event)
        except RuntimeError:  # The loop has ended.
            tell(event)

    return emit


class TaskHeartbeat(_Heartbeat["_TaskBeat"]):
    """Renews from timers of the event loop; nothing is pending while nothing runs."""

    def __init__(self, store: Store, report: Reporter, monotonic: Monotonic) -> None:
        super().__init__()
        self._store = store
        self._report = report
        self._monotonic = monotonic

    def _new_beat(self) -> _TaskBeat:
        return _TaskBeat(self._store, self._report, self._monotonic)

    async def stop(self, wait_seconds: float) -> None:
        """Ends the timers and the renewals that are under way, and waits that long for them."""
        self.end()
        tasks = [beat.task for beat in self._beats.values() if beat.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=wait_seconds)


class _TaskBeat:
    """One timer."""

    def __init__(self, store: Store, report: Reporter, monotonic: Monotonic) -> None:
        self._store = store
        self._report = report
        self._monotonic = monotonic
        self.leases: dict[bytes, Lease] = {}
        self._timer: asyncio.Handle | None = None
        # When the timer fires. Not asked of the timer: uvloop's has no instant once it is due.
        self._wakes_at = math.inf
        self.task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def add(self, lease: Lease) -> None:
        """Starts renewing; sets the timer only when it would fire too late."""
        self.leases[lease.token] = lease
        if self._timer is None or lease.renew_monotonic < self._wakes_at:
            self._schedule()

    def end(self) -> None:
        """Ends the timer and the renewal that is under way."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.task is not None:
            self.task.cancel()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._monotonic()
        # A copy: an operation in a thread may end its own renewal at any time.
        upcoming = next_renewal(list(self.leases.values()), now)
        if upcoming is not None and not self._is_stopped:
            rest = _rest(upcoming - now)
            self._timer = asyncio.get_running_loop().call_later(rest, self._fire)
            self._wakes_at = now + rest

    def _fire(self) -> None:
        self._timer = None
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._renew())
            self.task.add_done_callback(self._renewed)

    async def _renew(self) -> None:
        due = due_leases(held_leases(self.leases), self._monotonic())
        if due:
            await renew(self._store, due, self._monotonic, self._report)

    def _renewed(self, task: asyncio.Task[None]) -> None:
        self.task = None
        if task.cancelled() or task.exception() is not None:
            # Perhaps by somebody who cancels all tasks: what runs on all the same needs its lease.
            now = self._monotonic()
            for lease in due_leases(list(self.leases.values()), now):
                lease.put_off(now)
        self._schedule()
