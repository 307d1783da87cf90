"""The SQLite file: opened the durable way, and the same one for as long as it is in use.

Owns the pragmas, the sentences for SQLite's errors, and the identity of the files. Anything weaker
than `synchronous=FULL` may forget a claim after a power cut although the operation behind it
already ran.

A file that is deleted lives on for the processes that have it open, and the next process makes a
new one at the same path: each would grant the same key, and the operation would run in both. The
same happens when the files beside it are deleted: the locks are taken on the `-shm`, and what was
committed last is in the `-wal` alone. While a file is open, no other file gets its number, so the
number tells them apart.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreError, StoreMissing, StoreUnavailable

FileId = tuple[int, int]

# The low byte of an extended result code is the primary one.
_PRIMARY_MASK: Final = 0xFF
# Switching a fresh file to WAL fails at once while a rival does the same; it takes milliseconds.
_WAL_PAUSE_SECONDS: Final = 0.01
# For its owner alone.
_PRIVATE_MODE: Final = stat.S_IRUSR | stat.S_IWUSR
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


def connect(path: Path, create: bool, busy_seconds: float) -> sqlite3.Connection:
    """An open connection in autocommit mode; raises `StoreMissing` without a file to open.

    It changes nothing in an existing file: whose file it is shows only when it is read.
    """
    try:
        if not path.parent.is_dir():
            # First: nobody can be told to create a database in it.
            raise StoreMissing(
                f"there is no folder {path.parent} to hold the database: check the path, or make "
                "the folder"
            )
        if not create and not path.exists():
            raise StoreMissing(
                f"there is no database at {path}: check the path, or create it with "
                f"'retrysafe migrate --store sqlite:///{path}'"
            )
    except OSError as error:
        # A name that is too long, or a folder that may not be searched.
        raise StoreMissing(f"{path} cannot be opened: {error.strerror}") from error
    if create:
        _make_private(path)
    return sqlite3.connect(
        path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
    )


def _make_private(path: Path) -> None:
    """Makes a missing file that only its owner may read: it holds callers, keys and outcomes.

    SQLite gives the same mode to what it keeps beside the file. A file that is there stays as it
    is.
    """
    # The file that a link leads to: a link itself cannot be made anew.
    real = os.path.realpath(path)
    # Whatever cannot be made here, SQLite tries next, and says why in its own words.
    with suppress(OSError):
        try:
            # Made without being opened. Closing a file of one's own takes back the locks of the
            # whole process on it, and another thread may have opened it meanwhile.
            os.mknod(real, stat.S_IFREG | _PRIVATE_MODE)
        except (AttributeError, PermissionError):
            # Where only a superuser may do that, as on macOS, or nobody.
            os.close(os.open(real, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE_MODE))


def make_durable(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Switches the file to WAL for good, and this connection to commits that reach the disk."""
    _use_wal(connection, busy_seconds)
    connection.execute("PRAGMA synchronous = FULL")


def _use_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    give_up = time.monotonic() + busy_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(_WAL_PAUSE_SECONDS)


def full_code(error: sqlite3.Error) -> int:
    """SQLite's extended result code; 0 for an error of the binding itself, which has none."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code


def primary_code(error: sqlite3.Error) -> int:
    """The kind of SQLite's result code; 0 for an error of the binding itself."""
    return full_code(error) & _PRIMARY_MASK


def translated(error: sqlite3.OperationalError, location: str) -> StoreError:
    """The error in retrysafe's words."""
    code = primary_code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnavailable(
            f"{location} is locked by another writer for too long: look for a long transaction. It "
            "may be your own: end it, also on errors, before the operation ends"
        )
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreMissing(f"{location} cannot be opened: check the path and its permissions")
    if code == sqlite3.SQLITE_READONLY:
        return StoreMissing(f"{location} is read-only: check the permissions of file and folder")
    if full_code(error) == sqlite3.SQLITE_IOERR_SHORT_READ:
        return StoreMissing(
            f"{location} and the -wal and -shm beside it do not belong together: one of them was "
            "removed or replaced while a process had it open. Stop all processes that use it; then "
            "bring back a backup, or remove all three, and start again"
        )
    return StoreUnavailable(f"{location} does not answer: {error}")


class DatabaseFile:
    """The file at a path and those beside it, as they were when the store opened them."""

    __slots__ = ("_beside", "_file", "_location", "_name", "_path")

    def __init__(self, path: Path, location: str) -> None:
        self._path = path
        self._location = location
        self._name = str(path)
        # The numbers of the files; none before the first use.
        self._file: FileId | None = None
        self._beside: tuple[tuple[str, FileId], ...] = ()

    def require_unmoved(self) -> None:
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
        """What `require_unmoved` would raise."""
        try:
            self.require_unmoved()
        except StoreError as error:
            return error
        return None

    def connect(self, create: bool, busy_seconds: float) -> tuple[sqlite3.Connection, FileId]:
        """A connection, and which file it is to; makes no file anew that was removed.

        Raises as `require_unmoved`, and as the function `connect`.
        """
        for _ in range(_OPENING_TRIES):
            self.require_unmoved()
            before = self._found()
            if before is not None:
                self._require_inherited(before)
            connection = connect(self._path, create, busy_seconds)
            # The binding does not tell which file it has opened. If the same one was there before
            # and after, it is that one; a file that was made just now is opened a second time.
            if before is not None and before == self._found():
                return connection, before
            connection.close()
        raise self._moved(str(self._path))

    def remember(self, connection: sqlite3.Connection, file: FileId) -> None:
        """`require_unmoved` asks for these files from now on; the connection has opened them."""
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
