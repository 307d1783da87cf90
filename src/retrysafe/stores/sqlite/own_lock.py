"""Who would wait for the write lock of a file that it holds itself.

Owns the marks of open atomic blocks. A claim or an ending that is written from inside a block, by
way of the store's own connection, waits for the block's transaction, which waits for it.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreUnavailable


class Block:
    """An atomic block that holds the write lock of a file, until it is left."""

    __slots__ = ("_path", "is_open")

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_open = True
        _BLOCKS.set((*_BLOCKS.get(), self))

    def leave(self) -> None:
        """The lock is the user's transaction's from now on."""
        # The flag counts: a task or a thread that was started inside has a copy of the marks.
        self.is_open = False
        _BLOCKS.set(tuple(item for item in _BLOCKS.get() if item.is_open))

    def is_on(self, path: Path) -> bool:
        """Whether the block is open and holds the lock of this file."""
        return self.is_open and self._path == path


# By context and not by thread: a block may be left in another thread than it was entered in.
_BLOCKS: Final[ContextVar[tuple[Block, ...]]] = ContextVar("retrysafe_blocks", default=())


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
