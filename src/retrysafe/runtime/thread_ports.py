"""The ports for threads: what the core is given by one process.

Owns local waiting, how operations are called in their callers' threads, and which port is made of
which. A blocking port never suspends. When the ports are made, and again after a fork, `Calls`
says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import CoroutineType
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.core.events import Reporter
from retrysafe.core.one_call import OneCall
from retrysafe.core.ports import Lock, Ports, Renewals, Store, Transaction, Waits, Writer
from retrysafe.core.run_times import RunTimes
from retrysafe.runtime import local_time
from retrysafe.runtime.checks import async_here, require_runnable
from retrysafe.runtime.current import current
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.direct import DirectWriter
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.runtime.identity import mint_token, owner_name
from retrysafe.runtime.threaded import joined


class ThreadSignal:
    """Wakes one waiting thread. A plain lock, not an event: decision 31."""

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


class InterruptedThread:
    """Finishes the last write of a thread that is being interrupted, in that same thread."""

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        """Runs the flow now; a second interrupt ends it."""
        try:
            run_sync(flow)
        except BaseException as error:
            flow.close()
            abandon(f"{error!r} came while it was being stored")
            raise


class ThreadExecutor:
    """Calls operations in their callers' threads, and drives every flow to its end there."""

    __slots__ = ("_store", "step_lock")

    current = staticmethod(current.get)
    who = staticmethod(threading.get_ident)

    def __init__(self, store: Store, step_lock: Lock) -> None:
        self._store = store
        self.step_lock = step_lock

    # Without `self`: what every operation in flight brings along, the garbage collector walks over.
    @staticmethod
    async def perform(
        attempt: Attempt, operation: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls the operation as the current attempt; with None for arguments it gets that."""
        made = attempt.made = OneCall(operation, (attempt,) if args is None else args, kwargs)
        before = current.get()
        try:
            # Inside the try, and undone by one call of C: a signal must not leave it here.
            current.set(attempt)
            value = made.make()
        finally:
            current.set(before)
        if type(value) is CoroutineType:
            raise made.fail(async_here("the operation", operation, value))
        return value

    @staticmethod
    async def perform_step(call: Callable[..., Any], made: OneCall) -> Any:
        """Makes the call of a step; refuses one that would have to be awaited."""
        require_runnable(call)
        value = made.make()
        if type(value) is CoroutineType:
            raise made.fail(async_here("the step", call, value))
        return value

    def drive(self, flow: Coroutine[Any, Any, Any], waits: Waits | None = None) -> Any:
        """Runs the flow to its end."""
        return run_sync(flow)

    def join(self, connection: object) -> Transaction:
        """The transaction of a blocking connection."""
        return joined(self._store, connection, Waits.BLOCKING)

    def join_step(self, connection: object) -> Transaction:
        """The same: a thread's own connections block."""
        return joined(self._store, connection, Waits.BLOCKING)


def thread_writer(store: Store) -> Writer:
    """What claims and settles rows of a store: in batches, unless it never waits."""
    return (
        DirectWriter(store) if store.capabilities.waits is Waits.NEVER else ThreadGroupCommit(store)
    )


def thread_ports(
    store: Store, report: Reporter, run_times: RunTimes, writer: Writer, renewals: Renewals
) -> Ports:
    """The ports of one process."""
    # A signal's handler may call from inside of what it guards, which waits for nobody and is
    # whole at every place where a handler may run.
    lock = threading.RLock()
    return Ports(
        store=store,
        writer=writer,
        clock=ThreadClock(),
        lock=lock,
        renewals=renewals,
        background=InterruptedThread(),
        executor=ThreadExecutor(store, lock),
        report=report,
        run_times=run_times,
        mint_token=mint_token,
        owner=owner_name(),
    )
