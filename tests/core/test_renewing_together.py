"""Leases that are nearly due are renewed together with the first one that is due."""

from __future__ import annotations

import asyncio

import pytest

from retrysafe.core.events import Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.renewal import due_leases, renew
from retrysafe.stores.memory.store import MemoryStore


def _lease(asked_monotonic: float, *, lease_ms: int = 6_000) -> Lease:
    return Lease(
        key=Key("key", caller="tester"),
        token=b"t" * 16,
        lease_ms=lease_ms,
        remaining_ms=lease_ms,
        ends_at_ms=0,
        asked_monotonic=asked_monotonic,
    )


def test_nothing_is_renewed_before_one_lease_is_due():
    """A renewal is due after a third of the lease, and not a moment earlier."""
    leases = [_lease(100.0), _lease(100.5)]
    assert due_leases(leases, 101.99) == []
    assert due_leases([], 101.99) == []


def test_leases_past_half_of_their_way_come_along():
    """With one lease due, those that are at least half-way to their renewal share its batch."""
    due, near, far = _lease(100.0), _lease(101.0), _lease(101.1)
    assert due_leases([due, near, far], 102.0) == [due, near]


def test_revoked_lease_neither_is_renewed_nor_makes_others_due():
    """A claim that is lost is nobody's reason to write."""
    revoked, other = _lease(100.0), _lease(100.5)
    revoked.revoke()
    assert due_leases([revoked, other], 102.0) == []


@pytest.mark.parametrize("error", [OSError("odd"), RuntimeError("a bug in the store")])
def test_renewal_outlives_an_error_that_no_store_should_raise(error):
    """Whatever a store raises, the lease is only put off and tried again."""

    class BrokenStore(MemoryStore):
        async def extend(self, extensions, timeout_seconds):
            raise error

    lease = _lease(100.0)
    asyncio.run(renew(BrokenStore(), [lease], lambda: 102.0, Reporter(None)))
    assert lease.renew_monotonic == 102.5
    assert lease.may_renew(102.0)
