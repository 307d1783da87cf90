"""What each decision writes: the fields that change, and those that must not."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.machine import Trigger, condition_of, decide
from retrysafe.core.model import (
    Condition,
    Decision,
    Extension,
    Fingerprint,
    OperatorCommand,
    Payload,
    Record,
    Seen,
    SettleKind,
    State,
    Step,
    StepWrite,
    StoredKey,
)
from retrysafe.core.policy import FOREVER
from retrysafe.core.transitions import OPERATOR_RELEASE_KEPT_MS
from retrysafe.errors import DigestCollision
from tests.core.building import (
    ACTIVE_MS,
    KEY,
    LEASE_MS,
    MARK,
    NOW,
    OTHER_MARK,
    OTHER_TOKEN,
    TOKEN,
    record,
    request,
    settlement,
)

LATER = NOW + LEASE_MS  # The lease of `record()` has just ended.
SETTLED = (State.SUCCEEDED, State.FAILED, State.RELEASED)
RECORDS = st.builds(
    record,
    st.sampled_from(State),
    token=st.sampled_from([TOKEN, OTHER_TOKEN]),
    attempt=st.integers(0, 9),
    rule=st.sampled_from([1, 2]),
    lease_ends_at_ms=st.integers(NOW - 5, NOW + 5),
    expires_at_ms=st.integers(NOW - 5, NOW + 5) | st.none(),
)


def changed(before: Record, after: Record) -> set[str]:
    return {name for name, value in asdict(after).items() if asdict(before)[name] != value}


@given(RECORDS | st.none(), st.sampled_from([TOKEN, OTHER_TOKEN]))
def test_a_worker_takes_over_as_a_retry_does_or_loses(before, held):
    """What it gets is exactly what the same request by a retry would get; else nothing changes."""
    wish = request(b"W" * 16)
    made, answer = transitions.take_over(before, wish, held, NOW)
    is_seen = before is not None and before.token == held
    if is_seen and condition_of(before, NOW) is Condition.ABANDONED:
        assert (made, answer) == transitions.claim(before, wish, NOW)
        assert answer.decision is Decision.TAKE_OVER
        assert (made.rule, made.fingerprint) == (before.rule, before.fingerprint)
    else:
        is_running = is_seen and condition_of(before, NOW) is Condition.RUNNING
        assert made is None
        assert answer.decision is (Decision.IN_FLIGHT if is_running else Decision.LOST)
        assert answer.condition is condition_of(before, NOW)


def test_a_worker_that_asks_again_finds_its_own_claim():
    """Its answer was lost: the token tells that it has the key, while its lease holds."""
    taken, _ = transitions.take_over(record(), request(OTHER_TOKEN), TOKEN, LATER)
    made, answer = transitions.take_over(taken, request(OTHER_TOKEN), TOKEN, LATER + 1)
    assert (made, answer.decision, answer.attempt) == (None, Decision.CONFIRM, 2)
    assert answer.remaining_ms == LEASE_MS - 1


def test_a_worker_never_takes_over_another_key_with_the_same_digest():
    """The row is not what the worker saw, so it is as if there were none."""
    for other in (record(text="order-2"), record(caller="tenant-2")):
        made, answer = transitions.take_over(other, request(OTHER_TOKEN), TOKEN, LATER)
        assert (made, answer.decision) == (None, Decision.LOST)


def test_a_first_claim_makes_a_pending_record():
    made, answer = transitions.claim(None, request(), NOW)
    assert made == record()
    assert (answer.decision, answer.condition) == (Decision.ADMIT, Condition.ABSENT)
    assert (answer.attempt, answer.state) == (1, State.PENDING)
    assert (answer.remaining_ms, answer.lease_ends_at_ms) == (LEASE_MS, NOW + LEASE_MS)


def test_a_statement_that_admits_answers_as_the_table_does():
    """Stores that insert a new key without asking the table give the answer of `claim`."""
    assert transitions.admitted(request(), NOW) == transitions.claim(None, request(), NOW)[1]


def test_a_takeover_counts_the_attempt_and_keeps_birth_and_fingerprint():
    """The record stays comparable to the request that it was made for, under its first rule."""
    old = record(attempt=2, rule=1)
    new_mark = Fingerprint(2, b"N" * 16)
    made, answer = transitions.claim(old, request(OTHER_TOKEN, new_mark, MARK), LATER)
    assert answer.decision is Decision.TAKE_OVER
    assert answer.condition is Condition.ABANDONED
    assert answer.attempt == made.attempt == 3
    assert changed(old, made) == {
        "token",
        "attempt",
        "claimed_at_ms",
        "lease_ends_at_ms",
        "is_uncertain",
    }
    assert (made.token, made.claimed_at_ms) == (OTHER_TOKEN, LATER)
    assert answer.lease_ends_at_ms == made.lease_ends_at_ms == LATER + LEASE_MS


def test_claiming_a_released_record_makes_it_pending_again():
    made, answer = transitions.claim(record(State.RELEASED), request(OTHER_TOKEN), NOW + 1)
    assert answer.condition is Condition.RELEASED
    assert (made.state, made.attempt) == (State.PENDING, 2)
    assert (made.settled_at_ms, made.expires_at_ms) == (None, None)


@pytest.mark.parametrize("state", SETTLED)
def test_an_outlived_record_starts_a_new_life(state):
    """Attempts, birth and fingerprint begin anew, even for a different request."""
    old = record(state, attempt=7)
    made, answer = transitions.claim(old, request(OTHER_TOKEN, OTHER_MARK), NOW + ACTIVE_MS)
    assert (answer.decision, answer.attempt) == (Decision.ADMIT, 1)
    assert (made.attempt, made.first_claimed_at_ms) == (1, NOW + ACTIVE_MS)
    assert made.fingerprint == OTHER_MARK.digest


def test_a_running_record_tells_how_long_its_lease_lasts():
    made, answer = transitions.claim(record(), request(OTHER_TOKEN), NOW + 10)
    assert made is None
    assert answer.decision is Decision.IN_FLIGHT
    assert answer.remaining_ms == LEASE_MS - 10
    assert answer.state is State.PENDING


def test_a_repeated_claim_is_confirmed_and_changes_nothing():
    made, answer = transitions.claim(record(attempt=2), request(TOKEN), NOW + 10)
    assert made is None
    assert (answer.decision, answer.attempt) == (Decision.CONFIRM, 2)
    assert answer.remaining_ms == LEASE_MS - 10


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
def test_a_replay_tells_how_long_the_window_lasts(state):
    made, answer = transitions.claim(record(state, attempt=3), request(OTHER_TOKEN), NOW + 10)
    assert made is None
    assert (answer.decision, answer.attempt, answer.state) == (Decision.REPLAY, 3, state)
    assert answer.remaining_ms == ACTIVE_MS - 10


def test_a_replay_without_an_expiry_has_no_time_left_to_be_cached():
    _, answer = transitions.claim(
        record(State.SUCCEEDED, expires_at_ms=None), request(OTHER_TOKEN), NOW
    )
    assert answer.remaining_ms == 0


@pytest.mark.parametrize(
    "key", [Key("order-2", caller="tenant-1"), Key("order-1", caller="tenant-2")]
)
def test_a_row_of_another_key_is_never_served(key):
    """Two keys with one digest: the second is refused, whatever the first one's state."""
    with pytest.raises(DigestCollision) as caught:
        transitions.claim(record(State.SUCCEEDED), request(key=key), NOW)
    assert caught.value.key == key.text


