"""Atomic mode for tasks: a block in the user's transaction, and a decorator that makes one."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.atomic.complete_in import stage_in
from retrysafe.core.call import Call
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.framing import Part
from retrysafe.core.keys.key import Key
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Waits
from retrysafe.runtime.atomic_threads import with_connection
from retrysafe.runtime.checks import require_async
from retrysafe.runtime.describe import CallerSource, KeySource, owner_name
from retrysafe.runtime.face import Face, mint_token
from retrysafe.runtime.gate import TaskGate
from retrysafe.runtime.local_clocks import TaskClock
from retrysafe.transactions import is_outage

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")


class AsyncAtomicRun(Generic[C]):
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

    async def complete(self, value: Any) -> None:
        """Stores the outcome, to be committed with everything else; raises as `AtomicRun` does."""
        await self._block.complete(value)

    async def fail(self, error: Exception) -> None:
        """Stores a failure for good, to be committed; every later use of the key raises it."""
        await self._block.fail(error)

    @property
    def outbox(self) -> Staging:
        """What is delivered once your transaction has committed with the outcome in it."""
        return self._block.outbox

    def child_key(self, *parts: Part) -> str:
        """The key for a call downstream; raises `SecretMissing`."""
        return self._block.child_key(*parts)


class AsyncAtomicContext(Generic[C]):
    """The `async with` statement of an atomic block."""

    def __init__(
        self, block: AtomicBlock, connection: C, bound_gate: Callable[[], TaskGate]
    ) -> None:
        self._block = block
        self._connection = connection
        self._bound_gate = bound_gate

    async def __aenter__(self) -> AsyncAtomicRun[C]:
        # Asked for here: the block may have been made where no loop runs.
        self._gate = self._bound_gate()
        self._gate.enter()
        try:
            await self._block.enter()
        except BaseException:
            self._gate.leave()
            raise
        return AsyncAtomicRun(self._block, self._connection)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        try:
            await self._block.leave(error)
        finally:
            self._gate.leave()
        return False


class TaskTransacting:
    """The transactions that an adapter's function opens, for an engine of tasks."""

    __slots__ = ("block", "open")

    def __init__(
        self,
        transaction: Callable[[], AbstractAsyncContextManager[Any]],
        block: Callable[[Call, Any], AtomicBlock],
    ) -> None:
        self.open = transaction
        self.block = block

    def is_outage(self, error: Exception) -> bool:
        """Whether a retry can help."""
        return is_outage(error)


class AtomicTasks(Face, ABC):
    """The atomic mode of a face for asyncio."""

    @abstractmethod
    def _atomic_gate(self) -> TaskGate:
        """The gate of the running loop."""

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
    ) -> AsyncAtomicContext[C]:
        """A block whose writes and whose outcome commit together, in your open transaction.

        `connection` is an async psycopg connection, an asyncpg connection, or an async connection
        or session of SQLAlchemy. Raises as the blocking face does.
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

    def _atomic_context(self, call: Call, connection: C) -> AsyncAtomicContext[C]:
        return AsyncAtomicContext(
            self._atomic_block(call, connection), connection, self._atomic_gate
        )

    def _atomic_block(self, call: Call, connection: object) -> AtomicBlock:
        return AtomicBlock(
            call,
            self._join(connection, Waits.SUSPENDING),
            waiting=TaskClock(),
            mint_token=mint_token,
            report=self._report,
            owner=owner_name(),
            secrets=self._settings.secrets,
            has_outbox=self._store.capabilities.has_outbox,
            run_times=self.run_times,
        )

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

        Takes what the blocking face takes, and raises as it does.
        """
        entry = self._staged(topic, payload, key, aggregate, deliver_at, content_type)
        transaction = self._join(connection, Waits.SUSPENDING)
        return await stage_in(transaction, entry)

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
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Decorates an async function so that each key runs it once, as an atomic block.

        `connection` names the parameter that holds the connection. What the function returns is
        the outcome; what it raises undoes what it wrote. The rest is as in `once`.
        """

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            require_async(function)
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
            async def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = decoration.call(args, kwargs)
                used = decoration.argument(connection, args, kwargs)
                async with self._atomic_context(call, used) as run:
                    if not run.replayed:
                        await run.complete(await function(*args, **kwargs))
                value: T = run.value
                return value

            return run_once

        return decorate
