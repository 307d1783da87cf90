"""Finished outcomes kept in the process, for replays without a store call.

Never the source of truth: an entry lives a few seconds at most, so that an operator's release or
expiry takes effect everywhere soon, and never longer than the record's own active window.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from retrysafe.core.flights import Request
from retrysafe.core.model import Fingerprint, Payload

# Long enough to absorb a burst of retries, short enough for an operator who waits for effect.
TIME_TO_LIVE_SECONDS: Final = 2.0
# 16 MiB and 10,000 entries: a bound on memory that needs no tuning in an ordinary worker.
BYTES_LIMIT: Final = 16 * 1024 * 1024
ENTRIES_LIMIT: Final = 10_000


# An outcome as it is kept: when it ends, its attempt, its operation, its payload, and the pairs of
# rule and digest that tell its request. A plain tuple of plain values, because the garbage
# collector forgets such a tuple; objects of our own it would walk over again and again, which cost
# more than everything else that is done for a finished operation.
Kept = tuple[Any, ...]
_PAYLOAD: Final = slice(3, 6)
_FIRST_PAIR: Final = 6


class CachedOutcome:
    """A finished outcome, the request that it belongs to, and the attempt that made it."""

    __slots__ = ("kept",)

    def __init__(self, kept: Kept) -> None:
        # Two finds of one outcome have the very same: nothing was remembered in between.
        self.kept = kept

    @property
    def attempt(self) -> int:
        """The attempt that made it."""
        attempt: int = self.kept[1]
        return attempt

    @property
    def operation(self) -> str:
        """Of which operation."""
        operation: str = self.kept[2]
        return operation

    @property
    def payload(self) -> Payload:
        """What is replayed."""
        return Payload(*self.kept[_PAYLOAD])

    def is_of(self, fingerprint: Fingerprint) -> bool:
        """Whether the request that it is the outcome of has this for its first fingerprint."""
        kept = self.kept
        return bool(
            kept[_FIRST_PAIR + 1] == fingerprint.digest and kept[_FIRST_PAIR] == fingerprint.rule
        )

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What was asked for."""
        pairs = self.kept[_FIRST_PAIR:]
        return tuple(map(Fingerprint, pairs[::2], pairs[1::2]))


class ReplayCache:
    """A bounded map from key digest to outcome, oldest out first.

    `find` and `replay` need no lock; whoever calls the others holds one.
    """

    __slots__ = ("_bytes", "_bytes_limit", "_entries_limit", "_seconds", "entries")

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
        self.entries: OrderedDict[bytes, Kept] = OrderedDict()
        self._bytes = 0

    def find(self, digest: bytes, monotonic: float) -> CachedOutcome | None:
        """The outcome, if it is still fresh."""
        kept = self.entries.get(digest)
        if kept is None:
            return None
        # A stale entry stays until it is replaced or pushed out: only the writers hold the lock.
        return CachedOutcome(kept) if monotonic < kept[0] else None

    def replay(
        self, digest: bytes, monotonic: float, fingerprint: Fingerprint
    ) -> tuple[Payload, int] | None:
        """The outcome and its attempt, if it is fresh and its request is told by this fingerprint.

        What `find` tells, without an object for it: most replays need nothing else.
        """
        kept = self.entries.get(digest)
        if (
            kept is None
            or monotonic >= kept[0]
            or len(kept) == _FIRST_PAIR
            or kept[_FIRST_PAIR + 1] != fingerprint.digest
            or kept[_FIRST_PAIR] != fingerprint.rule
        ):
            return None
        return Payload(kept[3], kept[4], kept[5]), kept[1]

    def keep(
        self,
        digest: bytes,
        request: Request,
        payload: Payload,
        attempt: int,
        asked_monotonic: float,
        remaining_ms: int,
    ) -> None:
        """Remembers the outcome of a request, counted from the instant that the store was asked."""
        seconds = self._seconds
        if remaining_ms < seconds * 1000:
            seconds = remaining_ms / 1000
        head, body = payload.head, payload.body
        size_bytes = len(head) + len(body)
        if seconds <= 0 or size_bytes > self._bytes_limit // 16:
            return  # One large outcome must not push out a thousand small ones.
        entries = self.entries
        if digest in entries:
            self.forget(digest)
        kept: Kept = (
            asked_monotonic + seconds,
            attempt,
            request.operation,
            payload.form,
            head,
            body,
        )
        for fingerprint in request.fingerprints:
            kept += (fingerprint.rule, fingerprint.digest)
        entries[digest] = kept
        self._bytes += size_bytes
        while len(entries) > self._entries_limit or self._bytes > self._bytes_limit:
            self._bytes -= _size_bytes(entries.popitem(last=False)[1])

    def forget(self, digest: bytes) -> None:
        """Drops one outcome."""
        kept = self.entries.pop(digest, None)
        if kept is not None:
            self._bytes -= _size_bytes(kept)

    def clear(self) -> None:
        """Drops everything."""
        self.entries.clear()
        self._bytes = 0


def _size_bytes(kept: Kept) -> int:
    return len(kept[4]) + len(kept[5])
