"""Idempotency for threads and processes: plain calls, and no event loop.

Owns what users call; no thread is hidden here but the heartbeat's. How a function and its
arguments become a call, `Operations` says; what becomes of the call, `Calls`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
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
from retrysafe.runtime.atomic import AtomicContext, new_entry, with_connection
from retrysafe.runtime.calls import Calls
from retrysafe.runtime.checks import (
    misplaced_keywords,
    require_name,
    require_no_positional,
    require_plain,
)
from retrysafe.runtime.describe import ONCE_ATTRIBUTE, UNSET, KeySource, Unset, once_of
from retrysafe.runtime.thread_ports import ThreadClock
from retrysafe.stores.opening import checked_store, open_store
from retrysafe.workers.duties import WorkerPolicy, duties_of
from retrysafe.workers.pools import ThreadWorkerPool
from retrysafe.workers.worker import Duty, ThreadDuty, Worker

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
C = TypeVar("C")


class Idempotency:
    """Runs operations once, for threads and processes."""

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
        """`store` is a URL such as `sqlite:///app.db`, or a store object that stays yours.

        `caller` says whose keys they are: a text, a function that returns it, or `GLOBAL`.
        `fingerprint` says which requests are the same. `secret` keys the hashes of fingerprints,
        callers, child keys and body keys; of a list, the first makes new ones and the others are
        recognised (default: `RETRYSAFE_SECRET`).
        """
        store = checked_store(store)
        observing = checked_observers(observers)
        settings = Settings.checked(
            caller=caller,
            policy=policy,
            fingerprint=fingerprint,
            secret=secret or environment_secret(),
            cache=cache,
        )
        self._calls = Calls(
            open_store(store) if isinstance(store, str) else store,
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

    def run(
        self,
        key: str | Key,
        operation: Callable[[*Ts], T],
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
        """Runs `operation(*args)` once for this key, and returns the first run's outcome.

        The request that a retry must match is the operation's name with `request`, or with `args`
        when no request is given. Raises `KeyReused`, `OperationInFlight`, the stored failure,
        `OutcomeUnavailable`, `ClaimLost`, `OutcomeNotStored`, `StoreUnavailable`, and what the
        operation raises.
        """
        require_plain(operation)
        if misplaced:
            raise misplaced_keywords("run", operation, misplaced)
        call = self._calls.operations.call(
            key, operation, args, caller, name, request, policy, fingerprint, returns
        )
        value: T = self._calls.answer(call, operation, args, {}).value
        return value

    def answer(
        self,
        key: str | Key,
        operation: Callable[[*Ts], T],
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
        require_plain(operation)
        if misplaced:
            raise misplaced_keywords("answer", operation, misplaced)
        call = self._calls.operations.call(
            key, operation, args, caller, name, request, policy, fingerprint, returns
        )
        return self._calls.answer(call, operation, args, {})

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
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorates a function or method so that each key runs it once.

        `key` names the parameters that identify the operation, or is a function of the arguments,
        or a `BodyKey`. `window` is how long the key is remembered after the run: FOREVER, or a
        timedelta; a `BodyKey` has its own. `ignore` names parameters that are not part of the
        request. `resumable` stores the arguments with the claim, so that a worker can finish what
        a crash interrupted.
        """
        require_no_positional(misplaced)

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            require_plain(function)
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
            def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = decoration.call(args, kwargs)
                value: T = self._calls.answer(call, function, args, kwargs).value
                return value

            setattr(run_once, ONCE_ATTRIBUTE, decoration)
            return run_once

        return decorate

    def answer_of(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer[T]:
        """Calls a function decorated with `once`, and also tells whether it was a replay."""
        once, bound = once_of(function)
        arguments = (*bound, *args)
        return self._calls.answer(once.call(arguments, kwargs), once.function, arguments, kwargs)

    def resumable(
        self,
        name: str | None = None,
        *,
        policy: Policy | None = None,
        returns: type | tuple[type, ...] | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Declares a function for `run` that a worker may finish without its caller.

        From then on its arguments are stored with every claim. The function stays as it is; policy
        and `returns` count for `run` too. `name` (default: the function's own) must stay the same
        in every release. Raises `InvalidInput` for methods, and for a name that is taken.
        """
        require_name(name)

        def declare(function: Callable[P, T]) -> Callable[P, T]:
            require_plain(function)
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
    ) -> AtomicContext[C]:
        """A block whose writes and whose outcome commit together, in your open transaction.

        `connection` is a psycopg connection, a SQLAlchemy connection or session, Django's
        connection, or a `sqlite3.Connection` to the store's file. Entering raises
        `TransactionMissing`, `KeyReused`, `OperationInFlight`, the stored failure or
        `OutcomeUnavailable`; leaving without an outcome raises `OutcomeMissing`. Whatever leaves
        the block as an exception undoes what the block wrote.
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
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorates a function so that each key runs it once, as an atomic block.

        `connection` names the parameter that holds the connection. What the function returns is
        the outcome; what it raises undoes what it wrote. The rest is as in `once`.
        """

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            require_plain(function)
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
            def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = decoration.call(args, kwargs)
                used = decoration.argument(connection, args, kwargs)
                with self._calls.atomic(call, used) as run:
                    if not run.replayed:
                        run.complete(function(*args, **kwargs))
                value: T = run.value
                return value

            return run_once

        return decorate

    def stage(
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

        For entries that belong to no operation; inside one, use its `outbox`. `key` is what
        receivers tell repetitions by, and is random unless you give one. Raises
        `TransactionMissing`, `InvalidInput` for what cannot be delivered, and what the database
        raises.
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
        return self._calls.stage(connection, entry)

    # Looking after the store.

    def check(self) -> None:
        """Raises what would fail at the first call: no driver, no database, an old schema.

        Call it at the start of a process. Raises a `StoreError` that says what to do;
        `StoreUnavailable` when a later try may help.
        """
        self._calls.read(CHECK_KEY, with_audit=False)

    def read(
        self, key: str | Key, *, caller: CallerSource | None = None, with_audit: bool = True
    ) -> StoredKey | None:
        """The stored record of a key with its steps and its audit.

        Without the audit, its outcomes are only the one that a replay gives: for those who poll.
        """
        return self._calls.read(self._key(key, caller), with_audit=with_audit)

    def release(
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
        self._calls.operate(self._key(key, caller), command, reason)

    def expire(
        self, key: str | Key, *, caller: CallerSource | None = None, reason: str = ""
    ) -> None:
        """Ends a settled key's active window now: its next use runs the operation again.

        Raises `OperatorRefused` for a pending key.
        """
        self._calls.operate(self._key(key, caller), OperatorCommand.EXPIRE, reason)

    def _key(self, key: str | Key, caller: CallerSource | None) -> Key:
        return self._calls.settings.key(key, caller)

    def sweep(self, *, limit: int = 1000) -> SweepReport:
        """Removes at most `limit` keys and outcomes that are past their windows.

        A large store is walked over in several calls: call again while the report `has_more`.
        Raises `InvalidInput` for a limit below 1.
        """
        return self._calls.sweep(limit)

    def worker(
        self,
        policy: WorkerPolicy | None = None,
        *,
        app: Any = None,
        also: Mapping[str, Duty] | None = None,
    ) -> Worker:
        """What finishes abandoned operations, reports others and sweeps; see `Worker.run`.

        It resumes the operations that are declared with this object, and sends requests of
        resumable routes through `app`, your whole WSGI application. `also` takes more duties by
        their names, a relay for one. Stop the worker before you close this object.
        """
        policy = policy or WorkerPolicy()
        if app is not None:
            self._calls.operations.app = app
        flows = duties_of(
            store=self._calls.store,
            clock=ThreadClock(),
            pool=ThreadWorkerPool(policy.concurrency),
            lock=threading.RLock(),
            resumers=self._calls.operations.resumables.by_name,
            report=self._calls.report,
            policy=policy,
        )
        duties = {name: ThreadDuty(flow) for name, flow in flows.items()}
        return Worker({**duties, **(also or {})})

    def close(self, wait: timedelta = timedelta(seconds=30)) -> bool:
        """Starts nothing new and waits for running operations; False when some still run.

        Those keep their claims until the leases end, since nothing renews them any more; they
        still store their outcomes. Closing again waits for them again. A store that is busy is
        closed as soon as it can be; that, too, is waited for no longer than the limit.
        """
        return self._calls.close(wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
