"""Figures over the last minutes, from counters that only grow: duplicates, and the rate of keys.

Owns the samples that they are made of. Bounded in number, whatever the pace of the scrapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

# Over what time: long enough that a retry storm is no single scrape, short enough to alert on.
WINDOW_SECONDS: Final = 300.0
# Scrapes that come quicker share a sample.
SPACING_SECONDS: Final = 5.0

T = TypeVar("T")


class Samples(Generic[T]):
    """What was counted, for as long as the window lasts."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, T]] = deque()

    def since(self, now: float, counted: T) -> tuple[float, T] | None:
        """The sample that the window begins with; None when this is the first one."""
        samples = self._samples
        # One that is older than the window stays until another can take its place.
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()
        if not samples:
            samples.append((now, counted))
            return None
        first = samples[0]
        if now - samples[-1][0] >= SPACING_SECONDS:
            samples.append((now, counted))
        return first


class DedupWindow:
    """The share of duplicates among the calls of the last minutes, by operation."""

    def __init__(self) -> None:
        self._samples: Samples[Mapping[str, tuple[float, float]]] = Samples()

    def ratios(self, now: float, counted: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """`counted` has duplicates and all calls of each operation, ever."""
        first = self._samples.since(now, counted)
        before = {} if first is None else first[1]
        found = {}
        for operation, (duplicates, calls) in counted.items():
            earlier_duplicates, earlier_calls = before.get(operation, (0.0, 0.0))
            if calls < earlier_calls:  # The counters have begun anew.
                earlier_duplicates = earlier_calls = 0.0
            new = calls - earlier_calls
            found[operation] = (duplicates - earlier_duplicates) / new if new else 0.0
        return found


class KeyRate:
    """How many keys a store gets in a second, over the last minutes."""

    def __init__(self) -> None:
        self._samples: Samples[int] = Samples()

    def per_second(self, now: float, inserted: int) -> float | None:
        """`inserted` is how many it ever got; None until two looks are far enough apart."""
        first = self._samples.since(now, inserted)
        if first is None or now - first[0] < SPACING_SECONDS or inserted < first[1]:
            return None
        return (inserted - first[1]) / (now - first[0])
