"""Retention on PostgreSQL: bounded, safe beside everybody else, and never a pending record."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from retrysafe.core.model import Condition, Decision, SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import listing, schema
from retrysafe.testing.suite.probe import ACTIVE_MS, LEASE_MS, RESULT, key_of

LIMIT_SECONDS = 30


@pytest.fixture
def rival(postgres_server):
    """A connection in a transaction of its own."""
    with psycopg.connect(postgres_server.url()) as made:
        yield made


def test_a_locked_key_is_left_and_its_neighbours_are_removed(desk, rival):
    """A sweep never waits for a row that somebody holds; the next one removes it."""
    held, other = desk.done(2)
    desk.advance(ACTIVE_MS)
    rival.execute(f"SELECT 1 FROM {desk.schema}.keys WHERE digest = %s FOR UPDATE", (held.digest,))
    assert desk.sweep().keys == 1
    assert (desk.find(held) is None, desk.find(other) is None) == (False, True)
    rival.rollback()
    assert desk.sweep().keys == 1
    assert desk.find(held) is None


def test_a_key_that_comes_back_during_the_sweep_stays(desk, rival):
    """A claim that is not committed yet keeps its row from being swept, and then it is pending."""
    (key,) = desk.done()
    desk.advance(ACTIVE_MS)
    rival.execute(
        f"UPDATE {desk.schema}.keys SET state = 1, expires_at_ms = NULL, lease_ends_at_ms = %s "
        "WHERE digest = %s",
        (desk.clock() + LEASE_MS, key.digest),
    )
    assert desk.sweep().keys == 0
    rival.commit()
    assert desk.sweep().keys == 0
    assert desk.read(key).condition is Condition.RUNNING


def test_sweepers_at_once_remove_each_key_once(desk):
    """Four sweepers share the work: the sum is what there was, and every step is gone too."""
    desk.fill(2000)
    desk.sql(
        "INSERT INTO {schema}.steps SELECT digest, 'step', 1, 'json.1', '', '', 0 "
        "FROM {schema}.keys"
    )
    barrier = threading.Barrier(4)

    def sweep_all(store):
        barrier.wait(LIMIT_SECONDS)
        removed = 0
        for _ in range(200):
            report = run_sync(store.sweep(50))
            removed += report.keys
            if not report.has_more:
                return removed
        raise AssertionError("the sweep did not end")

    with ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(sweep_all, [desk.another() for _ in range(4)]))
    rest = desk.sweep(limit=2000).keys  # What a rival held for a moment was left.
    assert total + rest == 2000
    assert desk.sql("SELECT count(*) FROM {schema}.keys") == [(0,)]
    assert desk.sql("SELECT count(*) FROM {schema}.steps") == [(0,)]


def test_pages_are_found_by_their_number(desk):
    """Neither the sweep nor the search for abandoned keys reads more than its range of pages."""
    desk.fill(5000)
    desk.sql("ANALYZE {schema}.keys")
    sql = schema.statements(desk.schema)
    for name, limit in (("sweep_pages", 100), ("pending_in_pages", 100)):
        statement = sql[name].replace("$1", "'(0,0)'").replace("$2", "'(2,0)'")
        rows = desk.sql(f"EXPLAIN {statement}".replace("$3", str(limit)))
        plan = "\n".join(line for (line,) in rows)
        assert "Tid Range Scan on keys" in plan, plan
        assert "Seq Scan on keys" not in plan, plan


def test_asyncpg_sweeps_and_lists_too(desk):
    """The statements take what either driver sends."""
    desk.fill(3, expires_at_ms=0)

    async def work():
        store = postgres_store(desk.url, is_async=True)
        try:
            return await store.list_abandoned(5), await store.sweep(5)
        finally:
            await store.close()

    abandoned, report = asyncio.run(work())
    assert (abandoned, report.keys, report.has_more) == ([], 3, False)


def test_abandoned_keys_are_found_longest_ended_first(desk):
    """Running, settled and outlived records are not among them."""
    late, early = key_of("late"), key_of("early")
    desk.hold(early)
    desk.advance(5)
    desk.hold(late)
    desk.done()
    desk.advance(LEASE_MS)
    desk.hold(key_of("running"))
    found = run_sync(desk.store.list_abandoned(10))
    assert [item.record.text for item in found] == ["early", "late"]
    assert {item.condition for item in found} == {Condition.ABANDONED}


def test_the_search_for_abandoned_keys_stops_at_its_limit(desk, monkeypatch):
    """With enough found, the rest of the table is not read."""
    monkeypatch.setattr(listing, "LOOK_PAGES", 2)
    desk.fill(2000, state=1, lease_ends_at_ms=desk.clock())
    asked = []
    fetch = desk.store._statements.fetch

    async def counting(name, *params):
        asked.append(name)
        return await fetch(name, *params)

    monkeypatch.setattr(desk.store._listing, "_fetch", counting)
    assert len(run_sync(desk.store.list_abandoned(5))) == 5
    assert asked == ["now_ms", "table_pages", "pending_in_pages"]
    assert len(run_sync(desk.store.list_abandoned(5000))) == 2000


def test_a_new_life_keeps_the_outcomes_of_the_old_one(desk):
    """Two windows: the key is new again, and the audit still shows what was answered before."""
    (key,) = desk.done(audit_ms=30 * 86_400_000)
    first = desk.read(key).outcomes
    desk.advance(ACTIVE_MS)
    token = desk.hold(key)
    assert desk.end(SettleKind.FAIL, token, key, audit_ms=30 * 86_400_000) is Decision.APPLY
    found = desk.read(key)
    assert found.outcomes[:1] == first
    assert (len(found.outcomes), found.outcomes[1].token) == (2, token)
    desk.advance(ACTIVE_MS)
    assert desk.sweep().keys == 1
    desk.hold(key)
    assert len(desk.read(key).outcomes) == 2


def test_an_outcome_lives_as_long_as_its_key(desk):
    """With equal windows, no sweep takes the payload before the key itself is outlived."""
    window_ms = 3 * 86_400_000
    (key,) = desk.done(active_ms=window_ms, audit_ms=window_ms)
    for _ in range(5):
        desk.advance(window_ms // 5 - 1)
        desk.sweep()
        answer = desk.claim(key)
        assert (answer.decision, answer.payload) == (Decision.REPLAY, RESULT)
    desk.advance(5)
    assert desk.sweep().keys == 1


def test_the_tables_have_the_options_that_they_were_designed_with(desk):
    """Room for HOT updates in every page, and vacuum by a fixed number of dead rows."""
    ((options,),) = desk.sql(
        "SELECT reloptions FROM pg_class WHERE oid = '{schema}.keys'::regclass"
    )
    assert set(options) == {
        "fillfactor=45",
        "autovacuum_vacuum_scale_factor=0.0",
        "autovacuum_vacuum_threshold=50000",
        "autovacuum_vacuum_insert_scale_factor=0.0",
        "autovacuum_vacuum_insert_threshold=200000",
    }
    indexes = desk.sql(
        "SELECT indexdef FROM pg_indexes WHERE schemaname = '{schema}' AND tablename = 'keys'"
    )
    # Nothing that an ending or a renewal changes is in an index.
    columns = sorted(text.partition(" USING ")[2].partition(" WITH")[0] for (text,) in indexes)
    assert columns == ["brin (claimed_at_ms)", "btree (digest)"]
