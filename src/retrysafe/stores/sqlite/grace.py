"""A grace for owners who could not renew because nobody could write.

Owns when a lease that has ended is spared. SQLite has one writer: while a process that holds the
write lock stands still, no lease of the file is renewed, and all of them run out. When the lock is
free again, the renewals of healthy owners and the claims of their rivals come at the same moment,
and a rival that is first would run what is running. So a process that had to wait for the lock
takes no key over at once: it gives the owner the time that its next renewal takes (decision 33).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from retrysafe.core import transitions
from retrysafe.core.lease import RENEWALS_PER_LEASE
from retrysafe.core.model import ClaimRequest, Extension, Record

# Commits take a few milliseconds. Whoever waits longer waits for a crowd, or for one that stands
# still; which of the two, nobody can tell.
BLOCKED_SECONDS: Final = 0.1
# The same for a process that held the lock itself. A flush of a busy disk takes a few tenths of a
# second; who holds the lock for longer has stood still.
HELD_SECONDS: Final = 0.5
# An owner whose renewal was not answered tries again after a quarter of the time between two, and
# asks SQLite for the lock at least every tenth of a second. Twice that.
_PARTS_OF_A_RENEWAL: Final = 2
_LEAST_MS: Final = 250
# How many keys are remembered whose owners were spared, and for how long at least: for ten times
# what they were given, for ten minutes, and until nobody had to wait for ten minutes. When none of
# them may be forgotten, nobody else is spared. A walk over more keys than are remembered would else
# spare all of them each time, and nothing would ever be recovered.
_SPARED_LIMIT: Final = 10_000
_REMEMBERED_GRACES: Final = 10
_REMEMBERED_SECONDS: Final = 600.0


class Grace:
    """Whom one process spares."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self._blocked_at = -math.inf
        # Since when there was no calm.
        self._contended_since = -math.inf
        # By digest, the token that was spared: once for each attempt, so that a file with many
        # writers, where each has to wait, does not keep a crashed owner's key for ever. With the
        # time from which on it may be forgotten; in the order in which they were spared.
        self._spared: dict[bytes, tuple[bytes, float]] = {}

    def note_wait(self, asked: float) -> None:
        """Notes how long the write lock was waited for, in vain or not."""
        now = self.monotonic()
        if now - asked >= BLOCKED_SECONDS:
            if now - self._blocked_at > _REMEMBERED_SECONDS:
                self._contended_since = now
            self._blocked_at = now

    def spared(self, record: Record, request: ClaimRequest, now_ms: int) -> Record | None:
        """The record that a claim takes over, with some time for its owner; None for no need.

        The owner's token stays, so that its renewal counts. It is written for all to see: rivals in
        other processes wait as well.
        """
        grace_ms = request.lease_ms // RENEWALS_PER_LEASE // _PARTS_OF_A_RENEWAL + _LEAST_MS
        now = self.monotonic()
        if now - self._blocked_at > grace_ms / 1000:
            return None
        token, _ = self._spared.get(record.digest, (None, 0.0))
        # Its own claim, whose answer was lost, or one that had its time.
        if record.token in (request.token, token) or not self._has_room(record.digest):
            return None
        remembered = max(_REMEMBERED_SECONDS, grace_ms / 1000 * _REMEMBERED_GRACES)
        self._spared[record.digest] = (record.token, now + remembered)
        extension = Extension(request.key, record.token, grace_ms)
        changed, _ = transitions.extend(record, extension, now_ms)
        return changed

    def _has_room(self, digest: bytes) -> bool:
        """Makes room for one more, if the oldest may be forgotten."""
        self._spared.pop(digest, None)  # Of an earlier attempt.
        if len(self._spared) < _SPARED_LIMIT:
            return True
        oldest = next(iter(self._spared))
        if self._contended_since < self._spared[oldest][1]:
            return False
        del self._spared[oldest]
        return True
