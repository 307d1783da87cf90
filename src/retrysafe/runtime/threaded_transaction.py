"""Joining a user's transaction, and a blocking one in an event loop.

There every call is one hop to a worker thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Settlement,
    StagedEntry,
    StepWrite,
)
from retrysafe.core.ports import Fate, Store, Transaction, Waits
from retrysafe.errors import InvalidInput
from retrysafe.reentry import OpenBlock
from retrysafe.runtime.thread_pool import ThreadPool
from retrysafe.runtime.threaded_store import drive_in_thread

T = TypeVar("T")


class ThreadedTransaction:
    """The same transaction, for event loops.

    It has a thread of its own: in a shared pool, the many who wait for a lock would take every
    thread, and the one who holds it could not give it back.
    """

    waits = Waits.SUSPENDING

    def __init__(self, transaction: Transaction, store: Store) -> None:
        self._transaction = transaction
        self._store = store
        self._worker = ThreadPool(1, "retrysafe-transaction")
        self._block: OpenBlock | None = None

    async def _hop(self, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        return await self._worker.run(drive_in_thread, method, args)

    async def _last_hop(self, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """As `_hop`, and ends the thread; whoever asks once more gets a new one."""
        try:
            return await self._hop(method, *args)
        finally:
            # Without waiting: after a cancellation the statement may still be under way.
            self._worker.end()

    async def begin(self) -> None:
        """Marks the point that `undo` returns to."""
        await self._hop(self._transaction.begin)

    async def keep(self) -> None:
        """Hands what was written to the user's transaction."""
        self._leave_block()
        await self._last_hop(self._transaction.keep)

    async def undo(self) -> None:
        """Takes back everything since `begin`."""
        self._leave_block()
        await self._last_hop(self._transaction.undo)

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Keeps other transactions off the key."""
        is_locked = await self._hop(self._transaction.lock, key, wait_seconds)
        if is_locked and self._store.capabilities.has_one_writer:
            # Port `SoleWriter`.
            is_open = getattr(self._transaction, "is_open", None)
            self._block = OpenBlock(self._store, asyncio.current_task(), is_open)
        return is_locked

    def _leave_block(self) -> None:
        if self._block is not None:
            self._block.leave()
            self._block = None

    async def look(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would be answered."""
        return await self._hop(self._transaction.look, request)

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key under the lock."""
        return await self._hop(self._transaction.claim, request)

    async def sees_changes(self) -> bool:
        """Whether asking again can show what others commit."""
        return await self._hop(self._transaction.sees_changes)

    async def settle(self, settlement: Settlement) -> Decision:
        """Ends an attempt."""
        return await self._hop(self._transaction.settle, settlement)

    async def fate(self, settlement: Settlement) -> Fate:
        """What became of a settlement."""
        return await self._last_hop(self._transaction.fate, settlement)

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        """Writes outbox entries."""
        await self._hop(self._transaction.stage, entries)

    async def record_step(self, write: StepWrite) -> Decision:
        """Records a step."""
        return await self._hop(self._transaction.record_step, write)

    async def step_fate(self, write: StepWrite) -> Fate:
        """What became of a step."""
        return await self._last_hop(self._transaction.step_fate, write)


def joined(store: Store, connection: object, waits: Waits | None) -> Transaction:
    """The user's transaction, if the store can work in it and it waits as it must.

    None takes either kind. Raises `InvalidInput`.
    """
    join: Callable[[object], Transaction] | None = getattr(store, "join", None)
    if join is None:
        raise InvalidInput(
            f"{type(store).__name__} has no transactions to join: atomic mode needs a PostgreSQL "
            "or a SQLite store"
        )
    transaction = join(connection)
    if waits is Waits.SUSPENDING and transaction.waits is store.capabilities.waits:
        # A store that blocks is used through a thread, and so are its transactions.
        transaction = in_thread(transaction, store)
    if waits is not None and transaction.waits is not waits:
        needed = "Idempotency" if transaction.waits is Waits.BLOCKING else "AsyncIdempotency"
        kind = type(connection)
        raise InvalidInput(f"use {needed} with {kind.__module__}.{kind.__qualname__}")
    return transaction


def in_thread(transaction: Transaction, store: Store) -> Transaction:
    """The store's transaction for an event loop; one that suspends is as it should be."""
    if transaction.waits is Waits.BLOCKING:
        return ThreadedTransaction(transaction, store)
    return transaction
