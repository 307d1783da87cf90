"""How much of a process the requests of one application may take beside the server's own limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from retrysafe.errors import PolicyInvalid

# A task that waits costs a few kilobytes. A thread that waits is one that serves nobody, and most
# servers have few.
LOOP_WAITERS: Final = 1_000
THREAD_WAITERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one protection in one process; raises `PolicyInvalid` for impossible ones."""

    # How many requests wait at the same time for a run of their key. Whoever comes after that is
    # told 409 at once. None: 1,000 on an event loop, 4 in threads.
    waiters: int | None = None
    # How many runs go on behind a 202, out of sight of the server's own limit of requests. Whoever
    # comes after that is answered when the run has ended, as if there were no preference.
    background_runs: int = 10

    def __post_init__(self) -> None:
        for name in ("waiters", "background_runs"):
            value = getattr(self, name)
            if value is None and name == "waiters":
                continue
            if type(value) is not int or value < 0:
                raise PolicyInvalid(f"{name} is a whole number from 0 up, got {value!r}")

    def waiters_for(self, *, is_on_loop: bool) -> int:
        """How many may wait."""
        if self.waiters is not None:
            return self.waiters
        return LOOP_WAITERS if is_on_loop else THREAD_WAITERS
