"""Leases that were renewed beside their rows, as whoever reads a record must see them.

Owns what such a renewal means for a record. `leases` writes it while a user's transaction has the
row; it is looked at here, on the store's connections and on users' own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from retrysafe.core.model import Payload, Record, State

# Runs a statement by its name.
_Fetch = Callable[..., Awaitable[Sequence[Sequence[Any]]]]


async def look_beside(fetch: _Fetch, records: Iterable[Record]) -> None:
    """Completes pending records that were just read by what was renewed beside their rows."""
    pending = {item.digest: item for item in records if item.state is State.PENDING}
    if not pending:
        return
    for digest, token, ends_at_ms in await fetch("read_renewals", list(pending)):
        record = pending[bytes(digest)]
        # A renewal counts for the claim that made it; one of another token is left over.
        if bytes(token) == record.token:
            record.lease_ends_at_ms = max(record.lease_ends_at_ms, ends_at_ms)


async def look_before_takeovers(
    fetch: _Fetch, found: Iterable[tuple[Record, Payload | None, int]]
) -> None:
    """The same where a lease has ended by its row alone: other claims do not pay for it."""
    await look_beside(
        fetch, [record for record, _, now_ms in found if record.lease_ends_at_ms <= now_ms]
    )
