"""Calls in threads: what `Idempotency` and the adapters hold.

Owns the gate, which closes without cutting a call short, the engine of this process, and both anew
after a fork. A call comes in as a `Call`: `Operations` makes it of a function, an adapter of a
request.
"""

from __future__ import annotations

import logging
import threading
import time
from asyncio import _get_running_loop  # The public one raises where there is none.
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from retrysafe import forks
from retrysafe.core.atomic.block import AtomicBlock
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
from retrysafe.errors import Closed, InvalidInput
from retrysafe.runtime.atomic import AtomicContext, ThreadTransacting
from retrysafe.runtime.checks import checked_limit, operator_outcome, require_waiting_threads
from retrysafe.runtime.closing import Limit, end_within
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.group_commit.threads import ThreadGroupCommit
from retrysafe.runtime.heartbeat import ThreadHeartbeat
from retrysafe.runtime.identity import owner_name
from retrysafe.runtime.measuring import Tell, measure_in_thread
from retrysafe.runtime.operations import Operations
from retrysafe.runtime.thread_ports import ThreadClock, thread_ports, thread_writer

T = TypeVar("T")
C = TypeVar("C")

_logger: Final = logging.getLogger("retrysafe")
Held_co = TypeVar("Held_co", covariant=True)


class _HoldsCalls(Protocol[Held_co]):
    """An `Idempotency` or an `AsyncIdempotency`."""

    @property
    def _calls(self) -> Held_co: ...


def calls_of(idempotency: _HoldsCalls[T]) -> T:
    """For adapters: what an `Idempotency` or an `AsyncIdempotency` asks itself."""
    return idempotency._calls  # noqa: SLF001 — the one way from the public objects to here.


def closed() -> Closed:
    """The refusal of a call after `close`."""
    return Closed("this object was closed and starts nothing new: make another one")


def still_running(count: int) -> InvalidInput:
    """The refusal to take away the store of calls that use it."""
    return InvalidInput(
        f"{count} calls of this object still run: attach a test kit before the first request, and "
        "let the requests end before the test does"
    )


# How often those who close a gate look by themselves whether somebody is inside.
_LOOK_SECONDS: Final = 0.25


class ThreadGate:
    """Counts threads.

    A call is a token in a dictionary, which no signal can leave half-way (decision 31). Whoever
    leaves takes its token out of `inside` by itself, and then calls `notify`.
    """

    def __init__(self) -> None:
        self.inside: dict[object, None] = {}
        # Where those wait who close it: plain locks, not events, see decision 31.
        self._closers: dict[threading.Lock, None] = {}
        self.is_closed = False

    def enter(self, token: object) -> None:
        """Lets a call in; raises `Closed`. The caller takes its token out in any case."""
        # In this order: `close` sets its mark before it looks, so one of the two sees the other.
        self.inside[token] = None
        if self.is_closed:
            raise closed()

    def notify(self) -> None:
        """Has those who close it look again."""
        for closer in self._closers.copy():
            with suppress(RuntimeError):  # Told before, and not looked at yet.
                closer.release()

    def close(self, wait_seconds: float) -> bool:
        """Lets nobody in any more, and waits for those inside; False when the time ran out."""
        until = time.monotonic() + wait_seconds
        self.is_closed = True
        closer = threading.Lock()
        closer.acquire()
        try:
            self._closers[closer] = None
            while self.inside:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                # Not to the end: a signal may have kept the last one from notifying.
                closer.acquire(timeout=min(left, _LOOK_SECONDS))
            return True
        finally:
            self._closers.pop(closer, None)


