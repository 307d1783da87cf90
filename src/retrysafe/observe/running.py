"""The running set: which operations are under way in this process, and in its siblings.

Owns how long they have been. Several processes of one server share a folder, in which each writes
when its operations began: whoever is scraped reads them all. The host's monotonic clock is the same
for all of its processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import pack_into
from typing import Final

from retrysafe import forks

# How many operations of one process have a place in its file; those beyond are not shown to others.
PLACES: Final = 4096
_SIZE_BYTES: Final = PLACES * 8
_PREFIX: Final = "retrysafe_running_"
_SUFFIX: Final = ".bin"


class RunningSet:
    """When the operations began that are under way."""

    def __init__(
        self, folder: str | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Operations of other processes are seen through `folder`, if there is one."""
        self.monotonic = monotonic
        self._folder = None if folder is None else Path(folder)
        self._began: dict[object, tuple[float, int | None]] = {}
        self._file: mmap.mmap | None = None
        self._descriptor: int | None = None
        self._free: list[int] = []
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Starts empty: what the parent runs is the parent's to show."""
        self._began = {}
        # Closing our copy of the descriptor takes no lock from the parent: it is not inherited.
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._file, self._descriptor, self._free = None, None, []

    def add(self, item: object) -> None:
        """An operation has begun."""
        began = self.monotonic()
        place: int | None = None
        if self._folder is not None:
            file = self._file or self._open(self._folder)
            with suppress(IndexError):  # All places are taken.
                place = self._free.pop()
                pack_into("d", file, place * 8, began)
        self._began[item] = began, place

    def remove(self, item: object) -> None:
        """It has ended; harmless for one that is not there."""
        _, place = self._began.pop(item, (0.0, None))
        if place is not None and self._file is not None:
            pack_into("d", self._file, place * 8, 0.0)
            self._free.append(place)

    def ages_seconds(self) -> list[float]:
        """For how long each of them has been under way, the youngest first."""
        now = self.monotonic()
        began = [since for since, _ in list(self._began.values())]
        if self._folder is not None:
            own = f"{_PREFIX}{os.getpid()}{_SUFFIX}"
            for path in self._folder.glob(f"{_PREFIX}*{_SUFFIX}"):
                # Never one's own: closing any descriptor of a file gives its lock away.
                if path.name != own:
                    began += _read(path)
        return sorted(now - since for since in began)

    def _open(self, folder: Path) -> mmap.mmap:
        path = folder / f"{_PREFIX}{os.getpid()}{_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Held for as long as this process lives, and by no child of it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, _SIZE_BYTES)
        file = mmap.mmap(descriptor, _SIZE_BYTES)
        self._descriptor, self._free = descriptor, list(range(PLACES))
        self._file = file
        return file


def _read(path: Path) -> list[float]:
    """What another process has under way; nothing, and no file any more, if it is gone."""
    try:
        with path.open("r+b") as file:
            with suppress(OSError):
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
                return []
            content = file.read(_SIZE_BYTES)
    except OSError:
        return []  # Removed in this very moment, by another reader.
    return [since for since in array("d", content) if since]
