"""Atomic mode for tasks: a block in the user's transaction, and a decorator that makes one."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.atomic.complete_in import stage_in
from retrysafe.core.call import Call
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.framing import Part
from retrysafe.core.keys.key import Key
from retrysafe.core.outbox.staging import Staging
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Ports, Transaction, Waits
from retrysafe.core.settings import CallerSource, Settings
from retrysafe.runtime.atomic_threads import with_connection
from retrysafe.runtime.checks import require_async
from retrysafe.runtime.describe import KeySource
from retrysafe.runtime.face import Face
from retrysafe.runtime.gate import TaskGate
from retrysafe.runtime.threaded_transaction import joined
from retrysafe.transactions import is_outage

P = ParamSpec("P")
T = TypeVar("T")


class AsyncAtomicRun:
    """What an atomic block works with: the outcome to replay, or the run that is to give one."""

    __slots__ = ("_block",)

    def __init__(self, block: AtomicBlock) -> None:
        self._block = block

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


class AsyncAtomicContext:
    """The `async with` statement of an atomic block."""

    def __init__(
        self,
        call: Call,
        transaction: Transaction,
        settings: Settings,
        bound: Callable[[], tuple[Ports, TaskGate]],
    ) -> None:
        self._call = call
        self._transaction = transaction
        self._settings = settings
        self._bound = bound
        self._block: AtomicBlock | None = None

    async def __aenter__(self) -> AsyncAtomicRun:
        # Asked for here: the block may have been made where no loop runs.
        ports, self._gate = self._bound()
        block = self._block
        if block is None:
            self._block = block = AtomicBlock(self._call, self._transaction, ports, self._settings)
        self._gate.enter()
        try:
            await block.enter()
        except BaseException:
            self._gate.leave()
            raise
        return AsyncAtomicRun(block)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        try:
            assert self._block is not None  # Made on entering.
            await self._block.leave(error)
        finally:
            self._gate.leave()
        return False


class TaskTransacting:
    """The transactions that an adapter's function opens, for an engine of tasks."""

    __slots__ = ("open",)

    def __init__(self, transaction: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self.open = transaction

    def is_outage(self, error: Exception) -> bool:
        """Whether a retry can help."""
        return is_outage(error)


class AtomicTasks(Face, ABC):
    """The atomic mode of a face for asyncio."""

    @abstractmethod
    def _atomic_ports(self) -> tuple[Ports, TaskGate]:
        """The ports and the gate of the running loop."""

    def atomic(
        self,
        connection: object,
        key: str | Key,
        *,
        caller: CallerSource | None = None,
        name: str = "",
        request: object = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        returns: type | tuple[type, ...] | None = None,
    ) -> AsyncAtomicContext:
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

    def _atomic_context(self, call: Call, connection: object) -> AsyncAtomicContext:
        transaction = joined(self._store, connection, Waits.SUSPENDING)
        return AsyncAtomicContext(call, transaction, self._settings, self._atomic_ports)

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
        transaction = joined(self._store, connection, Waits.SUSPENDING)
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
