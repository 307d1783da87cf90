"""The sweep of a SQLite file: rows past their windows are looked for without a lock, then removed.

Owns where the walks over keys and outcomes stand. There is no index on the windows, because every
operation would pay for it (decision 28); rows are read by their ids, a bounded number at a time, on
the connection for readers. A look only proposes. What goes is decided under the file's write lock.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from retrysafe.core.model import SweepReport
from retrysafe.reentry import reentered
from retrysafe.stores.audit import ACTIONS_KEPT_MS
from retrysafe.stores.sqlite.connections import Connections
from retrysafe.stores.sqlite.schema import SQL

# Rows that one look reads, in a few milliseconds. Outcomes may be large, and their windows are
# stored behind their bodies, so fewer of them.
KEYS_PER_LOOK: Final = 10_000
OUTCOMES_PER_LOOK: Final = 2_000
# Looks per call and table: a large file in which nothing is outlived is walked over in many calls,
# so that whoever calls can pause in between.
LOOKS_PER_CALL: Final = 8
# Rows that one commit removes, in a few milliseconds. All other writers wait for it, and for long
# when this process stands still in the middle.
REMOVALS_PER_COMMIT: Final = 250
_LAST_ID: Final = 2**63 - 1


class _Walk(Protocol):
    """A way over one table, in looks."""

    is_over: bool

    def look(self, connection: sqlite3.Connection, now_ms: int, limit: int) -> list[int]:
        """At most `limit` rows of the next stretch that are past their window; moves on."""

    def restart(self) -> None:
        """Goes back to the first row."""


class KeyWalk:
    """Over the keys. Any of them may be settled or expired at any time, so all are read anew."""

    def __init__(self) -> None:
        self.is_over = False
        self._after = 0

    def look(self, connection: sqlite3.Connection, now_ms: int, limit: int) -> list[int]:
        """At most `limit` keys of the next stretch that are past their window; moves on."""
        stretch = {"now_ms": now_ms, "after": self._after, "rows": KEYS_PER_LOOK}
        last, listed = connection.execute(SQL["look_at_keys"], stretch).fetchone()
        if last is None:
            self.is_over = True
            return []
        found = sorted(json.loads(listed))
        # Those over the limit are met again by the next look.
        self._after = last if len(found) <= limit else found[limit - 1]
        return found[:limit]

    def restart(self) -> None:
        """Goes back to the first row."""
        self.is_over = False
        self._after = 0


@dataclass(slots=True)
class _Stretch:
    """Outcomes up to an id, from where the stretch before it ends."""

    # One that was there when they were read.
    last_id: int
    # When the first of those that were read is past its audit window.
    first_ends_at_ms: int


class OutcomeWalk:
    """Over the outcomes, which never change: what was read is read again when one of them ends.

    New rows come behind all others, so none comes into a stretch that was read. Ids are used again
    only when the last rows of the table were removed, and a stretch ends with a row that it had: if
    that one is gone, its window was over, and the stretch is read again. Whatever else may change
    rows, a restored backup say, can make one go late and never early.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._stretches: list[_Stretch] = []
        self._next = 0

    def look(self, connection: sqlite3.Connection, now_ms: int, limit: int) -> list[int]:
        """At most `limit` outcomes of the next stretch that are past their window; moves on."""
        stretches = self._stretches
        while self._next < len(stretches) and stretches[self._next].first_ends_at_ms > now_ms:
            self._next += 1
        known = stretches[self._next] if self._next < len(stretches) else None
        after = stretches[self._next - 1].last_id if self._next else 0
        last, count, first_ends_at_ms, listed = connection.execute(
            SQL["look_at_outcomes"],
            {
                "now_ms": now_ms,
                "after": after,
                "upto": _LAST_ID if known is None else known.last_id,
                "rows": OUTCOMES_PER_LOOK,
            },
        ).fetchone()
        found = sorted(json.loads(listed))
        if len(found) > limit:
            return found[:limit]  # The next look is at this stretch again, and at what is left.
        is_full = count == OUTCOMES_PER_LOOK
        if known is None:
            # A stretch that is still filling up is not remembered.
            self.is_over = not is_full
        if is_full and (known is None or last < known.last_id):
            # More rows than were here before have used ids again, so nothing holds from here on.
            stretches[self._next :] = [_Stretch(last, first_ends_at_ms)]
            self._next += 1
        elif known is not None and count:
            known.last_id, known.first_ends_at_ms = last, first_ends_at_ms
            self._next += 1
        elif known is not None:
            del stretches[self._next]
        return found

    def restart(self) -> None:
        """Goes back to the first row."""
        self.is_over = False
        self._next = 0


