"""Lists of records: what a filter means, in which order, and where a page goes on."""

from __future__ import annotations

import pytest

from retrysafe.core.listing import Position, RecordPage, RecordQuery
from retrysafe.core.model import (
    Condition,
    OperatorCommand,
    OperatorNote,
    Record,
    State,
    StoredKey,
    SweepReport,
)
from retrysafe.core.pace import rest_of_command, rest_within_walk
from retrysafe.core.transitions import action_of

NOW_MS = 1_000_000


def stored(text, claimed_at_ms=NOW_MS, **changes):
    values = {
        "digest": text.encode().ljust(16, b"."),
        "caller": "acme",
        "text": text,
        "operation": "charge",
        "rule": 1,
        "fingerprint": b"f" * 16,
        "state": State.SUCCEEDED,
        "token": b"t" * 16,
        "attempt": 2,
        "first_claimed_at_ms": 0,
        "claimed_at_ms": claimed_at_ms,
        "lease_ends_at_ms": 0,
        "settled_at_ms": NOW_MS,
        "expires_at_ms": 2 * NOW_MS,
        "owner": "host:1",
    }
    return StoredKey(Record(**(values | changes)), Condition.SUCCEEDED, NOW_MS)


@pytest.mark.parametrize(
    ("query", "is_match"),
    [
        (RecordQuery(), True),
        (RecordQuery(caller="acme"), True),
        (RecordQuery(caller="acm"), False),
        (RecordQuery(text_prefix="or"), True),
        (RecordQuery(text_prefix="r"), False),
        (RecordQuery(conditions=frozenset({Condition.SUCCEEDED})), True),
        (RecordQuery(conditions=frozenset({Condition.FAILED})), False),
        (RecordQuery(operation="charge"), True),
        (RecordQuery(operation=""), False),
        (RecordQuery(older_than_ms=100), True),
        (RecordQuery(older_than_ms=101), False),
        (RecordQuery(newer_than_ms=100), True),
        (RecordQuery(newer_than_ms=99), False),
        (RecordQuery(after=Position(NOW_MS - 99, b"")), True),
        (RecordQuery(after=Position(NOW_MS - 101, b"")), False),
        (RecordQuery(after=Position(NOW_MS - 100, b"a" * 16)), True),
        (RecordQuery(after=Position(NOW_MS - 100, b"order".ljust(16, b"."))), False),
    ],
)
def test_a_record_must_pass_every_filter(query, is_match):
    """Each filter alone, at its edge."""
    assert query.matches(stored("order", NOW_MS - 100)) is is_match


def test_pages_follow_each_other_without_a_gap():
    """Each page begins behind the last record of the one before, whatever instants are equal."""
    found = [stored(f"{number:02d}", NOW_MS - number // 3) for number in range(10)]
    query, texts = RecordQuery(limit=4), []
    while True:
        page = query.page_of(reversed(found))
        texts += [item.record.text for item in page.keys]
        if page.after is None:
            break
        query = RecordQuery(limit=4, after=page.after)
    assert texts == [f"{number:02d}" for number in range(10)]


def test_a_page_says_what_was_not_searched():
    """A page that is not full has nothing behind it, but may have left something unsearched."""
    page = RecordQuery().page_of([], "half of it")
    assert page == RecordPage([], None, "half of it")


@pytest.mark.parametrize("position", [Position(5, b"\x00\xff"), Position(0, b"")])
def test_a_position_is_written_and_read_back(position):
    """The text of a position is all that the next page needs."""
    assert Position.of(str(position)) == position


@pytest.mark.parametrize("text", ["", "5", "-", "x-00", "5-0", "5-zz", "-5-00", "9" * 19 + "-00"])
def test_what_is_no_position_is_none(text):
    """Whatever people paste."""
    assert Position.of(text) is None


def test_an_action_tells_what_the_key_was():
    """Before the command, not after it."""
    action = action_of(
        stored("a").record, OperatorCommand.EXPIRE, OperatorNote("kim", "refunded"), NOW_MS
    )
    assert (action.condition, action.attempt, action.operator) == ("succeeded", 2, "kim")


def test_a_command_rests_only_for_what_it_wrote():
    """A sweep that somebody waits for pauses after rounds that removed something."""
    assert rest_of_command(SweepReport(has_more=True), 1.0) == 0
    for report in (SweepReport(keys=1), SweepReport(outcomes=1), SweepReport(entries=1)):
        assert rest_of_command(report, 1.0) == rest_within_walk(1.0)
