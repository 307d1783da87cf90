"""Opening a SQLite file the durable way, and telling its errors apart.

Owns the pragmas. Anything weaker than `synchronous=FULL` may forget a claim after a power cut
although the operation behind it already ran.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreError, StoreMissing, StoreUnavailable

# The low byte of an extended result code is the primary one.
_PRIMARY_MASK: Final = 0xFF
# Switching a fresh file to WAL fails at once while a rival does the same; it takes milliseconds.
_WAL_PAUSE_SECONDS: Final = 0.01
# For its owner alone.
_PRIVATE_MODE: Final = stat.S_IRUSR | stat.S_IWUSR


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


def roll_back(connection: sqlite3.Connection) -> None:
    """Ends the open transaction, if SQLite has not done so itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


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
            f"{location} is locked by another writer for too long: look for a long transaction"
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
