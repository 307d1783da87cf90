"""Renewing leases: one batch for all running attempts of a process.

Owns what an extend's answer means for a lease. When to renew is the heartbeat's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, Extension
from retrysafe.core.ports import ExtendResult, Store
from retrysafe.errors import StoreError


def held_leases(leases: dict[bytes, Lease]) -> list[Lease]:
    """What somebody works under; the others are dropped, whose holder could not remove them."""
    left = [lease for lease in list(leases.values()) if not lease.is_held]
    for lease in left:
        leases.pop(lease.token, None)
    # Held again since then, for its last write: it must not miss a renewal.
    leases.update((lease.token, lease) for lease in left if lease.is_held)
    return list(leases.values())


def due_leases(leases: Sequence[Lease], monotonic: float) -> list[Lease]:
    """Which leases are to be renewed now: none before one is due, then the nearly due ones too.

    Taking those along puts operations that started one after the other into one batch, and from
    then on they are due together; else each would pay a commit of its own.
    """
    renewable = [lease for lease in leases if lease.may_renew(monotonic)]
    if all(lease.renew_monotonic > monotonic for lease in renewable):
        return []
    return [lease for lease in renewable if lease.is_nearly_due(monotonic)]


def next_renewal(leases: Iterable[Lease], monotonic: float) -> float | None:
    """When the next lease is due; None when there is none to renew."""
    return min(
        (lease.renew_monotonic for lease in leases if lease.may_renew(monotonic)), default=None
    )


async def renew(
    store: Store, leases: list[Lease], monotonic: Callable[[], float], report: Reporter
) -> None:
    """Extends the leases in batches; a lease that cannot be extended says so, none raises."""
    limit = store.capabilities.batch_limit
    for start in range(0, len(leases), limit):
        await _renew_batch(store, leases[start : start + limit], monotonic, report)


async def confirm(
    store: Store, monotonic: Callable[[], float], report: Reporter, lease: Lease
) -> None:
    """Asks for one lease that may be over, where somebody waits for it; the lease tells."""
    await _renew_batch(store, [lease], monotonic, report)


async def _renew_batch(
    store: Store, leases: list[Lease], monotonic: Callable[[], float], report: Reporter
) -> None:
    asked = monotonic()
    extensions = [
        Extension(lease.key, lease.token, lease.lease_ms, lease.is_joined) for lease in leases
    ]
    timeout_seconds = min(lease.renewal_timeout_seconds(asked) for lease in leases)
    answers: Sequence[ExtendResult]
    try:
        answers = await store.extend(extensions, timeout_seconds)
    except Exception as error:
        # Whatever a store raises: a heartbeat that died of it would let every lease run out.
        told = (
            error
            if isinstance(error, StoreError)
            else StoreError(f"{type(error).__name__}: {error}")
        )
        answers = [told] * len(leases)
    for lease, answer in zip(leases, answers, strict=True):
        if isinstance(answer, StoreError):
            # The lease may still be renewed before it ends, so try again soon.
            lease.put_off(monotonic())
            report.beside(EventKind.RENEWAL_FAILED, lease.key, detail=str(answer))
        elif answer.decision is Decision.LOST and lease.may_be_settled:
            # By the user's commit, most likely, after which the operation may still be at work.
            lease.end_renewals(monotonic())
        elif answer.decision is Decision.LOST:
            # Also when the attempt settled meanwhile; then nobody looks at the lease any more.
            lease.revoke()
        else:
            lease.renewed(answer.remaining_ms, answer.lease_ends_at_ms, asked)
