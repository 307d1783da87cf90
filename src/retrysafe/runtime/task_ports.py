"""The ports for the tasks of one event loop.

Owns local waiting, how operations are called in their callers' tasks, where the last writes of
cancelled ones are finished, and which port is made of which. When the ports are made, for which
loop, and when they end, `AsyncCalls` says; nothing here asks which loop is running.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from contextvars import Token
from functools import partial
from threading import get_ident
from types import CoroutineType
from typing import Any, Final

from retrysafe.core.attempt import Attempt
from retrysafe.core.events import Reporter
from retrysafe.core.one_call import OneCall
from retrysafe.core.ports import (
    ExtendsAnywhere,
    Ports,
    Store,
    Transaction,
    Waits,
)
from retrysafe.core.run_times import RunTimes
from retrysafe.errors import AwaitForgotten, StoreError
from retrysafe.runtime import local_time
from retrysafe.runtime.checks import not_awaited, require_runnable
from retrysafe.runtime.closing import Limit, end_aside_within
from retrysafe.runtime.current import current
from retrysafe.runtime.drive import hidden_task, run_sync
from retrysafe.runtime.group_commit.direct import DirectWriter
from retrysafe.runtime.group_commit.tasks import TaskGroupCommit
from retrysafe.runtime.heartbeat import TaskHeartbeat, ThreadHeartbeat
from retrysafe.runtime.identity import mint_token, owner_name
from retrysafe.runtime.threaded import ThreadedStore, joined

# How long a loop that is ending waits for the last writes. As long as `close` does by default: a
# store that is away for longer has failed them by then.
LAST_WRITES_SECONDS: Final = 30.0
# Those whose last writes may be told as lost when the process ends.
_alive: Final[weakref.WeakSet[LoopPorts]] = weakref.WeakSet()


@atexit.register
def _tell_what_is_lost() -> None:
    for loop_ports in list(_alive):
        loop_ports.abandon("the process ended before the store had answered")


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


class TaskBackground:
    """Finishes the last writes of cancelled tasks in tasks of their own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # A loop holds its tasks weakly: without this one could vanish before it has written.
        self._tasks: dict[asyncio.Task[None], Callable[[str], None]] = {}

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        """Runs the flow in the background; `close` waits for it, and so does the loop.

        The garbage collector may end a lost caller in any thread, and after the loop itself.
        """
        if self._loop.is_closed():
            flow.close()
            abandon("the event loop has ended")
        elif self._loop.is_running() and not _is_running_here(self._loop):
            self._loop.call_soon_threadsafe(self._start, flow, abandon)
        else:
            try:
                self._start(flow, abandon)
            except BaseException as error:
                # Where the stack ends, for example: nobody is going to write it.
                flow.close()
                abandon(f"{error!r} came while it was being handed over")
                raise

    def _start(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        task = hidden_task(flow, self._loop)
        try:
            self._tasks[task] = abandon
            task.add_done_callback(self._ended)
        except BaseException:
            # Closing would wait for its end, of which nobody hears.
            self._tasks.pop(task, None)
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)

    async def drain(self) -> None:
        """Waits until every flow is done."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def abandon_all(self, reason: str) -> None:
        """Tells of every flow that is not done; nobody waits for it any more."""
        while self._tasks:
            with suppress(KeyError):
                task, abandon = self._tasks.popitem()
                if not task.done():
                    abandon(reason)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _is_reset(token: Token[Attempt | None]) -> bool:
    """Takes the attempt back; False in another context than the one that it was set in."""
    try:
        current.reset(token)
    except ValueError:
        return False
    return True


class TaskExecutor:
    """Calls operations in the tasks of one loop, and gives flows back to be awaited.

    An application on an event loop runs its blocking endpoints in threads, on blocking connections:
    an attempt may be completed in either.
    """

    __slots__ = ("_store", "_threaded", "step_lock")

    current = staticmethod(current.get)

    def __init__(self, store: Store, threaded: ThreadedStore | None) -> None:
        self._store = store
        self._threaded = threaded
        # The steps of an operation may be taken in threads of its own. One thread may take it
        # twice: the garbage collector may end a lost step while it is held.
        self.step_lock = threading.RLock()

    # Without `self`: what every operation in flight brings along, the garbage collector walks over.
    @staticmethod
    async def perform(
        attempt: Attempt, operation: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls the operation as the current attempt, and awaits what it gives.

        With None for arguments it gets the attempt.
        """
        if not attempt.is_first:
            # Read at its end anyway; a thread that completes on a blocking connection needs it
            # before that, and cannot wait for the loop.
            try:
                await attempt.load_steps()
            except StoreError:
                pass  # Asked again where it is needed, and raised there.
            # That took its time, and nothing starts on a lease that may be over.
            await attempt.hold()
        made = attempt.made = OneCall(operation, (attempt,) if args is None else args, kwargs)
        token = current.set(attempt)
        try:
            value = made.make()
            # A plain function has done its work by now, so what it returned is the outcome.
            # Futures are told by their class: asking an abstract class takes ten times as long.
            if (
                type(value) is CoroutineType
                or isinstance(value, asyncio.Future)
                or inspect.isawaitable(value)
            ):
                made.go_on()
                try:
                    value = await value
                except BaseException as error:
                    made.fail(error)
                    raise
                made.end(value)
                if type(value) is CoroutineType:
                    raise made.fail(not_awaited("the operation", value))
        except Exception as error:
            if not _is_reset(token):
                # Not the operation's ending: a task that nobody held is being ended by the garbage
                # collector, in the context of whatever was running, and the operation could not
                # take that: it awaited on its way out, or reset a variable of its own. Nobody
                # knows how far it got, so only the lease frees the key.
                raise GeneratorExit from error
            raise
        except BaseException:
            _is_reset(token)
            raise
        _is_reset(token)
        steps = attempt.steps
        if steps is not None:
            try:
                steps.require_begun()
            except AwaitForgotten as error:
                made.fail(error)
                raise
        return value

    @staticmethod
    async def perform_step(call: Callable[..., Any], made: OneCall) -> Any:
        """Makes the call of a step: awaited when there is something to await.

        Raises `AwaitForgotten` for one that returns a coroutine.
        """
        require_runnable(call)
        value = made.make()
        if type(value) is CoroutineType or inspect.isawaitable(value):
            made.go_on()
            try:
                value = await value
            except BaseException as error:
                made.fail(error)
                raise
            made.end(value)
            if type(value) is CoroutineType:
                raise made.fail(not_awaited("the step", value))
        return value

    def drive(self, flow: Coroutine[Any, Any, Any], waits: Waits | None = None) -> Any:
        """Runs the flow here in a blocking transaction; else it is to be awaited."""
        return flow if waits is None or waits is Waits.SUSPENDING else run_sync(flow)

    def join(self, connection: object) -> Transaction:
        """The transaction that an attempt completes in: of an async connection, or a blocking one.

        The latter is used in the thread that asks, so only its fate is asked elsewhere.
        """
        transaction = joined(self._store, connection, None)
        if self._threaded is None or transaction.waits is Waits.SUSPENDING:
            return transaction
        return self._threaded.asking_elsewhere(transaction)

    def join_step(self, connection: object) -> Transaction:
        """The transaction of a step or an atomic block, which are awaited: of an async one only."""
        return joined(self._store, connection, Waits.SUSPENDING)

    @staticmethod
    def who() -> None:
        """Nobody: a loop runs the handlers of signals by themselves, between two callbacks."""


