"""Atomic mode for threads: a block in the user's transaction, and a decorator that makes one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from retrysafe import forks
from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.atomic.complete_in import stage_in
from retrysafe.core.call import Call
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.framing import Part
from retrysafe.core.keys.key import Key
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Waits
from retrysafe.runtime.checks import require_plain
from retrysafe.runtime.describe import CallerSource, KeySource, owner_name
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.face import Face, mint_token
from retrysafe.runtime.gate import ThreadGate
from retrysafe.runtime.local_clocks import ThreadClock
from retrysafe.transactions import is_outage

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")


class AtomicRun(Generic[C]):
    """What an atomic block works with: the outcome to replay, or the run that is to give one.

    `connection` is the one that the block was made with: what is written on it commits with the
    outcome.
    """

    __slots__ = ("_block", "connection")

    def __init__(self, block: AtomicBlock, connection: C) -> None:
        self._block = block
        self.connection = connection

    @property
    def key(self) -> Key:
        """The key of the run."""
        return self._block.call.key

    @property
    def replayed(self) -> bool:
        """Whether an earlier run gave the outcome: use `value`, and write nothing."""
        return self._block.replayed

    @property
    def value(self) -> Any:
        """The outcome: replayed, or given to `complete`; raises `OutcomeMissing` before that."""
        return self._block.value

    @property
    def attempt(self) -> int:
        """Which attempt this is, or which one gave the outcome."""
        return self._block.attempt

    def complete(self, value: Any) -> None:
        """Stores the outcome, to be committed with everything else.

        Raises `ClaimLost` when the claim was rolled back inside the block, and `InvalidInput` when
        the value cannot be stored; let both end the transaction.
        """
        run_sync(self._block.complete(value))

    def fail(self, error: Exception) -> None:
        """Stores a failure for good, to be committed; every later use of the key raises it."""
        run_sync(self._block.fail(error))

    @property
    def outbox(self) -> Staging:
        """What is delivered once your transaction has committed with the outcome in it."""
        return self._block.outbox

    def child_key(self, *parts: Part) -> str:
        """The key for a call downstream; raises `SecretMissing`."""
        return self._block.child_key(*parts)


class AtomicContext(Generic[C]):
    """The `with` statement of an atomic block."""

    def __init__(self, block: AtomicBlock, connection: C, gate: ThreadGate) -> None:
        self._block = block
        self._connection = connection
        self._gate = gate

    def __enter__(self) -> AtomicRun[C]:
        # Made first: a signal that raises after the block is entered leaves it so, because then
        # nobody calls `__exit__`.
        run = AtomicRun(self._block, self._connection)
        try:
            self._gate.enter(self)
            run_sync(self._block.enter())
        except BaseException:
            # Here, by one call of C: a signal may raise at the entry of a function, and closing
            # would wait for this block until its time is over.
            self._gate.inside.pop(self, None)
            self._gate.tell()
            raise
        return run

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        try:
            run_sync(self._block.leave(error))
        finally:
            self._gate.inside.pop(self, None)  # As in `__enter__`.
            self._gate.tell()
        return False


class _Opened(AbstractAsyncContextManager[Any]):
    """A plain context manager where an async one is expected; it never suspends."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    async def __aenter__(self) -> Any:
        return self._context.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)


class ThreadTransacting:
    """The transactions that an adapter's function opens, for an engine of threads."""

    __slots__ = ("_transaction", "block")

    def __init__(
        self,
        transaction: Callable[[], AbstractContextManager[Any]],
        block: Callable[[Call, Any], AtomicBlock],
    ) -> None:
        self._transaction = transaction
        self.block = block

    def open(self) -> AbstractAsyncContextManager[Any]:
        """The next transaction."""
        return _Opened(self._transaction())

    def is_outage(self, error: Exception) -> bool:
        """Whether a retry can help."""
        return is_outage(error)


class AtomicThreads(Face):
    """The atomic mode of a face for threads."""

    _gate: ThreadGate

    def atomic(
        self,
        connection: C,
        key: str | Key,
        *,
        caller: CallerSource | None = None,
        name: str = "",
        request: object = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
    ) -> AtomicContext[C]:
        """A block whose writes and whose outcome commit together, in your open transaction.

        `connection` is a psycopg connection, a SQLAlchemy connection or session, Django's
        connection, or a `sqlite3.Connection` to the store's file. Entering raises
        `TransactionMissing`, `KeyReused`, `OperationInFlight`, the stored failure or
        `OutcomeUnavailable`; leaving without an outcome raises `OutcomeMissing`. Whatever leaves
        the block as an exception undoes what the block wrote.
        """
        call = self._atomic_call(
            key,
            caller=caller,
            name=name,
            request=request,
            policy=policy,
            rule=rule,
            returns=returns,
        )
        return self._atomic_context(call, connection)

    def _atomic_context(self, call: Call, connection: C) -> AtomicContext[C]:
        forks.refresh_if_stale()
        return AtomicContext(self._atomic_block(call, connection), connection, self._gate)

    def _atomic_block(self, call: Call, connection: object) -> AtomicBlock:
        return AtomicBlock(
            call,
            self._join(connection, Waits.BLOCKING),
            waiting=ThreadClock(),
            mint_token=mint_token,
            report=self._report,
            owner=owner_name(),
            secrets=self._settings.secrets,
            has_outbox=self._store.capabilities.has_outbox,
            run_times=self.run_times,
        )

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
        entry = self._staged(topic, payload, key, aggregate, deliver_at, content_type)
        forks.refresh_if_stale()
        transaction = self._join(connection, Waits.BLOCKING)
        return run_sync(stage_in(transaction, entry))

    def atomic_once(
        self,
        *,
        key: KeySource,
        connection: str,
        window: timedelta | None = None,
        caller: CallerSource | None = None,
        name: str | None = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        ignore: Iterable[str] = (),
        returns: type | tuple[type, ...] | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorates a function so that each key runs it once, as an atomic block.

        `connection` names the parameter that holds the connection. What the function returns is
        the outcome; what it raises undoes what it wrote. The rest is as in `once`.
        """

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
                ignore=with_connection(ignore, connection),
                returns=returns,
            )

            @functools.wraps(function)
            def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = decoration.call(args, kwargs)
                used = decoration.argument(connection, args, kwargs)
                with self._atomic_context(call, used) as run:
                    if not run.replayed:
                        run.complete(function(*args, **kwargs))
                value: T = run.value
                return value

            return run_once

        return decorate


def with_connection(ignore: Iterable[str], connection: str) -> Iterable[str]:
    """The parameters that are not part of the request; a lone text is refused further on."""
    return ignore if isinstance(ignore, str) else (*ignore, connection)
