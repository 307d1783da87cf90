"""The sweep of a PostgreSQL schema: a walk over the pages of the keys, and what is swept beside it.

Owns how far the walk has come, how wide its next step is, and how much one call may write. Knows
nothing of pauses: whoever calls rests between two calls (`core.pace`).

The unit is the page that is written. After a checkpoint the first change of a page puts the whole
page into the WAL, however few rows were removed from it, and every claim that commits meanwhile
waits until all of that is flushed. So a call ends when it has written its share of pages, and the
rest that follows is what keeps the latency of claims.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from retrysafe.core.model import SweepReport
from retrysafe.stores.audit import ACTIONS_KEPT_MS
from retrysafe.stores.postgres.outbox import PostgresOutbox
from retrysafe.stores.postgres.statements import Fetch

# Pages of keys that one call writes at most: a quarter of a megabyte of page images, which a flush
# takes along without being noticed. It is also the width of a step where most pages hold something.
PAGES_PER_CALL: Final = 32
# With so many written the call ends. What is left would be steps of a few pages each.
PAGES_ENOUGH: Final = 16
# The widest step, over pages that hold little: four megabytes are read in a few milliseconds, and
# five million live keys are walked over in less than 600 statements.
WIDTH_MOST: Final = 512
# Steps per call: a large table in which nothing is outlived is walked over in many calls, so that
# whoever calls can pause in between.
STEPS_PER_CALL: Final = 16
# Rows of another table that one call removes at most. Those of one age lie together: small entries
# are half of the keys' share of WAL, those of a kilobyte about twice as much. With fewer, it would
# be the least rest between two calls that says how fast they go.
ROWS_BESIDE: Final = 512
# The other tables are looked at by the first call of a walk and by every so many calls after it: a
# walk may take minutes, and what is delivered or needless must not wait for its end. After a walk,
# what they have left is swept alone, but a new walk starts after as many calls: an outbox that
# always has more must not keep the keys from being swept.
CALLS_BETWEEN: Final = 16


class KeyWalk:
    """A way over the pages of the keys that ends where the table ends."""

    __slots__ = ("_fetch", "_page", "_was_in_vain", "_width", "is_over")

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        # The first page that has not been seen to the end.
        self._page = 0
        self._width = PAGES_PER_CALL
        # Whether the last step removed nothing of what it chose.
        self._was_in_vain = False
        # The next step starts from the first page again.
        self.is_over = True

    async def remove(self, limit: int) -> int:
        """Removes at most `limit` outlived keys from the next pages; says how many."""
        removed = written = 0
        for _ in range(STEPS_PER_CALL):
            keys, pages = await self._step(limit - removed, PAGES_PER_CALL - written)
            removed += keys
            written += pages
            if self.is_over or removed >= limit or written >= PAGES_ENOUGH:
                break
        return removed

    async def _step(self, limit: int, pages_left: int) -> tuple[int, int]:
        """One statement, which writes at most `pages_left` pages; the keys removed, the pages."""
        start = 0 if self.is_over else self._page
        width = self._width
        if width > PAGES_PER_CALL:
            # Who removes so many rows writes no more pages, however many of the range hold some.
            limit = min(limit, pages_left)
        else:
            width = min(width, pages_left)
        ((keys, written, last, pages, chosen),) = await self._fetch(
            "sweep_pages", f"({start},0)", f"({start + width},0)", limit
        )
        if chosen >= limit and (keys or not self._was_in_vain):
            # The last page may hold more. The scan goes by page numbers, so those before do not.
            # Nothing removed means that it was written meanwhile, or that a trigger of the table
            # keeps it: that must not keep the walk, so it is tried once more and no oftener.
            self._was_in_vain = not keys
            self._page = max(start, last)
            self._width = PAGES_PER_CALL
            self.is_over = False
            return keys, written
        self._was_in_vain = False
        self._page = start + width
        if written * 4 <= width:
            # Little is found here. A wider step that finds much ends at its limit, above.
            self._width = min(2 * self._width, WIDTH_MOST)
        self.is_over = self._page >= pages
        return keys, written


class Sweeping:
    """Removes what is past its window, a bounded part by each call."""

    def __init__(
        self, fetch: Fetch, outbox: PostgresOutbox, tend: Callable[[], Awaitable[list[str]]]
    ) -> None:
        self._tend = tend
        self._keys = KeyWalk(fetch)
        # Those of this walk, and those after it that left the keys alone.
        self._calls = self._calls_alone = 0

        async def outcomes(limit: int) -> int:
            ((count,),) = await fetch("sweep_default_outcomes", limit)
            return int(count)

        async def arguments(limit: int) -> int:
            ((count,),) = await fetch("sweep_arguments", limit)
            return int(count)

        async def renewals(limit: int) -> int:
            ((count,),) = await fetch("sweep_renewals", limit)
            return int(count)

        async def actions(limit: int) -> int:
            ((count,),) = await fetch("sweep_actions", limit, ACTIONS_KEPT_MS)
            return int(count)

        self._beside = {
            "outcomes": outcomes,
            "entries": outbox.sweep,
            "arguments": arguments,
            "renewals": renewals,
            "actions": actions,
        }
        # Those that reached their limit at their last turn, and so may have left something.
        self._unfinished: set[str] = set()

    async def sweep(self, limit: int) -> SweepReport:
        """Removes at most `limit` rows of each table, mostly fewer."""
        keys, dropped, is_turn, is_over = 0, [], False, True
        if self._keys.is_over and self._unfinished and self._calls_alone < CALLS_BETWEEN:
            self._calls_alone += 1
        else:
            if self._keys.is_over:
                self._calls = 0
                # Once in a walk: making and dropping partitions takes locks.
                dropped = await self._tend()
            is_turn = self._calls % CALLS_BETWEEN == 0
            keys = await self._keys.remove(limit)
            # Read before anything else is awaited: another call may start the next walk meanwhile.
            is_over = self._keys.is_over
            # Not before: a walk that an outage kept from being begun is not put off once more.
            self._calls_alone = 0
        removed = dict.fromkeys(self._beside, 0)
        most = min(limit, ROWS_BESIDE)
        for name, remove in self._beside.items():
            if is_turn or name in self._unfinished:
                removed[name] = await remove(most)
                if removed[name] >= most:
                    self._unfinished.add(name)
                else:
                    self._unfinished.discard(name)
        # Counted last, so that a turn that an outage cut short is taken again.
        self._calls += 1
        has_more = not is_over or bool(self._unfinished)
        return SweepReport(keys, removed["outcomes"], has_more, len(dropped), removed["entries"])