@given(RECORDS, st.sampled_from([TOKEN, OTHER_TOKEN]), st.sampled_from([MARK, OTHER_MARK]))
def test_a_claim_writes_only_when_it_is_granted(item, token, mark):
    made, answer = transitions.claim(item, request(token, mark), NOW)
    assert (made is not None) == (answer.decision in (Decision.ADMIT, Decision.TAKE_OVER))
    assert answer.condition is condition_of(item, NOW)
    assert answer.remaining_ms >= 0
    if made is not None:
        assert condition_of(made, NOW) is Condition.RUNNING
        assert made.token == token
        assert condition_of(item, NOW) is not Condition.RUNNING


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (SettleKind.COMPLETE, State.SUCCEEDED),
        (SettleKind.FAIL, State.FAILED),
        (SettleKind.RELEASE, State.RELEASED),
    ],
)
@pytest.mark.parametrize("now_ms", [NOW + 1, LATER])
def test_an_ending_writes_state_and_window_only(kind, state, now_ms):
    """The window starts when the attempt ends; a late owner that still holds the token counts."""
    old = record(attempt=2)
    made, answer = transitions.settle(old, settlement(kind), now_ms)
    assert answer.decision is Decision.APPLY
    assert changed(old, made) == {"state", "settled_at_ms", "expires_at_ms"}
    assert (made.state, made.settled_at_ms) == (state, now_ms)
    assert made.expires_at_ms == now_ms + ACTIVE_MS
    assert type(made.state) is State


