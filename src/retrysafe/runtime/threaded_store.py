"""An async store over a blocking one: every call is one hop to a worker thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Extension,
    OperatorCommand,
    RecordQuery,
    Settlement,
    StepWrite,
    StoredKey,
    StoredOutcome,
    SweepReport,
)
from retrysafe.core.outbox.port import outbox_of
from retrysafe.core.ports import (
    Capabilities,
    ClaimResult,
    ExtendResult,
    Fate,
    SettleResult,
    Store,
    Transaction,
    Waits,
)
from retrysafe.reentry import require_outside
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.thread_pool import ThreadPool
from retrysafe.runtime.threaded_outbox import ThreadedOutbox

T = TypeVar("T")

# One for the batch under way and one for steps and operators, which must not queue behind it.
# Renewals do not come this way: the heartbeat's own thread asks the blocking store.
WORKERS: Final = 2


class ThreadedStore:
    """The same store, for event loops."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = _workers()

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store, but suspending."""
        return replace(self._store.capabilities, waits=Waits.SUSPENDING)

    @property
    def outbox(self) -> ThreadedOutbox:
        """The store's entries; raises `InvalidInput` when it has none."""
        return ThreadedOutbox(outbox_of(self._store), self._hop)

    async def _hop(self, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        # Also after `close`: an operation that outlived it must still store its outcome. The flow
        # is made in the worker: a cancelled hop must not leave one that never ran.
        return await self._pool.run(drive_in_thread, method, args)

    async def _write(self, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """As `_hop`, for what the task itself writes; raises inside of an atomic block."""
        self.require_outside()
        return await self._hop(method, *args)

    def require_outside(self) -> None:
        """Raises `StoreUnavailable` where this task would wait for an atomic block of its own."""
        require_outside(self._store, asyncio.current_task())

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimResult], list[SettleResult]]:
        """Makes a batch durable."""
        return await self._hop(self._store.commit, claims, settlements)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendResult]:
        """Extends leases."""
        return await self._hop(self._store.extend, extensions, timeout_seconds)

    async def record_step(self, write: StepWrite) -> Decision:
        """Stores a step's result."""
        return await self._write(self._store.record_step, write)

    async def read(self, key: Key, *, with_audit: bool = False) -> StoredKey | None:
        """The record of a key."""
        return await self._hop(partial(self._store.read, with_audit=with_audit), key)

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The newest ending of a key."""
        return await self._hop(self._store.last_outcome, key)

    async def list_records(self, query: RecordQuery) -> list[StoredKey]:
        """Records for an operator."""
        return await self._hop(self._store.list_records, query)

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """Records that nobody holds any more."""
        return await self._hop(self._store.list_abandoned, limit)

    async def list_resumable(
        self, limit: int, after: bytes, operations: Sequence[str]
    ) -> list[StoredKey]:
        """Those that have arguments."""
        return await self._hop(self._store.list_resumable, limit, after, operations)

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims an abandoned key for a worker."""
        return await self._hop(self._store.take_over, request, held)

    async def operate(self, key: Key, command: OperatorCommand) -> Decision:
        """Applies an operator's command."""
        return await self._write(self._store.operate, key, command)

    async def sweep(self, limit: int) -> SweepReport:
        """Removes what is past its windows."""
        return await self._write(self._store.sweep, limit)

    def asking_elsewhere(self, transaction: Transaction) -> Transaction:
        """The user's transaction, whose fate is asked for in a worker and not on the loop."""
        return cast("Transaction", _AskedElsewhere(transaction, self._hop))

    async def close(self) -> None:
        """Closes the store, then ends the workers; the next use starts new ones."""
        await self._hop(self._store.close)
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
                run_sync(self._store.close())
            pool.close()

        return end


class _AskedElsewhere:
    """A blocking transaction, used where its owner runs and looked at by the loop.

    The owner's own calls go straight through, in the owner's thread.
    """

    def __init__(self, transaction: Transaction, hop: Callable[..., Awaitable[Fate]]) -> None:
        self._transaction = transaction
        self._hop = hop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def fate(self, settlement: Settlement) -> Fate:
        return await self._hop(self._transaction.fate, settlement)


def _workers() -> ThreadPool:
    return ThreadPool(WORKERS, "retrysafe-store")


def drive_in_thread(method: Callable[..., Coroutine[Any, Any, T]], args: tuple[object, ...]) -> T:
    """Runs a method of a blocking store to its end."""
    return run_sync(method(*args))
