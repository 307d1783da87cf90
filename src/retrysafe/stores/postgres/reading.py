"""How records are read: many by one statement, and with the payloads to replay if need be.

Owns the guess in which partitions the payloads are. A statement over all of them sets each of them
up, and the keys of one service mostly have theirs in the same few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from retrysafe.core.machine import condition_of
from retrysafe.core.model import Condition, Payload, Record
from retrysafe.stores.postgres.busy_keys import Fetch
from retrysafe.stores.postgres.partitions import DAY_MS
from retrysafe.stores.postgres.renewals import look_before_takeovers, look_beside
from retrysafe.stores.postgres.rows import EVERY_DAY, NO_DAY, found_row

# A record, the payload to replay, and the instant of the reading.
Found = tuple[Record, Payload | None, int]

_REPLAYED: Final = frozenset({Condition.SUCCEEDED, Condition.FAILED})


class Reader:
    """Reads records over one statement port."""

    __slots__ = ("_farthest_ms", "_fetch", "_nearest_ms", "_now_ms")

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        # How far ahead the audits of replayed keys end, counted from the reading: that stays the
        # same from day to day. Nothing is known before the first replay.
        self._nearest_ms, self._farthest_ms = NO_DAY
        self._now_ms = 0

    async def read(self, digest: bytes) -> tuple[Record, int] | None:
        """The record of a digest, and the instant of the reading."""
        found = (await self.read_all([digest])).get(digest)
        if found is not None:
            await look_beside(self._fetch, [found[0]])
        return found

    async def read_all(self, digests: Sequence[bytes]) -> dict[bytes, tuple[Record, int]]:
        """The same for several digests, by digest; leases are as the rows alone have them."""
        rows = await self._fetch("read_records", digests, *NO_DAY)
        return {record.digest: (record, now_ms) for record, _, now_ms in map(found_row, rows)}

    async def read_payload(self, digest: bytes) -> Found | None:
        """The same with the payload to replay."""
        return (await self.read_payloads([digest])).get(digest)

    async def read_payloads(self, digests: Sequence[bytes]) -> dict[bytes, Found]:
        """The records of several digests with the payloads to replay, by digest."""
        first_ms, last_ms = self._now_ms + self._nearest_ms, self._now_ms + self._farthest_ms
        rows = await self._fetch("read_records", digests, first_ms, last_ms)
        found = {item[0].digest: item for item in map(found_row, rows)}
        if rows:
            self._now_ms = rows[0][0]
        # Of a row without a payload, the end of its audit tells whether anybody looked for one.
        passed = [
            (bytes(row[1]), row[-4])
            for row in rows
            if row[-3] is None and row[-4] is not None and not first_ms <= row[-4] <= last_ms
        ]
        missed = []
        for digest, audit_ends_at_ms in passed:
            record, _, now_ms = found[digest]
            # Of a key for ever whose audit is over, nothing is left: a look at every day would not
            # find it, and would widen the look of all replays after it.
            if audit_ends_at_ms > now_ms and condition_of(record, now_ms) in _REPLAYED:
                missed.append(digest)
                self._reach(audit_ends_at_ms - now_ms)
        if missed:
            for digest in missed:
                del found[digest]  # Read anew, it may be gone.
            rows = await self._fetch("read_records", missed, *EVERY_DAY)
            found |= {item[0].digest: item for item in map(found_row, rows)}
        await look_before_takeovers(self._fetch, found.values())
        return found

    def _reach(self, ahead_ms: int) -> None:
        """Looks that far ahead from now on, and a day around it: keys grow older."""
        if self._nearest_ms > self._farthest_ms:
            self._nearest_ms = self._farthest_ms = ahead_ms
        self._nearest_ms = min(self._nearest_ms, ahead_ms - DAY_MS)
        self._farthest_ms = max(self._farthest_ms, ahead_ms + DAY_MS)
