"""What blocks, on an event loop: every call of a method is one hop to a worker thread.

Owns the hop, and what is different there for a store and for a user's transaction. What the methods
are, their ports say; there is no list of them here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    NO_NOTE,
    Decision,
    OperatorCommand,
    OperatorNote,
    Settlement,
    StepWrite,
    SweepReport,
)
from retrysafe.core.outbox.port import Outbox, outbox_of
from retrysafe.core.ports import Capabilities, Fate, Store, Transaction, Waits
from retrysafe.errors import InvalidInput
from retrysafe.reentry import OpenBlock, require_outside
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.thread_pool import ThreadPool

T = TypeVar("T")
Method = Callable[..., Coroutine[Any, Any, T]]

# One for the batch under way and one for steps and operators, which must not queue behind it.
# Renewals do not come this way: the heartbeat's own thread asks the blocking store.
WORKERS: Final = 2


def _drive(method: Method[T], args: Any, kwargs: Any) -> T:
    # The flow is made in the worker: a cancelled hop must not leave one that never ran.
    return run_sync(method(*args, **kwargs))


class Threaded:
    """The same object, with its methods called in worker threads."""

    def __init__(self, blocking: Any, pool: ThreadPool) -> None:
        self._blocking = blocking
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not defined here: the methods of the port, and what it tells of itself.
        found = getattr(self._blocking, name)
        return partial(self._hop, found) if callable(found) else found

    async def _hop(self, method: Method[T], *args: Any, **kwargs: Any) -> T:
        return await self._pool.run(_drive, method, args, kwargs)


class ThreadedStore(Threaded):
    """A blocking store. Also after `close`: what outlived it must still store its outcome."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, _workers())

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store, but suspending."""
        capabilities: Capabilities = self._blocking.capabilities
        return replace(capabilities, waits=Waits.SUSPENDING)

    @property
    def outbox(self) -> Outbox:
        """The store's entries; raises `InvalidInput` when it has none."""
        return cast("Outbox", Threaded(outbox_of(self._blocking), self._pool))

    # What a task writes by itself, and not in a batch that another task carries: it raises inside
    # of an atomic block of the task.

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result."""
        return await self._write(self._blocking.record_step, write)

    async def operate(
        self, key: Key, command: OperatorCommand, note: OperatorNote = NO_NOTE
    ) -> Decision:
        """Applies an operator's command."""
        return await self._write(self._blocking.operate, key, command, note)

    async def sweep(self, limit: int) -> SweepReport:
        """Removes what is past its windows."""
        return await self._write(self._blocking.sweep, limit)

    async def _write(self, method: Method[T], *args: Any) -> T:
        self.require_outside()
        return await self._hop(method, *args)

    def require_outside(self) -> None:
        """Raises `StoreUnavailable` where this task would wait for an atomic block of its own."""
        require_outside(self._blocking, asyncio.current_task())

    def asking_elsewhere(self, transaction: Transaction) -> Transaction:
        """The user's transaction, whose fate is asked for in a worker and not on the loop."""
        return cast("Transaction", _AskedElsewhere(transaction, self))

    async def close(self) -> None:
        """Closes the store, then ends the workers; the next use starts new ones."""
        await self._hop(self._blocking.close)
        self.end_workers()

    def end_workers(self) -> None:
        """Ends the workers and leaves the store open: somebody else owns it."""
        self._pool.close()

    def ending(self, *, with_store: bool) -> Callable[[], None]:
        """Takes the workers away at once; what comes back ends them, and may wait in doing so.

        Whoever uses the store meanwhile gets new ones.
        """
        pool, self._pool = self._pool, _workers()

        def end() -> None:
            if with_store:
                run_sync(self._blocking.close())
            pool.close()

        return end


def _workers() -> ThreadPool:
    return ThreadPool(WORKERS, "retrysafe-store")


class _AskedElsewhere:
    """A blocking transaction, used where its owner runs and looked at by the loop.

    The owner's own calls go straight through, in the owner's thread.
    """

    def __init__(self, transaction: Transaction, store: ThreadedStore) -> None:
        self._transaction = transaction
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def fate(self, settlement: Settlement) -> Fate:
        return await self._store._hop(self._transaction.fate, settlement)  # noqa: SLF001 — its own.


class ThreadedTransaction(Threaded):
    """A user's blocking transaction.

    It has a thread of its own: in a shared pool, the many who wait for a lock would take every
    thread, and the one who holds it could not give it back.
    """

    waits = Waits.SUSPENDING

    def __init__(self, transaction: Transaction, store: Store) -> None:
        super().__init__(transaction, ThreadPool(1, "retrysafe-transaction"))
        self._store = store
        self._block: OpenBlock | None = None

    async def _last_hop(self, method: Method[T], *args: Any) -> T:
        """As `_hop`, and ends the thread; whoever asks once more gets a new one."""
        try:
            return await self._hop(method, *args)
        finally:
            # Without waiting: after a cancellation the statement may still be under way.
            self._pool.end()

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Keeps other transactions off the key."""
        is_locked: bool = await self._hop(self._blocking.lock, key, wait_seconds)
        if is_locked and self._store.capabilities.has_one_writer:
            # Port `SoleWriter`.
            is_open = getattr(self._blocking, "is_open", None)
            self._block = OpenBlock(self._store, asyncio.current_task(), is_open)
        return is_locked

    async def keep(self) -> None:
        """Hands what was written to the user's transaction."""
        self._leave_block()
        await self._last_hop(self._blocking.keep)

    async def undo(self) -> None:
        """Takes back everything since `begin`."""
        self._leave_block()
        await self._last_hop(self._blocking.undo)

    def _leave_block(self) -> None:
        if self._block is not None:
            self._block.leave()
            self._block = None

    async def fate(self, settlement: Settlement) -> Fate:
        """What became of a settlement."""
        return await self._last_hop(self._blocking.fate, settlement)

    async def step_fate(self, write: StepWrite) -> Fate:
        """What became of a step."""
        return await self._last_hop(self._blocking.step_fate, write)


def joined(store: Store, connection: object, waits: Waits | None) -> Transaction:
    """The user's transaction, if the store can work in it and it waits as it must.

    None takes either kind. Raises `InvalidInput`.
    """
    join: Callable[[object], Transaction] | None = getattr(store, "join", None)
    if join is None:
        raise InvalidInput(
            f"{type(store).__name__} has no transactions to join: atomic mode needs a PostgreSQL "
            "or a SQLite store. In tests use sqlite:/// and a file instead of memory://"
        )
    transaction = join(connection)
    # A store that blocks is used through a thread, and so are its transactions.
    is_hop = waits is Waits.SUSPENDING and transaction.waits is Waits.BLOCKING
    if is_hop and store.capabilities.waits is Waits.BLOCKING:
        return cast("Transaction", ThreadedTransaction(transaction, store))
    if waits is not None and transaction.waits is not waits:
        needed = "Idempotency" if transaction.waits is Waits.BLOCKING else "AsyncIdempotency"
        kind = type(connection)
        raise InvalidInput(f"use {needed} with {kind.__module__}.{kind.__qualname__}")
    return transaction
