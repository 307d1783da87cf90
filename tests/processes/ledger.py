"""The ground truth of the process tests: one appended line for everything that really happened.

A line is one `write` to a file opened with O_APPEND, so lines of different processes never mix and
none is lost when its writer is killed right after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def note(path: str, *words: object) -> None:
    """Appends one line."""
    line = " ".join(map(str, words)) + "\n"
    with _opened(path) as descriptor:
        assert os.write(descriptor, line.encode()) == len(line)


def noted(path: str) -> list[list[str]]:
    """All lines so far, each as its words."""
    if not Path(path).exists():
        return []
    return [line.split() for line in Path(path).read_text().splitlines()]
