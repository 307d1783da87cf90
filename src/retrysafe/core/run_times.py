"""How long operations usually take, and when a duplicate of a running one should come back.

Owns a small sketch of past runs per operation, in this process, and the hint that is made of it. It
has no clock: those who run and those who ask bring the time. What a lease has left only bounds the
hint, because a lease is renewed for as long as its operation runs and says nothing of its end.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Final

# Names come from code, and from rules; a caller that makes them up must not fill the memory.
OPERATIONS_LIMIT: Final = 512
# Past it all counts of an operation are halved: what it took last week fades.
COUNT_LIMIT: Final = 64
# Runs are counted in steps of a fifth, from 10 ms to a day.
SHORTEST_SECONDS: Final = 0.01
_STEPS_PER_DOUBLING: Final = 4
_LAST_STEP: Final = ceil(log2(86_400 / SHORTEST_SECONDS) * _STEPS_PER_DOUBLING)
# When nothing is known. Shorter would have a client knock twice at nearly every operation.
UNKNOWN_SECONDS: Final = 1.0
# Whoever is told to come back at once comes back in a tight loop.
MINIMUM_SECONDS: Final = 0.1
# Where no lease bounds it.
MAXIMUM_SECONDS: Final = 60.0

# How many runs took up to the time of a step, and longer than that of the step before.
_Sketch = dict[int, int]


def _seconds_of(step: int) -> float:
    seconds: float = SHORTEST_SECONDS * 2.0 ** (step / _STEPS_PER_DOUBLING)
    return seconds


class RunTimes:
    """How long the operations of this process took.

    For any number of threads, without a lock: every access to a dictionary is one that is atomic,
    and a run that is lost between two threads is one of many.
    """

    __slots__ = ("_sketches",)

    def __init__(self) -> None:
        self._sketches: dict[str, _Sketch] = {}

    def add(self, operation: str, seconds: float) -> None:
        """A run of the operation has ended after so many seconds, well or not."""
        sketch = self._sketches.get(operation)
        if sketch is None:
            if len(self._sketches) >= OPERATIONS_LIMIT:
                # The oldest. One that is still in use is soon known again.
                self._sketches.pop(list(self._sketches)[0], None)  # noqa: RUF015 — atomic.
            sketch = self._sketches[operation] = {}
        doublings = log2(max(seconds, SHORTEST_SECONDS) / SHORTEST_SECONDS)
        step = min(_LAST_STEP, ceil(doublings * _STEPS_PER_DOUBLING))
        count = sketch[step] = sketch.get(step, 0) + 1
        if count > COUNT_LIMIT:
            self._sketches[operation] = {
                step: count // 2 for step, count in list(sketch.items()) if count > 1
            }

    def retry_after(
        self, operation: str, elapsed_seconds: float, left_seconds: float | None
    ) -> float:
        """When to ask again for a run that began so long ago, in seconds from now.

        Never beyond what is left of its lease, also when HTTP rounds it up to whole seconds; None
        where it has none.
        """
        wanted = self._rest(operation, elapsed_seconds)
        if wanted > 1.0:
            wanted = float(ceil(wanted))
        if left_seconds is None:
            return min(wanted, MAXIMUM_SECONDS)
        left = float(int(left_seconds)) if left_seconds >= 1.0 else left_seconds
        return max(MINIMUM_SECONDS, min(wanted, left))

    def _rest(self, operation: str, elapsed_seconds: float) -> float:
        """How much longer such a run takes, by those that took at least as long."""
        sketch = self._sketches.get(operation, {})
        longer = [
            (step, count)
            for step, count in sorted(list(sketch.items()))  # noqa: C414 — atomic.
            if _seconds_of(step) > elapsed_seconds
        ]
        half = sum(count for _, count in longer) / 2
        for step, count in longer:
            half -= count
            if half <= 0:
                return max(MINIMUM_SECONDS, _seconds_of(step) - elapsed_seconds)
        # It takes longer than any run that is known. The longer it has taken, the longer it may
        # still take: with as long again, the answer is there after a few tries, and is not old.
        least = MINIMUM_SECONDS if sketch else UNKNOWN_SECONDS
        return max(least, elapsed_seconds if elapsed_seconds < 1.0 else round(elapsed_seconds))
