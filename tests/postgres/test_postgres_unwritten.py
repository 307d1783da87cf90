"""Many endings and renewals that a batch does not write: few statements, and the truth for each."""

from __future__ import annotations

import psycopg
import pytest

from retrysafe.core.model import Decision, SettleKind
from retrysafe.errors import StoreUnavailable
from retrysafe.testing.suite.probe import key_of, request, settlement
from tests.postgres.counting import Counted

COUNT = 100


def claimed(desk, count=COUNT):
    """Keys that are being worked on."""
    claims = [request(key_of(f"key {number}"), lease_ms=60_000) for number in range(count)]
    desk.commit(claims)
    return claims


def of_kind(kind, claims):
    return [settlement(kind, item.key, item.token) for item in claims]


def test_renewals_of_locked_rows_share_their_statements(desk):
    """A service that is behind renews what it is ending in another batch at the same time."""
    claims = claimed(desk)
    counted = Counted(desk.store)
    with psycopg.connect(desk.plain_url) as user:
        user.execute(f"SELECT 1 FROM {desk.schema}.keys FOR UPDATE")
        _, told = desk.commit([], of_kind(SettleKind.EXTEND, claims))
    assert counted.statements <= 3
    assert {type(result) for result in told} == {StoreUnavailable}
    assert [result.key for result in told] == [item.key.text for item in claims]
    assert "being written" in str(told[0])


@pytest.mark.parametrize("kind", [SettleKind.EXTEND, SettleKind.COMPLETE, SettleKind.RELEASE])
def test_owners_who_have_lost_their_keys_are_told_together(desk, kind):
    claims = claimed(desk)
    desk.sql("UPDATE {schema}.keys SET token = '\\x00'")
    counted = Counted(desk.store)
    _, told = desk.commit([], of_kind(kind, claims))
    assert counted.statements <= 3
    assert {answer.decision for answer in told} == {Decision.LOST}


def test_keys_that_are_gone_are_told_together(desk):
    claims = claimed(desk)
    desk.sql("DELETE FROM {schema}.keys")
    counted = Counted(desk.store)
    _, told = desk.commit([], of_kind(SettleKind.EXTEND, claims))
    assert counted.statements <= 3
    assert {answer.decision for answer in told} == {Decision.LOST}


def test_a_renewal_that_was_only_in_the_way_of_a_moment_is_written(desk):
    """The rows are free again when they are read: none of the renewals is lost."""
    claims = claimed(desk)
    fetch = desk.store._connector.fetch
    is_first = True

    async def blind(sql, params=()):
        nonlocal is_first
        if is_first:
            is_first = False
            return []  # As if every row had been locked.
        return await fetch(sql, params)

    desk.store._connector.fetch = blind
    _, told = desk.commit([], of_kind(SettleKind.EXTEND, claims))
    assert {answer.decision for answer in told} == {Decision.APPLY}
    assert not is_first


def test_a_renewal_beside_the_ending_of_its_key_is_told_of_the_ending(desk):
    claims = claimed(desk, 3)
    endings = of_kind(SettleKind.COMPLETE, claims)
    renewals = of_kind(SettleKind.EXTEND, claims)
    _, told = desk.commit([], [*renewals, *endings])
    assert [answer.decision for answer in told[:3]] == [Decision.APPLY] * 3
    assert [answer.decision for answer in told[3:]] == [Decision.APPLY] * 3
    _, told = desk.commit([], [*endings, *renewals])
    assert [answer.decision for answer in told[3:]] == [Decision.LOST] * 3
    for item in claims:
        assert desk.read(item.key).record.settled_at_ms is not None


def test_some_are_written_and_the_others_told_why_not(desk):
    """Each result stands at the place of its row, whatever became of its neighbours."""
    claims = claimed(desk, 40)
    for item in claims[::4]:
        desk.sql("UPDATE {schema}.keys SET token = '\\x00' WHERE digest = %s", item.key.digest)
    items = [
        settlement(SettleKind.EXTEND if place % 2 else SettleKind.COMPLETE, item.key, item.token)
        for place, item in enumerate(claims)
    ]
    _, told = desk.commit([], items)
    assert [answer.decision is Decision.LOST for answer in told] == [
        place % 4 == 0 for place in range(40)
    ]
