"""Finished outcomes kept in the process, for replays without a store call.

Never the source of truth: an entry lives a few seconds at most, so that an operator's release or
expiry takes effect everywhere soon, and never longer than the record's own active window.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from retrysafe.core.model import Fingerprint, Payload

# Long enough to absorb a burst of retries, short enough for an operator who waits for effect.
TIME_TO_LIVE_SECONDS: Final = 2.0
# 16 MiB and 10,000 entries: a bound on memory that needs no tuning in an ordinary worker.
BYTES_LIMIT: Final = 16 * 1024 * 1024
ENTRIES_LIMIT: Final = 10_000


class CachedOutcome:
    """A finished outcome, the request that it belongs to, and the attempt that made it."""

    __slots__ = ("attempt", "ends_monotonic", "fingerprints", "operation", "payload", "size_bytes")

    def __init__(
        self,
        fingerprints: tuple[Fingerprint, ...],
        operation: str,
        payload: Payload,
        attempt: int,
    ) -> None:
        self.fingerprints = fingerprints
        self.operation = operation
        self.payload = payload
        self.attempt = attempt
        self.size_bytes = len(payload.head) + len(payload.body)
        self.ends_monotonic = 0.0


class ReplayCache:
    """A bounded map from key digest to outcome, oldest out first.

    `find` needs no lock; whoever calls the others holds one.
    """

    __slots__ = ("_bytes", "_bytes_limit", "_entries", "_entries_limit", "_seconds")

    def __init__(
        self,
        *,
        seconds: float = TIME_TO_LIVE_SECONDS,
        entries_limit: int = ENTRIES_LIMIT,
        bytes_limit: int = BYTES_LIMIT,
    ) -> None:
        self._seconds = seconds
        self._entries_limit = entries_limit
        self._bytes_limit = bytes_limit
        # A plain dictionary looks for its first entry among the holes of all that were removed.
        self._entries: OrderedDict[bytes, CachedOutcome] = OrderedDict()
        self._bytes = 0

    def find(self, digest: bytes, monotonic: float) -> CachedOutcome | None:
        """The outcome, if it is still fresh."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        # A stale entry stays until it is replaced or pushed out: only the writers hold the lock.
        return entry if monotonic < entry.ends_monotonic else None

    def keep(
        self, digest: bytes, outcome: CachedOutcome, asked_monotonic: float, remaining_ms: int
    ) -> None:
        """Remembers an outcome, counted from the instant that the store was asked."""
        seconds = min(self._seconds, remaining_ms / 1000)
        size_bytes = outcome.size_bytes
        if seconds <= 0 or size_bytes > self._bytes_limit // 16:
            return  # One large outcome must not push out a thousand small ones.
        entries = self._entries
        if digest in entries:
            self.forget(digest)
        outcome.ends_monotonic = asked_monotonic + seconds
        entries[digest] = outcome
        self._bytes += size_bytes
        while len(entries) > self._entries_limit or self._bytes > self._bytes_limit:
            self._bytes -= entries.popitem(last=False)[1].size_bytes

    def forget(self, digest: bytes) -> None:
        """Drops one outcome."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._bytes -= entry.size_bytes

    def clear(self) -> None:
        """Drops everything."""
        self._entries.clear()
        self._bytes = 0
