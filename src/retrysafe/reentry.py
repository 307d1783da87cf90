"""Refuses a thread that would wait for itself.

A signal's handler runs in the main thread, between two instructions of whatever that thread does.
If that is a store at work, and the handler calls the store, it waits for a lock that its own thread
holds: for ever. Owns the words for it. Who holds which lock, its owner notes beside the lock, or
the lock itself knows.
"""

from __future__ import annotations

import threading
from typing import Any

from retrysafe.errors import StoreUnavailable

# A lock that its own thread may take again: without that, asking whether it holds it is a wait.
ReentrantLock = Any


def new_lock() -> ReentrantLock:
    """A lock for `unheld`."""
    return threading.RLock()


def unheld(lock: ReentrantLock, location: str) -> ReentrantLock:
    """The lock, to be taken by a `with`; raises `StoreUnavailable` when this thread holds it."""
    if lock._is_owned():  # noqa: SLF001 — no public name; conditions have asked it for ever.
        raise reentered(location)
    return lock


def reentered(location: str) -> StoreUnavailable:
    """For a call that came while the same thread was inside of what it asks for.

    No other kind of error: the batch that is refused may hold rows of others, who try again.
    """
    return StoreUnavailable(
        f"this thread is at work in {location} already and would wait for itself: a signal's "
        "handler must not call retrysafe. Set a flag there, and act on it outside"
    )
