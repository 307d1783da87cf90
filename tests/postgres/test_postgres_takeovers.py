"""Many keys that are taken over at once: few statements, and one new owner for each."""

from __future__ import annotations

import threading
from datetime import timedelta

import psycopg
import pytest

from retrysafe.core import transitions
from retrysafe.core.model import Condition, Decision, Payload, SettleKind
from retrysafe.errors import StoreRejected
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.claims import BALANCE_LIMIT, Takeover, write_takeovers
from retrysafe.testing.suite.probe import key_of, request, settlement
from tests.postgres.counting import Counted

COUNT = 100
ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")
# Conditions in which a key can be taken over, and what the table calls that.
FREE = {
    Condition.RELEASED: Decision.TAKE_OVER,
    Condition.ABANDONED: Decision.TAKE_OVER,
    Condition.OUTLIVED: Decision.ADMIT,
}
PATIENCE_SECONDS = 30


def bring(desk, conditions):
    """Keys in these conditions, which start with a step and arguments each, by few statements."""
    keys = [key_of(f"key {number}") for number in range(len(conditions))]
    claims = [request(key, lease_ms=60_000, arguments=ARGUMENTS) for key in keys]
    desk.commit(claims)
    for item in claims:
        assert desk.record(item.token, key=item.key) is Decision.APPLY
    endings = []
    for item, condition in zip(claims, conditions, strict=True):
        if condition is Condition.RELEASED:
            endings.append(settlement(SettleKind.RELEASE, item.key, item.token))
        elif condition is Condition.OUTLIVED:
            endings.append(settlement(SettleKind.COMPLETE, item.key, item.token, active_ms=60_000))
    desk.commit([], endings)
    desk.clock.advance(timedelta(minutes=2))
    return keys


def decisions(answers):
    return [answer.decision for answer in answers]


@pytest.mark.parametrize("condition", FREE)
@pytest.mark.parametrize("reads_first", [False, True], ids=["written first", "read first"])
def test_takeovers_share_a_statement(desk, condition, reads_first):
    """However many keys are taken over, the batch is three statements at most, and one more for
    leases that have ended: they may have been renewed beside their rows."""
    keys = bring(desk, [condition] * COUNT)
    desk.store._claims.balance = BALANCE_LIMIT if reads_first else -BALANCE_LIMIT
    counted = Counted(desk.store)
    wishes = [request(key, operation="refund", owner="owner-2", lease_ms=5000) for key in keys]
    wishes.append(request(key_of("new")))
    answers, _ = desk.commit(wishes)
    assert counted.statements <= 3 + (condition is Condition.ABANDONED)
    assert decisions(answers) == [FREE[condition]] * COUNT + [Decision.ADMIT]
    attempt = 1 if condition is Condition.OUTLIVED else 2
    now_ms = desk.clock()
    for wish, answer in zip(wishes[:COUNT], answers, strict=False):
        assert (answer.condition, answer.attempt) == (condition, attempt)
        assert answer.lease_ends_at_ms == now_ms + 5000
        found = desk.read(wish.key).record
        assert (found.token, found.attempt, found.owner) == (wish.token, attempt, "owner-2")
        assert (found.operation, found.claimed_at_ms) == ("refund", now_ms)
        assert found.lease_ends_at_ms == now_ms + 5000
        assert (found.settled_at_ms, found.expires_at_ms) == (None, None)
    endings = [settlement(SettleKind.COMPLETE, wish.key, wish.token) for wish in wishes]
    _, settled = desk.commit([], endings)
    assert decisions(settled) == [Decision.APPLY] * (COUNT + 1)


def test_only_a_new_life_forgets_the_steps_and_the_arguments(desk):
    """What is resumed keeps them, in the same batch."""
    conditions = list(FREE) * 2
    keys = bring(desk, conditions)
    answers, _ = desk.commit([request(key) for key in keys])
    assert decisions(answers) == [FREE[condition] for condition in conditions]
    for key, condition in zip(keys, conditions, strict=True):
        found = desk.read(key)
        is_new_life = condition is Condition.OUTLIVED
        assert [step.name for step in found.steps] == ([] if is_new_life else ["reserve"])
        assert found.arguments == (None if is_new_life else ARGUMENTS)
    ((rows,),) = desk.sql("SELECT count(*) FROM {schema}.arguments")
    assert rows == 4


