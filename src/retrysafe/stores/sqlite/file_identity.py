"""Whether a path still leads to the files that were opened there.

Owns their identity. A file that is deleted lives on for whoever has it open, and the next process
makes a new one at the same path: each would grant the same key, and the operation would run in
both. The same happens when the files beside it are deleted: the locks are taken on the `-shm`, and
what was committed last is in the `-wal` alone. While it is open, a file's number is not given to
another one, so it tells them apart.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreError, StoreMissing, StoreUnavailable
from retrysafe.stores.sqlite import file as connecting

FileId = tuple[int, int]

# A file that is replaced again and again while it is being opened is not worth more.
_OPENING_TRIES: Final = 5
# What says that nothing is there; all else says that it could not be seen.
_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
_stat: Final = os.stat
# What SQLite keeps beside a file in WAL mode.
_BESIDE: Final = ("-shm", "-wal")
# The `-shm` of the files that a parent had open when it forked this process. SQLite's library takes
# all locks on it here, also for new connections to such a file: it still has the parent's open.
_inherited: dict[FileId, FileId] = {}


class FileIdentity:
    """The file at a path and those beside it, as they were when the store opened them."""

    __slots__ = ("_beside", "_file", "_location", "_name", "_path")

    def __init__(self, path: Path, location: str) -> None:
        self._path = path
        self._location = location
        self._name = str(path)
        # The numbers of the files; none before the first use.
        self._file: FileId | None = None
        self._beside: tuple[tuple[str, FileId], ...] = ()

    def require(self) -> None:
        """Raises `StoreMissing` when the path leads elsewhere by now, or nowhere.

        Raises `StoreUnavailable` when that cannot be seen, which is no reason to give up.
        """
        # Spelled out: this is done for every claim and for every ending.
        file = self._file
        if file is None:
            return
        name = self._name
        try:
            found = _stat(name)
            if (found.st_ino, found.st_dev) != file:
                raise self._moved(name)
            for name, known in self._beside:
                found = _stat(name)
                if (found.st_ino, found.st_dev) != known:
                    raise self._moved(name)
        except OSError as error:
            raise self._unseen(name, error) from error

    def loss(self) -> StoreError | None:
        """What `require` would raise."""
        try:
            self.require()
        except StoreError as error:
            return error
        return None

    def connect(self, create: bool, busy_seconds: float) -> tuple[sqlite3.Connection, FileId]:
        """A connection, and which file it is to; raises as `connecting.connect` and `require`.

        What is not there any more is not made anew.
        """
        for _ in range(_OPENING_TRIES):
            self.require()
            before = self._found()
            if before is not None:
                self._require_inherited(before)
            connection = connecting.connect(self._path, create, busy_seconds)
            # The binding does not tell which file it has opened. If the same one was there before
            # and after, it is that one; a file that was made just now is opened a second time.
            if before is not None and before == self._found():
                return connection, before
            connection.close()
        raise self._moved(str(self._path))

    def remember(self, connection: sqlite3.Connection, file: FileId) -> None:
        """From now on `require` asks for these files; the connection has opened all of them."""
        beside: list[tuple[str, FileId]] = []
        ((mode,),) = connection.execute("PRAGMA journal_mode").fetchall()
        # Without shared memory in the file system, the file is not in WAL mode and has no other.
        if mode == "wal":
            # SQLite keeps them beside the file itself, also when the path is a link to it.
            real = os.path.realpath(self._path)
            beside = [(real + ending, self._seen(real + ending)) for ending in _BESIDE]
            self._require_inherited(file)
        self._beside = tuple(beside)
        self._file = file

    def after_fork_in_child(self) -> None:
        """Remembers for every store of this process what SQLite's library goes on with."""
        if self._file is not None and self._beside:
            _inherited[self._file] = self._beside[0][1]

    def _require_inherited(self, file: FileId) -> None:
        """Raises `StoreMissing` when nobody else would see the locks of this process."""
        inherited = _inherited.get(file)
        if inherited is None:
            return
        name = os.path.realpath(self._path) + _BESIDE[0]
        if self._seen(name) != inherited:
            raise self._moved(name)

    def forget(self) -> None:
        """The files are closed; whatever is at the path next is as good."""
        self._file = None
        self._beside = ()

    def _seen(self, name: str) -> FileId:
        try:
            found = _stat(name)
        except OSError as error:
            raise self._unseen(name, error) from error
        return found.st_ino, found.st_dev

    def _found(self) -> FileId | None:
        try:
            found = _stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_dev

    def _unseen(self, name: str, error: OSError) -> StoreError:
        if error.errno in _NOTHING_THERE:
            return self._moved(name)
        return StoreUnavailable(f"{self._location} cannot be used: {name}: {error.strerror}")

    def _moved(self, name: str) -> StoreMissing:
        return StoreMissing(
            f"{self._location} cannot be used: {name} was removed or replaced while this process "
            "had it open, so another process may work on another file. Stop all processes that "
            "use it, and start them again"
        )
