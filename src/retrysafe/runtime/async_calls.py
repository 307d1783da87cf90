"""Calls on an event loop: what `AsyncIdempotency` and the adapters hold.

Owns the gate and the engine of the loop that runs, and when they are made: a loop that has ended is
followed by the next one.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from datetime import timedelta
from threading import get_ident
from typing import Any, TypeVar

from retrysafe import forks
from retrysafe.core.atomic.complete_in import stage_in
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.engine import Engine
from retrysafe.core.events import Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    Decision,
    OperatorCommand,
    OperatorNote,
    StagedEntry,
    StoredKey,
    SweepReport,
)
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Store, Waits
from retrysafe.core.run_times import RunTimes
from retrysafe.core.settings import Settings
from retrysafe.errors import InvalidInput
from retrysafe.runtime.atomic import AsyncAtomicContext, TaskTransacting
from retrysafe.runtime.calls import closed, still_running
from retrysafe.runtime.checks import checked_limit, operator_outcome, running_loop
from retrysafe.runtime.closing import Limit, end_aside_within
from retrysafe.runtime.identity import owner_name
from retrysafe.runtime.measuring import Tell, measure_in_thread, measure_on_loop
from retrysafe.runtime.operations import Operations
from retrysafe.runtime.task_ports import LoopPorts
from retrysafe.runtime.threaded import joined

T = TypeVar("T")
C = TypeVar("C")


class TaskGate:
    """Counts tasks of one loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._empty: asyncio.Event | None = None
        self.is_closed = False

    def enter(self) -> None:
        """Lets a call in; raises `Closed`."""
        if self.is_closed:
            raise closed()
        self._inside += 1

    def leave(self) -> None:
        """Lets a call out."""
        self._inside -= 1
        if self._empty is not None and not self._inside:
            self._empty.set()

    def require_empty(self) -> None:
        """Raises `InvalidInput` while calls are inside."""
        if self._inside:
            raise still_running(self._inside)

    async def close(self, wait_seconds: float) -> bool:
        """Lets nobody in any more, and waits for those inside; False when the time ran out."""
        self.is_closed = True
        if not self._inside:
            return True
        # Shared by several calls: each must hear of the end.
        self._empty = self._empty or asyncio.Event()
        try:
            await asyncio.wait_for(self._empty.wait(), wait_seconds)
        except TimeoutError:
            return False
        return True


class BoundLoop:
    """The gate and the engine of one event loop, over its ports."""

    __slots__ = ("engine", "gate", "loop_ports", "ports", "settings")

    def __init__(self, loop_ports: LoopPorts, settings: Settings) -> None:
        self.loop_ports = loop_ports
        self.ports = loop_ports.ports
        self.settings = settings
        self.gate = TaskGate()
        self.engine = Engine(loop_ports.ports, settings)


