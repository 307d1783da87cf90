"""Lists on a large table: found by the instant of their claim, and pending keys by a kept walk."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.listing import RecordQuery
from retrysafe.core.model import Condition, Decision, OperatorCommand, OperatorNote
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.audit import ACTIONS_KEPT_MS
from retrysafe.stores.postgres import listing, schema
from retrysafe.testing.suite.probe import LEASE_MS, key_of

PENDING = frozenset({Condition.RUNNING, Condition.ABANDONED})


@pytest.fixture
def asked(desk, monkeypatch):
    """The statements of lists, in their order."""
    names = []
    fetch = desk.store._listing._fetch

    async def told(name, *params):
        names.append(name)
        return await fetch(name, *params)

    monkeypatch.setattr(desk.store._listing, "_fetch", told)
    return names


def texts(page):
    return [item.record.text for item in page.keys]


def test_a_list_reads_by_the_index_of_claims(desk):
    """Whatever the filters, the table is not read from end to end."""
    desk.fill(3000)
    desk.sql("VACUUM ANALYZE {schema}.keys")
    statement = schema.statements(desk.schema)["list_claimed"]
    values = ["NULL", "''", "'{}'", "5", "NULL", "10", "20", "''", "30"]
    for number, value in reversed(list(enumerate(values, 1))):
        statement = statement.replace(f"${number}", value)
    desk.sql("SET enable_seqscan = off")
    plan = "\n".join(line for (line,) in desk.sql(f"EXPLAIN {statement}"))
    assert "keys_claimed" in plan, plan
    assert "Seq Scan on keys" not in plan, plan


def test_no_completion_pays_for_the_index_of_claims(desk):
    """An ending and a renewal stay in their page: no index has a column that they change."""
    desk.done(50)
    token = desk.hold()
    desk.advance(1)
    desk.extend(token)
    desk.sql("SELECT pg_stat_force_next_flush()")
    ((updates, hot),) = desk.sql(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
        "WHERE schemaname = '{schema}' AND relname = 'keys'"
    )
    assert updates == hot


def test_a_search_that_runs_out_of_time_says_how_to_go_on(desk):
    """Windows grow until the time is over; the next search begins where this one ended."""
    desk.hold(key_of("old"))
    desk.advance(86_400_000)
    desk.hold(key_of("new"))
    page = run_sync(desk.store.list_records(RecordQuery(seconds=0)))
    assert texts(page) == ["new"]
    assert page.unsearched.startswith("keys claimed before 2")
    rest = run_sync(desk.store.list_records(RecordQuery(after=page.after)))
    assert (texts(rest), rest.after, rest.unsearched) == (["old"], None, "")


def test_pending_keys_are_found_without_another_walk(desk, asked):
    """After a worker's walk: those that it met and that are pending still, and newer claims."""
    for text in ("met", "settled"):
        desk.hold(key_of(text))
    run_sync(desk.store.list_abandoned(10))
    desk.advance(LEASE_MS)
    run_sync(desk.store.operate(key_of("settled"), OperatorCommand.RELEASE))
    desk.hold(key_of("since"))
    asked.clear()
    page = run_sync(desk.store.list_records(RecordQuery(conditions=PENDING)))
    assert (texts(page), page.unsearched) == (["since", "met"], "")
    assert asked == ["now_ms", "read_walk", "pending_of", "pending_since"]
    only = RecordQuery(conditions=frozenset({Condition.ABANDONED}))
    assert texts(run_sync(desk.store.list_records(only))) == ["met"]


def test_an_old_walk_is_made_anew(desk, asked):
    """What nobody has looked at for long is not relied on; reading does not write."""
    desk.hold(key_of("k"))
    run_sync(desk.store.list_abandoned(10))
    desk.advance(15 * 60_000 + 1)
    asked.clear()
    page = run_sync(desk.store.list_records(RecordQuery(conditions=PENDING)))
    assert texts(page) == ["k"]
    assert asked == ["now_ms", "read_walk", "table_pages", "pending_in_pages"]


def test_a_walk_that_did_not_end_says_so(desk, monkeypatch):
    """In its time it saw a part of the pages, and says how much it did not see."""
    monkeypatch.setattr(listing, "LOOK_PAGES", 1)
    desk.fill(200, state=1, lease_ends_at_ms=0)
    page = run_sync(desk.store.list_records(RecordQuery(conditions=PENDING, seconds=0)))
    assert page.unsearched.endswith("% of the table")


def test_a_walk_keeps_a_bounded_number(desk, monkeypatch):
    """More pending keys than that are told of as not searched."""
    monkeypatch.setattr(listing, "NOTED_LIMIT", 20)
    desk.fill(50, state=1, lease_ends_at_ms=desk.clock() + LEASE_MS)
    assert run_sync(desk.store.list_abandoned(10)) == []
    page = run_sync(desk.store.list_records(RecordQuery(conditions=PENDING)))
    assert page.unsearched == "pending keys beyond the first 20"
    assert len(page.keys) == 20


def test_an_earlier_walk_does_not_take_the_place_of_a_later_one(desk):
    """Two workers walk at once: the one that began later knows more."""
    note = desk.store._statements.fetch
    run_sync(note("note_walk", 100, True, b"b" * 16))
    run_sync(note("note_walk", 99, True, b"a" * 16))
    ((digests,),) = desk.sql("SELECT digests FROM {schema}.pending_walk")
    assert bytes(digests) == b"b" * 16


def test_an_action_and_its_change_are_one_transaction(desk):
    """Neither is there without the other; the sweep removes it after its year."""
    key = key_of("k")
    desk.hold(key)
    desk.sql("ALTER TABLE {schema}.operator_actions ADD CONSTRAINT full_up CHECK (false) NOT VALID")
    note = OperatorNote("kim", "why")
    with pytest.raises(Exception, match="full_up"):
        run_sync(desk.store.operate(key, OperatorCommand.FORCE_RELEASE, note))
    assert desk.read(key).condition is Condition.RUNNING
    desk.sql("ALTER TABLE {schema}.operator_actions DROP CONSTRAINT full_up")
    done = run_sync(desk.store.operate(key, OperatorCommand.FORCE_RELEASE, note))
    assert done is Decision.APPLY
    (action,) = run_sync(desk.store.read_actions(key))
    assert (action.condition, action.operator, action.reason) == ("running", "kim", "why")
    desk.advance(ACTIONS_KEPT_MS - 1)
    desk.sweep()
    assert desk.sql("SELECT count(*) FROM {schema}.operator_actions") == [(1,)]
    desk.advance(1)
    desk.sweep()
    assert desk.sql("SELECT count(*) FROM {schema}.operator_actions") == [(0,)]


def test_a_claim_that_was_committed_late_is_found(desk):
    """Its instant is before the beginning of the walk, which did not see it yet."""
    run_sync(desk.store.list_abandoned(10))
    desk.clock.jump_back(timedelta(seconds=5))
    desk.hold(key_of("late"))
    page = run_sync(desk.store.list_records(RecordQuery(conditions=PENDING)))
    assert texts(page) == ["late"]
