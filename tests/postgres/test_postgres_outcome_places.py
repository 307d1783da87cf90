"""Outcomes among many: where one is, is known, and no statement looks for it from end to end."""

from __future__ import annotations

import pytest

from retrysafe.stores.postgres import schema
from retrysafe.stores.postgres.connector import PLANNER_SETTINGS
from retrysafe.testing.suite.probe import RESULT

# About as many as fit into five thousand pages, each with an instant of its own.
OUTCOMES = 100_000
# A key, its token, and an outcome's place: three looks into an index and the pages that they name,
# in the outcome's own day alone.
FEW_PAGES = 60


@pytest.fixture
def crowded(desk):
    """A day of outcomes with one of ours in it, as a vacuum leaves it, and a store's connection."""
    (key,) = desk.done()
    ((ends_at_ms, token),) = desk.sql(
        "SELECT audit_ends_at_ms, token FROM {schema}.keys WHERE digest = %s", key.digest
    )
    desk.sql(
        "INSERT INTO {schema}.outcomes SELECT uuid_send(md5(n::text)::uuid), "
        "uuid_send(md5('token ' || n)::uuid), 1, 2, 'json.1', '', "
        "convert_to(repeat('x', 300), 'UTF8'), 0, %s::bigint + n - %s "
        "FROM generate_series(1, %s) AS n",
        ends_at_ms,
        OUTCOMES // 2,
        OUTCOMES,
    )
    desk.sql("VACUUM (ANALYZE) {schema}.outcomes")
    for name, value in PLANNER_SETTINGS.items():
        desk.sql(f"SET {name} = '{value}'")
    return desk, key, token, ends_at_ms


def pages_of(desk, name, *values):
    """How many pages a statement of the store touches, planned as the store has it planned."""
    desk.sql(f"PREPARE looked AS {schema.statements(desk.schema)[name]}")
    given = ", ".join(values)
    execution = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE looked({given})"
    desk.sql(execution)  # What the server learns of its own tables at first does not count.
    (((found,),),) = desk.sql(execution)
    desk.sql("DEALLOCATE looked")
    plan = found["Plan"]
    assert plan["Actual Rows"] == 1, found
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def pages_touched(desk):
    """How many pages of outcomes and their indexes anybody has read so far."""
    desk.store._connector._pool.discard_idle()  # A connection that ends tells what it has counted.
    desk.sql("SELECT pg_stat_force_next_flush()")
    return desk.sql(
        "SELECT sum(heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read)::int "
        "FROM pg_statio_user_tables WHERE schemaname = %s AND relname LIKE 'outcomes%%'",
        desk.schema,
    )[0][0]


def literal(value):
    return f"'\\x{bytes(value).hex()}'"


def test_a_replay_goes_to_the_place_of_its_outcome(crowded):
    """So do a look at the standing outcome, at the last one, and at the fate of a transaction."""
    desk, key, token, ends_at_ms = crowded
    digest, held, ends_at = literal(key.digest), literal(token), str(ends_at_ms)
    looks = {
        "read_records": (f"ARRAY[{digest}]::bytea[]", "0", str(2**62)),
        "read_standing": (digest, held),
        "read_last_outcome": (digest, f"'{key.caller}'", f"'{key.text}'"),
        "count_outcomes": (digest, held, "2", ends_at),
    }
    pages = {name: pages_of(desk, name, *values) for name, values in looks.items()}
    assert {name: count for name, count in pages.items() if count > FEW_PAGES} == {}
    # Of an outcome that another transaction has written, the key's row knows the place.
    assert pages_of(desk, "count_outcomes", digest, held, "2", "NULL") <= FEW_PAGES


def test_the_audit_of_a_key_without_a_row_is_not_searched_for_from_end_to_end(crowded):
    """Of a day's pages, those are read that may have some of it."""
    desk, key, *_ = crowded
    desk.sql("DELETE FROM {schema}.keys WHERE digest = %s", key.digest)
    ((pages,),) = desk.sql(
        "SELECT sum(pg_relation_size(inhrelid) / 8192)::int FROM pg_inherits "
        f"WHERE inhparent = '{desk.schema}.outcomes'::regclass"
    )
    assert pages > 4000
    before = pages_touched(desk)
    (outcome,) = desk._run(desk.store.read_audit(key))
    assert outcome.payload == RESULT
    assert pages_touched(desk) - before < pages / 10
