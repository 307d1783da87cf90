"""Lengths of time as people say them: "7 days, 0:00:00" is not how."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from retrysafe.core.policy import FOREVER

_UNITS: Final = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def spoken(duration: timedelta) -> str:
    """A length of time in the largest unit that fits without a rest."""
    if duration == FOREVER:
        return "ever"
    seconds = duration.total_seconds()
    for size, name in _UNITS:
        count, rest = divmod(seconds, size)
        if count and not rest:
            return f"{count:.0f} {name}" + ("" if count == 1 else "s")
    return f"{seconds:g} seconds"