def test_a_second_claim_of_the_batch_meets_the_first_ones_record(desk):
    """One of them takes over; the other is told, and costs one more statement for all of them."""
    keys = bring(desk, [Condition.ABANDONED] * 10)
    counted = Counted(desk.store)
    first, second = ([request(key) for key in keys] for _ in range(2))
    answers, _ = desk.commit([*first, *second])
    assert decisions(answers) == [Decision.TAKE_OVER] * 10 + [Decision.IN_FLIGHT] * 10
    assert counted.statements <= 5
    assert [desk.read(key).record.token for key in keys] == [item.token for item in first]


def test_the_same_claim_twice_in_a_batch_is_confirmed(desk):
    """A claim that was asked for again, because nobody heard the answer, holds the key once."""
    keys = bring(desk, [Condition.RELEASED] * 3)
    wishes = [request(key) for key in keys]
    answers, _ = desk.commit([*wishes, *wishes])
    assert decisions(answers) == [Decision.TAKE_OVER] * 3 + [Decision.CONFIRM] * 3
    assert [desk.read(key).record.attempt for key in keys] == [2] * 3


def test_claims_with_arguments_keep_to_the_order_of_the_batch(desk):
    """They are written alone, and a later claim of the same key does not overtake them."""
    keys = bring(desk, [Condition.OUTLIVED] * 4)
    later = Payload("json.1", b"", b"[[2],{}]")
    first = [request(key, arguments=later) for key in keys[:2]]
    second = [request(key) for key in keys]
    answers, _ = desk.commit([*first, *second])
    assert (
        decisions(answers) == [Decision.ADMIT] * 2 + [Decision.IN_FLIGHT] * 2 + [Decision.ADMIT] * 2
    )
    assert [desk.read(key).arguments for key in keys] == [later, later, None, None]


# Rivals.


@pytest.mark.parametrize("condition", FREE)
def test_a_rival_between_the_look_and_the_write_is_met(desk, spied, condition):
    """What was read is compared with every row: each key goes to one, and the losers are told by
    one more statement."""
    keys = bring(desk, [condition] * 10)
    rival = desk.another()
    won = [request(key) for key in keys[::2]]
    spied.before["replace_records"] = lambda: run_sync(rival.commit(won, []))
    spied.taken()
    wishes = [request(key) for key in keys]
    answers, _ = desk.commit(wishes)
    assert decisions(answers) == [Decision.IN_FLIGHT, FREE[condition]] * 5
    looks = ["read_renewals"] if condition is Condition.ABANDONED else []
    assert spied.taken() == [
        "commit", "read_records", *looks, "replace_records", "read_records"
    ]  # fmt: skip
    owners = [item.token for pair in zip(won, wishes[1::2], strict=True) for item in pair]
    assert [desk.read(key).record.token for key in keys] == owners


def test_an_outcome_that_came_in_between_is_replayed(desk, spied):
    """The owner that was given up has completed: that outcome stands, and its neighbours go on."""
    keys = bring(desk, [Condition.ABANDONED] * 3)
    held = desk.read(keys[1]).record.token
    ending = settlement(SettleKind.COMPLETE, keys[1], held)
    rival = desk.another()
    spied.before["replace_records"] = lambda: run_sync(rival.commit([], [ending]))
    answers, _ = desk.commit([request(key) for key in keys])
    assert decisions(answers) == [Decision.TAKE_OVER, Decision.REPLAY, Decision.TAKE_OVER]
    assert answers[1].payload == ending.payload


def test_a_key_that_was_swept_in_between_is_a_new_one(desk, spied):
    """Its row is gone when it should be replaced, so it is claimed as any other new key."""
    keys = bring(desk, [Condition.OUTLIVED] * 3)
    spied.before["replace_records"] = lambda: desk.sql(
        "DELETE FROM {schema}.keys WHERE key = %s", keys[1].text
    )
    answers, _ = desk.commit([request(key) for key in keys])
    assert decisions(answers) == [Decision.ADMIT] * 3
    assert answers[1].condition is Condition.ABSENT


