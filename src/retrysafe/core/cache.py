"""Finished outcomes kept in the process, for replays without a store call.

Never the source of truth: an entry lives a few seconds at most, so that an operator's release or
expiry takes effect everywhere soon, and never longer than the record's own active window.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from retrysafe.core.flights import Requested
from retrysafe.core.model import Fingerprint, Payload

# Long enough to absorb a burst of retries, short enough for an operator who waits for effect.
TIME_TO_LIVE_SECONDS: Final = 2.0
# 16 MiB and 10,000 entries: a bound on memory that needs no tuning in an ordinary worker.
BYTES_LIMIT: Final = 16 * 1024 * 1024
REPLAYED_LIMIT: Final = 9_000
# How many more may be outcomes that nobody has asked for again, and which part of the bytes is for
# them: for as many as 500 operations a second leave behind until they are too old, at 4 KiB each.
NEW_LIMIT: Final = 1_000
NEW_BYTES_SHARE: Final = 4


# An outcome as it is kept: when it ends, its attempt, its operation, its payload, the trace of its
# run, and the pairs of rule and digest that tell its request. A plain tuple of plain values: the
# garbage collector forgets such a tuple; objects of our own it would walk over again and again,
# which cost more than everything else that is done for a finished operation.
Kept = tuple[Any, ...]
_PAYLOAD: Final = slice(3, 6)
_TRACE: Final = 6
_FIRST_PAIR: Final = 7


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

    @property
    def trace(self) -> str:
        """In which trace it was made; empty for none."""
        trace: str = self.kept[_TRACE]
        return trace

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What was asked for."""
        pairs = self.kept[_FIRST_PAIR:]
        return tuple(map(Fingerprint, pairs[::2], pairs[1::2]))


class ReplayCache:
    """A bounded map from key digest to outcome, in two parts, oldest out first in each.

    An outcome is new until it is asked for again, which most never are. The new ones have a small
    part to themselves: a process at full speed fills and empties it all the time, and a large one
    would push what the operations work with out of the processor's own caches, and what is asked
    for again and again out of this one.

    `find` needs no lock; whoever calls the others holds one.
    """

    __slots__ = (
        "_bytes_limit",
        "_new_bytes",
        "_new_bytes_limit",
        "_new_limit",
        "_replayed_bytes",
        "_replayed_bytes_limit",
        "_replayed_limit",
        "_seconds",
        "new",
        "replayed",
    )

    def __init__(
        self,
        *,
        seconds: float = TIME_TO_LIVE_SECONDS,
        new_limit: int = NEW_LIMIT,
        replayed_limit: int = REPLAYED_LIMIT,
        bytes_limit: int = BYTES_LIMIT,
    ) -> None:
        self._seconds = seconds
        self._new_limit = new_limit
        self._replayed_limit = replayed_limit
        self._bytes_limit = bytes_limit
        self._new_bytes_limit = bytes_limit // NEW_BYTES_SHARE
        self._replayed_bytes_limit = bytes_limit - self._new_bytes_limit
        # A plain dictionary looks for its first entry among the holes of all that were removed.
        self.new: OrderedDict[bytes, Kept] = OrderedDict()
        self.replayed: OrderedDict[bytes, Kept] = OrderedDict()
        self._new_bytes = 0
        self._replayed_bytes = 0

    def find(self, digest: bytes, monotonic: float) -> CachedOutcome | None:
        """The outcome, if it is still fresh."""
        # In this order: what is moved is in the other part before it leaves this one.
        kept = self.new.get(digest) or self.replayed.get(digest)
        if kept is None:
            return None
        # A stale entry stays until it is replaced or pushed out: only the writers hold the lock.
        return CachedOutcome(kept) if monotonic < kept[0] else None

    def keep(
        self,
        digest: bytes,
        request: Requested,
        payload: Payload,
        attempt: int,
        asked_monotonic: float,
        remaining_ms: int,
        trace: str = "",
    ) -> None:
        """Remembers the outcome of a request, counted from the instant that the store was asked."""
        seconds = self._seconds
        if remaining_ms < seconds * 1000:
            seconds = remaining_ms / 1000
        head, body = payload.head, payload.body
        size_bytes = len(head) + len(body)
        if seconds <= 0 or size_bytes > self._bytes_limit // 16:
            return  # One large outcome must not push out a thousand small ones.
        new = self.new
        if digest in new or digest in self.replayed:
            self.forget(digest)
        kept: Kept = (
            asked_monotonic + seconds,
            attempt,
            request.operation,
            payload.form,
            head,
            body,
            trace,
        )
        for fingerprint in request.fingerprints:
            kept += (fingerprint.rule, fingerprint.digest)
        new[digest] = kept
        self._new_bytes += size_bytes
        while len(new) > self._new_limit or self._new_bytes > self._new_bytes_limit:
            if not new:
                self._new_bytes = 0  # A signal has raised between an entry and its count.
                break
            self._new_bytes -= _size_bytes(new.popitem(last=False)[1])

    def move(self, digest: bytes) -> None:
        """Takes note that an outcome was asked for again: no new one pushes it out any more."""
        new, replayed = self.new, self.replayed
        kept = new.get(digest)
        if kept is None:
            return
        size_bytes = _size_bytes(kept)
        replayed[digest] = kept
        self._replayed_bytes += size_bytes
        del new[digest]
        self._new_bytes -= size_bytes
        while (
            len(replayed) > self._replayed_limit
            or self._replayed_bytes > self._replayed_bytes_limit
        ):
            if not replayed:
                self._replayed_bytes = 0  # As above.
                break
            self._replayed_bytes -= _size_bytes(replayed.popitem(last=False)[1])

    def forget(self, digest: bytes) -> None:
        """Drops one outcome."""
        kept = self.new.pop(digest, None)
        if kept is not None:
            self._new_bytes -= _size_bytes(kept)
        kept = self.replayed.pop(digest, None)
        if kept is not None:
            self._replayed_bytes -= _size_bytes(kept)


def _size_bytes(kept: Kept) -> int:
    return len(kept[4]) + len(kept[5])
