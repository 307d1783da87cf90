"""Refuses a thread that would wait for itself.

A signal's handler runs in the main thread, between two instructions of whatever that thread does.
If that is a store at work, and the handler calls the store, it waits for a lock that its own thread
holds: for ever. Owns the words for it; who holds which lock, its owner notes beside the lock.
"""

from __future__ import annotations

from retrysafe.errors import StoreUnavailable


def reentered(location: str) -> StoreUnavailable:
    """For a call that came while the same thread was inside of what it asks for.

    No other kind of error: the batch that is refused may hold rows of others, who try again.
    """
    return StoreUnavailable(
        f"this thread is at work in {location} already and would wait for itself: a signal's "
        "handler must not call retrysafe. Set a flag there, and act on it outside"
    )
