"""Many endings and renewals that a batch does not write: few statements, and the truth for each."""

from __future__ import annotations

import psycopg
import pytest

from retrysafe.core.model import Decision, Extension, SettleKind, StagedEntry, State
from retrysafe.errors import StoreUnavailable
from retrysafe.testing.suite.probe import ENDINGS, key_of, kind_name, request, settlement
from tests.postgres.counting import Counted

COUNT = 100


def claimed(desk, count=COUNT):
    """Keys that are being worked on."""
    claims = [request(key_of(f"key {number}"), lease_ms=60_000) for number in range(count)]
    desk.commit(claims)
    return claims


def extensions_of(claims):
    return [Extension(item.key, item.token, 60_000) for item in claims]


def of_kind(kind, claims):
    return [settlement(kind, item.key, item.token) for item in claims]


@pytest.fixture
def locked(desk, spied):
    """A user's transaction that has every row, and ends when the store reads what it has."""
    with psycopg.connect(desk.plain_url) as user:

        def lock():
            user.execute(f"SELECT 1 FROM {desk.schema}.keys FOR UPDATE")
            spied.before["read_records"] = user.rollback

        yield lock
    assert not spied.before


def test_renewals_of_locked_rows_share_their_statements(desk):
    """A service that is behind renews what it is ending in another batch at the same time."""
    claims = claimed(desk)
    counted = Counted(desk.store)
    with psycopg.connect(desk.plain_url) as user:
        user.execute(f"SELECT 1 FROM {desk.schema}.keys FOR UPDATE")
        told = desk.extend_all(extensions_of(claims))
    assert counted.statements <= 3
    assert {type(result) for result in told} == {StoreUnavailable}
    assert [result.key for result in told] == [item.key.text for item in claims]
    assert "being written" in str(told[0])


@pytest.mark.parametrize("kind", [None, SettleKind.COMPLETE, SettleKind.RELEASE])
def test_owners_who_have_lost_their_keys_are_told_together(desk, kind):
    claims = claimed(desk)
    desk.sql("UPDATE {schema}.keys SET token = '\\x00'")
    counted = Counted(desk.store)
    if kind is None:
        told = desk.extend_all(extensions_of(claims))
    else:
        _, told = desk.commit([], of_kind(kind, claims))
    assert counted.statements <= 3
    assert {answer.decision for answer in told} == {Decision.LOST}


def test_several_rows_of_keys_that_are_lost_are_told_together(desk):
    """What is lost stays lost, whatever else the batch holds for its key."""
    claims = claimed(desk)
    desk.sql("UPDATE {schema}.keys SET token = '\\x00'")
    counted = Counted(desk.store)
    items = [*of_kind(SettleKind.RELEASE, claims), *of_kind(SettleKind.COMPLETE, claims)]
    _, told = desk.commit([], items)
    assert counted.statements <= 3
    assert {answer.decision for answer in told} == {Decision.LOST}


def test_keys_that_are_gone_are_told_together(desk):
    claims = claimed(desk)
    desk.sql("DELETE FROM {schema}.keys")
    counted = Counted(desk.store)
    told = desk.extend_all(extensions_of(claims))
    assert counted.statements <= 3
    assert {answer.decision for answer in told} == {Decision.LOST}


def test_a_renewal_that_was_only_in_the_way_of_a_moment_is_written(desk):
    """The rows are free again when they are read: none of the renewals is lost."""
    claims = claimed(desk)
    fetch = desk.store._connector.fetch_renewal
    is_first = True

    async def blind(seconds, sql, params=()):
        nonlocal is_first
        if is_first:
            is_first = False
            return []  # As if every row had been locked.
        return await fetch(seconds, sql, params)

    desk.store._connector.fetch_renewal = blind
    told = desk.extend_all(extensions_of(claims))
    assert {answer.decision for answer in told} == {Decision.APPLY}
    assert not is_first