def test_an_extend_moves_the_end_of_the_lease_only():
    old = record()
    made, answer = transitions.extend(old, Extension(KEY, TOKEN, LEASE_MS), NOW + 10)
    assert changed(old, made) == {"lease_ends_at_ms"}
    assert made.lease_ends_at_ms == answer.lease_ends_at_ms == NOW + 10 + LEASE_MS
    assert answer.remaining_ms == LEASE_MS


def test_an_extend_never_makes_a_lease_shorter():
    """An extend that was delayed on its way, or asks for less, must not cut a longer lease."""
    made, answer = transitions.extend(record(), Extension(KEY, TOKEN, 5), NOW)
    assert made.lease_ends_at_ms == NOW + LEASE_MS
    assert answer.remaining_ms == LEASE_MS


@given(RECORDS | st.none(), st.sampled_from(SettleKind), st.sampled_from([TOKEN, OTHER_TOKEN]))
def test_a_settlement_writes_only_what_the_table_applies(item, kind, token):
    made, answer = transitions.settle(item, settlement(kind, token), NOW)
    assert (made is not None) == (answer.decision is Decision.APPLY)
    if made is not None:
        assert item.token == made.token == token
        assert item.state is State.PENDING
    if item is not None and item.token != token:
        assert answer.decision is Decision.LOST


PAYLOAD = Payload("json.1", b"head", b"1")


@given(RECORDS | st.none(), st.sampled_from([TOKEN, OTHER_TOKEN]))
def test_a_step_is_stored_only_for_the_holder_of_a_pending_record(item, token):
    holds = item is not None and item.token == token and item.state is State.PENDING
    expected = Decision.APPLY if holds else Decision.LOST
    write = StepWrite(KEY, token, Step("charge", 1, PAYLOAD))
    assert transitions.record_step(item, write, None, NOW) is expected
    assert transitions.record_step(item, write, replace(PAYLOAD), NOW) is expected


@given(RECORDS | st.none(), st.sampled_from([TOKEN, OTHER_TOKEN]))
def test_another_result_of_a_stored_step_is_a_lost_claim(item, token):
    """Whoever holds the token: there is a result already, and it is not the writer's."""
    write = StepWrite(KEY, token, Step("charge", 1, PAYLOAD))
    for stored in (
        replace(PAYLOAD, form="other.1"),
        replace(PAYLOAD, head=b"other"),
        replace(PAYLOAD, body=b"other"),
    ):
        assert transitions.record_step(item, write, stored, NOW) is Decision.LOST


@given(RECORDS | st.none(), st.sampled_from(OperatorCommand))
def test_an_operator_writes_only_what_the_table_applies(item, command):
    made, decision = transitions.operate(item, command, NOW)
    assert decision is decide(Trigger(f"operator {command.value}"), condition_of(item, NOW))
    assert (made is not None) == (decision is Decision.APPLY)


@pytest.mark.parametrize("command", [OperatorCommand.RELEASE, OperatorCommand.FORCE_RELEASE])
@pytest.mark.parametrize(
    "old", [record(attempt=9, releases=4), record(State.FAILED, attempt=9, releases=8)]
)
def test_an_operators_release_gives_all_attempts_back(command, old):
    """Else an exhausted record would be exhausted again by the very next claim."""
    made, decision = transitions.operate(old, command, LATER)
    assert decision is Decision.APPLY
    assert (made.state, made.attempt, made.releases) == (State.RELEASED, 0, 0)
    assert made.settled_at_ms == LATER
    _, answer = transitions.claim(made, request(OTHER_TOKEN), LATER)
    assert (answer.decision, answer.attempt, answer.releases) == (Decision.TAKE_OVER, 1, 0)


