"""Claims of keys that have rows: one statement, and the answers of the table."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.model import (
    ClaimAnswer,
    Condition,
    Decision,
    OperatorCommand,
    Payload,
    SettleKind,
)
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.postgres.claims import BALANCE_LIMIT
from retrysafe.stores.postgres.partitions import DAY_MS
from retrysafe.testing.suite.probe import KEY, OTHER, RESULT, key_of, request, settlement

ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")
# Longer than the partitions are made ahead: such outcomes are in the default one.
HOUR_MS = 3_600_000
YEAR_MS = 365 * DAY_MS


def expect_rows(desk):
    """Brings the store to expect rows, by the replays that it takes."""
    keys = desk.done(BALANCE_LIMIT + 1)
    for _ in range(2):
        answers, _ = desk.commit([request(key) for key in keys])
    assert {answer.decision for answer in answers} == {Decision.REPLAY}
    assert desk.store._claims.balance == BALANCE_LIMIT
    return keys


def test_a_replay_is_one_statement_once_replays_are_what_comes(desk, spied):
    """After a batch of replays the next one reads, and writes nothing; so does a single claim."""
    keys = expect_rows(desk)
    spied.taken()
    answers, _ = desk.commit([request(key) for key in keys])
    assert [(item.decision, item.payload) for item in answers] == [(Decision.REPLAY, RESULT)] * len(
        keys
    )
    assert spied.taken() == ["read_records"]
    assert desk.claim(keys[0]).decision is Decision.REPLAY
    assert spied.taken() == ["read_records"]


def test_a_replay_of_a_resumable_operation_sends_no_arguments(desk, spied):
    """Its claim is read first as any other."""
    keys = expect_rows(desk)
    spied.taken()
    assert desk.claim(keys[0], arguments=ARGUMENTS).decision is Decision.REPLAY
    assert spied.taken() == ["read_records"]


def test_a_new_key_is_one_statement_while_keys_are_new(desk, spied):
    """A few retries among new keys do not make the new ones pay for a look."""
    (known,) = desk.done()
    for number in range(BALANCE_LIMIT * 2):
        assert desk.claim(key_of(f"new-{number}")).decision is Decision.ADMIT
        assert desk.claim(known).decision is Decision.REPLAY
    spied.taken()
    assert desk.claim(key_of("the next")).decision is Decision.ADMIT
    assert spied.taken() == ["claim_one"]


def test_new_keys_are_written_first_again_as_soon_as_they_are_most(desk, spied):
    """One batch of new keys that was read in vain is enough."""
    expect_rows(desk)
    spied.taken()
    for number in range(2):
        claims = [request(key_of(f"new-{number}-{count}")) for count in range(BALANCE_LIMIT)]
        answers, _ = desk.commit(claims)
        assert {answer.decision for answer in answers} == {Decision.ADMIT}
    assert spied.taken() == ["read_records", "commit", "commit"]


def test_a_batch_that_is_read_first_writes_its_new_keys_together(desk, spied):
    """Each claim gets its own answer, in the order of the batch."""
    known = expect_rows(desk)
    spied.taken()
    new = [key_of(f"new-{number}") for number in range(3)]
    batch = [new[0], known[0], new[1], known[1], new[2]]
    answers, _ = desk.commit([request(key) for key in batch])
    assert [answer.decision.value for answer in answers] == [
        "admit",
        "replay",
        "admit",
        "replay",
        "admit",
    ]
    assert spied.taken() == ["read_records", "commit"]


def test_endings_are_not_kept_waiting_by_a_look(desk, spied):
    """A batch with an ending in it is written first, whatever its claims may meet."""
    keys = expect_rows(desk)
    token = desk.hold()
    spied.taken()
    ending = settlement(SettleKind.COMPLETE, KEY, token)
    claimed, settled = desk.commit([request(keys[0])], [ending])
    assert [answer.decision for answer in (*claimed, *settled)] == [Decision.REPLAY, Decision.APPLY]
    assert spied.taken() == ["commit", "read_records"]


def test_a_rival_between_the_look_and_the_write_is_met(desk, spied):
    """A key that was free when it was read, and is not when it is written, is not run twice."""
    known = expect_rows(desk)
    rival = desk.another()
    spied.before["commit"] = lambda: run_sync(rival.commit([request(KEY)], []))
    answers, _ = desk.commit([request(KEY), request(key_of("free")), request(known[0])])
    assert [answer.decision.value for answer in answers] == ["in flight", "admit", "replay"]


def test_a_rival_between_the_look_and_a_takeover_is_met(desk, spied):
    """What was read is compared when it is replaced: one of two takes over."""
    known = expect_rows(desk)
    desk.hold(KEY, lease_ms=1000)
    desk.clock.advance(timedelta(seconds=2))
    rival = desk.another()
    spied.before["replace_record"] = lambda: run_sync(rival.commit([request(KEY)], []))
    answers, _ = desk.commit([request(KEY), request(known[0])])
    assert [answer.decision.value for answer in answers] == ["in flight", "replay"]


def test_the_same_token_is_told_that_it_holds_the_key(desk):
    """A claim whose answer was lost is asked for again, and confirmed by what is read."""
    expect_rows(desk)
    wish = request(KEY)
    assert desk.ask(wish).decision is Decision.ADMIT
    expect_rows(desk)
    assert desk.ask(wish).decision is Decision.CONFIRM


def test_another_request_is_refused_by_what_is_read(desk):
    """Before anything else, and without the outcome."""
    keys = expect_rows(desk)
    answer = desk.claim(keys[0], None, OTHER)
    assert (answer.decision, answer.payload) == (Decision.MISMATCH, None)


def test_a_key_of_another_pair_with_the_same_digest_is_refused_alone(desk):
    """A collision is told to its own row; its neighbour is replayed."""
    keys = expect_rows(desk)
    desk.sql("UPDATE {schema}.keys SET key = 'other text' WHERE key = %s", keys[0].text)
    answers, _ = desk.commit([request(keys[0]), request(keys[1])])
    assert type(answers[0]).__name__ == "DigestCollision"
    assert answers[1].decision is Decision.REPLAY


# Where the payloads are.


def payload_of(desk, key):
    answer = desk.claim(key)
    assert isinstance(answer, ClaimAnswer)
    assert answer.decision is Decision.REPLAY
    return answer.payload


@pytest.mark.parametrize("audit_ms", [HOUR_MS, DAY_MS, 5 * DAY_MS, 30 * DAY_MS, YEAR_MS])
def test_a_payload_is_found_wherever_it_is(desk, audit_ms):
    """Also where nobody has looked before: in another day's partition, or in the default one."""
    (near,) = desk.done(audit_ms=2 * DAY_MS)
    assert payload_of(desk, near) == RESULT
    (far,) = desk.done(audit_ms=audit_ms)
    assert payload_of(desk, far) == RESULT
    answers, _ = desk.commit([request(near), request(far)])
    assert [answer.payload for answer in answers] == [RESULT, RESULT]


