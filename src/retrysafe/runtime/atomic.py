"""Atomic mode: a block in the user's transaction, for threads and for tasks.

Owns how a block is entered and left by a `with` statement. What a block does, the core says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from retrysafe.core.atomic.block import AtomicBlock
from retrysafe.core.atomic.run import InTransaction
from retrysafe.core.call import Call
from retrysafe.core.model import StagedEntry
from retrysafe.core.outbox.staging import staged_entry
from retrysafe.core.ports import Store, Transaction
from retrysafe.errors import InvalidInput
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.identity import mint_token
from retrysafe.transactions import is_outage

if TYPE_CHECKING:
    from retrysafe.runtime.async_calls import BoundLoop, TaskGate
    from retrysafe.runtime.calls import ThreadGate

C = TypeVar("C")


class _Run(InTransaction[C]):
    """What an atomic block works with: the outcome to replay, or the run that is to give one.

    `connection` is the one that the block was made with: what is written on it commits with the
    outcome.
    """

    __slots__ = ()

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


class AtomicRun(_Run[C]):
    """What an atomic block works with in threads."""

    __slots__ = ()

    def complete(self, value: Any) -> None:
        """Stores the outcome, to be committed with everything else.

        Raises `ClaimLost` when the claim was rolled back inside the block, and `InvalidInput` when
        the value cannot be stored; let both end the transaction.
        """
        run_sync(self._block.complete(value))

    def fail(self, error: Exception) -> None:
        """Stores a failure for good, to be committed; every later use of the key raises it."""
        run_sync(self._block.fail(error))


class AsyncAtomicRun(_Run[C]):
    """What an atomic block works with on an event loop."""

    __slots__ = ()

    async def complete(self, value: Any) -> None:
        """Stores the outcome, to be committed with everything else; raises as `AtomicRun` does."""
        await self._block.complete(value)

    async def fail(self, error: Exception) -> None:
        """Stores a failure for good, to be committed; every later use of the key raises it."""
        await self._block.fail(error)


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
            # Here, by one call of C: decision 31.
            self._gate.inside.pop(self, None)
            self._gate.notify()
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
            self._gate.notify()
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

    __slots__ = ("_transaction",)

    def __init__(self, transaction: Callable[[], AbstractContextManager[Any]]) -> None:
        self._transaction = transaction

    def open(self) -> AbstractAsyncContextManager[Any]:
        """The next transaction."""
        return _Opened(self._transaction())

    def is_outage(self, error: Exception) -> bool:
        """Whether a retry can help."""
        return is_outage(error)


class AsyncAtomicContext(Generic[C]):
    """The `async with` statement of an atomic block."""

    def __init__(
        self, call: Call, transaction: Transaction, connection: C, bound: Callable[[], BoundLoop]
    ) -> None:
        self._call = call
        self._transaction = transaction
        self._connection = connection
        self._bound = bound
        self._block: AtomicBlock | None = None
        self._gate: TaskGate

    async def __aenter__(self) -> AsyncAtomicRun[C]:
        # Asked for here: the block may have been made where no loop runs.
        bound = self._bound()
        if self._block is None:
            self._block = AtomicBlock(self._call, self._transaction, bound.ports, bound.settings)
        self._gate = bound.gate
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
        assert self._block is not None  # Made on entering.
        try:
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


def new_entry(
    store: Store,
    topic: str,
    payload: Any,
    *,
    key: str | None,
    aggregate: str | None,
    deliver_at: datetime | None,
    content_type: str | None,
) -> StagedEntry:
    """An entry of no operation; its key is random unless one is given. Raises `InvalidInput`."""
    if not store.capabilities.has_outbox:
        raise InvalidInput(f"{type(store).__name__} has no outbox to stage entries in")
    return staged_entry(
        f"entry:{mint_token().hex()}" if key is None else key,
        topic,
        payload,
        aggregate=aggregate,
        deliver_at=deliver_at,
        content_type=content_type,
    )


def with_connection(ignore: Iterable[str], connection: str) -> Iterable[str]:
    """The parameters that are not part of the request; a lone text is refused further on."""
    return ignore if isinstance(ignore, str) else (*ignore, connection)
