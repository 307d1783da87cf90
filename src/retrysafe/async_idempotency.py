"""The face for asyncio: the same methods as the blocking one, awaited."""

from __future__ import annotations

import asyncio
import functools
import threading
from asyncio import current_task
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from datetime import timedelta
from threading import get_ident
from types import TracebackType
from typing import Any, Never, ParamSpec, Self, TypeVar, TypeVarTuple

from retrysafe import forks
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.cache import CachedOutcome
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import Emit
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, OperatorCommand, StoredKey, SweepReport
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Store
from retrysafe.errors import InvalidInput
from retrysafe.runtime.atomic_tasks import AtomicTasks, TaskTransacting
from retrysafe.runtime.checks import (
    SecretSource,
    misplaced_keywords,
    require_async,
    require_no_positional,
    running_loop,
)
from retrysafe.runtime.closing import Limit, end_aside_within
from retrysafe.runtime.describe import (
    ONCE_ATTRIBUTE,
    UNSET,
    CallerSource,
    KeySource,
    Unset,
    once_of,
)
from retrysafe.runtime.face import Face, checked_limit, operator_outcome, require_name
from retrysafe.runtime.gate import TaskGate
from retrysafe.runtime.local_clocks import TaskClock
from retrysafe.runtime.loop_ports import LoopPorts
from retrysafe.workers.duties import WorkerPolicy, duties_of
from retrysafe.workers.pools import TaskWorkerPool
from retrysafe.workers.worker import AsyncDuty, AsyncWorker, TaskDuty

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
C = TypeVar("C")


