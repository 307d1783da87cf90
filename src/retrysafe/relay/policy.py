"""How a relay works: its leases, its tries, its pace. Plain settings, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from retrysafe.core.outbox.entries import BackOff
from retrysafe.errors import PolicyInvalid

_ATTEMPTS_MOST: Final = 1_000_000
_BATCH_MOST: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPolicy:
    """The settings of a relay; raises `PolicyInvalid` for those that make no sense."""

    # How long a claimed entry is this relay's without a renewal: what frees it after a crash.
    lease: timedelta = timedelta(seconds=60)
    # How long one delivery may take in an event loop; a thread cannot be interrupted.
    timeout: timedelta = timedelta(seconds=30)
    # Tries before an entry is dead. With the back-off below that is about two hours of outage.
    attempt_limit: int = 20
    back_off: BackOff = field(default_factory=BackOff)
    # Whether a dead entry holds the later ones of its aggregate back until an operator decides.
    dead_blocks: bool = True
    # How long a delivered entry can still be looked at.
    keep: timedelta = timedelta(days=1)
    # How long a relay without work rests. Hints of the same process wake it earlier.
    poll: timedelta = timedelta(seconds=1)
    # Free entries, and heads of aggregates, that one claim takes at most.
    batch_limit: int = 100

    def __post_init__(self) -> None:
        for name in ("lease", "timeout", "poll"):
            if getattr(self, name) < timedelta(milliseconds=1):
                raise PolicyInvalid(f"{name} is at least a millisecond, got {getattr(self, name)}")
        if self.timeout > self.lease:
            raise PolicyInvalid(
                f"a delivery may take {self.timeout}, and its lease is {self.lease}: another relay "
                "would deliver it at the same time"
            )
        if self.keep < timedelta(0):
            raise PolicyInvalid(f"keep is no negative time, got {self.keep}")
        if not 1 <= self.attempt_limit <= _ATTEMPTS_MOST:
            raise PolicyInvalid(
                f"attempt_limit is a whole number from 1 to {_ATTEMPTS_MOST:,}, "
                f"got {self.attempt_limit}"
            )
        if not 1 <= self.batch_limit <= _BATCH_MOST:
            raise PolicyInvalid(
                f"batch_limit is a whole number from 1 to {_BATCH_MOST:,}, got {self.batch_limit}"
            )
