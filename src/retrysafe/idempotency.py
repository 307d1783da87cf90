"""The face for threads: plain calls, no event loop, no hidden thread but the heartbeat's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Never, ParamSpec, Self, TypeVar, TypeVarTuple

from retrysafe import forks
from retrysafe.core.atomic.complete_in import Joiner
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.cache import CachedOutcome
from retrysafe.core.call import Answer, Call
from retrysafe.core.engine import Engine
from retrysafe.core.events import Emit
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, OperatorCommand, StoredKey, SweepReport
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Store, Transaction, Waits, Writer
from retrysafe.core.renewal import confirm
from retrysafe.core.steps.run import Stepper
from retrysafe.errors import InvalidInput
from retrysafe.runtime.atomic_threads import AtomicThreads, ThreadTransacting
from retrysafe.runtime.checks import (
    SecretSource,
    misplaced_keywords,
    require_no_positional,
    require_plain,
    require_waiting_threads,
)
from retrysafe.runtime.closing import Limit, end_within
from retrysafe.runtime.current import current
from retrysafe.runtime.describe import (
    ONCE_ATTRIBUTE,
    UNSET,
    CallerSource,
    KeySource,
    Unset,
    once_of,
    owner_name,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.face import Face, checked_limit, mint_token, operator_outcome, require_name
from retrysafe.runtime.gate import ThreadGate
from retrysafe.runtime.group_commit.direct import DirectWriter
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.runtime.heartbeat import ThreadHeartbeat
from retrysafe.runtime.local_clocks import ThreadClock
from retrysafe.runtime.performing import perform_in_thread
from retrysafe.runtime.steps import codec_of_step, perform_blocking
from retrysafe.workers.duties import WorkerPolicy, duties_of
from retrysafe.workers.pools import ThreadWorkerPool
from retrysafe.workers.worker import Duty, ThreadDuty, Worker

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
C = TypeVar("C")


class _InterruptedThread:
    """Finishes the last write of a thread that is being interrupted, in that same thread."""

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        """Runs the flow now; a second interrupt ends it."""
        try:
            run_sync(flow)
        except BaseException as error:
            flow.close()
            abandon(f"{error!r} came while it was being stored")
            raise


class BlockingIdempotency(AtomicThreads, Face):
    """Runs operations once, for threads and processes."""

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
        if store.capabilities.waits is Waits.SUSPENDING:
            raise InvalidInput("this store needs an event loop: use AsyncIdempotency with it")
        self._build()
        forks.register(self)

    def _build(self) -> None:
        # Here and not only when it is made: a preloaded application is patched after that.
        require_waiting_threads()
        store = self._store
        self._gate = ThreadGate()
        waiting, background = ThreadClock(), _InterruptedThread()
        # A signal's handler may call from inside of what it guards, which waits for nobody and is
        # whole at every place where a handler may run.
        lock = threading.RLock()
        self._heartbeat = ThreadHeartbeat(store, self._report, waiting.monotonic)
        self._writer: Writer = (
            DirectWriter(store)
            if store.capabilities.waits is Waits.NEVER
            else ThreadGroupCommit(store)
        )
        self._engine = Engine(
            writer=self._writer,
            waiting=waiting,
            lock=lock,
            renewals=self._heartbeat,
            background=background,
            mint_token=mint_token,
            cache=self._new_cache(),
            report=self._report,
            endings=store,
            owner=owner_name(),
            secrets=self._settings.secrets,
            joiner=Joiner(
                join=self._join_blocking,
                drive=lambda waits, flow: run_sync(flow),
                has_outbox=store.capabilities.has_outbox,
            ),
            stepper=Stepper(
                store=store,
                waiting=waiting,
                lock=lock,
                background=background,
                report=self._report,
                drive=run_sync,
                perform=perform_blocking,
                codec_for=codec_of_step,
                current=current.get,
                join=self._join_blocking,
            ),
            recovers=store,
            confirm=partial(confirm, store, waiting.monotonic, self._report),
            perform=perform_in_thread,
            who=threading.get_ident,
            run_times=self.run_times,
        )

    def _join_blocking(self, connection: object) -> Transaction:
        return self._join(connection, Waits.BLOCKING)

    def after_fork_in_child(self) -> None:
        """Starts afresh: the parent's running operations are the parent's to renew.

        Raises `InvalidInput` for threads that cannot wait.
        """
        was_closed = self._gate.is_closed
        # A child that was forked inside an operation still has the operation on its stack. Its end
        # there is not the operation's: the parent's copy goes on.
        for lease in self._heartbeat.leases:
            lease.revoke()
        if isinstance(self._writer, ThreadGroupCommit):
            self._writer.leave_to_parent()
        self._build()
        self._gate.is_closed = was_closed

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
        rule: FingerprintRule | None = None,
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
        call = self._call(key, operation, args, caller, name, request, policy, rule, returns)
        value: T = self._answer(call, operation, args, {}).value
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
        rule: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
        **misplaced: Never,
    ) -> Answer[T]:
        """As `run`, and also tells whether the outcome is a replay."""
        require_plain(operation)
        if misplaced:
            raise misplaced_keywords("answer", operation, misplaced)
        call = self._call(key, operation, args, caller, name, request, policy, rule, returns)
        return self._answer(call, operation, args, {})

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
            def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                value: T = self._answer(decoration.call(args, kwargs), function, args, kwargs).value
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
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Declares a function for `run` that a worker may finish without its caller.

        From then on its arguments are stored with every claim. The function stays as it is; policy
        and `returns` count for `run` too. `name` (default: the function's own) must stay the same
        in every release. Raises `InvalidInput` for methods, and for a name that is taken.
        """
        require_name(name)

        def declare(function: Callable[P, T]) -> Callable[P, T]:
            require_plain(function)
            self._register(function, name, policy, returns, self._resume)
            return function

        return declare

    def answer_of(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Answer[T]:
        """Calls a function decorated with `once`, and also tells whether it was a replay."""
        once, bound = once_of(function)
        arguments = (*bound, *args)
        return self._answer(once.call(arguments, kwargs), once.function, arguments, kwargs)

    def recall(self, call: Call) -> Answer[Any] | None:
        """For adapters: the answer when this process remembers it, without asking the store.

        None when it does not. Raises `KeyReused`, the stored failure or `OutcomeUnavailable`.
        """
        forks.refresh_if_stale()
        return self._engine.recall(call)

    def remembered(self, call: Call) -> CachedOutcome | None:
        """For adapters: what this process remembers of the outcome; raises `KeyReused`."""
        forks.refresh_if_stale()
        return self._engine.remembered(call)

    def repeats(self, call: Call, outcome: CachedOutcome) -> bool:
        """For adapters: whether that is still what is remembered; counts as a replay then."""
        return self._engine.repeats(call, outcome)

    def is_in_flight(self, call: Call) -> bool:
        """For adapters: whether the key's operation is known to run, here or elsewhere."""
        return self._engine.is_in_flight(call)

    def is_claiming(self, call: Call) -> bool:
        """For adapters: whether the store has not yet said what a key is that is asked for here."""
        return self._engine.is_claiming(call)

    def let_go(self, call: Call) -> None:
        """For adapters: nobody is going to run this call, so its claim is not to stay.

        In threads there is nothing to do: who asks for a key waits there until it has an answer.
        """

    def answer_call(self, call: Call, operation: Callable[[Attempt], T]) -> Answer[T]:
        """For adapters: answers a call that they have put together; the operation gets its attempt.

        Raises as `run` does.
        """
        return self._answer(call, operation, None, None)

    def answer_atomic(
        self,
        call: Call,
        transaction: Callable[[], AbstractContextManager[C]],
        operation: Callable[[AtomicAttempt[C]], T],
    ) -> Answer[T]:
        """For adapters: answers a call in a transaction, with its outcome and what it wrote.

        `transaction` opens one and gives its connection; it commits at the end and rolls back on
        any exception. It is asked only when neither this process nor a run in it has the answer.
        Raises as `run` does, and `StoreUnavailable` for a transaction that could not be had.
        """

        async def invoke(attempt: AtomicAttempt[C]) -> T:
            return operation(attempt)

        forks.refresh_if_stale()
        transacting = ThreadTransacting(transaction, self._atomic_block)
        gate = self._gate
        # As in `_answer`.
        flow = self._engine.answer(call, invoke, transacting=transacting)
        try:
            try:
                gate.enter(flow)
                return run_sync(flow)
            finally:
                flow.close()
        finally:
            gate.inside.pop(flow, None)
            gate.tell()

    def _answer(
        self, call: Call, operation: Callable[..., Any], args: Any, kwargs: Any
    ) -> Answer[Any]:
        forks.refresh_if_stale()
        gate = self._gate
        gate.require_open()
        remembered = self._engine.recall(call)
        if remembered is not None:
            return remembered
        # Also what the gate knows this call by.
        flow = self._engine.ask(call, operation, args, kwargs)
        try:
            try:
                gate.enter(flow)
                return run_sync(flow)
            finally:
                # The gate, or a signal before its first step, may have kept it from running, and
                # Python warns of a flow that was never begun. One that has ended takes no notice.
                flow.close()
        finally:
            # Here, by one call of C: a signal may raise at the entry of a function, and closing
            # would wait for this call until its time is over.
            gate.inside.pop(flow, None)
            gate.tell()

    async def _resume(
        self,
        call: Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Answer[Any]:
        return self._answer(call, function, args, kwargs)

    # Looking after the store.

    def read(
        self, key: str | Key, *, caller: CallerSource | None = None, with_audit: bool = True
    ) -> StoredKey | None:
        """The stored record of a key with its steps and its audit.

        Without the audit, its outcomes are only the one that a replay gives: for those who poll.
        """
        found = self._settings.key(key, caller)
        forks.refresh_if_stale()
        return run_sync(self._store.read(found, with_audit=with_audit))

    def release(
        self, key: str | Key, *, caller: CallerSource | None = None, force: bool = False
    ) -> None:
        """Frees a key whose owner is gone or whose failure is to be tried again.

        Raises `OperatorRefused` when that could run the operation twice; `force` frees a key
        whose lease still holds, and whoever held it has lost its claim.
        """
        command = OperatorCommand.FORCE_RELEASE if force else OperatorCommand.RELEASE
        self._operate(self._settings.key(key, caller), command)

    def expire(self, key: str | Key, *, caller: CallerSource | None = None) -> None:
        """Ends a settled key's active window now: its next use runs the operation again.

        Raises `OperatorRefused` for a pending key.
        """
        self._operate(self._settings.key(key, caller), OperatorCommand.EXPIRE)

    def _operate(self, key: Key, command: OperatorCommand) -> None:
        forks.refresh_if_stale()
        decision = run_sync(self._store.operate(key, command))
        if decision is Decision.APPLY:
            self._engine.forget(key)
        operator_outcome(decision, command, key, run_sync(self._store.read(key)))

    def sweep(self, *, limit: int = 1000) -> SweepReport:
        """Removes at most `limit` keys and outcomes that are past their windows.

        A large store is walked over in several calls: call again while the report `has_more`.
        Raises `InvalidInput` for a limit below 1.
        """
        limit = checked_limit(limit)
        forks.refresh_if_stale()
        return run_sync(self._store.sweep(limit))

    def worker(
        self, policy: WorkerPolicy | None = None, *, also: Mapping[str, Duty] | None = None
    ) -> Worker:
        """What finishes abandoned operations, reports others and sweeps; see `Worker.run`.

        It resumes the operations that are declared with this object. `also` takes more duties by
        their names, a relay for one. Stop the worker before you close this object.
        """
        policy = policy or WorkerPolicy()
        flows = duties_of(
            store=self._store,
            waiting=ThreadClock(),
            pool=ThreadWorkerPool(policy.concurrency),
            lock=threading.RLock(),
            resumers=self._resumables.by_name,
            report=self._report,
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
        limit = Limit(wait)
        forks.refresh_if_stale()
        has_ended = self._gate.close(limit.seconds)
        limit.spare_the_ending()
        self._heartbeat.stop(limit.left_seconds)
        if self._owns_store:
            end_within(self._close_store, limit)
        return has_ended

    def _close_store(self) -> None:
        run_sync(self._store.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