class Calls:
    """Answers calls in the threads that ask for them."""

    def __init__(
        self, store: Store, settings: Settings, report: Reporter, *, owns_store: bool = False
    ) -> None:
        """Raises `InvalidInput` for a store of event loops, and for threads that cannot wait."""
        if store.capabilities.waits is Waits.SUSPENDING:
            raise InvalidInput("this store needs an event loop: use AsyncIdempotency with it")
        self.store = store
        self.settings = settings
        self.operations = Operations(settings)
        # Also for what happens outside of the engine.
        self.report = report
        self.run_times = RunTimes()
        self.owns_store = owns_store
        self._build()
        forks.register(self)

    def _build(self) -> None:
        # Here and not only when it is made: a preloaded application is patched after that.
        require_waiting_threads()
        store, report = self.store, self.report
        self._gate = ThreadGate()
        self._heartbeat = ThreadHeartbeat(store, report, ThreadClock.monotonic)
        self._writer = thread_writer(store)
        self._ports = thread_ports(store, report, self.run_times, self._writer, self._heartbeat)
        self._engine = Engine(self._ports, self.settings)
        # Whether to look for an event loop that waits for this object; told once.
        self._looks_for_loop = store.capabilities.waits is Waits.BLOCKING

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

    def replace_store(self, store: Store, settings: Settings, *, owns_store: bool) -> None:
        """Goes on with another store and other settings; for tests.

        Raises `InvalidInput` while calls run.
        """
        if self._gate.inside:
            raise still_running(len(self._gate.inside))
        self._heartbeat.stop(_LOOK_SECONDS)
        self.store, self.settings, self.owns_store = store, settings, owns_store
        self._build()

    # Answers.

    def answer(
        self,
        call: Call,
        operation: Callable[..., Any],
        args: Any,
        kwargs: Any,
        transacting: ThreadTransacting | None = None,
    ) -> Answer[Any]:
        """Answers a call by its operation with these arguments, unless it has an outcome.

        Raises as `Idempotency.run` does.
        """
        forks.refresh_if_stale()
        if self._looks_for_loop and _get_running_loop() is not None:
            self._looks_for_loop = False
            _logger.warning(
                "Idempotency is used inside a running event loop, which stands still meanwhile, "
                "with everything else on it: use AsyncIdempotency, and await it"
            )
        gate = self._gate
        # Also what the gate knows this call by.
        flow = self._engine.answer(call, operation, args, kwargs, transacting)
        try:
            try:
                gate.enter(flow)
                return run_sync(flow)
            finally:
                # The gate, or a signal before its first step, may have kept it from running, and
                # Python warns of a flow that was never begun. One that has ended takes no notice.
                flow.close()
        finally:
            # Here, by one call of C: decision 31.
            gate.inside.pop(flow, None)
            if gate.is_closed:
                gate.notify()

    async def resume(
        self,
        call: Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Answer[Any]:
        """The same for a worker."""
        return self.answer(call, function, args, kwargs)

    def answer_call(self, call: Call, operation: Callable[[Attempt], T]) -> Answer[T]:
        """Answers a call that an adapter has put together; the operation gets its attempt."""
        return self.answer(call, operation, None, None)

    def answer_atomic(
        self,
        call: Call,
        transaction: Callable[[], AbstractContextManager[C]],
        operation: Callable[[AtomicAttempt[C]], T],
    ) -> Answer[T]:
        """Answers a call in a transaction, with its outcome and what it wrote.

        `transaction` opens one and gives its connection; it commits at the end and rolls back on
        any exception. It is asked only when neither this process nor a run in it has the answer.
        Raises as `run` does, and `StoreUnavailable` for a transaction that could not be had.
        """

        async def invoke(attempt: AtomicAttempt[C]) -> T:
            return operation(attempt)

        return self.answer(call, invoke, None, None, ThreadTransacting(transaction))

    # What is known without asking the store.

    def recall(self, call: Call) -> Answer[Any] | None:
        """The answer when this process remembers it; None when it does not.

        Raises `KeyReused`, the stored failure or `OutcomeUnavailable`.
        """
        forks.refresh_if_stale()
        return self._engine.recall(call)

    def is_in_flight(self, call: Call) -> bool:
        """Whether the key's operation is known to run, here or elsewhere."""
        return self._engine.is_in_flight(call)

    def is_claiming(self, call: Call) -> bool:
        """Whether the store has not yet said what a key is that is asked for here."""
        return self._engine.is_claiming(call)

    def let_go(self, call: Call) -> None:
        """Nobody is going to run this call, so its claim is not to stay.

        In threads there is nothing to do: who asks for a key waits there until it has an answer.
        """

    # In a user's transaction.

    def atomic(self, call: Call, connection: C) -> AtomicContext[C]:
        """The atomic block of a call; raises `InvalidInput` for an unknown connection."""
        forks.refresh_if_stale()
        transaction = self._ports.executor.join_step(connection)
        block = AtomicBlock(call, transaction, self._ports, self.settings)
        return AtomicContext(block, connection, self._gate)

    def stage(self, connection: object, entry: StagedEntry) -> str:
        """Writes an entry of no operation; returns its key."""
        forks.refresh_if_stale()
        return run_sync(stage_in(self._ports.executor.join_step(connection), entry))

    # Looking after the store.

    @property
    def policy(self) -> Policy:
        """The policy of calls that bring none of their own."""
        return self.settings.policy

    def read(self, key: Key, *, with_audit: bool) -> StoredKey | None:
        """The stored record of a key."""
        forks.refresh_if_stale()
        return run_sync(self.store.read(key, with_audit=with_audit))

    def operate(self, key: Key, command: OperatorCommand, reason: str) -> None:
        """Applies an operator's command; raises `OperatorRefused`."""
        forks.refresh_if_stale()
        decision = run_sync(self.store.operate(key, command, OperatorNote(owner_name(), reason)))
        if decision is Decision.APPLY:
            self._engine.forget(key)
        operator_outcome(decision, command, key, run_sync(self.store.read(key)))

    def sweep(self, limit: int) -> SweepReport:
        """Removes what is past its windows; raises `InvalidInput` for a limit below 1."""
        limit = checked_limit(limit)
        forks.refresh_if_stale()
        return run_sync(self.store.sweep(limit))

    def measure(self, tell: Tell) -> None:
        """Has the size of the store told to a function, later and from another thread."""
        forks.refresh_if_stale()
        measure_in_thread(self.store, tell)

    def close(self, wait: timedelta) -> bool:
        """Starts nothing new and waits for running operations; False when some still run."""
        limit = Limit(wait)
        forks.refresh_if_stale()
        has_ended = self._gate.close(limit.seconds)
        limit.spare_the_ending()
        self._heartbeat.stop(limit.left_seconds)
        if self.owns_store:
            end_within(self._close_store, limit)
        return has_ended

    def _close_store(self) -> None:
        run_sync(self.store.close())
