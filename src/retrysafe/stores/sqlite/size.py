"""How large the file is, without a scan."""

from __future__ import annotations

import sqlite3

from retrysafe.core.size import COUNT_LIMIT, StoreSize, TableSize
from retrysafe.stores.sqlite.schema import SQL


def measure(connection: sqlite3.Connection, now_ms: int) -> StoreSize:
    """The size now."""
    size_bytes, *ends = connection.execute(SQL["read_sizes"]).fetchone()
    names = ("keys", "outcomes", "outbox")
    tables = {
        name: TableSize(last - first + 1)
        for name, last, first in zip(names, ends[::2], ends[1::2], strict=True)
    }
    tables["file"] = TableSize(sum(table.rows for table in tables.values()), size_bytes)
    waiting, dead, *due_at_ms = connection.execute(
        SQL["read_outbox_size"], {"limit": COUNT_LIMIT}
    ).fetchone()
    first_due = min((at_ms for at_ms in due_at_ms if at_ms is not None), default=now_ms)
    return StoreSize(
        tables,
        keys_inserted=ends[0],
        outbox_waiting=min(waiting, COUNT_LIMIT),
        outbox_dead=dead,
        outbox_oldest_seconds=max(0, now_ms - first_due) / 1000,
    )
