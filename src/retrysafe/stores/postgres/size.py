"""How large the schema is, by what the server keeps of its tables anyway."""

from __future__ import annotations

from retrysafe.core.size import COUNT_LIMIT, StoreSize, TableSize
from retrysafe.stores.postgres.statements import Fetch


async def measure(fetch: Fetch, schema_name: str) -> StoreSize:
    """The size now; raises `StoreUnavailable`."""
    rows = {row[0]: row for row in await fetch("read_sizes", schema_name)}
    ((now_ms, waiting, dead, due_at_ms),) = await fetch("read_outbox_size", COUNT_LIMIT)
    return StoreSize(
        {
            name: TableSize(rows[name][1], rows[name][2])
            for name in ("keys", "outcomes", "steps", "outbox")
        },
        keys_inserted=rows["keys"][3],
        outbox_waiting=min(waiting, COUNT_LIMIT),
        outbox_dead=dead,
        outbox_oldest_seconds=0.0 if due_at_ms is None else max(0, now_ms - due_at_ms) / 1000,
    )
