"""Which task would wait for the lock of a store that an atomic block of its own holds.

Owns the marks of the blocks that are open in an event loop, on stores that have one writer at a
time. A call that is made from inside of one waits for the block's transaction, which waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from retrysafe.core.ports import Store, Transaction
from retrysafe.errors import StoreUnavailable


class OpenBlock:
    """A block that holds the lock of a store, until it is left or its transaction ends."""

    __slots__ = ("_has_lock", "_store", "_task")

    def __init__(self, store: Store, transaction: Transaction) -> None:
        self._store = store
        # Port `SoleWriter`. A transaction that cannot tell has the lock until the block is left.
        self._has_lock: Callable[[], bool] = getattr(transaction, "is_open", _always)
        # None once it is left: a task that was started inside has a copy of the marks.
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        _BLOCKS.set((*_open_ones(), self))

    def leave(self) -> None:
        """The lock is the user's transaction's from now on."""
        self._task = None
        # A copy of the marks must not keep the user's connection.
        self._has_lock = _always
        _BLOCKS.set(_open_ones())

    @property
    def is_open(self) -> bool:
        """Whether it was not left, and its transaction has not ended.

        Whoever enters a block by hand may never leave it, and a signal that raises just before the
        body keeps it from being left at all.
        """
        return self._task is not None and self._has_lock()

    def is_on(self, store: Store) -> bool:
        """Whether the block is this task's, is open and holds the lock of this store.

        A task that was started inside may wait, because the block goes on.
        """
        return self._store is store and self._task is asyncio.current_task() and self.is_open


def _always() -> bool:
    return True


_BLOCKS: Final[ContextVar[tuple[OpenBlock, ...]]] = ContextVar("retrysafe_own_blocks", default=())


def _open_ones() -> tuple[OpenBlock, ...]:
    return tuple(block for block in _BLOCKS.get() if block.is_open)


def require_outside(store: Store) -> None:
    """Raises `StoreUnavailable`, as stores do for threads, inside of an atomic block on it."""
    for block in _BLOCKS.get():
        if block.is_on(store):
            raise StoreUnavailable(
                "this is inside of an atomic block on the same store, and would wait for the "
                "block's own transaction: await run and once before the block, or after your commit"
            )