def _heartbeat(
    loop: asyncio.AbstractEventLoop, store: Store, report: Reporter, clock: TaskClock
) -> ThreadHeartbeat | TaskHeartbeat:
    """In a thread of its own, if the store can be asked there: a busy loop is late."""
    is_blocking = store.capabilities.waits is Waits.BLOCKING
    if is_blocking or isinstance(store, ExtendsAnywhere):
        return ThreadHeartbeat(store, report, clock.monotonic, loop)
    return TaskHeartbeat(store, report, clock.monotonic)


class LoopPorts:
    """Everything that belongs to one event loop; made in the thread that runs it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, store: Store, report: Reporter, run_times: RunTimes
    ) -> None:
        self.loop = loop
        self.thread_id = get_ident()
        clock = TaskClock()
        self.heartbeat = _heartbeat(loop, store, report, clock)
        self.threaded = ThreadedStore(store) if store.capabilities.waits is Waits.BLOCKING else None
        self.store: Store = store if self.threaded is None else self.threaded
        self.group_commit: TaskGroupCommit | None = None
        if store.capabilities.waits is not Waits.NEVER:
            require_outside = None
            if self.threaded is not None and store.capabilities.has_one_writer:
                require_outside = self.threaded.require_outside
            self.group_commit = TaskGroupCommit(self.store, loop, require_outside)
        self.background = TaskBackground(loop)
        self.ports = Ports(
            store=self.store,
            writer=self.group_commit or DirectWriter(self.store),
            clock=clock,
            # The garbage collector may end a lost call while it is held.
            lock=threading.RLock(),
            renewals=self.heartbeat,
            background=self.background,
            executor=TaskExecutor(store, self.threaded),
            report=report,
            run_times=run_times,
            mint_token=mint_token,
            owner=owner_name(),
        )
        self._end_of_loop = self._write_before_the_loop_ends()
        # Its first step tells the loop of it, which has it closed at its end.
        with suppress(StopIteration):
            self._end_of_loop.__anext__().send(None)
        _alive.add(self)

    async def end_renewals(self, limit: Limit) -> None:
        """Renews nothing more, and waits for what is under way within the limit."""
        heartbeat = self.heartbeat
        if isinstance(heartbeat, TaskHeartbeat):
            await heartbeat.stop(limit.left_seconds)
        else:
            await end_aside_within(partial(heartbeat.stop, limit.left_seconds), limit)

    def leave(self) -> None:
        """Ends what is left of a loop that has ended."""
        self.abandon("the event loop was closed before the store had answered")
        self.forget()
        self.heartbeat.end()
        if self.threaded is not None:
            self.threaded.end_workers()

    async def _write_before_the_loop_ends(self) -> AsyncGenerator[None, None]:
        """Finishes what is queued when the loop ends and nobody has called `close`.

        `asyncio.run` and its like cancel all tasks, then close what async generators are left, and
        only then the loop. This one is there for nothing but that moment: the outcomes of
        operations that have run must not be lost with their callers.
        """
        try:
            yield
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITES_SECONDS):
                    await self.drain()
            self.abandon("the event loop ended before the store had answered")

    def abandon(self, reason: str) -> None:
        """Tells of every ending that is not stored, and that nobody is going to store any more."""
        self.background.abandon_all(reason)

    def forget(self) -> None:
        """In a forked child: all of it is the parent's to write and to tell."""
        _alive.discard(self)

    async def drain(self) -> None:
        """Waits until everything that was submitted is answered; cancelling stops none of it."""
        await self.background.drain()
        if self.group_commit is not None:
            await self.group_commit.drain()
