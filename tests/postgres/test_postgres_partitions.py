"""Partitions: made ahead, dropped when their audit is over, and never in anybody's way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from retrysafe.core.model import Decision
from retrysafe.errors import StoreError
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.partitions import (
    DAY_MS,
    HORIZON_DAYS,
    HORIZON_LIMIT_DAYS,
    SPARE_DAYS,
    day_start_ms,
    partition_name,
)
from retrysafe.testing.suite.probe import ACTIVE_MS, RESULT

LIMIT_SECONDS = 30


def names(now_ms, days):
    """The partitions of the days from now on."""
    return [partition_name(now_ms + number * DAY_MS) for number in range(days + 1)]


def default_rows(desk):
    ((count,),) = desk.sql("SELECT count(*) FROM {schema}.outcomes_default")
    return count


def replays(desk, key):
    answer = desk.claim(key)
    return (answer.decision, answer.payload) == (Decision.REPLAY, RESULT)


def test_migrating_makes_the_coming_days(desk):
    """The first outcome finds its partition, before any sweep has run."""
    assert desk.partitions() == names(desk.clock(), HORIZON_DAYS)
    desk.done(audit_ms=30 * DAY_MS)
    assert default_rows(desk) == 0
    assert desk.tend().made == []


def test_every_partition_has_the_bounds_of_its_name(desk):
    """A day is dropped by its name, so the name must be the truth."""
    desk.days(1)
    desk.tend()
    rows = desk.sql(
        "SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits AS i JOIN pg_class "
        "AS c ON c.oid = i.inhrelid WHERE i.inhparent = '{schema}.outcomes'::regclass "
        "AND c.relname <> 'outcomes_default'"
    )
    assert len(rows) == HORIZON_DAYS + 1
    for name, bounds in rows:
        start_ms = int(bounds.split("'")[1])
        assert bounds == f"FOR VALUES FROM ('{start_ms}') TO ('{start_ms + DAY_MS}')"
        assert (day_start_ms(start_ms), partition_name(start_ms)) == (start_ms, name)


def test_a_day_is_dropped_when_it_is_over_and_not_before(desk):
    """In the last millisecond of the day everything is there; in the next one the day is gone."""
    (key,) = desk.done(active_ms=1000, audit_ms=1000)
    left_ms = day_start_ms(desk.clock() + 1000) + DAY_MS - desk.clock()
    today = partition_name(desk.clock() + 1000)
    desk.advance(left_ms - 1)
    assert desk.sweep().partitions == 0
    assert today in desk.partitions()
    desk.advance(1)
    assert desk.sweep().partitions >= 1
    assert today not in desk.partitions()
    assert desk.partitions()[-1] == partition_name(desk.clock() + HORIZON_DAYS * DAY_MS)
    desk.hold(key)
    assert desk.read(key).outcomes == []


def test_a_day_without_a_partition_is_kept_in_the_default_one(desk):
    """It replays from there, its day gets no partition while it is there, and it ends in time."""
    desk.days(HORIZON_DAYS + 5)  # Nobody swept for weeks.
    (key,) = desk.done(audit_ms=ACTIVE_MS)
    assert default_rows(desk) == 1
    assert replays(desk, key)
    blocked = partition_name(desk.clock() + ACTIVE_MS)
    made = desk.tend().made
    assert blocked not in made
    assert len(made) == HORIZON_DAYS
    assert replays(desk, key)
    desk.advance(ACTIVE_MS)
    report = desk.sweep()
    assert (report.keys, report.outcomes, default_rows(desk)) == (1, 1, 0)
    assert desk.tend().made == [blocked]


def test_an_outcome_that_arrives_while_its_day_is_made_wins(desk, monkeypatch):
    """The day is then left out; nothing is lost and nothing fails."""
    desk.days(HORIZON_DAYS + 5)
    (key,) = desk.done(audit_ms=ACTIVE_MS)
    plain = desk.store._statements.text

    def looked_too_early(name):
        # The look at the default partition, as it was before the outcome arrived.
        if name == "days_in_default":
            return "SELECT 1 WHERE $1::bigint[] IS NULL"
        return plain(name)

    monkeypatch.setattr(desk.store._statements, "text", looked_too_early)
    tended = desk.tend()
    assert (len(tended.made), tended.is_complete) == (HORIZON_DAYS, True)
    assert replays(desk, key)


def test_longer_audit_windows_move_the_horizon(desk):
    """The first outcomes of a longer window have no partition; those of the next days do."""
    window_ms = 90 * DAY_MS
    desk.done(audit_ms=window_ms)
    assert default_rows(desk) == 1
    desk.sweep()
    assert desk.partitions()[-1] == partition_name(desk.clock() + (90 + SPARE_DAYS) * DAY_MS)
    for _ in range(2 * SPARE_DAYS):
        desk.days(1)
        desk.done(audit_ms=window_ms)
        desk.sweep()
    assert default_rows(desk) == 1
    ahead = partition_name(desk.clock() + window_ms + DAY_MS)
    assert desk.partitions()[-1] >= ahead


def test_windows_past_the_limit_make_no_partitions(desk):
    """One operation with an audit of ten years must not make thousands of tables."""
    (key,) = desk.done(audit_ms=3650 * DAY_MS)
    desk.sweep()
    assert desk.partitions() == names(desk.clock(), HORIZON_DAYS)
    desk.done(audit_ms=(HORIZON_LIMIT_DAYS - 1) * DAY_MS)
    desk.sweep()
    assert len(desk.partitions()) == HORIZON_LIMIT_DAYS
    assert default_rows(desk) == 2
    assert replays(desk, key)


def test_a_long_reader_postpones_the_drop_and_nobody_fails(desk, postgres_server):
    """The sweep gives up its lock soon, settlements go on, and the next sweep drops the day."""
    desk.done(audit_ms=1000)
    desk.days(2)
    with psycopg.connect(postgres_server.url()) as reader:
        reader.execute(f"SELECT count(*) FROM {desk.schema}.outcomes")
        before = desk.partitions()
        assert desk.sweep().partitions == 0
        tended = desk.tend()
        assert (tended.made, tended.dropped, tended.is_complete) == ([], [], False)
        assert desk.partitions() == before
        (key,) = desk.done()
        assert replays(desk, key)
        reader.rollback()
    assert desk.sweep().partitions == 2
    assert desk.partitions() == names(desk.clock(), HORIZON_DAYS)


def test_making_a_day_does_not_wait_for_settlements(desk, postgres_server):
    """An open transaction that stored an outcome keeps nobody from making the coming days."""
    with psycopg.connect(postgres_server.url()) as writer:
        writer.execute(
            f"INSERT INTO {desk.schema}.outcomes VALUES ('', '', 1, 2, '', '', '', 0, %s)",
            (desk.clock() + 3 * DAY_MS,),
        )
        desk.days(1)
        tended = desk.tend()
        assert tended.made == [partition_name(desk.clock() + HORIZON_DAYS * DAY_MS)]
        assert (tended.dropped, tended.is_complete) == ([], False)  # Dropping does wait.
        writer.rollback()


def test_sweepers_that_tend_at_once_make_each_day_once(desk):
    """Eight of them after two weeks: no error, every day exactly once, the past dropped once."""
    desk.done(2, audit_ms=1000)
    desk.days(14)
    stores = [desk.another() for _ in range(8)]
    barrier = threading.Barrier(len(stores))

    def tend(store):
        barrier.wait(LIMIT_SECONDS)
        return run_sync(store.tend_partitions())

    with ThreadPoolExecutor(len(stores)) as pool:
        dropped = [name for names_ in pool.map(tend, stores) for name in names_]
    dropped += desk.tend().dropped  # What was left because a rival was at it.
    assert sorted(dropped) == sorted(set(dropped))
    assert len(dropped) == 14
    assert desk.partitions() == names(desk.clock(), HORIZON_DAYS)


def test_a_role_that_may_not_make_partitions_hears_of_it(desk, connection):
    """Silence would fill the default partition for months."""
    role = f"{desk.schema}_app"
    connection.execute(f"CREATE ROLE {role} LOGIN")
    try:
        connection.execute(f"GRANT USAGE ON SCHEMA {desk.schema} TO {role}")
        connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {desk.schema} TO {role}")
        desk.url = desk.url.replace("retrysafe@", f"{role}@")
        store = desk.another()
        assert run_sync(store.tend_partitions()) == []
        desk.days(1)
        with pytest.raises(StoreError, match="permission denied"):
            run_sync(store.sweep(10))
    finally:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
