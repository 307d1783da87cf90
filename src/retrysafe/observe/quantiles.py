"""Quantiles of the ages of running operations."""

from __future__ import annotations

from typing import Final

QUANTILES: Final = (0.5, 0.95, 0.99)


def quantile(ordered: list[float], part: float) -> float:
    """The value that this part of all is not above; 0 of nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
