"""The parts of an async face that belong to one event loop, put together.

Owns which part is made of which. When they are made, for which loop, and when they end, the face
says; nothing here asks which loop is running.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, Final, TypeVar

from retrysafe.core.atomic.complete_in import Joiner
from retrysafe.core.cache import ReplayCache
from retrysafe.core.engine import Engine
from retrysafe.core.events import Reporter
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.model import ClaimAnswer, ClaimRequest
from retrysafe.core.ports import UNSHARED, ExtendsAnywhere, Store, Transaction, Waits, Writer
from retrysafe.core.renewal import confirm
from retrysafe.core.run_times import RunTimes
from retrysafe.core.steps.run import Stepper
from retrysafe.runtime.background import TaskBackground
from retrysafe.runtime.closing import Limit, end_aside_within
from retrysafe.runtime.current import current
from retrysafe.runtime.describe import owner_name
from retrysafe.runtime.face import mint_token
from retrysafe.runtime.gate import TaskGate
from retrysafe.runtime.group_commit.direct import DirectWriter
from retrysafe.runtime.group_commit.tasks import TaskGroupCommit
from retrysafe.runtime.heartbeat import TaskHeartbeat, ThreadHeartbeat
from retrysafe.runtime.joining import drive_either
from retrysafe.runtime.local_clocks import TaskClock
from retrysafe.runtime.performing import perform_in_task
from retrysafe.runtime.steps import codec_of_step, perform_suspending
from retrysafe.runtime.threaded import ThreadedStore

T = TypeVar("T")

# How long a loop that is ending waits for the last writes. As long as `close` does by default: a
# store that is away for longer has failed them by then.
LAST_WRITES_SECONDS: Final = 30.0
# Those whose last writes may be told as lost when the process ends.
_alive: Final[weakref.WeakSet[LoopPorts]] = weakref.WeakSet()


@atexit.register
def _tell_what_is_lost() -> None:
    for parts in list(_alive):
        parts.abandon("the process ended before the store had answered")


def _as_it_is(flow: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """A flow for an event loop: whoever asked for it awaits it."""
    return flow


class OutsideWriter:
    """Group commit on a store with one writer: refuses claims of a task that holds its lock.

    They are told here, because the batch that a claim leaves in is committed by another task.
    """

    __slots__ = ("_claim", "_require_outside", "settle")

    def __init__(self, group_commit: TaskGroupCommit, require_outside: Callable[[], None]) -> None:
        self._claim = group_commit.claim
        self._require_outside = require_outside
        self.settle = group_commit.settle

    def claim(self, request: ClaimRequest) -> asyncio.Future[ClaimAnswer]:
        """Claims a key in the next batch; raises `StoreUnavailable` inside of an atomic block."""
        self._require_outside()
        return self._claim(request)


def _heartbeat(
    loop: asyncio.AbstractEventLoop, store: Store, report: Reporter, waiting: TaskClock
) -> ThreadHeartbeat | TaskHeartbeat:
    """In a thread of its own, if the store can be asked there: a busy loop is late."""
    is_blocking = store.capabilities.waits is Waits.BLOCKING
    if is_blocking or isinstance(store, ExtendsAnywhere):
        return ThreadHeartbeat(store, report, waiting.monotonic, loop)
    return TaskHeartbeat(store, report, waiting.monotonic)


class LoopPorts:
    """Everything of a face that belongs to one event loop; made in the thread that runs it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Store,
        *,
        report: Reporter,
        cache: ReplayCache | None,
        secrets: Secrets,
        join: Callable[[object, Waits | None], Transaction],
        run_times: RunTimes,
    ) -> None:
        self.loop = loop
        self.thread_id = get_ident()
        self._waiting = TaskClock()
        self.heartbeat = _heartbeat(loop, store, report, self._waiting)
        self.threaded: ThreadedStore | None = None
        if store.capabilities.waits is Waits.BLOCKING:
            store = self.threaded = ThreadedStore(store)
        self.store: Store = store
        self.group_commit: TaskGroupCommit | None = None
        if store.capabilities.waits is not Waits.NEVER:
            self.group_commit = TaskGroupCommit(store, loop)
        self.gate = TaskGate()
        self.background = TaskBackground(loop)
        self._join = join
        self._run_times = run_times
        self.engine = self._new_engine(report, cache, secrets)
        self._end_of_loop = self._write_before_the_loop_ends()
        # Its first step tells the loop of it, which has it closed at its end.
        with suppress(StopIteration):
            self._end_of_loop.__anext__().send(None)
        _alive.add(self)

    def _new_engine(self, report: Reporter, cache: ReplayCache | None, secrets: Secrets) -> Engine:
        store = self.store
        waiting = self._waiting
        return Engine(
            writer=self._new_writer(),
            waiting=waiting,
            # Whoever asks the engine does so in the thread of the loop, see `AsyncFace._bound`.
            lock=UNSHARED,
            renewals=self.heartbeat,
            background=self.background,
            mint_token=mint_token,
            cache=cache,
            report=report,
            endings=store,
            owner=owner_name(),
            secrets=secrets,
            joiner=Joiner(
                join=self._join_either,
                drive=drive_either,
                has_outbox=store.capabilities.has_outbox,
            ),
            stepper=Stepper(
                store=store,
                waiting=waiting,
                # The steps of an operation may be taken in threads of its own. One thread may take
                # it twice: the garbage collector may end a lost step while it is held.
                lock=threading.RLock(),
                background=self.background,
                report=report,
                drive=_as_it_is,
                perform=perform_suspending,
                codec_for=codec_of_step,
                current=current.get,
                join=self._join_suspending,
            ),
            recovers=store,
            confirm=partial(confirm, store, waiting.monotonic, report),
            perform=perform_in_task,
            run_times=self._run_times,
        )

    def _new_writer(self) -> Writer:
        if self.group_commit is None:
            return DirectWriter(self.store)
        if self.threaded is not None and self.store.capabilities.has_one_writer:
            return OutsideWriter(self.group_commit, self.threaded.require_outside)
        return self.group_commit

    async def end_renewals(self, limit: Limit) -> None:
        """Renews nothing more, and waits for what is under way within the limit."""
        heartbeat = self.heartbeat
        if isinstance(heartbeat, TaskHeartbeat):
            await heartbeat.stop(limit.left_seconds)
        else:
            await end_aside_within(partial(heartbeat.stop, limit.left_seconds), limit)

    def leave(self) -> None:
        """Ends what is left of the parts of a loop that has ended."""
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
                    await self.settle()
            self.abandon("the event loop ended before the store had answered")

    def abandon(self, reason: str) -> None:
        """Tells of every ending that is not stored, and that nobody is going to store any more."""
        self.background.abandon_all(reason)

    def forget(self) -> None:
        """In a forked child: all of it is the parent's to write and to tell."""
        _alive.discard(self)

    async def settle(self) -> None:
        """Waits until everything that was submitted is answered; cancelling stops none of it."""
        await self.background.settle()
        if self.group_commit is not None:
            await self.group_commit.drain()

    def _join_suspending(self, connection: object) -> Transaction:
        return self._join(connection, Waits.SUSPENDING)

    def _join_either(self, connection: object) -> Transaction:
        transaction = self._join(connection, None)
        if self.threaded is None:
            return transaction
        return self.threaded.asking_elsewhere(transaction)
