"""Lists for operators and workers, over a table of any size.

Owns how records are searched without an index that operations would pay for. Lists go back in
time in windows of claims, each wider than the one before, until enough is found or the time is
over. Pending keys are met by a walk over the pages, which a worker makes every few minutes and
keeps: after that only the keys claimed since are looked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from retrysafe.core.keys.canonical import DIGEST_BYTES
from retrysafe.core.listing import Position, RecordPage, RecordQuery
from retrysafe.core.model import Condition, StoredKey
from retrysafe.stores.clock import instant_text
from retrysafe.stores.postgres.reading import stored_of
from retrysafe.stores.postgres.statements import Fetch

# Pages per statement of a walk. It changes nothing, so it reads many: 16 MB.
LOOK_PAGES: Final = 2048
# The first window, and by how much the next one is wider. Even the keys of a month are reached in
# a dozen statements, and a busy second does not fill the first one with more than can be sorted.
_FIRST_WINDOW_MS: Final = 1_000
_WIDER: Final = 4
# Whatever is older is one window.
_LAST_WINDOW_MS: Final = 40 * 86_400_000
_EVER_MS: Final = 2**62
# How many pending keys a walk keeps: an incident has thousands, and each is 16 bytes.
NOTED_LIMIT: Final = 10_000
# Where a walk ends in any case: what it has met is held in memory.
_WALK_LIMIT: Final = 100_000
# How long a kept walk is good for; then somebody should have made the next one.
_WALK_GOOD_MS: Final = 15 * 60_000
# A claim is committed this long after its instant at the latest.
_COMMIT_MS: Final = 60_000
_PENDING: Final = frozenset({Condition.RUNNING, Condition.ABANDONED})


class Listing:
    """Searches the records of one schema."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    async def list_records(self, query: RecordQuery) -> RecordPage:
        """Records, newest claim first, as far as the query's time allows."""
        if query.conditions and query.conditions <= _PENDING:
            found, unsearched = await self.pending(query.seconds)
            return query.page_of(found, unsearched)
        return await self._claimed(query)

    async def _claimed(self, query: RecordQuery) -> RecordPage:
        until = None if query.seconds is None else time.monotonic() + query.seconds
        ((now_ms,),) = await self._fetch("now_ms")
        newer, older = query.newer_than_ms, query.older_than_ms
        first_ms = -_EVER_MS if newer is None else now_ms - newer
        last_ms = _EVER_MS if older is None else now_ms - older
        after = b""
        if query.after is not None and query.after.claimed_at_ms <= last_ms:
            last_ms, after = query.after
        found: list[StoredKey] = []
        width_ms = _FIRST_WINDOW_MS
        while first_ms <= last_ms:
            from_ms = max(first_ms, min(last_ms, now_ms) - width_ms)
            if width_ms > _LAST_WINDOW_MS:
                from_ms = first_ms
            asked_at = time.monotonic()
            rows = await self._fetch(
                "list_claimed",
                query.caller,
                query.text_prefix,
                [item.value for item in query.conditions],
                query.limit - len(found),
                query.operation,
                from_ms,
                last_ms,
                after,
                now_ms,
            )
            found += map(stored_of, rows)
            if len(found) >= query.limit or from_ms == first_ms:
                break
            last_ms, after = from_ms - 1, b""
            width_ms *= _WIDER
            if until is not None:
                left = until - time.monotonic()
                took = max(time.monotonic() - asked_at, 1e-6)
                if left <= 0:
                    unsearched = f"keys claimed before {instant_text(from_ms)}"
                    return RecordPage(found, Position(last_ms, b""), unsearched)
                # A window that would take longer than what is left is made narrower.
                width_ms = max(
                    _FIRST_WINDOW_MS, min(width_ms, int(width_ms * left / _WIDER / took))
                )
        return RecordPage.of(found, query.limit)

    async def sample(self, size: int) -> list[StoredKey]:
        """About so many records, from pages that are chosen at random."""
        ((pages,),) = await self._fetch("table_pages")
        # A page holds about seven, and fewer where many were removed; small tables are read whole.
        percent = min(100.0, 100.0 * max(size // 4, 64) / max(pages, 1))
        rows = await self._fetch("sample_records", percent, 4 * size)
        return [stored_of(row) for row in rows][:: max(1, len(rows) // size)]

    async def list_abandoned(self, limit: int) -> list[StoredKey]:
        """At most `limit` pending records whose lease has ended, longest ended first.

        Walks over the table's pages in short statements and stops at the limit, so it is cheap for
        the server even where it takes a while, and may see a record that was settled meanwhile.
        A walk that met every page is kept for whoever lists pending keys next.
        """
        ((now_ms,),) = await self._fetch("now_ms")
        found, share = await self._walk(None, limit)
        if share == 1:
            kept = b"".join(list(found)[:NOTED_LIMIT])
            await self._fetch("note_walk", now_ms, len(found) <= NOTED_LIMIT, kept)
        abandoned = [item for item in found.values() if item.condition is Condition.ABANDONED]
        return sorted(abandoned, key=lambda item: item.record.lease_ends_at_ms)[:limit]

    async def pending(self, seconds: float | None) -> tuple[list[StoredKey], str]:
        """All pending records, and what was not searched for them."""
        ((now_ms,),) = await self._fetch("now_ms")
        rows = await self._fetch("read_walk")
        if rows and abs(now_ms - rows[0][1]) <= _WALK_GOOD_MS:
            started_at_ms, _, is_whole, digests = rows[0]
            return await self._pending_since(started_at_ms, is_whole, bytes(digests))
        found, share = await self._walk(seconds, None)
        unsearched = "" if share == 1 else f"{100 - int(100 * share)} % of the table"
        return list(found.values()), unsearched

    async def _pending_since(
        self, started_at_ms: int, is_whole: bool, digests: bytes
    ) -> tuple[list[StoredKey], str]:
        listed = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
        rows: Sequence[Sequence[Any]] = await self._fetch("pending_of", listed)
        found = {item.record.digest: item for item in map(stored_of, rows)}
        recent = await self._fetch("pending_since", started_at_ms - _COMMIT_MS, NOTED_LIMIT)
        found |= {item.record.digest: item for item in map(stored_of, recent)}
        is_all = is_whole and len(recent) < NOTED_LIMIT
        unsearched = "" if is_all else f"pending keys beyond the first {NOTED_LIMIT:,}"
        return list(found.values()), unsearched

    async def _walk(
        self, seconds: float | None, limit: int | None
    ) -> tuple[dict[bytes, StoredKey], float]:
        """Pending records by digest, and which share of the pages was seen for them.

        Ends when so many abandoned ones were met.
        """
        until = None if seconds is None else time.monotonic() + seconds
        ((pages,),) = await self._fetch("table_pages")
        found: dict[bytes, StoredKey] = {}
        for page in range(0, pages, LOOK_PAGES):
            if until is not None and time.monotonic() > until:
                return found, page / pages
            rows = await self._fetch(
                "pending_in_pages", f"({page},0)", f"({page + LOOK_PAGES},0)", _WALK_LIMIT
            )
            # A row that moved to a later page meanwhile is met twice; the later one counts.
            found |= {item.record.digest: item for item in map(stored_of, rows)}
            abandoned = [item for item in found.values() if item.condition is Condition.ABANDONED]
            is_enough = limit is not None and len(abandoned) >= limit
            if is_enough or len(found) >= _WALK_LIMIT:
                return found, page / pages
        return found, 1
