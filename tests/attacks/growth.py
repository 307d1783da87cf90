"""How work grows with its input: measured in the CPU time of this thread, never by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# In proportion is 8, quadratic is 64; memory that no longer fits a cache lies in between.
FACTOR = 8
LIMIT = 16.0
_ROUNDS = 6
_FEWEST_ROUNDS = 3
# Below this a measurement is mostly noise.
_SHORTEST_SECONDS = 0.0002


def growth(make: Callable[[int], Any], work: Callable[[Any], object], size: int) -> float:
    """By what factor the work grows when the input is eight times as large.

    The best of several rounds of each size, taken in turn: a busy machine makes work slower, never
    faster. A work that raises for its input counts as well: refusing has its price, too.
    """
    small, large = make(size), make(size * FACTOR)
    repeats = 1
    while repeats < 4_096 and _seconds(work, small, repeats) < _SHORTEST_SECONDS:
        repeats *= 2
    best = [float("inf")] * 2
    for number in range(1, _ROUNDS + 1):
        for place, given in enumerate((small, large)):
            best[place] = min(best[place], _seconds(work, given, repeats))
        # Not after the first round: one slow small input would pass for growth in proportion.
        if number >= _FEWEST_ROUNDS and best[1] <= 0.75 * LIMIT * best[0]:
            break
    return best[1] / best[0]


def _seconds(work: Callable[[Any], object], given: Any, repeats: int) -> float:
    begun = time.thread_time()
    for _ in range(repeats):
        try:
            work(given)
        except Exception:
            pass
    return time.thread_time() - begun
