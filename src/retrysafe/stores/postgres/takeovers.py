"""Claims that meet a record: what the table makes of them, and how many are written at once.

Owns the statement that replaces the records of a batch. What is left over, because a rival was
there first or has the row, is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from retrysafe.core import transitions
from retrysafe.core.model import ClaimAnswer, ClaimRequest, Decision, Record
from retrysafe.core.ports import ClaimResult
from retrysafe.errors import DigestCollision, StoreRejected
from retrysafe.stores.postgres.busy_keys import Fetch
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.packing import split
from retrysafe.stores.postgres.reading import Found

# Looked up once: members of an enum are dear to look up per row.
_REPLAY: Final = Decision.REPLAY
_CONFIRM: Final = Decision.CONFIRM


class Takeover(NamedTuple):
    """What the table makes of a record for a claim, until it is written."""

    old: Record
    new: Record
    answer: ClaimAnswer
    # Of the claim in its batch.
    position: int


def judged(request: ClaimRequest, found: Found, position: int) -> ClaimResult | Takeover:
    """The answer of the table, or what it writes for the claim at that position of its batch."""
    record, payload, now_ms = found
    try:
        changed, answer = transitions.claim(record, request, now_ms)
    except DigestCollision as error:
        return error
    if changed is not None:
        return Takeover(record, changed, answer, position)
    if answer.decision is _REPLAY:
        answer.payload = payload
    if answer.decision is _CONFIRM:
        # Written as it is, see `Batches.confirm`.
        return Takeover(record, record, answer, position)
    return answer


async def write(fetch: Fetch, takeovers: Iterable[Takeover]) -> tuple[set[bytes] | None, bool]:
    """Replaces the records that are still what was judged: their digests, and whether it waited.

    None when nothing could be written together.
    """
    columns = [list(column) for column in zip(*map(_row, takeovers), strict=True)]
    has_waited = False
    try:
        try:
            ((replaced,),) = await fetch("replace_records", *columns)
        except Locked:
            # Everybody in the batch has waited once; whom nobody holds up goes on without the rest.
            has_waited = True
            ((replaced,),) = await fetch("replace_records_unlocked", *columns)
    except (Locked, StoreRejected):
        return None, has_waited
    return split(bytes(replaced)), has_waited


def _row(takeover: Takeover) -> tuple[Any, ...]:
    """The pending record, and what must still be there."""
    old, new, answer, _ = takeover
    return (
        old.digest,
        new.operation,
        new.rule,
        new.fingerprint,
        new.token,
        new.attempt,
        new.first_claimed_at_ms,
        new.claimed_at_ms,
        new.lease_ends_at_ms,
        new.owner,
        transitions.is_new_request(old, new, answer.decision),
        old.token,
        old.state.value,
        old.attempt,
        old.lease_ends_at_ms,
        old.expires_at_ms,
        new.releases,
        new.is_uncertain,
        new.corrected_at_ms,
        old.nothing_happened,
    )
