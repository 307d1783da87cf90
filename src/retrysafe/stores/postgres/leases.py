"""Lease upkeep on PostgreSQL: renewals in few statements, and the truth for each of them.

Owns the statements that renew, on the key's row or beside it, and what follows for the rows that
they left out: those are read and decided by the core's table with the server's clock. A service
that is behind renews much that is being ended at the same moment, so they are read together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from retrysafe.core import transitions
from retrysafe.core.model import Decision, ExtendAnswer, Extension
from retrysafe.core.ports import ExtendResult
from retrysafe.errors import StoreRejected
from retrysafe.stores.postgres.contended import being_written
from retrysafe.stores.postgres.drivers.port import RowRefused
from retrysafe.stores.postgres.reading import NO_RECORD, read_records
from retrysafe.stores.postgres.statements import Fetch

_Answers = dict[tuple[bytes, bytes], ExtendAnswer]


async def extend(fetch: Fetch, extensions: Sequence[Extension]) -> list[ExtendResult]:
    """Extends leases; where a row is refused, the batch is halved until it stands alone."""
    try:
        return await _extend(fetch, extensions)
    except RowRefused as error:
        if len(extensions) == 1:
            return [StoreRejected(f"PostgreSQL refuses this row: {error}")]
    middle = len(extensions) // 2
    first = await extend(fetch, extensions[:middle])
    return first + await extend(fetch, extensions[middle:])


async def _extend(fetch: Fetch, extensions: Sequence[Extension]) -> list[ExtendResult]:
    written: _Answers = {}
    for statement, is_joined in (("extend", False), ("extend_beside", True)):
        items = [item for item in extensions if item.is_joined is is_joined]
        if items:
            written |= await _write(fetch, statement, items)
    rest = [item for item in extensions if _name(item) not in written]
    decided: _Answers = {}
    if rest:
        read = await read_records(fetch, [item.key.digest for item in rest])
        busy: list[Extension] = []
        for item in rest:
            record, now_ms = read.get(item.key.digest, NO_RECORD)
            _, answer = transitions.extend(record, item, now_ms)
            if answer.decision is Decision.APPLY:
                # Held by this token, and yet not written: somebody else was at the row.
                busy.append(item)
            else:
                decided[_name(item)] = answer
        if busy:
            # A user's transaction, perhaps, that its operation has joined in this moment.
            decided |= await _write(fetch, "extend_beside", busy)
    return [
        written.get(_name(item)) or decided.get(_name(item)) or being_written(item.key)
        for item in extensions
    ]


async def _write(fetch: Fetch, statement: str, extensions: Collection[Extension]) -> _Answers:
    """Extends leases whose tokens hold their keys; answers for those alone.

    One row per key: the statement says whose lease it extended, and not by which token.
    """
    items = {item.key.digest: item for item in extensions}
    rows = await fetch(
        statement,
        [item.key.digest for item in items.values()],
        [item.token for item in items.values()],
        [item.lease_ms for item in items.values()],
    )
    return {
        _name(items[bytes(digest)]): ExtendAnswer(Decision.APPLY, remaining_ms, ends_at_ms)
        for digest, ends_at_ms, remaining_ms in rows
    }


def _name(item: Extension) -> tuple[bytes, bytes]:
    return item.key.digest, item.token
