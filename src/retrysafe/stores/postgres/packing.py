"""How a batch is packed: many claims and endings as the arrays of one statement.

Owns the statements that write a batch, and nothing of what follows when they skip a row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

from retrysafe.core.keys.canonical import DIGEST_BYTES
from retrysafe.core.model import ClaimRequest, Payload, Settlement
from retrysafe.stores.postgres.busy_keys import Fetch
from retrysafe.stores.postgres.rows import claim_row

_digest_of: Final = attrgetter("key.digest")
# A batch has at most 128 rows, so the number of a row's manner fits into one byte.
_BYTES: Final = [bytes((number,)) for number in range(256)]


def split(digests: bytes) -> set[bytes]:
    """The digests that the server strung together."""
    return {digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)}


def _columns(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


async def write(
    fetch: Fetch, claims: Collection[ClaimRequest], endings: Collection[Settlement]
) -> tuple[int, bytes, bytes]:
    """Inserts new keys and ends attempts: the instant, and the digests of either kind."""
    if len(claims) + len(endings) == 1:
        # What most batches are while there is little to do.
        for request in claims:
            instants = await fetch("claim_one", *claim_row(request))
            return (instants[0][0], request.key.digest, b"") if instants else _NOTHING
        for item in endings:
            if item.payload is not None:
                instants = await fetch("settle_one", *_ending_row(item, item.payload))
                return (instants[0][0], b"", item.key.digest) if instants else _NOTHING
    ((now_ms, claimed, settled),) = await fetch("commit", *_packed(claims, endings))
    return now_ms, bytes(claimed), bytes(settled)


# Nothing was written, so nobody asks when.
_NOTHING: Final = (0, b"", b"")


def _ending_row(item: Settlement, payload: Payload) -> Sequence[Any]:
    return (
        item.key.digest,
        item.token,
        int(item.kind),
        item.active_ms,
        item.audit_ms,
        payload.form,
        payload.head,
        payload.body,
        item.nothing_happened,
    )


def _packed(claims: Iterable[ClaimRequest], endings: Iterable[Settlement]) -> Sequence[Any]:
    """The arrays of a batch.

    The identities of a row travel as one value, and what many rows have in common travels once
    as their manner: for the client a batch costs by the number of its values.
    """
    identities: list[bytes] = []
    callers: list[str] = []
    keys: list[str] = []
    manners: dict[tuple[str, int, int, str], int] = {}
    manner: tuple[str, int, int, str] | None = None
    mark = b""
    # In the order of the digests: two batches over the same keys cannot deadlock.
    for request in sorted(claims, key=_digest_of):
        key, fingerprint = request.key, request.fingerprints[0]
        # Mostly that of the row before; comparing takes less time than looking it up.
        if manner != (
            new := (request.operation, fingerprint.rule, request.lease_ms, request.owner)
        ):
            manner, mark = new, _BYTES[manners.setdefault(new, len(manners))]
        identities.append(key.digest + fingerprint.digest + request.token + mark)
        callers.append(key.caller)
        keys.append(key.text)
    ended: list[bytes] = []
    heads: list[bytes | None] = []
    bodies: list[bytes | None] = []
    ways: dict[tuple[int, int, int, str | None, bool], int] = {}
    way: tuple[int, int, int, str | None, bool] | None = None
    for item in sorted(endings, key=_digest_of):
        payload = item.payload
        if payload is None:
            form = head = body = None
        else:
            form, head, body = payload.form, payload.head, payload.body
        if way != (
            another := (item.kind, item.active_ms, item.audit_ms, form, item.nothing_happened)
        ):
            way, mark = another, _BYTES[ways.setdefault(another, len(ways))]
        ended.append(item.key.digest + item.token + mark)
        heads.append(head)
        bodies.append(body)
    operations, rules, leases, owners = _columns(manners) or [[]] * 4
    kinds, actives, audits, forms, marks = _columns(ways) or [[]] * 5
    return (
        identities,
        callers,
        keys,
        operations,
        rules,
        leases,
        owners,
        ended,
        heads,
        bodies,
        [int(kind) for kind in kinds],
        actives,
        audits,
        forms,
        marks,
    )


async def claim_resumable(fetch: Fetch, claims: Iterable[ClaimRequest]) -> dict[bytes, int]:
    """Inserts new keys with their arguments: the instant, by the digest of each."""
    rows = []
    for request in sorted(claims, key=_digest_of):
        arguments = request.arguments
        assert arguments is not None  # Chosen for having some.
        rows.append((*claim_row(request), arguments.form, arguments.head, arguments.body))
    columns = [list(column) for column in zip(*rows, strict=True)]
    ((now_ms, claimed),) = await fetch("claim_resumable", *columns)
    return dict.fromkeys(split(bytes(claimed)), int(now_ms))
