"""A look at the file and where it lies: what would make claims impossible or forgettable.

Owns the sentences and what they are judged by. It changes nothing: not even the mode of the file,
which the first use does.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

from retrysafe.errors import StoreError
from retrysafe.stores.diagnosis import Checkup, Finding
from retrysafe.stores.sqlite import file, schema

# Where Linux lists what is mounted; elsewhere the kind of a file system is not looked up.
_MOUNTS: Final = Path("/proc/self/mounts")
# Locks and shared memory, on which WAL relies, do not reach from host to host.
_NETWORK: Final = frozenset(
    {
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
    }
)
_IN_MEMORY: Final = frozenset({"ramfs", "tmpfs"})


def look(path: Path, busy_seconds: float) -> Checkup:
    """What is wrong with the file, and what is worth knowing; raises `StoreMissing`."""
    checkup = Checkup()
    if not checkup.add("access", access_findings(path)):
        # Even reading needs the two files beside it, which a folder that is closed does not allow.
        with closing(file.connect(path, False, busy_seconds)) as connection:
            checkup.add("schema", schema_findings(connection))
            checkup.add("journal mode", mode_findings(connection))
    checkup.add("other readers", reader_findings(path))
    checkup.add("file system", file_system_findings(file_system_of(path, _mounts())))
    return checkup


def access_findings(path: Path) -> list[Finding]:
    """Whether this user may write the file, and the two that SQLite keeps beside it."""
    found = []
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        found.append(
            Finding(
                f"{path} may not be written by this user: no key could be claimed. Change it.",
                mend=f"chown $(id -u) {shlex.quote(str(path))}",
            )
        )
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
        found.append(
            Finding(
                f"The folder {path.parent} may not be written by this user, and SQLite keeps two "
                "files beside the database there. Change it.",
                mend=f"chown $(id -u) {shlex.quote(str(path.parent))}",
            )
        )
    return found


def reader_findings(path: Path) -> list[Finding]:
    """Who else may read the file."""
    if not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return []
    return [
        Finding(
            f"{path} may be read by other users of this machine, with the callers, keys and "
            "outcomes in it. The files that retrysafe makes are for their owner alone: run chmod "
            "600 on this one and on the -wal and -shm beside it, unless it is meant to be read.",
            is_problem=False,
            mend=f"chmod 600 {shlex.quote(str(path))}*",
        )
    ]


def schema_findings(connection: sqlite3.Connection) -> list[Finding]:
    """Whether the schema is there and is this release's."""
    try:
        is_current = not schema.pending_migrations(connection)
    except StoreError as error:
        text = str(error)
        return [Finding(f"{text[:1].upper()}{text[1:]}.")]
    if is_current:
        return []
    return [
        Finding(
            "The schema is missing or not up to date. Run retrysafe migrate.",
            mend="retrysafe migrate",
        )
    ]


def mode_findings(connection: sqlite3.Connection) -> list[Finding]:
    """Whether readers and the writer go side by side already."""
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode == "wal":
        return []
    return [
        Finding(
            f"The file is in the journal mode {mode}; the next use switches it to WAL, for all "
            "programs that open it.",
            is_problem=False,
        )
    ]


def file_system_findings(kind: str | None) -> list[Finding]:
    """What the kind of file system means for the file."""
    if kind in _NETWORK:
        return [
            Finding(
                f"The file is on a network file system ({kind}), whose locks SQLite cannot rely "
                "on: two hosts could run one operation, and the file can be damaged. Use a local "
                "disk, or PostgreSQL for several hosts."
            )
        ]
    if kind in _IN_MEMORY:
        return [
            Finding(
                f"The file is in memory ({kind}): a restart of the machine forgets every key.",
                is_problem=False,
            )
        ]
    return []


def file_system_of(path: Path, mounts: Iterable[str]) -> str | None:
    """The kind of file system that a path is on; None where the list does not say."""
    real = path.resolve()
    best, kind = -1, None
    for line in mounts:
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        # Blanks in the name of a folder are written in octal.
        mount = Path(parts[1].replace("\\040", " "))
        # The last of equals: what is mounted later covers what was there.
        if real.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), parts[2]
    return kind


def _mounts() -> list[str]:
    try:
        return _MOUNTS.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
