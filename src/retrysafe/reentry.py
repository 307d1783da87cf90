"""Refuses whoever would wait for itself, for ever.

A signal's handler runs in the main thread, between two instructions of whatever that thread does.
If that is a store at work, and the handler calls the store, it waits for a lock that its own thread
holds. Owns the words for it. Who holds which lock, its owner notes beside the lock, or the lock
itself knows.

A call from inside of an atomic block, on a store with one writer at a time, waits for the block's
transaction, which waits for it. Owns the marks of the blocks that are open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from retrysafe.errors import StoreUnavailable

# A lock that its own thread may take again: without that, asking whether it holds it is a wait.
ReentrantLock = Any


def new_lock() -> ReentrantLock:
    """A lock for `unheld`."""
    return threading.RLock()


def unheld(lock: ReentrantLock, location: str) -> ReentrantLock:
    """The lock, to be taken by a `with`; raises `StoreUnavailable` when this thread holds it."""
    if lock._is_owned():  # noqa: SLF001 — no public name; conditions have asked it for ever.
        raise reentered(location)
    return lock


def reentered(location: str) -> StoreUnavailable:
    """For a call that came while the same thread was inside of what it asks for.

    No other kind of error: the batch that is refused may hold rows of others, who try again.
    """
    error = StoreUnavailable(
        f"this thread is at work in {location} already and would wait for itself: a signal's "
        "handler must not call retrysafe. Set a flag there, and act on it outside"
    )
    error.is_reentry = True
    return error


class OpenBlock:
    """An atomic block that holds a store's write lock, until it is left or its transaction ends.

    `lock` is what the store and its blocks know the lock by: a path, or the store itself. `owner`
    is the thread or the task that waits for the body of the block.
    """

    __slots__ = ("_has_transaction", "_lock", "_owner")

    def __init__(
        self, lock: object, owner: object, has_transaction: Callable[[], bool] | None
    ) -> None:
        self._lock = lock
        # None once it is left. This counts: a task or a thread that was started inside has a copy
        # of the marks.
        self._owner: object | None = owner
        # A transaction that cannot tell has the lock until the block is left.
        self._has_transaction = has_transaction or _always
        _BLOCKS.set((*_open_ones(), self))

    def leave(self) -> None:
        """The lock is the user's transaction's from now on."""
        self._owner = None
        # A copy of the marks must not keep the user's connection.
        self._has_transaction = _always
        _BLOCKS.set(_open_ones())

    @property
    def is_open(self) -> bool:
        """Whether it was not left, and its transaction has not ended.

        Whoever enters a block by hand may never leave it, and a signal that raises just before the
        body keeps it from being left at all.
        """
        return self._owner is not None and self._has_transaction()

    def is_in_the_way(self, lock: object, owner: object) -> bool:
        """Whether the owner would wait for a lock that this block of its own holds.

        Others may have the marks as well; they may wait, because the block goes on.
        """
        return self._owner == owner and self._lock == lock and self.is_open


def _always() -> bool:
    return True


# By context: a block may be left in another thread than it was entered in.
_BLOCKS: Final[ContextVar[tuple[OpenBlock, ...]]] = ContextVar("retrysafe_blocks", default=())


def _open_ones() -> tuple[OpenBlock, ...]:
    return tuple(block for block in _BLOCKS.get() if block.is_open)


def require_outside(lock: object, owner: object) -> None:
    """Raises `StoreUnavailable` where the owner is inside of an atomic block that holds the lock.

    No other kind of error: the batch that is refused may hold rows of others, who try again.
    """
    for block in _BLOCKS.get():
        if block.is_in_the_way(lock, owner):
            raise StoreUnavailable(
                "this is inside of an atomic block on the same store, and would wait for the "
                "block's own transaction: call run and once before the block, or after your commit"
            )
