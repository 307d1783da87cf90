"""Insisting: what has run is written until it stands, within the policy's patience.

Owns the retries of such a write. Nothing here may free a key, or forget what has run quietly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from retrysafe.core.events import EventKind
from retrysafe.core.handlers import is_of_handler
from retrysafe.core.model import Settlement, Step
from retrysafe.core.ports import LocalClock
from retrysafe.core.retries import RETRY_PAUSE_SECONDS
from retrysafe.core.values import codec
from retrysafe.errors import RetrysafeError, StoreError, StoreRejected, StoreUnavailable

A = TypeVar("A")

_PAUSE_MAXIMUM_SECONDS: Final = 1.0


async def insist(
    write: Callable[[], Awaitable[A]],
    held: Settlement | Step,
    error: StoreError,
    *,
    patience_seconds: float,
    clock: LocalClock,
    tell: Callable[[EventKind, str], None],
    not_stored: Callable[[StoreError], RetrysafeError],
) -> A:
    """Writes again after a try that failed like this, until it stands; else raises `not_stored`.

    Raises the error itself if a signal's handler raised it: then the store has refused nothing.
    """
    pause = RETRY_PAUSE_SECONDS
    give_up = clock.monotonic() + patience_seconds
    while True:
        if is_of_handler(error):
            raise error
        if isinstance(error, StoreRejected):
            if held.payload is not None and held.payload.form == codec.WITHHELD:
                raise not_stored(error) from error
            # The store cannot hold this outcome; that it is done can still be remembered.
            held.payload = codec.withheld(f"the store refused it: {error}")
            tell(EventKind.WITHHELD, str(error))
        elif not isinstance(error, StoreUnavailable):
            # Waiting does not bring a lost database back; the caller must hear that it ran.
            raise not_stored(error) from error
        else:
            tell(EventKind.STORE_UNAVAILABLE, str(error))
            if error.is_reentry or clock.monotonic() + pause > give_up:
                raise not_stored(error) from error
            await clock.sleep(pause)
            pause = min(pause * 2, _PAUSE_MAXIMUM_SECONDS)
        try:
            return await write()
        except StoreError as again:
            error = again
