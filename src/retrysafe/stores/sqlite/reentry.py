"""Who would wait for the write lock of a file that it holds itself.

Owns the marks of open atomic blocks. A claim or an ending that is written from inside a block, by
way of the store's own connection, waits for the block's transaction, which waits for it.
"""

from __future__ import annotations

import sqlite3
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreUnavailable


class Block:
    """An atomic block that holds the write lock of a file, until it is left."""

    __slots__ = ("_connection", "_path", "_thread")

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        # None once it is left, so that a copy of the marks does not keep it open.
        self._connection: sqlite3.Connection | None = connection
        self._thread = threading.get_ident()
        _BLOCKS.set((*_open_ones(), self))

    def leave(self) -> None:
        """The lock is the user's transaction's from now on."""
        # This counts: a task or a thread that was started inside has a copy of the marks.
        self._connection = None
        _BLOCKS.set(_open_ones())

    @property
    def is_open(self) -> bool:
        """Whether it was not left, and its transaction has not ended.

        A signal that raises just before the body keeps the block from being left at all.
        """
        connection = self._connection
        try:
            return connection is not None and connection.in_transaction
        except sqlite3.ProgrammingError:
            return False  # Closed.

    def is_on(self, path: Path) -> bool:
        """Whether the block is this thread's, is open and holds the lock of this file.

        Another thread may have the marks as well; it may wait, because the block goes on.
        """
        return self._thread == threading.get_ident() and self._path == path and self.is_open


# By context, too: a block may be left in another thread than it was entered in.
_BLOCKS: Final[ContextVar[tuple[Block, ...]]] = ContextVar("retrysafe_blocks", default=())


def _open_ones() -> tuple[Block, ...]:
    return tuple(item for item in _BLOCKS.get() if item.is_open)


def require_outside(path: Path) -> None:
    """Raises `StoreUnavailable` inside of an atomic block on this file.

    No other kind of error: the batch that is refused may hold rows of others, who try again.
    """
    for block in _BLOCKS.get():
        if block.is_on(path):
            raise StoreUnavailable(
                f"this is inside of an atomic block on {path}, and would wait for the block's own "
                "transaction: call run and once before the block, or after your commit"
            )