@pytest.mark.parametrize(
    ("old", "token", "counted"),
    [
        (record(State.RELEASED, attempt=3, releases=1), OTHER_TOKEN, (4, 2)),
        (record(attempt=3, releases=1), OTHER_TOKEN, (4, 1)),
        # Its own claim again, which never started.
        (record(attempt=3, releases=1), TOKEN, (3, 1)),
        # As a release of retrysafe leaves it that does not know this count.
        (record(State.RELEASED, attempt=0, releases=5), OTHER_TOKEN, (1, 0)),
        (record(attempt=1, releases=5), OTHER_TOKEN, (2, 1)),
    ],
)
def test_a_takeover_counts_how_the_attempt_before_it_ended(old, token, counted):
    """With a word, without one, or not at all; never more words than there were attempts."""
    made, answer = transitions.claim(old, request(token), LATER)
    assert answer.decision is Decision.TAKE_OVER
    assert (answer.attempt, answer.releases) == counted
    assert (made.attempt, made.releases) == counted


DAY_MS = OPERATOR_RELEASE_KEPT_MS


@pytest.mark.parametrize(
    ("old", "now_ms", "expires_at_ms"),
    [
        # Its window is not known, and may be for ever.
        (record(), LATER, LATER + FOREVER // timedelta(milliseconds=1)),
        (record(State.FAILED, settled_at_ms=NOW, expires_at_ms=NOW + 9), NOW + 5, NOW + 5 + DAY_MS),
        (
            record(State.FAILED, settled_at_ms=NOW, expires_at_ms=NOW + 9 * DAY_MS),
            LATER,
            LATER + 9 * DAY_MS,
        ),
        # The clock was set back.
        (
            record(State.FAILED, settled_at_ms=NOW, expires_at_ms=NOW + 9 * DAY_MS),
            NOW - 5,
            NOW + 9 * DAY_MS,
        ),
    ],
)
def test_an_operators_release_is_kept_for_the_keys_window(old, now_ms, expires_at_ms):
    """Forgotten earlier, the steps of a crashed attempt run again; a day is the least."""
    made, _ = transitions.operate(old, OperatorCommand.FORCE_RELEASE, now_ms)
    assert made.expires_at_ms == expires_at_ms


def test_after_a_forced_release_the_old_owner_has_lost():
    """It still knows the token, and its write is refused because the record is not pending."""
    made, _ = transitions.operate(record(), OperatorCommand.FORCE_RELEASE, NOW)
    _, answer = transitions.settle(made, settlement(SettleKind.COMPLETE), NOW)
    assert answer.decision is Decision.LOST


@pytest.mark.parametrize("state", SETTLED)
def test_an_operators_expiry_ends_the_window_now(state):
    old = record(state)
    made, _ = transitions.operate(old, OperatorCommand.EXPIRE, NOW + 7)
    assert changed(old, made) == {"expires_at_ms"}
    assert condition_of(made, NOW + 7) is Condition.OUTLIVED


def test_digest_belongs_to_the_key():
    made, _ = transitions.claim(None, request(), NOW)
    assert (made.digest, made.caller, made.text) == (KEY.digest, KEY.caller, KEY.text)


def test_a_command_for_what_somebody_has_seen_is_refused_for_anything_else():
    """A failure may have become a success meanwhile; a lease that ran out makes it only safer."""
    failed = record(State.FAILED)
    expire = OperatorCommand.EXPIRE
    assert (
        transitions.operate(failed, expire, NOW, Seen(TOKEN, Condition.FAILED))[1] is Decision.APPLY
    )
    for seen in (Seen(OTHER_TOKEN, Condition.FAILED), Seen(TOKEN, Condition.SUCCEEDED)):
        assert transitions.operate(failed, expire, NOW, seen) == (None, Decision.REFUSE)
    running = Seen(TOKEN, Condition.RUNNING)
    released = transitions.operate(record(), OperatorCommand.RELEASE, NOW + LEASE_MS, running)
    assert released[1] is Decision.APPLY


@pytest.mark.parametrize(
    ("item", "condition", "since_ms"),
    [
        (record(), Condition.RUNNING, NOW),
        (record(), Condition.ABANDONED, NOW + LEASE_MS),
        (record(State.FAILED), Condition.FAILED, NOW),
    ],
)
def test_a_stored_key_tells_since_when_it_is_what_it_is(item, condition, since_ms):
    """By the instant of its claim, of the end of its lease, or of its ending."""
    stored = StoredKey(item, condition, NOW)
    assert stored.seen == Seen(TOKEN, condition)
    assert (stored.was_so(since_ms - 1), stored.was_so(since_ms)) == (False, True)
