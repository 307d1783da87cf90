"""Whether a path still leads to the files that were opened there.

Owns their identity. A file that is deleted lives on for whoever has it open, and the next process
makes a new one at the same path: each would grant the same key, and the operation would run in
both. The same happens when the files beside it are deleted, because the locks are taken on the
`-shm`. While it is open, a file's number is not given to another one, so it tells them apart.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreMissing
from retrysafe.stores.sqlite import connecting

FileId = tuple[int, int]

# A file that is replaced again and again while it is being opened is not worth more.
_OPENING_TRIES: Final = 5
_stat: Final = os.stat


class Place:
    """The file at a path and its `-shm`, as they were when the store opened them."""

    __slots__ = ("_known", "_location", "_path")

    def __init__(self, path: Path, location: str) -> None:
        self._path = path
        self._location = location
        # Name, number and device of each file; nothing before the first use.
        self._known: tuple[tuple[str, int, int], ...] = ()

    def require(self) -> None:
        """Raises `StoreMissing` when the path leads elsewhere by now, or nowhere."""
        for name, number, device in self._known:
            try:
                found = _stat(name)
            except OSError:
                raise self._moved(name) from None
            if found.st_ino != number or found.st_dev != device:
                raise self._moved(name)

    def loss(self) -> StoreMissing | None:
        """What `require` would raise."""
        try:
            self.require()
        except StoreMissing as error:
            return error
        return None

    def connect(self, create: bool, busy_seconds: float) -> tuple[sqlite3.Connection, FileId]:
        """A connection, and which file it is to; raises as `connecting.connect` and `require`.

        What is not there any more is not made anew.
        """
        for _ in range(_OPENING_TRIES):
            self.require()
            before = self._found()
            connection = connecting.connect(self._path, create, busy_seconds)
            # The binding does not tell which file it has opened. If the same one was there before
            # and after, it is that one; a file that was made just now is opened a second time.
            if before is not None and before == self._found():
                return connection, before
            connection.close()
        raise self._moved(str(self._path))

    def remember(self, connection: sqlite3.Connection, file: FileId) -> None:
        """From now on `require` asks for these files; the connection has opened all of them."""
        known = [(str(self._path), *file)]
        # SQLite keeps them beside the file itself, also when the path is a link to it.
        ((_, _, real),) = connection.execute("PRAGMA database_list").fetchall()
        shared = f"{real}-shm"
        try:
            found = _stat(shared)
        except FileNotFoundError:
            pass  # The file system has no shared memory, so the file is not in WAL mode.
        else:
            known.append((shared, found.st_ino, found.st_dev))
        self._known = tuple(known)

    def forget(self) -> None:
        """The files are closed; whatever is at the path next is as good."""
        self._known = ()

    def _found(self) -> FileId | None:
        try:
            found = _stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_dev

    def _moved(self, name: str) -> StoreMissing:
        return StoreMissing(
            f"{self._location} cannot be used: {name} was removed or replaced while this process "
            "had it open, so another process may work on another file. Stop all processes that "
            "use it, and start them again"
        )
