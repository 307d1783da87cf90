"""The pace of a sweeper: how much it takes at a time, and how long it rests.

Owns two promises, and knows neither a clock nor a store. It keeps up: what expires is removed as
fast as it expires. And it never runs flat out: however much there is to remove, most of the time
belongs to claims and completions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from retrysafe.core.model import SweepReport

# A round of this length disappears among other statements; a longer one means that the store is
# slow or busy, so the next one takes less.
_ROUND_SECONDS: Final = 0.05
_LIMIT_LEAST: Final = 50
_LIMIT_MOST: Final = 5_000
# Rests are at least four times as long as the work before them.
_REST_SHARE: Final = 4.0
_REST_LEAST_SECONDS: Final = 0.01
# A round that removes fewer has spent its time with looking. No part of the limit, which grows
# where much lies together: a round that ends early, as its rows lie far apart, removes as well.
_LOOKING_BELOW: Final = 16
# Between two walks over the store: often enough that a day's partition is made and dropped in
# time, and that the first keys of a quiet store do not wait for long.
_WALK_REST_LEAST_SECONDS: Final = 1.0
_WALK_REST_MOST_SECONDS: Final = 60.0


def rest_of_command(report: SweepReport, took_seconds: float) -> float:
    """The seconds to rest after a round of a sweep that somebody waits for.

    Claims wait for what a round writes. One that found nothing has only read.
    """
    has_removed = report.keys or report.outcomes or report.entries
    return rest_within_walk(took_seconds) if has_removed else 0.0


def rest_within_walk(took_seconds: float) -> float:
    """The seconds to rest after a round that left more to do, of a sweeper that never ends."""
    return max(_REST_LEAST_SECONDS, took_seconds * _REST_SHARE)


@dataclass(slots=True)
class Pace:
    """Adapts to what the rounds report; one object for one sweeper."""

    # Keys, outcomes and entries per round, of each.
    limit: int = 500
    _walk_removed: int = field(default=0, init=False)
    # The time of the rounds that found next to nothing.
    _walk_looking_seconds: float = field(default=0.0, init=False)
    _last_walk_ended_at: float | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)

    def rest_after(self, report: SweepReport, *, started_at: float, ended_at: float) -> float:
        """The seconds to rest after a round; the next round takes `limit`."""
        took_seconds = max(0.0, ended_at - started_at)
        self._failures = 0
        removed = max(report.keys, report.outcomes, report.entries)
        self._walk_removed += removed
        if removed < _LOOKING_BELOW:
            self._walk_looking_seconds += took_seconds
        if took_seconds > _ROUND_SECONDS:
            self.limit = max(_LIMIT_LEAST, self.limit // 2)
        elif removed >= self.limit:
            self.limit = min(_LIMIT_MOST, self.limit + self.limit // 2)
        if report.has_more:
            return rest_within_walk(took_seconds)
        return max(rest_within_walk(took_seconds), self._rest_between_walks(started_at, ended_at))

    def rest_after_failure(self) -> float:
        """The seconds to rest when the store did not answer: longer each time."""
        self._failures += 1
        return float(min(_WALK_REST_MOST_SECONDS, 2.0 ** min(self._failures - 1, 10)))

    def _rest_between_walks(self, started_at: float, ended_at: float) -> float:
        """Until about one round's worth has expired, as far as the last walk can tell.

        Looking in vain is paid for once more, because that is what fewer walks save. Removing is
        not: it has rested after each round, and has to be done in any case.
        """
        since = started_at if self._last_walk_ended_at is None else self._last_walk_ended_at
        rate_per_second = self._walk_removed / max(ended_at - since, 0.001)
        least = max(_WALK_REST_LEAST_SECONDS, self._walk_looking_seconds * _REST_SHARE)
        wanted = self.limit / rate_per_second if rate_per_second else _WALK_REST_MOST_SECONDS
        self._last_walk_ended_at = ended_at
        self._walk_removed = 0
        self._walk_looking_seconds = 0.0
        return max(least, min(wanted, _WALK_REST_MOST_SECONDS))