class Sweeping:
    """The sweep of one file by one process."""

    def __init__(self, connections: Connections, now_ms: Callable[[], int]) -> None:
        self._write, self._read = connections.write, connections.read
        self._now_ms = now_ms
        # Two threads that sweep take turns: they would look at the same rows.
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._keys = KeyWalk()
        self._outcomes = OutcomeWalk()

    def sweep(self, limit: int) -> SweepReport:
        """One round of the walk over the file; the round after the last one starts anew."""
        thread = threading.get_ident()
        if self._thread == thread:
            raise reentered("the sweep of its store")
        with self._lock:
            try:
                self._thread = thread
                keys = self._look(self._keys, limit)
                outcomes = self._look(self._outcomes, limit)
                report = self._remove_others(limit)
                self._remove(keys, outcomes, report)
                report.has_more |= not (self._keys.is_over and self._outcomes.is_over)
            except BaseException:
                # What was found and not removed lies behind the walk.
                self._restart()
                raise
            finally:
                self._thread = None
            if not report.has_more:
                self._restart()
            return report

    def _restart(self) -> None:
        self._keys.restart()
        self._outcomes.restart()

    def _look(self, walk: _Walk, limit: int) -> list[int]:
        found: list[int] = []
        for _ in range(LOOKS_PER_CALL):
            if walk.is_over or len(found) >= limit:
                break
            # A short transaction each: a long one would keep the log from being written back, and
            # other readers waiting.
            look = partial(walk.look, now_ms=self._now_ms(), limit=limit - len(found))
            found += self._read(look)
        return found

    def _instants(self) -> dict[str, int]:
        now_ms = self._now_ms()
        return {"now_ms": now_ms, "past_ms": now_ms - ACTIONS_KEPT_MS}

    def _has_others(self) -> bool:
        look = SQL["look_at_others"]
        (is_there,) = self._read(
            lambda connection: connection.execute(look, self._instants()).fetchone()
        )
        return bool(is_there)

    def _remove(self, keys: list[int], outcomes: list[int], report: SweepReport) -> None:
        """Removes those that are past their windows now."""
        for start in range(0, max(len(keys), len(outcomes)), REMOVALS_PER_COMMIT):
            stretch = slice(start, start + REMOVALS_PER_COMMIT)
            removed, past = self._remove_rows(keys[stretch], outcomes[stretch])
            report.keys += removed
            report.outcomes += past

    def _remove_rows(self, keys: list[int], outcomes: list[int]) -> tuple[int, int]:
        listed_keys, listed_outcomes = json.dumps(keys), json.dumps(outcomes)

        def remove(connection: sqlite3.Connection) -> tuple[int, int]:
            now_ms = self._now_ms()
            (ids,) = connection.execute(SQL["still_outlived"], (listed_keys, now_ms)).fetchone()
            connection.execute(SQL["delete_steps_of_keys"], (ids,))
            connection.execute(SQL["delete_arguments_of_keys"], (ids,))
            removed = connection.execute(SQL["delete_keys"], (ids,)).rowcount
            past = connection.execute(SQL["delete_outcomes"], (listed_outcomes, now_ms)).rowcount
            return removed, past

        return self._write(remove)

    def _remove_others(self, limit: int) -> SweepReport:
        """Removes entries and arguments that nobody needs, at most so many of each."""
        report = SweepReport()
        has_others = self._has_others()
        for start in range(0, limit, REMOVALS_PER_COMMIT):
            if not has_others:
                break
            size = min(REMOVALS_PER_COMMIT, limit - start)

            def remove(connection: sqlite3.Connection, size: int = size) -> int:
                removed = connection.execute(SQL["delete_entries"], (self._now_ms(), size))
                connection.execute(SQL["delete_needless_arguments"], (size,))
                connection.execute(SQL["delete_actions"], {**self._instants(), "limit": size})
                return removed.rowcount

            report.entries += self._write(remove)
            has_others = self._has_others()
        report.has_more = has_others
        return report
