"""Group commit: rows that arrive while a commit is under way leave together in the next one.

Owns what threads and tasks have in common on the way to a store: what a failed commit is told as,
and the way without merging. No row waits for a timer to be merged: one that arrives when nothing is
under way leaves at once, so an idle system waits for nothing, and a busy one pays one disk flush
for many rows. A failed commit is told to every row in it; nobody knows whether it happened, and
asking again with the same token is safe.
"""

from __future__ import annotations

from typing import Final

from retrysafe.core.handlers import is_of_handler
from retrysafe.core.model import ClaimAnswer, ClaimRequest, SettleAnswer, Settlement
from retrysafe.core.ports import Store
from retrysafe.errors import StoreError, StoreUnavailable, error_like

# While fewer rows than this are on their way, the next one leaves at once if the store allows it.
# More of them wait for each other: small batches cost client and server as much as large ones, and
# the flush of one waits for the flush of the other.
FEW_ROWS: Final = 3
# A batch that takes longer than this is held up, by one connection perhaps, and others must not
# wait for it. Long against any flush, and short against any lease.
HELD_UP_SECONDS: Final = 0.05


def as_store_error(error: BaseException) -> StoreError:
    """A fresh error for one caller: a shared one would collect everybody's traceback."""
    if not isinstance(error, StoreError) or is_of_handler(error):
        fresh = StoreUnavailable(f"the commit broke off: {error!r}")
        fresh.__cause__ = error
        return fresh
    # It stands in for the original, with where that was raised and why. Chained to it instead,
    # one problem would be told twice in every traceback. Not through its constructor, which may
    # take anything in the class of somebody else's store.
    try:
        copied = error_like(error)
    except Exception:
        # Whatever is odd about its class, everybody who waits must be told.
        copied = StoreUnavailable(str(error), key=error.key)
    copied = copied.with_traceback(error.__traceback__)
    copied.__cause__ = error.__cause__
    if isinstance(copied, StoreUnavailable):
        copied.is_reentry = False  # Who carried the row is in its own way, and nobody else's.
    return copied


class DirectWriter:
    """Rows one by one, for a store that never waits: there is nothing to merge them behind."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key."""
        ((answer,), _) = await self._store.commit([request], [])
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def settle(self, settlement: Settlement) -> SettleAnswer:
        """Ends an attempt."""
        (_, (answer,)) = await self._store.commit([], [settlement])
        if isinstance(answer, StoreError):
            raise answer
        return answer
