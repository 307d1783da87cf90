"""The walk of the sweep on PostgreSQL: little is written at a time, and nothing is left behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrysafe.errors import StoreUnavailable
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres import schema
from retrysafe.stores.postgres.sweep import (
    CALLS_BETWEEN,
    PAGES_PER_CALL,
    ROWS_BESIDE,
    STEPS_PER_CALL,
)
from retrysafe.testing.suite.probe import ACTIVE_MS

LIMIT_SECONDS = 30
# Of the widest step here, so that small tables have some.
WIDTH_MOST = 128
LIMIT = 10_000
CALLS_LIMIT = 500
# Any number that nobody else locks.
RACE_LOCK = 1_709_171
BESIDE = ["sweep_default_outcomes", "sweep_entries", "sweep_arguments"]


def pages_of(desk):
    """How many keys each page of the table holds."""
    rows = desk.sql("SELECT (ctid::text::point)[0]::int, count(*) FROM {schema}.keys GROUP BY 1")
    return dict(rows)


def table_pages(desk):
    ((pages,),) = desk.sql(schema.statements(desk.schema)["table_pages"])
    return pages


def walked(desk, limit=LIMIT):
    """Sweeps to the end of the walk; what each call reported and how many pages it wrote."""
    before = pages_of(desk)
    calls = []
    for _ in range(CALLS_LIMIT):
        report = desk.sweep(limit)
        after = pages_of(desk)
        calls.append((report, sum(after.get(page) != count for page, count in before.items())))
        before = after
        if not report.has_more:
            return calls
    raise AssertionError("the walk did not end")


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr("retrysafe.stores.postgres.sweep.WIDTH_MOST", WIDTH_MOST)


@pytest.fixture
def ranges(desk):
    """The first page, the width and the limit of each step of the desk's store."""
    walk = desk.store._sweeping._keys
    fetch = walk._fetch
    asked = []

    async def told(name, start, end, limit):
        first, past = (int(place[1:].partition(",")[0]) for place in (start, end))
        asked.append((first, past - first, limit))
        return await fetch(name, start, end, limit)

    walk._fetch = told
    return asked


def fill_beside(desk, count, *, first=1):
    """Needless arguments, delivered entries and outcomes past their audit that have no day."""
    numbers = f"generate_series({first}, {first + count - 1}) AS n"
    digest = "decode(lpad(to_hex(n + 1000000), 32, '0'), 'hex')"
    desk.sql(
        f"INSERT INTO {{schema}}.arguments SELECT {digest}, 0, 'json.1', '', '' FROM {numbers}"
    )
    desk.sql(
        f"INSERT INTO {{schema}}.outcomes SELECT {digest}, '\\x00', 1, 2, 'json.1', '', '', 0, 1 "
        f"FROM {numbers}"
    )
    desk.sql(
        "INSERT INTO {schema}.outbox (entry_key, topic, content_type, body, state, due_at_ms, "
        "staged_at_ms, settled_at_ms, expires_at_ms) "
        f"SELECT 'entry-' || n, 'paid', 'text/plain', '', 3, 0, 0, 0, 1 FROM {numbers}"
    )


def left_beside(desk):
    tables = ("arguments", "outcomes_default", "outbox")
    return [desk.sql(f"SELECT count(*) FROM {{schema}}.{name}")[0][0] for name in tables]


