"""A lease as its owner knows it: when it ends by the local clock, and whether it is lost.

Owns the owner's view only. The store decides by its own clock; the local end is counted from
before the claim was sent, so it never lies later than the true one.
"""

from __future__ import annotations

from retrysafe.core.keys.key import Key

# Two renewals may fail before a lease ends.
RENEWALS_PER_LEASE = 3
# A renewal gives up after this part of its lease: a connection that has gone silent may cost one
# try, and never so much of the lease that none is left for a fresh connection. A later try waits
# longer: the store may be slow, and then none that gives up so soon would ever come through.
TIMEOUTS_PER_LEASE = 6
LATE_TIMEOUTS_PER_LEASE = 4


class Lease:
    """One running attempt's hold on its key."""

    __slots__ = (
        "ends_at_ms",
        "ends_monotonic",
        "is_handed_over",
        "is_held",
        "is_joined",
        "is_revoked",
        "is_settled",
        "key",
        "lease_ms",
        "may_be_settled",
        "renew_monotonic",
        "renew_until_monotonic",
        "token",
    )

    def __init__(
        self,
        key: Key,
        token: bytes,
        lease_ms: int,
        remaining_ms: int,
        ends_at_ms: int,
        asked_monotonic: float,
        run_limit_seconds: float | None = None,
    ) -> None:
        self.key = key
        self.token = token
        self.lease_ms = lease_ms
        self.is_revoked = False
        # Whether the ending of its attempt is stored.
        self.is_settled = False
        # Whether it is stored in the background, for a caller who is gone.
        self.is_handed_over = False
        # Whether somebody works under it. An attribute that is set by itself, see decision 31: a
        # lease that is renewed for ever blocks its key.
        self.is_held = True
        # Whether its operation is about to write in a transaction of the user's, or has tried in
        # vain: renewals stay off the record.
        self.is_joined = False
        # Whether such a transaction has written, or tried to write, the ending of its run.
        self.may_be_settled = False
        self.renew_until_monotonic = (
            None if run_limit_seconds is None else asked_monotonic + run_limit_seconds
        )
        self.renewed(remaining_ms, ends_at_ms, asked_monotonic)

    def renewed(self, remaining_ms: int, ends_at_ms: int, asked_monotonic: float) -> None:
        """Takes over what the store answered to a claim or an extend asked for at that time."""
        # A store whose clock was set back answers with more than was asked for. Believing that
        # would put off the next renewal until long after the clock is right again.
        remaining_seconds = min(remaining_ms, self.lease_ms) / 1000
        self.ends_at_ms = ends_at_ms
        self.ends_monotonic = asked_monotonic + remaining_seconds
        self.renew_monotonic = asked_monotonic + remaining_seconds / RENEWALS_PER_LEASE

    def renewal_timeout_seconds(self, monotonic: float) -> float:
        """How long the store may take to answer a renewal that is asked for now."""
        lease_seconds = self.lease_ms / 1000
        is_late = self.ends_monotonic - monotonic < lease_seconds / 2
        return lease_seconds / (LATE_TIMEOUTS_PER_LEASE if is_late else TIMEOUTS_PER_LEASE)

    def put_off(self, monotonic: float) -> None:
        """Sets the next try after a renewal that the store did not answer."""
        self.renew_monotonic = monotonic + self.lease_ms / 1000 / RENEWALS_PER_LEASE / 4

    def end_renewals(self, monotonic: float) -> None:
        """Asks for no more of them; what is left of the lease stays the owner's."""
        self.renew_until_monotonic = monotonic

    def is_nearly_due(self, monotonic: float) -> bool:
        """Whether at least half of the time until the next renewal has passed."""
        half_seconds = self.lease_ms / 1000 / RENEWALS_PER_LEASE / 2
        return self.renew_monotonic - half_seconds <= monotonic

    def may_renew(self, monotonic: float) -> bool:
        """Whether the attempt is at work, within its run limit and not known to be lost."""
        return (self.is_held and not self.is_revoked) and (
            self.renew_until_monotonic is None or monotonic < self.renew_until_monotonic
        )

    def revoke(self) -> None:
        """Marks the claim as lost: the store said so."""
        self.is_revoked = True

    def is_lost(self, monotonic: float) -> bool:
        """Whether the claim is lost, or may be because the lease ran out unrenewed."""
        return self.is_revoked or monotonic >= self.ends_monotonic

    def is_given_up(self, monotonic: float) -> bool:
        """Whether nobody here holds on to the claim: the store said so, or its run limit is over.

        A lease that only ran out, because renewals failed or the process stood still, is not: the
        operation is known to run in this very process, and will be renewed if nobody was faster.
        """
        return self.is_revoked or (
            monotonic >= self.ends_monotonic
            and self.renew_until_monotonic is not None
            and monotonic >= self.renew_until_monotonic
        )

    def seconds_left(self, monotonic: float) -> float:
        """What is left of the lease, never negative."""
        return 0.0 if self.is_revoked else max(0.0, self.ends_monotonic - monotonic)