class AsyncFace(AtomicTasks, Face):
    """Runs operations once, for the tasks of an event loop."""

    def __init__(
        self,
        store: Store,
        *,
        caller: CallerSource | None = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        secret: SecretSource = None,
        cache: bool = True,
        observers: Iterable[Emit] = (),
        owns_store: bool = False,
    ) -> None:
        super().__init__(
            store,
            caller=caller,
            policy=policy,
            rule=rule,
            secret=secret,
            cache=cache,
            observers=observers,
            owns_store=owns_store,
        )
        self._parts: LoopPorts | None = None
        self._is_closed = False
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Starts afresh in the child's own loop."""
        if self._parts is not None:
            # The worker threads are the parent's; joining them here would wait for ever.
            self._parts.forget()
            forks.park(self._parts)
            self._parts = None

    def _bound(self) -> LoopPorts:
        """The parts for the running loop; a loop that has ended is replaced by the next one."""
        parts = self._parts
        # Asking for the running loop is a system call before Python 3.12. A loop that has a task
        # at work in this very thread is the one.
        if (
            parts is not None
            and parts.thread_id == get_ident()
            and current_task(parts.loop) is not None
        ):
            return parts
        loop = running_loop()
        if parts is not None and parts.loop is loop:
            parts.thread_id = get_ident()  # It may have gone on in another thread.
            return parts
        if parts is not None and not parts.loop.is_closed():
            raise InvalidInput(
                "this object is in use by another event loop: make one per loop, or close it there"
            )
        if parts is not None:
            parts.leave()
        self._parts = parts = LoopPorts(
            loop,
            self._store,
            report=self._report,
            cache=self._new_cache(),
            secrets=self._settings.secrets,
            join=self._join,
            run_times=self.run_times,
        )
        parts.gate.is_closed = self._is_closed
        return parts

    def _atomic_gate(self) -> TaskGate:
        return self._bound().gate

    # Running operations.

    async def run(
        self,
        key: str | Key,
        operation: Callable[[*Ts], Awaitable[T]],
        /,
        *args: *Ts,
        caller: CallerSource | None = None,
        name: str | None = None,
        request: object = UNSET,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
        **misplaced: Never,
    ) -> T:
        """Awaits `operation(*args)` once for this key, and returns the first run's outcome.

        The request that a retry must match is the operation's name with `request`, or with `args`
        when no request is given. Cancelling the caller before the operation has ended leaves the
        key to its lease; after that the outcome is stored all the same. Raises as the blocking
        face does.
        """
        if misplaced:
            raise misplaced_keywords("run", operation, misplaced)
        call = self._call(key, operation, args, caller, name, request, policy, rule, returns)
        # As in `_answer`, whose coroutine every call would pay for.
        parts = self._bound()
        gate, engine = parts.gate, parts.engine
        gate.enter()
        try:
            answer = engine.recall(call)
            if answer is None:
                answer = await engine.ask(call, operation, args, {})
        finally:
            gate.leave()
        value: T = answer.value
        return value

    async def answer(
        self,
        key: str | Key,
        operation: Callable[[*Ts], Awaitable[T]],
        /,
        *args: *Ts,
        caller: CallerSource | None = None,
        name: str | None = None,
        request: object | Unset = UNSET,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
        **misplaced: Never,
    ) -> Answer[T]:
        """As `run`, and also tells whether the outcome is a replay."""
        if misplaced:
            raise misplaced_keywords("answer", operation, misplaced)
        call = self._call(key, operation, args, caller, name, request, policy, rule, returns)
        return await self._answer(call, operation, args, {})

    def once(
        self,
        *misplaced: Never,
        key: KeySource,
        window: timedelta | None = None,
        caller: CallerSource | None = None,
        name: str | None = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        ignore: Iterable[str] = (),
        returns: type | tuple[type, ...] | None = None,
        resumable: bool = False,
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Decorates an async function or method so that each key runs it once.

        `key` names the parameters that identify the operation, or is a function of the arguments,
        or a `BodyKey`. `window` is how long the key is remembered after the run: FOREVER, or a
        timedelta; a `BodyKey` has its own. `ignore` names parameters that are not part of the
        request. `resumable` stores the arguments with the claim, so that a worker can finish what
        a crash interrupted.
        """
        require_no_positional(misplaced)

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            require_async(function, ", or call it with run")
            decoration = self._once(
                function,
                key=key,
                window=window,
                caller=caller,
                name=name,
                policy=policy,
                rule=rule,
                ignore=ignore,
                returns=returns,
                resume=self._resume if resumable else None,
            )

            @functools.wraps(function)
            async def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                answer = await self._answer(decoration.call(args, kwargs), function, args, kwargs)
                value: T = answer.value
                return value

            setattr(run_once, ONCE_ATTRIBUTE, decoration)
            return run_once

        return decorate

    def resumable(
        self,
        name: str | None = None,
        *,
        policy: Policy | None = None,
        returns: type | tuple[type, ...] | None = None,
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """Declares a function for `run` that a worker may finish without its caller.

        From then on its arguments are stored with every claim. The function stays as it is; policy
        and `returns` count for `run` too. `name` (default: the function's own) must stay the same
        in every release. Raises `InvalidInput` for methods, and for a name that is taken.
        """
        require_name(name)

        def declare(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            require_async(function)
            self._register(function, name, policy, returns, self._resume)
            return function

        return declare

    async def answer_of(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer[T]:
        """Calls a function decorated with `once`, and also tells whether it was a replay."""
        once, bound = once_of(function)
        arguments = (*bound, *args)
        return await self._answer(once.call(arguments, kwargs), once.function, arguments, kwargs)

    def recall(self, call: Call) -> Answer[Any] | None:
        """For adapters: the answer when this process remembers it, without asking the store.

        None when it does not. Raises `KeyReused`, the stored failure or `OutcomeUnavailable`.
        """
        return self._bound().engine.recall(call)

    def is_in_flight(self, call: Call) -> bool:
        """For adapters: whether the key's operation is known to run, here or elsewhere."""
        return self._bound().engine.is_in_flight(call)

    def is_claiming(self, call: Call) -> bool:
        """For adapters: whether the key was asked for, and the store has not said anything yet."""
        return self._bound().engine.is_claiming(call)

    def let_go(self, call: Call) -> None:
        """For adapters: nobody is going to run this call, so its claim is not to stay.

        Whoever awaits the call is cancelled next. If its claim is on its way to the store, and the
        key turns out to be new, it is given back at once. The claim is told by the call's `Key`
        object: make one for each call, or the claim of another call with it is given back as well.
        """
        group_commit = self._bound().group_commit
        # A store that never waits has answered every claim before anybody can lose patience.
        if group_commit is not None:
            level: Call | None = call
            while level is not None:
                group_commit.let_go(level.key)
                level = level.inner

    def remembered(self, call: Call) -> CachedOutcome | None:
        """For adapters: what this process remembers of the outcome; raises `KeyReused`."""
        return self._bound().engine.remembered(call)

    def repeats(self, call: Call, outcome: CachedOutcome) -> bool:
        """For adapters: whether that is still what is remembered; counts as a replay then."""
        return self._bound().engine.repeats(call, outcome)

    def answer_call(
        self, call: Call, operation: Callable[[Attempt], Awaitable[T]]
    ) -> Coroutine[Any, Any, Answer[T]]:
        """For adapters: answers a call that they have put together; the operation gets its attempt.

        Raises as `run` does.
        """
        return self._answer(call, operation, None, None)

    async def answer_atomic(
        self,
        call: Call,
        transaction: Callable[[], AbstractAsyncContextManager[C]],
        operation: Callable[[AtomicAttempt[C]], Awaitable[T]],
    ) -> Answer[T]:
        """For adapters: answers a call in a transaction, with its outcome and what it wrote.

        `transaction` opens one and gives its connection; it commits at the end and rolls back on
        any exception. It is asked only when neither this process nor a run in it has the answer.
        Raises as `run` does, and `StoreUnavailable` for a transaction that could not be had.
        """
        parts = self._bound()
        parts.gate.enter()
        try:
            transacting = TaskTransacting(transaction, self._atomic_block)
            return await parts.engine.answer(call, operation, transacting=transacting)
        finally:
            parts.gate.leave()

    async def _answer(
        self, call: Call, operation: Callable[..., Awaitable[Any]], args: Any, kwargs: Any
    ) -> Answer[Any]:
        # As in `Engine.answer`, whose coroutine every call would pay for.
        parts = self._bound()
        gate, engine = parts.gate, parts.engine
        gate.enter()
        try:
            answer = engine.recall(call)
            if answer is None:
                answer = await engine.ask(call, operation, args, kwargs)
            return answer
        finally:
            gate.leave()

    async def _resume(
        self,
        call: Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Answer[Any]:
        return await self._answer(call, function, args, kwargs)

    # Looking after the store.

    async def read(
        self, key: str | Key, *, caller: CallerSource | None = None, with_audit: bool = True
    ) -> StoredKey | None:
        """The stored record of a key with its steps and its audit.

        Without the audit, its outcomes are only the one that a replay gives: for those who poll.
        """
        found = self._settings.key(key, caller)
        return await self._bound().store.read(found, with_audit=with_audit)

    async def release(
        self, key: str | Key, *, caller: CallerSource | None = None, force: bool = False
    ) -> None:
        """Frees a key whose owner is gone or whose failure is to be tried again.

        Raises `OperatorRefused` when that could run the operation twice; `force` frees a key
        whose lease still holds, and whoever held it has lost its claim.
        """
        command = OperatorCommand.FORCE_RELEASE if force else OperatorCommand.RELEASE
        await self._operate(self._settings.key(key, caller), command)

    async def expire(self, key: str | Key, *, caller: CallerSource | None = None) -> None:
        """Ends a settled key's active window now: its next use runs the operation again.

        Raises `OperatorRefused` for a pending key.
        """
        await self._operate(self._settings.key(key, caller), OperatorCommand.EXPIRE)

    async def _operate(self, key: Key, command: OperatorCommand) -> None:
        parts = self._bound()
        decision = await parts.store.operate(key, command)
        if decision is Decision.APPLY:
            parts.engine.forget(key)
        operator_outcome(decision, command, key, await parts.store.read(key))

    async def sweep(self, *, limit: int = 1000) -> SweepReport:
        """Removes at most `limit` keys and outcomes that are past their windows.

        A large store is walked over in several calls: call again while the report `has_more`.
        Raises `InvalidInput` for a limit below 1.
        """
        return await self._bound().store.sweep(checked_limit(limit))

    def worker(
        self, policy: WorkerPolicy | None = None, *, also: Mapping[str, AsyncDuty] | None = None
    ) -> AsyncWorker:
        """What finishes abandoned operations, reports others and sweeps; see `AsyncWorker.run`.

        It resumes the operations that are declared with this object. `also` takes more duties by
        their names, a relay for one. Stop the worker before you close this object. Call it in the
        event loop that the worker is to run in.
        """
        policy = policy or WorkerPolicy()
        flows = duties_of(
            store=self._bound().store,
            waiting=TaskClock(),
            pool=TaskWorkerPool(policy.concurrency),
            lock=threading.Lock(),
            resumers=self._resumables.by_name,
            report=self._report,
            policy=policy,
        )
        duties = {name: TaskDuty(flow) for name, flow in flows.items()}
        return AsyncWorker({**duties, **(also or {})})

    async def close(self, wait: timedelta = timedelta(seconds=30)) -> bool:
        """Starts nothing new and waits for running operations; False when some still run.

        Those keep their claims until the leases end, since nothing renews them any more; they
        still store their outcomes, for as long as the loop runs. So do operations whose callers
        were cancelled: they count until their outcomes are stored. Closing again waits for them
        again. A store that is busy is waited for no longer than the limit either.
        """
        limit = Limit(wait)
        self._is_closed = True
        parts = self._bound()
        has_ended = await parts.gate.close(limit.seconds)
        limit.spare_the_ending()
        await parts.end_renewals(limit)
        try:
            async with asyncio.timeout(limit.left_seconds):
                await parts.settle()
        except TimeoutError:
            has_ended = False
        if parts.threaded is not None:
            await end_aside_within(parts.threaded.ending(with_store=self._owns_store), limit)
        elif self._owns_store:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit.left_seconds):
                    await parts.store.close()
        return has_ended

    async def __aenter__(self) -> Self:
        running_loop()  # Refused here and not by the first call in the block.
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