def test_a_call_writes_a_bounded_number_of_pages(desk):
    """Where every page holds outlived keys, each call writes its share, and no more than that."""
    desk.fill(3000)
    pages = table_pages(desk)
    assert pages > 3 * PAGES_PER_CALL
    calls = walked(desk)
    assert [written for _, written in calls[:-1]] == [PAGES_PER_CALL] * (pages // PAGES_PER_CALL)
    assert sum(report.keys for report, _ in calls) == 3000


def test_pages_are_counted_not_keys(desk):
    """One outlived key in each page costs as much WAL as a page full of them."""
    desk.fill(2000, expires_at_ms=desk.clock() + ACTIVE_MS)
    desk.sql(
        "UPDATE {schema}.keys SET expires_at_ms = 0 WHERE ctid IN "
        "(SELECT min(ctid) FROM {schema}.keys GROUP BY (ctid::text::point)[0])"
    )
    pages = table_pages(desk)
    calls = walked(desk)
    assert max(written for _, written in calls) <= PAGES_PER_CALL
    assert sum(report.keys for report, _ in calls) == pages
    assert len(calls) <= pages // PAGES_PER_CALL + 1


def test_a_wide_step_into_full_pages_writes_no_more_either(desk, ranges):
    """A step that grew wide over live keys stops at its share, and the next ones are narrow."""
    desk.fill(5000, expires_at_ms=desk.clock() + ACTIVE_MS)
    live_pages = table_pages(desk)
    desk.fill(5000, first=5001)
    calls = walked(desk)
    assert max(written for _, written in calls) <= PAGES_PER_CALL
    assert sum(report.keys for report, _ in calls) == 5000
    assert (WIDTH_MOST, PAGES_PER_CALL) in {(width, limit) for _, width, limit in ranges}
    into = next(at for at, (first, width, _) in enumerate(ranges) if first + width > live_pages)
    first, width, _ = ranges[into + 1]
    # It goes on where it stopped, which is not where it began.
    assert first > ranges[into][0]
    assert width <= PAGES_PER_CALL
    # No page is looked at by more than a step that stopped and the one that went on.
    assert sum(width for _, width, _ in ranges) <= table_pages(desk) + 2 * WIDTH_MOST


def test_live_keys_are_walked_over_in_few_statements(desk, ranges):
    """With nothing to remove the steps double, and one call walks over many of them."""
    desk.fill(10_000, expires_at_ms=desk.clock() + ACTIVE_MS)
    report = desk.sweep()
    assert (report.keys, report.has_more) == (0, False)
    assert [width for _, width, _ in ranges[:4]] == [32, 64, 128, 128]
    assert len(ranges) <= 2 + -(-table_pages(desk) // WIDTH_MOST)


def test_few_outlived_keys_are_found_in_few_statements(desk, ranges):
    """A key here and there does not make the steps narrow."""
    desk.fill(10_000, expires_at_ms=desk.clock() + ACTIVE_MS)
    desk.sql("UPDATE {schema}.keys SET expires_at_ms = 0 WHERE key LIKE 'key-%%000'")
    report = desk.sweep()
    assert (report.keys, report.has_more) == (10, False)
    assert len(ranges) <= 2 + -(-table_pages(desk) // WIDTH_MOST)


def test_one_call_walks_over_a_bounded_part_of_the_table(desk, monkeypatch):
    """A table without anything to remove is walked over in several calls, each of them short."""
    monkeypatch.setattr("retrysafe.stores.postgres.sweep.PAGES_PER_CALL", 2)
    monkeypatch.setattr("retrysafe.stores.postgres.sweep.WIDTH_MOST", 2)
    store = desk.store = desk.another()
    desk.fill(2000, expires_at_ms=desk.clock() + ACTIVE_MS)
    calls = -(-table_pages(desk) // (2 * STEPS_PER_CALL))
    assert calls > 2
    for number in range(calls):
        report = run_sync(store.sweep(LIMIT))
        assert (report.keys, report.has_more) == (0, number < calls - 1)


@pytest.mark.parametrize("limit", [1, 7, 50])
def test_a_limit_that_is_reached_within_a_range_leaves_nothing_behind(desk, ranges, limit):
    """The walk goes on in the page where it stopped, and looks at no page before it again."""
    desk.fill(100, expires_at_ms=desk.clock() + ACTIVE_MS)
    desk.fill(200, first=101)
    calls = walked(desk, limit)
    removed = [report.keys for report, _ in calls]
    assert sum(removed) == 200
    assert set(removed[:-1]) == {limit}
    starts = [first for first, _, _ in ranges]
    assert starts == sorted(starts)
    assert starts[-1] > 0


@pytest.mark.parametrize("limit", [1, 5])
def test_a_limit_that_is_reached_with_a_key_written_meanwhile_leaves_nothing_behind(
    desk, ranges, limit
):
    """It is chosen and stays, so one less is removed: the walk passes over nothing for that."""
    desk.fill(2000, expires_at_ms=desk.clock() + ACTIVE_MS)
    live_pages = table_pages(desk)
    desk.fill(20, first=2001)
    store, walk = desk.store, desk.store._sweeping._keys
    text, fetch = store._statements.text, walk._fetch
    # The clock is asked for by the first row that is looked at: the snapshot was taken by then.
    clock = f"(SELECT {desk.clock()}::bigint FROM pg_advisory_xact_lock_shared({RACE_LOCK}))"
    waiting = schema.statements(desk.schema, clock)["sweep_pages"]
    store._statements.text = lambda name: waiting if name == "sweep_pages" else text(name)

    async def held(name, start, end, limit):
        if int(end[1:].partition(",")[0]) > live_pages:
            desk.sql(f"SELECT pg_advisory_lock({RACE_LOCK})")
            walk._fetch = fetch
        return await fetch(name, start, end, limit)

    walk._fetch = held
    with ThreadPoolExecutor(1) as pool:
        swept = pool.submit(desk.sweep, limit)
        try:
            await_race(desk)
            desk.sql("UPDATE {schema}.keys SET owner = 'another' WHERE key = 'key-2001'")
        finally:
            desk.sql("SELECT pg_advisory_unlock_all()")
        first = swept.result(LIMIT_SECONDS)
    assert (first.keys, first.has_more) == (limit, True)
    walked(desk, limit)
    left = desk.sql("SELECT key FROM {schema}.keys WHERE expires_at_ms <= %s", desk.clock())
    # That one may be in an earlier page by now, which is the next walk's.
    assert set(left) <= {("key-2001",)}
    starts = [start for start, _, _ in ranges]
    assert starts == sorted(starts)


def await_race(desk):
    """Until a statement of the store waits for the test's lock."""
    pause = threading.Event()
    for _ in range(LIMIT_SECONDS * 100):
        ((waiting,),) = desk.sql(
            f"SELECT count(*) FROM pg_locks WHERE objid = {RACE_LOCK} AND NOT granted"
        )
        if waiting:
            return
        pause.wait(0.01)
    raise AssertionError("nobody waits")


def test_keys_that_a_trigger_keeps_do_not_keep_the_walk(desk):
    """They are chosen again and again, and never removed; the walk ends all the same."""
    desk.fill(3)
    desk.sql(
        "CREATE FUNCTION {schema}.stay() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN RETURN NULL; END'"
    )
    desk.sql(
        "CREATE TRIGGER stay BEFORE DELETE ON {schema}.keys "
        "FOR EACH ROW EXECUTE FUNCTION {schema}.stay()"
    )
    calls = walked(desk, limit=2)
    assert sum(report.keys for report, _ in calls) == 0
    desk.sql("DROP TRIGGER stay ON {schema}.keys")
    assert sum(report.keys for report, _ in walked(desk, limit=2)) == 3


def test_an_outlived_key_behind_the_walk_is_found_by_the_next_one(desk):
    """A walk that has ended starts anew from the first page."""
    desk.fill(2000)
    walked(desk)
    desk.fill(1, first=5000)
    assert sum(report.keys for report, _ in walked(desk)) == 1


def test_other_tables_are_swept_in_bounded_parts_until_nothing_is_left(desk):
    """`has_more` stays true for them alone, also when the walk over the keys is over."""
    fill_beside(desk, 2 * ROWS_BESIDE + 9)
    reports = [desk.sweep(LIMIT) for _ in range(3)]
    expected = [ROWS_BESIDE, ROWS_BESIDE, 9]
    assert [report.outcomes for report in reports] == expected
    assert [report.entries for report in reports] == expected
    assert [report.has_more for report in reports] == [True, True, False]
    assert left_beside(desk) == [0, 0, 0]


@pytest.mark.parametrize("name", BESIDE)
def test_one_other_table_alone_asks_for_more(desk, spied, name):
    """In the middle of a walk, only the one that may have left something is looked at again."""
    desk.fill(2000)
    fill_beside(desk, ROWS_BESIDE - 1)
    table = dict(zip(BESIDE, ("outcomes_default", "outbox", "arguments"), strict=True))[name]
    fill_beside(desk, 1, first=ROWS_BESIDE)
    for other in {"outcomes_default", "outbox", "arguments"} - {table}:
        desk.sql(f"DELETE FROM {{schema}}.{other}")
    desk.sweep(LIMIT)
    assert [item for item in spied.taken() if item in BESIDE] == BESIDE
    desk.sweep(LIMIT)
    assert [item for item in spied.taken() if item in BESIDE] == [name]
    desk.sweep(LIMIT)
    assert [item for item in spied.taken() if item in BESIDE] == []


def test_what_other_tables_have_left_is_swept_alone(desk, spied):
    """The walk is over: looking at the keys and the partitions again would take most of a call."""
    desk.fill(2000, expires_at_ms=desk.clock() + ACTIVE_MS)
    fill_beside(desk, 2 * ROWS_BESIDE + 9)
    desk.sql("DELETE FROM {schema}.arguments")
    assert desk.sweep(LIMIT).has_more
    assert "sweep_pages" in spied.taken()
    assert [desk.sweep(LIMIT).has_more for _ in range(2)] == [True, False]
    assert spied.taken() == ["sweep_default_outcomes", "sweep_entries"] * 2
    # They are finished, so the next call starts a walk and looks everywhere.
    assert not desk.sweep(LIMIT).has_more
    assert {"list_partitions", "sweep_pages", *BESIDE} <= set(spied.taken())


def test_an_outbox_that_always_has_more_does_not_keep_keys_from_being_swept(desk, spied):
    """A walk starts again after a bounded number of calls without the keys, time after time."""
    fill_beside(desk, 3 * (CALLS_BETWEEN + 1))
    assert desk.sweep(limit=1).has_more
    for first in (1, 2):
        desk.fill(1, first=first)
        spied.taken()
        reports = [desk.sweep(limit=1) for _ in range(CALLS_BETWEEN + 1)]
        assert [report.keys for report in reports] == [0] * CALLS_BETWEEN + [1]
        assert {report.entries for report in reports} == {1}
        assert spied.taken().count("list_partitions") == 1
        # The rest of that walk: its limit was reached in the only page.
        assert desk.sweep(limit=1).keys == 0


def test_other_tables_get_their_turn_in_a_long_walk(desk, spied):
    """Not with each of many small calls, and long before the walk is over."""
    desk.fill(2000)
    assert desk.sweep(limit=5).has_more
    fill_beside(desk, 3)
    spied.taken()
    for _ in range(CALLS_BETWEEN - 1):
        assert desk.sweep(limit=5).has_more
    assert not set(BESIDE) & set(spied.taken())
    assert left_beside(desk) == [3, 3, 3]
    assert desk.sweep(limit=5).has_more
    assert left_beside(desk) == [0, 0, 0]


def test_a_turn_that_an_outage_cut_short_is_taken_again(desk, spied):
    """The call after it looks at the other tables, although it is not the walk's first."""
    desk.fill(10_000, expires_at_ms=desk.clock() + ACTIVE_MS)
    fill_beside(desk, 3)

    def fail():
        raise StoreUnavailable("gone")

    # The second step of the first call.
    spied.before["sweep_pages"] = lambda: spied.before.update(sweep_pages=fail)
    with pytest.raises(StoreUnavailable):
        desk.sweep(LIMIT)
    assert not desk.sweep(LIMIT).has_more
    assert left_beside(desk) == [0, 0, 0]


def test_a_walk_that_an_outage_kept_from_being_begun_is_not_put_off(desk, spied):
    """Also while other tables have more: the next call begins it."""
    fill_beside(desk, 2 * CALLS_BETWEEN)
    for _ in range(CALLS_BETWEEN + 1):
        assert desk.sweep(limit=1).has_more
    desk.fill(1)

    def fail():
        raise StoreUnavailable("gone")

    spied.before["sweep_pages"] = fail
    with pytest.raises(StoreUnavailable):
        desk.sweep(limit=1)
    assert desk.sweep(limit=1).keys == 1


def test_partitions_are_tended_once_in_a_walk(desk, spied):
    """By its first call: making and dropping them takes locks."""
    desk.fill(2000)
    reports = walked(desk)
    assert len(reports) > 2
    assert spied.taken().count("list_partitions") == 1
    desk.sweep()
    assert spied.taken().count("list_partitions") == 1


@pytest.mark.parametrize("has_own_store", [True, False], ids=["two processes", "one store"])
def test_sweepers_at_once_leave_nothing(desk, has_own_store):
    """Each walk ends, what was removed is counted once, and nothing is left in the end."""
    desk.fill(3000)
    fill_beside(desk, 2 * ROWS_BESIDE)
    barrier = threading.Barrier(2)

    def sweep_all(store):
        barrier.wait(LIMIT_SECONDS)
        removed = 0
        for _ in range(CALLS_LIMIT):
            report = run_sync(store.sweep(LIMIT))
            removed += report.keys
            if not report.has_more:
                return removed
        raise AssertionError("the sweep did not end")

    stores = [desk.another() if has_own_store else desk.store for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        total = sum(pool.map(sweep_all, stores))
    assert total + sum(report.keys for report, _ in walked(desk)) == 3000
    assert pages_of(desk) == {}
    assert left_beside(desk) == [0, 0, 0]
