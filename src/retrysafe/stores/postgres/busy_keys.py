"""Batches that meet a user's open transaction: what can be written apart from it is.

Owns the keys that are known to be busy, and the transaction that writes a batch without the rows
that are locked. A user's transaction holds a key in two ways: an atomic run has inserted or
replaced its row, or a leased attempt has written something there with `complete_in` or a joined
step. Neither may hold up the other rows of a batch for as long as that transaction lasts.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Final

from retrysafe.core.model import ClaimRequest, Settlement
from retrysafe.stores.postgres.atomic import lock_number

# Runs a statement by its name.
Fetch = Callable[..., Awaitable[Sequence[Sequence[Any]]]]
# Whether locked rows are skipped, and claims and endings to be written together.
Part = tuple[bool, Collection[ClaimRequest], Collection[Settlement]]
# The instants at which keys were admitted, by digest, and the digests that were ended.
Written = tuple[dict[bytes, int], set[bytes]]
# Writes claims and endings by one statement.
Write = Callable[[Fetch, Collection[ClaimRequest], Collection[Settlement]], Awaitable[Written]]
# Runs several statements in one transaction, again after a conflict; they wait for any lock.
Transact = Callable[[Callable[[Fetch], Awaitable[Written]]], Awaitable[Written]]

# For so long a busy key is skipped at once, instead of holding up the batch that it comes in. Who
# waits for it asks twice a second.
BUSY_SECONDS: Final = 5.0
# More than the open transactions of most servers. A key that is forgotten costs a wait again.
BUSY_LIMIT: Final = 1000

_NEW: Final = 1
_ENDED: Final = 2
_HELD: Final = 3


class BusyKeys:
    """Tells the rows that would wait for a user's transaction from those that would not."""

    __slots__ = ("_busy", "_schema_name", "_transact")

    def __init__(self, transact: Transact, schema_name: str) -> None:
        self._transact = transact
        self._schema_name = schema_name
        # When each key was last seen busy.
        self._busy: dict[bytes, float] = {}

    def knows_any(self, digests: set[bytes]) -> bool:
        """Whether one of them was seen busy a moment ago."""
        return bool(self._busy) and not self._busy.keys().isdisjoint(digests)

    def is_busy(self, digest: bytes) -> bool:
        """Whether a key was seen busy a moment ago."""
        return digest in self._busy

    def note(self, digests: Iterable[bytes]) -> None:
        """Remembers keys that are busy now."""
        now = time.monotonic()
        for digest in digests:
            # Taken out first, so that those seen longest ago come first.
            self._busy.pop(digest, None)
            self._busy[digest] = now
        self._forget(now - BUSY_SECONDS)

    def parted(
        self, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> list[Part]:
        """The rows that are to be written as they are, and those of busy keys."""
        self._forget(time.monotonic() - BUSY_SECONDS)
        if not self._busy:
            return [(False, claims, endings)]
        busy = self._busy.copy()
        parts: list[Part] = []
        for skips_locked in (False, True):
            requests = [item for item in claims if (item.key.digest in busy) is skips_locked]
            ends = [item for item in endings if (item.key.digest in busy) is skips_locked]
            if requests or ends:
                parts.append((skips_locked, requests, ends))
        return parts

    async def write(
        self, write: Write, claims: Collection[ClaimRequest], endings: Collection[Settlement]
    ) -> Written:
        """Writes what waits for no user's transaction, and notes the rest as busy."""
        found: set[tuple[int, bytes]] = set()

        async def write_unlocked(fetch: Fetch) -> Written:
            rows = await fetch(
                "skip_locked",
                [request.key.digest for request in claims],
                [lock_number(self._schema_name, request.key.digest) for request in claims],
                [item.key.digest for item in endings],
                [item.token for item in endings],
            )
            found.clear()
            found.update((kind, bytes(digest)) for kind, digest in rows)
            new = [item for item in claims if (_NEW, item.key.digest) in found]
            held = [item for item in endings if (_HELD, item.key.digest) in found]
            return await write(fetch, new, held) if new or held else ({}, set())

        written = await self._transact(write_unlocked)
        busy = {item.key.digest for item in claims} | {item.key.digest for item in endings}
        for kind, digest in found:
            busy.discard(digest)
            if kind != _ENDED:  # Of such a row it is not known yet whether it can be replaced.
                self._busy.pop(digest, None)
        self.note(busy)
        return written

    def _forget(self, before: float) -> None:
        for digest, seen in self._busy.copy().items():
            if seen > before and len(self._busy) <= BUSY_LIMIT:
                break
            self._busy.pop(digest, None)
