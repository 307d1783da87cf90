"""A bounded number of places: for those who wait for another run, and for runs that nobody awaits.

Owns the count, and nothing of what the places are for.
"""

from __future__ import annotations

from collections.abc import Hashable


class Permits:
    """So many places. Whoever finds none goes on without one.

    For any number of threads, without a lock: of two that come for the last place at the same
    instant, both may be turned away, and never both be let in.
    """

    __slots__ = ("_taken", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: set[Hashable] = set()

    def enter(self, who: Hashable) -> bool:
        """Takes a place, or keeps the one that is taken already; False when there is none."""
        taken = self._taken
        if who in taken:
            return True
        taken.add(who)
        if len(taken) <= self.limit:
            return True
        taken.discard(who)
        return False

    def leave(self, who: Hashable) -> None:
        """Gives the place back. Harmless without one, so a signal in between loses none."""
        self._taken.discard(who)

    def __len__(self) -> int:
        return len(self._taken)
