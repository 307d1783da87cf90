"""The local clock: never jumps, and goes on while the machine is suspended.

Leases are counted by it. `time.monotonic` stands still during a suspension, so a lease that has
ended meanwhile would look alive, and work would start on a key that somebody else has. Timers stand
still too: whoever waits for an instant of this clock looks at it again now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Final

# The clock of each platform that counts a suspension. Elsewhere `time.monotonic` does, as on
# Windows, or nothing does.
_CLOCKS: Final = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC_RAW"}

# A timer that was set before a suspension is late by its length. This soon after it, a lease is
# looked at again.
REST_MAXIMUM_SECONDS: Final = 2.0


def clock_of(platform: str) -> Callable[[], float]:
    """The clock for a platform; `time.monotonic` where a sandbox refuses the better one."""
    number = getattr(time, _CLOCKS.get(platform, ""), None)
    if number is None:
        return time.monotonic
    clock: Callable[[], float] = partial(time.clock_gettime, number)
    try:
        clock()
    except OSError:
        return time.monotonic
    return clock


monotonic: Final = clock_of(sys.platform)