def test_a_row_that_cannot_be_stored_is_refused_alone(desk):
    """The others are taken over, although they shared its statement."""
    keys = bring(desk, [Condition.RELEASED] * 5)
    desk.store._claims.balance = BALANCE_LIMIT
    wishes = [request(key) for key in keys]
    wishes[2] = request(keys[2], operation="\x00")
    # Written before, and not asked for again.
    wishes.append(request(key_of("new")))
    answers, _ = desk.commit(wishes)
    assert isinstance(answers.pop(2), StoreRejected)
    assert decisions(answers) == [Decision.TAKE_OVER] * 4 + [Decision.ADMIT]


# Locks.


@pytest.fixture
def user(desk):
    with psycopg.connect(desk.plain_url) as made:
        yield made


def lock(user, desk, key):
    """Somebody else's open transaction has the row."""
    user.execute(
        f"SELECT 1 FROM {desk.schema}.keys WHERE digest = %s FOR UPDATE", [key.digest]
    ).fetchone()


def test_a_busy_row_holds_the_others_up_once(desk, user):
    """The rows beside it are taken over together, after one wait; then it is left out at once."""
    keys = bring(desk, [Condition.RELEASED, Condition.ABANDONED, Condition.OUTLIVED] * 10)
    lock(user, desk, keys[4])
    counted = Counted(desk.store)
    wishes = [request(key) for key in keys]
    answers, _ = desk.commit(wishes)
    assert answers[4].decision is Decision.IN_FLIGHT
    won = [answer.decision for place, answer in enumerate(answers) if place != 4]
    assert set(won) == {Decision.ADMIT, Decision.TAKE_OVER}
    # Insert, read, look beside, wait, take the rest, read the one that is left in both places, and
    # look at its lock.
    assert counted.statements == 8
    assert counted.locked == 2
    more = [key_of(f"more {number}") for number in range(3)]
    desk.commit([request(key, lease_ms=1000) for key in more])
    desk.clock.advance(timedelta(seconds=2))
    counted.locked = 0
    answers, _ = desk.commit([request(key) for key in (keys[4], *more)])
    assert decisions(answers) == [Decision.IN_FLIGHT] + [Decision.TAKE_OVER] * 3
    assert counted.locked == 1  # That look at its lock.
    user.rollback()
    assert desk.claim(keys[4]).decision is Decision.TAKE_OVER


def test_rows_are_locked_in_the_order_of_their_digests(desk, user):
    """Whatever order they come in: two batches over the same keys wait, and cannot deadlock."""
    keys = sorted(bring(desk, [Condition.ABANDONED] * 9), key=lambda key: key.digest)
    lock(user, desk, keys[4])
    wishes = []
    for place, key in enumerate(reversed(keys)):
        found = desk.read(key)
        new, answer = transitions.claim(found.record, request(key), found.now_ms)
        wishes.append(Takeover(found.record, new, answer, place))
    taken = []

    async def fetch(_, *columns):
        return await desk.store._statements.fetch("replace_records_patiently", *columns)

    writer = threading.Thread(
        target=lambda: taken.append(run_sync(write_takeovers(fetch, wishes))), daemon=True
    )
    writer.start()
    pause = threading.Event()
    for _ in range(PATIENCE_SECONDS * 100):
        ((waiting,),) = desk.sql(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND query LIKE '%{schema}.keys%'"
        )
        if waiting:
            break
        pause.wait(0.01)
    assert waiting == 1
    free = desk.sql("SELECT digest FROM {schema}.keys FOR UPDATE SKIP LOCKED")
    assert sorted(digest for (digest,) in free) == [key.digest for key in keys[5:]]
    user.rollback()
    writer.join(PATIENCE_SECONDS)
    assert taken == [({key.digest for key in keys}, False)]


def test_a_takeover_stays_in_its_page(desk):
    """No indexed column changes, so the new version of a row needs no entry in an index."""
    keys = bring(desk, [Condition.RELEASED] * COUNT)
    desk.sql("VACUUM {schema}.keys")  # Room in every page, as the table has it in the long run.
    counts = (
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
        " WHERE relid = '{schema}.keys'::regclass"
    )
    flush = desk.store._connector.fetch

    def counted():
        run_sync(flush("SELECT pg_stat_force_next_flush()"))
        ((updated, hot),) = desk.sql(counts)
        return updated, hot

    before = counted()
    answers, _ = desk.commit([request(key) for key in keys])
    assert set(decisions(answers)) == {Decision.TAKE_OVER}
    after = counted()
    assert [late - early for late, early in zip(after, before, strict=True)] == [COUNT, COUNT]
