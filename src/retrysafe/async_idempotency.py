"""Idempotency for asyncio: the same methods as for threads, awaited.

Owns what users call. How a function and its arguments become a call, `Operations` says; what
becomes of the call, `AsyncCalls`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Never, ParamSpec, Self, TypeVar, TypeVarTuple

from retrysafe.core.call import Answer
from retrysafe.core.events import Emit
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import Key
from retrysafe.core.model import OperatorCommand, StoredKey, SweepReport
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Store
from retrysafe.core.settings import (
    CHECK_KEY,
    CallerSource,
    SecretSource,
    Settings,
    environment_secret,
)
from retrysafe.observe.observers import checked_observers, reporter, watch_all
from retrysafe.runtime.async_calls import AsyncCalls
from retrysafe.runtime.atomic import AsyncAtomicContext, new_entry, with_connection
from retrysafe.runtime.checks import (
    misplaced_keywords,
    require_async,
    require_name,
    require_no_positional,
    running_loop,
)
from retrysafe.runtime.describe import ONCE_ATTRIBUTE, UNSET, KeySource, Unset, once_of
from retrysafe.runtime.task_ports import TaskClock
from retrysafe.stores.opening import checked_store, open_store
from retrysafe.workers.duties import WorkerPolicy, duties_of
from retrysafe.workers.pools import TaskWorkerPool
from retrysafe.workers.worker import AsyncDuty, AsyncWorker, TaskDuty

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
C = TypeVar("C")


class AsyncIdempotency:
    """Runs operations once, for the tasks of an event loop."""

    def __init__(
        self,
        store: Store | str,
        *,
        caller: CallerSource | None = None,
        policy: Policy | None = None,
        fingerprint: FingerprintRule | None = None,
        secret: SecretSource = None,
        cache: bool = True,
        observers: Iterable[Emit] = (),
    ) -> None:
        """Takes what `Idempotency` takes."""
        store = checked_store(store)
        observing = checked_observers(observers)
        settings = Settings.checked(
            caller=caller,
            policy=policy,
            fingerprint=fingerprint,
            secret=secret or environment_secret(),
            cache=cache,
        )
        self._calls = AsyncCalls(
            open_store(store, is_async=True) if isinstance(store, str) else store,
            settings,
            reporter(observing),
            owns_store=isinstance(store, str),
        )
        watch_all(observing, self._calls)

    @property
    def policy(self) -> Policy:
        """The policy of calls that bring none of their own."""
        return self._calls.settings.policy

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
        fingerprint: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
        **misplaced: Never,
    ) -> T:
        """Awaits `operation(*args)` once for this key, and returns the first run's outcome.

        The request that a retry must match is the operation's name with `request`, or with `args`
        when no request is given. Cancelling the caller before the operation has ended leaves the
        key to its lease; after that the outcome is stored all the same. Raises as `Idempotency`
        does.
        """
        if misplaced:
            raise misplaced_keywords("run", operation, misplaced)
        call = self._calls.operations.call(
            key, operation, args, caller, name, request, policy, fingerprint, returns
        )
        answer = await self._calls.answer(call, operation, args, {})
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
        fingerprint: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
        **misplaced: Never,
    ) -> Answer[T]:
        """As `run`, and also tells whether the outcome is a replay."""
        if misplaced:
            raise misplaced_keywords("answer", operation, misplaced)
        call = self._calls.operations.call(
            key, operation, args, caller, name, request, policy, fingerprint, returns
        )
        return await self._calls.answer(call, operation, args, {})

    def once(
        self,
        *misplaced: Never,
        key: KeySource,
        window: timedelta | None = None,
        caller: CallerSource | None = None,
        name: str | None = None,
        policy: Policy | None = None,
        fingerprint: FingerprintRule | None = None,
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
            decoration = self._calls.operations.once(
                function,
                key=key,
                window=window,
                caller=caller,
                name=name,
                policy=policy,
                fingerprint=fingerprint,
                ignore=ignore,
                returns=returns,
                resume=self._calls.resume if resumable else None,
            )

            @functools.wraps(function)
            async def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = decoration.call(args, kwargs)
                answer = await self._calls.answer(call, function, args, kwargs)
                value: T = answer.value
                return value

            setattr(run_once, ONCE_ATTRIBUTE, decoration)
            return run_once

        return decorate

    async def answer_of(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer[T]:
        """Calls a function decorated with `once`, and also tells whether it was a replay."""
        once, bound = once_of(function)
        arguments = (*bound, *args)
        call = once.call(arguments, kwargs)
        return await self._calls.answer(call, once.function, arguments, kwargs)

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
            self._calls.operations.register(function, name, policy, returns, self._calls.resume)
            return function

        return declare

    # In your own transaction.

    def atomic(
        self,
        connection: C,
        key: str | Key,
        *,
        caller: CallerSource | None = None,
        name: str = "",
        request: object = None,
        policy: Policy | None = None,
        fingerprint: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
    ) -> AsyncAtomicContext[C]:
        """A block whose writes and whose outcome commit together, in your open transaction.

        `connection` is an async psycopg connection, an asyncpg connection, or an async connection
        or session of SQLAlchemy. Raises as `Idempotency` does.
        """
        call = self._calls.operations.atomic_call(
            key,
            caller=caller,
            name=name,
            request=request,
            policy=policy,
            fingerprint=fingerprint,
            returns=returns,
        )
        return self._calls.atomic(call, connection)

    def atomic_once(
        self,
        *,
        key: KeySource,
        connection: str,
        window: timedelta | None = None,
        caller: CallerSource | None = None,
        name: str | None = None,
        policy: Policy | None = None,
        fingerprint: FingerprintRule | None = None,
        ignore: Iterable[str] = (),
        returns: type | tuple[type, ...] | None = None,
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Decorates an async function so that each key runs it once, as an atomic block.

        `connection` names the parameter that holds the connection. What the function returns is
        the outcome; what it raises undoes what it wrote. The rest is as in `once`.
        """

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            require_async(function)
            decoration = self._calls.operations.once(
                function,
                key=key,
                window=window,
                caller=caller,
                name=name,
                policy=policy,
                fingerprint=fingerprint,
                ignore=with_connection(ignore, connection),
                returns=returns,
            )

            @functools.wraps(function)
            async def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = decoration.call(args, kwargs)
                used = decoration.argument(connection, args, kwargs)
                async with self._calls.atomic(call, used) as run:
                    if not run.replayed:
                        await run.complete(await function(*args, **kwargs))
                value: T = run.value
                return value

            return run_once

        return decorate

    async def stage(
        self,
        connection: object,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        aggregate: str | None = None,
        deliver_at: datetime | None = None,
        content_type: str | None = None,
    ) -> str:
        """Has the payload delivered once your open transaction has committed; returns its key.

        Takes what `Idempotency.stage` takes, and raises as it does.
        """
        entry = new_entry(
            self._calls.store,
            topic,
            payload,
            key=key,
            aggregate=aggregate,
            deliver_at=deliver_at,
            content_type=content_type,
        )
        return await self._calls.stage(connection, entry)

    # Looking after the store.

    async def check(self) -> None:
        """Raises what would fail at the first call: no driver, no database, an old schema.

        Call it at the start of a process. Raises a `StoreError` that says what to do;
        `StoreUnavailable` when a later try may help.
        """
        await self._calls.read(CHECK_KEY, with_audit=False)

    async def read(
        self, key: str | Key, *, caller: CallerSource | None = None, with_audit: bool = True
    ) -> StoredKey | None:
        """The stored record of a key with its steps and its audit.

        Without the audit, its outcomes are only the one that a replay gives: for those who poll.
        """
        return await self._calls.read(self._key(key, caller), with_audit=with_audit)

    async def release(
        self,
        key: str | Key,
        *,
        caller: CallerSource | None = None,
        force: bool = False,
        reason: str = "",
    ) -> None:
        """Frees a key whose owner is gone or whose failure is to be tried again.

        Raises `OperatorRefused` when that could run the operation twice; `force` frees a key
        whose lease still holds, and whoever held it has lost its claim. Who did it and the reason
        are kept: `retrysafe keys show` tells them.
        """
        command = OperatorCommand.FORCE_RELEASE if force else OperatorCommand.RELEASE
        await self._calls.operate(self._key(key, caller), command, reason)

    async def expire(
        self, key: str | Key, *, caller: CallerSource | None = None, reason: str = ""
    ) -> None:
        """Ends a settled key's active window now: its next use runs the operation again.

        Raises `OperatorRefused` for a pending key.
        """
        await self._calls.operate(self._key(key, caller), OperatorCommand.EXPIRE, reason)

    def _key(self, key: str | Key, caller: CallerSource | None) -> Key:
        return self._calls.settings.key(key, caller)

    async def sweep(self, *, limit: int = 1000) -> SweepReport:
        """Removes at most `limit` keys and outcomes that are past their windows.

        A large store is walked over in several calls: call again while the report `has_more`.
        Raises `InvalidInput` for a limit below 1.
        """
        return await self._calls.sweep(limit)

    def worker(
        self,
        policy: WorkerPolicy | None = None,
        *,
        app: Any = None,
        also: Mapping[str, AsyncDuty] | None = None,
    ) -> AsyncWorker:
        """What finishes abandoned operations, reports others and sweeps; see `AsyncWorker.run`.

        It resumes the operations that are declared with this object, and sends requests of
        resumable routes through `app`, your whole ASGI application. `also` takes more duties by
        their names, a relay for one. Stop the worker before you close this object. Call it in the
        event loop that the worker is to run in.
        """
        policy = policy or WorkerPolicy()
        if app is not None:
            self._calls.operations.app = app
        flows = duties_of(
            store=self._calls.bound().loop_ports.store,
            clock=TaskClock(),
            pool=TaskWorkerPool(policy.concurrency),
            lock=threading.Lock(),
            resumers=self._calls.operations.resumables.by_name,
            report=self._calls.report,
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
        return await self._calls.close(wait)

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
