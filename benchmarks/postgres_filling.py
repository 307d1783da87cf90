"""Tables that look as if the service had run for a day before the measurement began."""

from __future__ import annotations

import asyncio
import time

import psycopg

from retrysafe.stores.opening import open_store
from retrysafe.stores.postgres.partitions import DAY_MS, day_start_ms, partition_name

# A WAL file is 16 MB, so these are the 4 GB that `min_wal_size` keeps.
WAL_FILES = 250

_NOW = "(SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms) AS c"


def use_wal_files(connection: psycopg.Connection, count: int = WAL_FILES) -> None:
    """Makes the server go through that many WAL files, which it uses again from then on.

    A server that has run for a while has them. A new one makes each of them, which takes a write
    and a flush of 16 MB, and every commit of the measurement would wait for that.
    """
    for _ in range(count):
        # A file in which nothing was written is not switched.
        connection.execute("SELECT pg_logical_emit_message(false, 'retrysafe', 'x')")
        connection.execute("SELECT pg_switch_wal()")
    connection.execute("CHECKPOINT")


def migrate(url: str) -> None:
    """Makes the schema that the URL names."""

    async def apply() -> None:
        store = open_store(url, is_async=True)
        await store.migrate()
        await store.close()

    asyncio.run(apply())


def fill(connection: psycopg.Connection, schema: str, keys: int, *, expired: str = "false") -> None:
    """Inserts succeeded keys; `expired` says for which numbers `i` the active window is over."""
    connection.execute(
        f"""
        INSERT INTO {schema}.keys SELECT
            uuid_send(md5('filled ' || i)::uuid), '', 'filled-' || i, 'benchmarks.operation', 1,
            uuid_send(md5('fingerprint ' || i)::uuid), 2, uuid_send(md5('token ' || i)::uuid), 1,
            c.now_ms, c.now_ms, c.now_ms + 30000, c.now_ms,
            c.now_ms + CASE WHEN {expired} THEN -1000 ELSE 86400000 END,
            c.now_ms + 2592000000::bigint, 'host:1'
        FROM generate_series(1, {keys}) AS i, {_NOW}""".encode()
    )


def fill_outcomes(connection: psycopg.Connection, schema: str) -> None:
    """Inserts the outcome of every key."""
    connection.execute(
        f"""
        INSERT INTO {schema}.outcomes SELECT
            digest, token, attempt, state, 'json.1', '', convert_to(repeat('x', 500), 'UTF8'),
            settled_at_ms, audit_ends_at_ms
        FROM {schema}.keys""".encode()
    )


def fill_past_day(connection: psycopg.Connection, schema: str, outcomes: int) -> str:
    """Makes a partition whose audit ended yesterday, full of outcomes; gives its name."""
    starts = day_start_ms(int(time.time() * 1000)) - DAY_MS
    name = partition_name(starts)
    connection.execute(
        f"""
        CREATE TABLE {schema}.{name} PARTITION OF {schema}.outcomes
        FOR VALUES FROM ({starts}) TO ({starts + DAY_MS})""".encode()
    )
    connection.execute(
        f"""
        INSERT INTO {schema}.{name} SELECT
            uuid_send(md5('past ' || i)::uuid), uuid_send(md5('past token ' || i)::uuid), 1, 2,
            'json.1', '', convert_to(repeat('x', 500), 'UTF8'), {starts}, {starts}
        FROM generate_series(1, {outcomes}) AS i""".encode()
    )
    return name


def tidy(connection: psycopg.Connection, schema: str) -> None:
    """Leaves nothing for later: no pages to clean and no checkpoint in the measurement."""
    connection.execute(f"VACUUM (ANALYZE) {schema}.keys".encode())
    connection.execute(f"VACUUM (ANALYZE) {schema}.outcomes".encode())
    connection.execute("CHECKPOINT")