class AsyncCalls:
    """Answers calls in the tasks that ask for them."""

    def __init__(
        self, store: Store, settings: Settings, report: Reporter, *, owns_store: bool = False
    ) -> None:
        self.store = store
        self.settings = settings
        self.operations = Operations(settings)
        # Also for what happens outside of the engine.
        self.report = report
        # Set before the first use, two objects share it.
        self.run_times = RunTimes()
        self.owns_store = owns_store
        self._bound: BoundLoop | None = None
        self._is_closed = False
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Starts afresh in the child's own loop."""
        if self._bound is not None:
            # The worker threads are the parent's; joining them here would wait for ever.
            self._bound.loop_ports.forget()
            forks.park(self._bound)
            self._bound = None

    def bound(self) -> BoundLoop:
        """What belongs to the running loop; a loop that has ended is replaced by the next one."""
        bound = self._bound
        # Asking for the running loop is a system call before Python 3.12. A loop that has a task
        # at work in this very thread is the one.
        if (
            bound is not None
            and bound.loop_ports.thread_id == get_ident()
            and current_task(bound.loop_ports.loop) is not None
        ):
            return bound
        loop = running_loop()
        if bound is not None:
            if bound.loop_ports.loop is loop:
                bound.loop_ports.thread_id = get_ident()  # It may have gone on in another thread.
                return bound
            if not bound.loop_ports.loop.is_closed():
                raise InvalidInput(
                    "this object is in use by another event loop: make one per loop, or close it "
                    "there"
                )
            bound.loop_ports.leave()
        loop_ports = LoopPorts(loop, self.store, self.report, self.run_times)
        self._bound = bound = BoundLoop(loop_ports, self.settings)
        bound.gate.is_closed = self._is_closed
        return bound

    def reopen(self) -> None:
        """Takes calls again after `close`, for an application that is started once more.

        Nothing of the loop before is used: what still runs there ends with its own parts.
        """
        if self._is_closed:
            self._is_closed = False
            self._bound = None

    def replace_store(self, store: Store, settings: Settings, *, owns_store: bool) -> None:
        """Goes on with another store and other settings; for tests.

        Raises `InvalidInput` while calls run.
        """
        bound = self._bound
        if bound is not None:
            bound.gate.require_empty()
            bound.loop_ports.leave()
        self.store, self.settings, self.owns_store = store, settings, owns_store
        self._bound = None
        self._is_closed = False

    # Answers.

    async def answer(
        self,
        call: Call,
        operation: Callable[..., Awaitable[Any]],
        args: Any,
        kwargs: Any,
        transacting: TaskTransacting | None = None,
    ) -> Answer[Any]:
        """Answers a call by its operation with these arguments, unless it has an outcome.

        Raises as `AsyncIdempotency.run` does.
        """
        bound = self.bound()
        bound.gate.enter()
        try:
            return await bound.engine.answer(call, operation, args, kwargs, transacting)
        finally:
            bound.gate.leave()

    def resume(
        self,
        call: Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Coroutine[Any, Any, Answer[Any]]:
        """The same for a worker."""
        return self.answer(call, function, args, kwargs)

    def answer_call(
        self, call: Call, operation: Callable[[Attempt], Awaitable[T]]
    ) -> Coroutine[Any, Any, Answer[T]]:
        """Answers a call that an adapter has put together; the operation gets its attempt."""
        return self.answer(call, operation, None, None)

    def answer_atomic(
        self,
        call: Call,
        transaction: Callable[[], AbstractAsyncContextManager[C]],
        operation: Callable[[AtomicAttempt[C]], Awaitable[T]],
    ) -> Coroutine[Any, Any, Answer[T]]:
        """Answers a call in a transaction, with its outcome and what it wrote.

        `transaction` opens one and gives its connection; it commits at the end and rolls back on
        any exception. It is asked only when neither this process nor a run in it has the answer.
        Raises as `run` does, and `StoreUnavailable` for a transaction that could not be had.
        """
        return self.answer(call, operation, None, None, TaskTransacting(transaction))

    # What is known without asking the store.

    def recall(self, call: Call) -> Answer[Any] | None:
        """The answer when this process remembers it; None when it does not.

        Raises `KeyReused`, the stored failure or `OutcomeUnavailable`.
        """
        return self.bound().engine.recall(call)

    def is_in_flight(self, call: Call) -> bool:
        """Whether the key's operation is known to run, here or elsewhere."""
        return self.bound().engine.is_in_flight(call)

    def is_claiming(self, call: Call) -> bool:
        """Whether the key was asked for, and the store has not said anything yet."""
        return self.bound().engine.is_claiming(call)

    def let_go(self, call: Call) -> None:
        """Nobody is going to run this call, so its claim is not to stay.

        Whoever awaits the call is cancelled next. If its claim is on its way to the store, and the
        key turns out to be new, it is given back at once. The claim is told by the call's `Key`
        object: make one for each call, or the claim of another call with it is given back as well.
        """
        group_commit = self.bound().loop_ports.group_commit
        # A store that never waits has answered every claim before anybody can lose patience.
        if group_commit is not None:
            level: Call | None = call
            while level is not None:
                group_commit.let_go(level.key)
                level = level.inner

    # In a user's transaction.

    def atomic(self, call: Call, connection: C) -> AsyncAtomicContext[C]:
        """The atomic block of a call; raises `InvalidInput` for an unknown connection."""
        transaction = joined(self.store, connection, Waits.SUSPENDING)
        return AsyncAtomicContext(call, transaction, connection, self.bound)

    async def stage(self, connection: object, entry: StagedEntry) -> str:
        """Writes an entry of no operation; returns its key."""
        return await stage_in(joined(self.store, connection, Waits.SUSPENDING), entry)

    # Looking after the store.

    @property
    def policy(self) -> Policy:
        """The policy of calls that bring none of their own."""
        return self.settings.policy

    async def read(self, key: Key, *, with_audit: bool) -> StoredKey | None:
        """The stored record of a key."""
        return await self.bound().loop_ports.store.read(key, with_audit=with_audit)

    async def operate(self, key: Key, command: OperatorCommand, reason: str) -> None:
        """Applies an operator's command; raises `OperatorRefused`."""
        bound = self.bound()
        store = bound.loop_ports.store
        decision = await store.operate(key, command, OperatorNote(owner_name(), reason))
        if decision is Decision.APPLY:
            bound.engine.forget(key)
        operator_outcome(decision, command, key, await store.read(key))

    async def sweep(self, limit: int) -> SweepReport:
        """Removes what is past its windows; raises `InvalidInput` for a limit below 1."""
        return await self.bound().loop_ports.store.sweep(checked_limit(limit))

    def measure(self, tell: Tell) -> None:
        """Has the size of the store told to a function, later; asked from any thread."""
        if self.store.capabilities.waits is not Waits.SUSPENDING:
            measure_in_thread(self.store, tell)
        elif self._bound is None:
            tell(None)  # Nobody has used it yet: nobody knows on which loop.
        else:
            measure_on_loop(self.store, self._bound.loop_ports.loop, tell)

    async def close(self, wait: timedelta) -> bool:
        """Starts nothing new and waits for running operations; False when some still run."""
        limit = Limit(wait)
        self._is_closed = True
        bound = self.bound()
        loop_ports = bound.loop_ports
        has_ended = await bound.gate.close(limit.seconds)
        limit.spare_the_ending()
        await loop_ports.end_renewals(limit)
        try:
            async with asyncio.timeout(limit.left_seconds):
                await loop_ports.drain()
        except TimeoutError:
            has_ended = False
        if loop_ports.threaded is not None:
            await end_aside_within(loop_ports.threaded.ending(with_store=self.owns_store), limit)
        elif self.owns_store:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit.left_seconds):
                    await loop_ports.store.close()
        return has_ended
