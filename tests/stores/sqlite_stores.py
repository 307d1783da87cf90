"""The SQLite store on a clock that a test moves, whatever the machine is busy with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from retrysafe.stores import SqliteStore
from retrysafe.stores.sqlite.grace import Grace


def calm_store(path: Path, now_ms: Callable[[], int]) -> SqliteStore:
    """A store that never takes itself for one that had to wait.

    One that waited for the write lock for a tenth of a second by the real clock, as any does on a
    busy machine, spares a lapsed lease instead of taking its key over (decision 33). Then leases
    would not end when the test's clock says so.
    """
    store = SqliteStore(path, now_ms=now_ms)
    store._connections.grace = Grace(lambda: 0.0)
    return store