def test_some_are_written_and_the_others_told_why_not(desk):
    """Each result stands at the place of its row, whatever became of its neighbours."""
    claims = claimed(desk, 40)
    for item in claims[::4]:
        desk.sql("UPDATE {schema}.keys SET token = '\\x00' WHERE digest = %s", item.key.digest)
    items = [
        settlement(SettleKind.FAIL if place % 2 else SettleKind.COMPLETE, item.key, item.token)
        for place, item in enumerate(claims)
    ]
    _, told = desk.commit([], items)
    assert [answer.decision is Decision.LOST for answer in told] == [
        place % 4 == 0 for place in range(40)
    ]


@pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
@pytest.mark.parametrize("is_staged", [False, True], ids=["plain", "with entries"])
def test_endings_that_were_in_the_way_of_a_moment_are_written(desk, locked, kind, is_staged):
    """An ending is told as applied once it stands, and never because its token holds the key."""
    claims = claimed(desk, 3)
    endings = of_kind(kind, claims)
    for item in endings if is_staged else []:
        item.entries = (StagedEntry(item.key.text, "topic", "text/plain", b"body"),)
    locked()
    _, told = desk.commit([], endings)
    assert [answer.decision for answer in told] == [Decision.APPLY] * 3
    for item in claims:
        stored = desk.read(item.key)
        assert stored.record.state is State(kind)
        assert len(stored.outcomes) == 1
    ((staged,),) = desk.sql("SELECT count(*) FROM {schema}.outbox")
    assert staged == (3 if is_staged else 0)


@pytest.mark.parametrize("kind", ENDINGS, ids=kind_name)
def test_endings_of_locked_rows_are_to_be_asked_for_again(desk, kind):
    """Nothing of them is written as long as somebody has their rows, and so they are told."""
    claims = claimed(desk, 3)
    with psycopg.connect(desk.plain_url) as user:
        user.execute(f"SELECT 1 FROM {desk.schema}.keys FOR UPDATE")
        _, told = desk.commit([], of_kind(kind, claims))
    assert {type(result) for result in told} == {StoreUnavailable}
    assert [result.key for result in told] == [item.key.text for item in claims]
    _, told = desk.commit([], of_kind(kind, claims))
    assert [answer.decision for answer in told] == [Decision.APPLY] * 3


@pytest.mark.parametrize("kind", SettleKind, ids=kind_name)
@pytest.mark.parametrize("is_owner_first", [True, False], ids=["owner first", "zombie first"])
def test_a_zombie_beside_the_owner_is_not_told_what_the_owner_is(desk, kind, is_owner_first):
    claims = claimed(desk, 3)
    owners = of_kind(kind, claims)
    zombies = [settlement(kind, item.key, b"zombie zombie zo") for item in claims]
    _, told = desk.commit([], [*owners, *zombies] if is_owner_first else [*zombies, *owners])
    expected = [Decision.APPLY] * 3 + [Decision.LOST] * 3
    if not is_owner_first:
        expected.reverse()
    assert [answer.decision for answer in told] == expected


def test_a_row_that_changes_hands_between_the_look_and_the_write_is_looked_at_again(desk, spied):
    """An owner who has lost the key in between is told so, and not to come back."""
    (item,) = claimed(desk, 1)

    def hand_to(token):
        desk.sql("UPDATE {schema}.keys SET token = %s", token)

    def give_back():
        hand_to(item.token)
        spied.before["settle_one"] = lambda: hand_to(b"rival")

    hand_to(b"rival")
    spied.before["read_records"] = give_back
    _, (answer,) = desk.commit([], of_kind(SettleKind.COMPLETE, [item]))
    assert not spied.before
    assert answer.decision is Decision.LOST


def test_a_single_ending_is_looked_at_once(desk):
    """It is read where it is decided; reading it with others first would be for nothing."""
    claims = claimed(desk, 1)
    with psycopg.connect(desk.plain_url) as user:
        user.execute(f"SELECT 1 FROM {desk.schema}.keys FOR UPDATE")
        desk.commit([], of_kind(SettleKind.COMPLETE, claims))
        counted = Counted(desk.store)
        _, (busy,) = desk.commit([], of_kind(SettleKind.COMPLETE, claims))
    assert isinstance(busy, StoreUnavailable)
    assert counted.statements == 1