def test_what_is_past_its_audit_is_not_looked_for(desk, spied):
    """A key for ever outlasts its outcome; its replays must not read every day in vain."""
    (key,) = desk.done(active_ms=YEAR_MS, audit_ms=0)
    spied.taken()
    assert payload_of(desk, key) is None
    assert spied.taken() == ["claim_one", "read_records"]


def test_a_day_is_looked_for_once(desk, spied):
    """What was read in vain is read again once, and the next replay finds it at once."""
    keys = desk.done(2)
    spied.taken()
    assert payload_of(desk, keys[0]) == RESULT
    assert spied.taken() == ["claim_one", "read_records", "read_records"]
    assert payload_of(desk, keys[1]) == RESULT
    assert spied.taken() == ["claim_one", "read_records"]


def test_keys_grow_older_within_reach(desk, spied):
    """The reach is counted from now, so that it need not be learnt anew every day."""
    (key,) = desk.done(active_ms=YEAR_MS, audit_ms=YEAR_MS)
    assert payload_of(desk, key) == RESULT
    spied.taken()
    for _ in range(10):
        desk.days(1)
        (fresh,) = desk.done(active_ms=YEAR_MS, audit_ms=YEAR_MS)
        assert payload_of(desk, fresh) == RESULT
    assert spied.taken().count("read_records") == 10
    assert payload_of(desk, key) == RESULT


def test_what_is_not_replayed_is_not_looked_for(desk, spied):
    """An outlived key has an outcome that nobody wants: it does not widen the reach."""
    (key,) = desk.done(active_ms=1000, audit_ms=20 * DAY_MS)
    desk.clock.advance(timedelta(seconds=2))
    spied.taken()
    assert desk.claim(key).condition is Condition.OUTLIVED
    assert spied.taken() == ["claim_one", "read_records", "replace_record"]


def test_an_outcome_that_is_gone_is_told_as_gone(desk, spied):
    """A replay without a payload, whether its day was looked at or not."""
    keys = desk.done(2)
    desk.sql("DELETE FROM {schema}.outcomes")
    for key in keys:
        answer = desk.claim(key)
        assert (answer.decision, answer.payload) == (Decision.REPLAY, None)
    assert spied.taken().count("read_records") == 3


def test_a_key_that_goes_between_two_readings_is_free(desk, spied):
    """Swept away while its payload was looked for again, it is claimed as a new one."""
    (key,) = desk.done()
    readings = []

    def remove():
        readings.append(1)
        if len(readings) == 2:
            desk.sql("DELETE FROM {schema}.keys WHERE key = %s", key.text)
        else:
            spied.before["read_records"] = remove

    spied.before["read_records"] = remove
    assert desk.claim(key).decision is Decision.ADMIT
    assert len(readings) == 2


def test_a_record_that_changes_while_it_is_read_is_read_again(desk, spied):
    """Else a life that was over would be shown without its outcome, as if that were gone."""
    (key,) = desk.done()

    def begin_anew():
        assert run_sync(desk.store.operate(key, OperatorCommand.EXPIRE)) is Decision.APPLY
        assert desk.claim(key).decision is Decision.ADMIT

    spied.before["read_standing"] = begin_anew
    found = run_sync(desk.store.read(key))
    assert found.condition is Condition.RUNNING
    assert found.outcomes == []
    assert "read_standing" not in spied.before
