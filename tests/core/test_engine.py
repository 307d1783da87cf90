"""The engine, one caller at a time: claim, run, settle, replay, refuse."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.engine import CLAIM_TRIES, POLL_MAXIMUM_SECONDS
from retrysafe.core.events import EventKind
from retrysafe.core.keys.key import Key, child_key
from retrysafe.core.model import (
    ClaimAnswer,
    Condition,
    Decision,
    Ending,
    Fingerprint,
    OperatorCommand,
    State,
)
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.values import codec
from retrysafe.errors import (
    AttemptsExhausted,
    ClaimLost,
    DigestCollision,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeUnavailable,
    StoreRejected,
    StoreUnavailable,
)
from tests.core.building import KEY, MARK, OTHER_MARK, call
from tests.core.driving import Fault, World, drive, state
from tests.core.sample_types import CardExpired, Declined

SECRET = b"0123456789abcdef"
DOWN = StoreUnavailable("down")
TERMINAL = Policy(terminal=Declined)
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=10))


def die(world: World, **options: object) -> None:
    """Another process claims the key and never comes back."""
    other = world.process()
    flow = other.start(call(**options), other.pausing(None))
    flow.throw(GeneratorExit())


# One run, then replays.


@pytest.mark.parametrize("value", [7, None, False, 0, "", {}, [], b"", (1, {2})])
def test_the_operation_runs_once_and_its_value_is_replayed(value):
    """Falsy values are values: the second caller gets them, and nothing runs again."""
    world = World()
    process = world.first
    first = process.answer(call(), process.returning(value))
    again = process.answer(call(), process.returning("something else"))
    assert (first.value, first.replayed, first.attempt) == (value, False, 1)
    assert (again.value, again.replayed, again.attempt) == (value, True, 1)
    assert type(again.value) is type(value)
    assert world.ran == [1]
    assert world.kinds == ["claimed", "completed", "replayed"]
    assert process.engine.flights_count == 0


def test_the_claim_is_durable_before_the_operation_starts():
    world = World()
    seen = []

    async def operation(attempt):
        seen.append(drive(world.store.read(KEY)).record)

    world.first.answer(call(), operation)
    assert seen[0].state is State.PENDING
    assert (seen[0].owner, seen[0].operation) == ("host:1", "shop.pay")


def test_an_attempt_knows_its_claim_and_is_renewed_while_it_runs():
    world = World(secret=SECRET)
    process = world.first
    seen = []

    async def operation(attempt):
        seen.append(attempt)
        assert [lease.token for lease in process.renewals.running] == [attempt.token]
        assert attempt.time_left == timedelta(seconds=30)
        assert not attempt.is_lost
        assert attempt.child_key("x") == child_key(SECRET, KEY, "x")

    process.answer(call(), operation)
    assert seen[0].is_first
    assert seen[0].token == process.writer.claims[0].token == process.writer.settlements[0].token
    assert process.renewals.running == []


def test_the_run_limit_reaches_the_lease():
    world = World()
    limited = Policy(run_limit=timedelta(seconds=40))

    async def operation(attempt):
        (lease,) = world.first.renewals.running
        assert lease.may_renew(world.clock.seconds + 39.9)
        assert not lease.may_renew(world.clock.seconds + 40)
        return True

    assert world.first.answer(call(policy=limited), operation).value is True


def test_settlements_carry_the_policys_windows():
    world = World()
    policy = Policy(active_window=timedelta(minutes=1), audit_window=timedelta(minutes=2))
    world.first.answer(call(policy=policy))
    (settlement,) = world.first.writer.settlements
    assert (settlement.active_ms, settlement.audit_ms) == (60_000, 120_000)
    world.clock.advance(60)
    assert not world.first.answer(call(policy=policy)).replayed


def test_a_replay_from_the_process_asks_no_store():
    world = World(cache=True)
    process = world.first
    process.answer(call())
    again = process.answer(call())
    assert again.replayed
    assert len(process.writer.claims) == 1
    assert world.heard[-1].source == "process"
    world.clock.advance(2.0)
    assert process.answer(call()).replayed
    assert len(process.writer.claims) == 2
    assert world.heard[-1].source == "store"


def test_a_replay_from_the_store_is_kept_for_the_next_one():
    world = World(cache=True)
    world.process().answer(call())
    process = world.first
    assert process.answer(call()).replayed
    assert process.answer(call()).replayed
    assert len(process.writer.claims) == 1


def test_the_process_refuses_another_request_without_asking():
    world = World(cache=True)
    process = world.first
    process.answer(call())
    with pytest.raises(KeyReused):
        process.answer(call(OTHER_MARK))
    assert len(process.writer.claims) == 1
    assert (world.kinds[-1], world.heard[-1].source) == ("mismatched", "process")


def test_a_replay_from_the_process_goes_by_the_rule_that_both_know():
    """A release with a new rule for fingerprints still finds what was kept under the old one."""
    world = World(cache=True)
    process = world.first
    process.answer(call(MARK))
    again = process.answer(call(Fingerprint(2, b"N" * 16), MARK))
    assert again.replayed
    assert len(process.writer.claims) == 1


def test_forgetting_makes_an_operators_change_visible_at_once():
    world = World(cache=True)
    process = world.first
    process.answer(call())
    drive(world.store.operate(KEY, OperatorCommand.EXPIRE))
    assert process.answer(call()).replayed
    process.engine.forget(KEY)
    assert not process.answer(call()).replayed
    world_without = World()
    world_without.first.engine.forget(KEY)  # Nothing is kept, and nothing is wrong.


# Refusals.


def test_another_request_is_refused_and_sees_nothing():
    world = World()
    world.first.answer(call(), world.first.returning("secret"))
    with pytest.raises(KeyReused, match="different request") as caught:
        world.first.answer(call(OTHER_MARK))
    assert "secret" not in str(caught.value)
    assert caught.value.key == "order-1"
    assert not caught.value.retryable
    assert world.kinds[-1] == "mismatched"


@pytest.mark.parametrize("cache", [False, True])
def test_a_key_of_another_operation_is_refused_with_its_name(cache):
    """From the store and from what the process remembers; the same operation goes unnamed."""
    world = World(cache=cache)
    world.first.answer(call(operation="charge"))
    with pytest.raises(KeyReused, match="first used for the operation 'charge'") as caught:
        world.first.answer(call(OTHER_MARK, operation="refund"))
    assert caught.value.first_operation == "charge"
    with pytest.raises(KeyReused, match="different request") as caught:
        world.first.answer(call(OTHER_MARK, operation="charge"))
    assert caught.value.first_operation is None


def test_a_nameless_first_operation_is_not_named():
    """What has no name is told as another request, not as the operation ''."""
    world = World()
    world.first.answer(call(operation=""))
    with pytest.raises(KeyReused, match="different request") as caught:
        world.first.answer(call(OTHER_MARK, operation="refund"))
    assert caught.value.first_operation is None


def test_a_record_of_an_earlier_rule_is_still_compared():
    world = World()
    world.first.answer(call())
    new = Fingerprint(2, b"N" * 16)
    assert world.first.answer(call(new, Fingerprint(1, b"F" * 16))).replayed
    with pytest.raises(KeyReused):
        world.first.answer(call(new, OTHER_MARK))


@pytest.mark.parametrize("policy", [Policy(), WAITING], ids=["refused", "would wait"])
def test_a_call_inside_of_its_own_operation_is_told_so_at_once(policy):
    """It would wait for itself."""
    process = World().first

    async def operation(attempt):
        return await process.engine.answer(call(policy=policy), process.returning(8))

    with pytest.raises(OperationInFlight, match="this call is inside of it"):
        process.answer(call(), process.operating(operation))


def test_a_running_operation_of_another_process_is_told_with_the_time_left():
    """When to ask again comes from the time since the claim, which the record holds."""
    world = World()
    other = world.process()
    other.start(call(), other.pausing(1))
    world.clock.advance(12)
    with pytest.raises(OperationInFlight, match=r"lease ends in 18\.0 s") as caught:
        world.first.answer(call())
    assert caught.value.retry_after == timedelta(seconds=12)
    assert not caught.value.is_known_here
    assert (world.kinds[-1], world.heard[-1].source) == ("in flight", "store")
    assert world.ran == [1]


def test_a_collision_of_digests_is_refused():
    world = World()
    world.first.answer(call())
    twin = Key("order-2", caller="tenant-1")
    twin.digest = KEY.digest
    with pytest.raises(DigestCollision):
        world.first.answer(call(key=twin))
    assert world.ran == [1]


# Waiting for another process.


def test_a_waiter_gets_the_outcome_of_the_other_process():
    world = World()
    other = world.process()
    running = other.start(call(), other.pausing("done"))
    world.first.clock.meanwhile.extend([lambda: None, running.step])
    answer = world.first.answer(call(policy=WAITING))
    assert (answer.value, answer.replayed) == ("done", True)
    assert world.first.clock.slept == pytest.approx([0.02, 0.03])
    assert world.ran == [1]


def test_a_waiter_gives_up_at_its_limit():
    """It polls slower and slower, never past its limit, and then answers like one in a hurry."""
    world = World()
    die(world)
    with pytest.raises(OperationInFlight) as caught:
        world.first.answer(call(policy=WAITING))
    slept = world.first.clock.slept
    assert sum(slept) == pytest.approx(10.0)
    assert max(slept) == POLL_MAXIMUM_SECONDS
    assert slept[:-1] == sorted(slept[:-1])
    assert caught.value.retry_after == timedelta(seconds=10)
    assert world.kinds[-1] == "wait timed out"


def test_a_wait_of_zero_asks_once():
    world = World()
    die(world)
    with pytest.raises(OperationInFlight):
        world.first.answer(call(policy=WAITING.with_changes(wait_limit=timedelta(0))))
    assert len(world.first.writer.claims) == 1


def test_a_waiter_takes_over_as_soon_as_the_lease_ends():
    world = World()
    die(world)
    world.clock.advance(29.5)
    answer = world.first.answer(call(policy=WAITING))
    assert (answer.replayed, answer.attempt) == (False, 2)
    assert 0.5 <= sum(world.first.clock.slept) < 0.51
    assert "taken over" in world.kinds


# Claims whose answer is lost.


@pytest.mark.parametrize("is_after", [False, True])
def test_an_ambiguous_claim_is_repeated_with_the_same_token(is_after):
    """Whether the first try took effect or not, the operation runs once, as attempt 1."""
    world = World()
    process = world.first
    process.writer.claim_faults.append(Fault(DOWN, is_after=is_after))
    answer = process.answer(call())
    assert (answer.replayed, answer.attempt) == (False, 1)
    assert len({request.token for request in process.writer.claims}) == 1
    assert len(process.writer.claims) == 2
    assert world.ran == [1]
    assert world.kinds == ["store unavailable", "claimed", "completed"]


def test_claims_are_tried_a_few_times_and_then_the_store_is_reported_down():
    world = World()
    process = world.first
    process.writer.claim_faults.extend([Fault(DOWN)] * CLAIM_TRIES)
    with pytest.raises(StoreUnavailable):
        process.answer(call())
    assert len(process.writer.claims) == CLAIM_TRIES == 3
    assert process.clock.slept == [0.05, 0.1]
    assert world.ran == []
    assert process.engine.flights_count == 0


@pytest.mark.parametrize("is_owned", [False, True])
def test_a_store_that_falls_silent_is_told_with_what_it_had_said(is_owned):
    """Who would run the operation without a store must know that it is running."""
    world = World()
    process = world.first
    if is_owned:
        other = world.process()
        other.start(call(), other.pausing("theirs"))
        process.writer.claim_faults.append(None)
    process.writer.claim_faults.extend([Fault(StoreUnavailable("down"))] * CLAIM_TRIES)
    with pytest.raises(StoreUnavailable) as caught:
        process.answer(call(policy=WAITING))
    assert caught.value.is_in_flight is is_owned


def test_a_refused_claim_is_not_tried_again():
    world = World()
    process = world.first
    process.writer.claim_faults.append(Fault(StoreRejected("too long")))
    with pytest.raises(StoreRejected):
        process.answer(call())
    assert len(process.writer.claims) == 1
    assert world.ran == []


# Failures of the operation.


def test_a_terminal_failure_is_stored_and_replayed():
    world = World()
    process = world.first
    error = CardExpired("4242", month=5)
    with pytest.raises(CardExpired) as first:
        process.answer(call(policy=TERMINAL), process.raising(error))
    assert first.value is error
    with pytest.raises(CardExpired) as again:
        process.answer(call(policy=TERMINAL))
    assert again.value is not error
    assert (again.value.card, again.value.month) == ("4242", 5)
    assert world.ran == [1]
    assert world.kinds == ["claimed", "failed", "replayed"]


def test_a_stored_failure_that_this_process_did_not_declare_is_reported():
    world = World()
    with pytest.raises(Declined):
        world.first.answer(call(policy=TERMINAL), world.first.raising(Declined("no funds")))
    with pytest.raises(OperationFailed, match="Declined: no funds") as caught:
        world.process().answer(call())
    assert caught.value.type_name == "tests.core.sample_types:Declined"


def test_a_caller_that_cannot_catch_the_declared_type_is_told_too():
    """A client of an API has no use for an exception of the server's."""
    world = World()
    with pytest.raises(Declined):
        world.first.answer(call(policy=TERMINAL), world.first.raising(Declined("no funds")))
    with pytest.raises(OperationFailed, match="Declined: no funds"):
        world.process().answer(call(policy=TERMINAL, rebuilds_failures=False))


def test_a_retryable_failure_frees_the_key_at_once():
    world = World(cache=True)
    process = world.first
    with pytest.raises(ConnectionError):
        process.answer(call(), process.raising(ConnectionError("reset")))
    assert state(world) is State.RELEASED
    answer = process.answer(call())
    assert (answer.replayed, answer.attempt) == (False, 2)
    assert world.kinds == ["claimed", "released", "claimed", "completed"]


def test_a_failed_value_is_stored_as_a_failure_and_replayed_as_a_value():
    """A judge may call a returned value a failure, as 402 is among responses."""
    world = World()
    judged = call(judge=lambda value: Ending.FAILED if value == 402 else Ending.SUCCEEDED)
    assert world.first.answer(judged, world.first.returning(402)).value == 402
    assert state(world) is State.FAILED
    assert world.first.answer(judged).value == 402


def test_a_value_judged_retryable_frees_the_key():
    world = World(cache=True)
    judged = call(judge=lambda value: Ending.RELEASED)
    assert world.first.answer(judged, world.first.returning(503)).value == 503
    assert state(world) is State.RELEASED
    assert not world.first.answer(judged).replayed


@pytest.mark.parametrize("error", [GeneratorExit(), KeyboardInterrupt(), SystemExit()])
def test_a_cancelled_operation_keeps_its_claim(error):
    """Nobody knows how far it got, so only the lease frees the key."""
    world = World()
    process = world.first
    flow = process.start(call(), process.pausing(None))
    flow.throw(error)
    assert flow.error is error
    assert state(world) is State.PENDING
    assert process.writer.settlements == []
    assert process.renewals.running == []
    assert process.engine.flights_count == 0
    with pytest.raises(OperationInFlight):
        process.answer(call())


# Attempts.


def test_a_crashed_owner_is_taken_over_after_its_lease():
    world = World()
    die(world)
    world.clock.advance(30)
    answer = world.first.answer(call())
    assert (answer.replayed, answer.attempt) == (False, 2)
    assert world.kinds == ["claimed", "taken over", "completed"]


def test_attempts_are_limited_and_the_last_claim_runs_nothing():
    """An operation that keeps killing its worker is given up, for good and for everybody."""
    world = World(cache=True)
    twice = Policy(attempt_limit=2)
    for _ in range(2):
        die(world, policy=twice)
        world.clock.advance(30)
    process = world.first
    with pytest.raises(AttemptsExhausted, match="attempt_limit=2 is reached"):
        process.answer(call(policy=twice))
    assert world.ran == [1, 2]
    assert state(world) is State.FAILED
    assert process.renewals.count == 0
    assert world.kinds[-2:] == ["exhausted", "failed"]
    for another in (process, world.process()):
        with pytest.raises(AttemptsExhausted):
            another.answer(call(policy=twice))
    assert world.ran == [1, 2]


def test_exhausted_attempts_are_told_although_the_caller_is_cancelled():
    world = World()
    die(world, policy=Policy(attempt_limit=1))
    world.clock.advance(30)
    world.first.writer.settle_faults.append(Fault(pauses=True))
    world.first.start(call(policy=Policy(attempt_limit=1))).throw(KeyboardInterrupt())
    drive(world.background[-1])
    assert state(world) is State.FAILED
    assert world.kinds[-2:] == ["exhausted", "failed"]


def test_attempts_that_ended_with_a_word_do_not_count_against_the_limit_of_crashes():
    """Ten outages in a row do not end a key for good, and their number is still counted."""
    world = World()
    process = world.first
    once = Policy(attempt_limit=1)
    for _ in range(12):
        with pytest.raises(ConnectionError):
            process.answer(call(policy=once), process.raising(ConnectionError()))
    assert process.answer(call(policy=once)).attempt == 13


def test_releases_have_a_limit_for_those_who_want_one():
    """It counts what freed the key, and no crash; the message names it."""
    world = World()
    process = world.first
    policy = Policy(attempt_limit=2, release_limit=2)
    die(world, policy=policy)
    world.clock.advance(30)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            process.answer(call(policy=policy), process.raising(ConnectionError()))
    with pytest.raises(AttemptsExhausted, match="release_limit=2 is reached"):
        process.answer(call(policy=policy))
    assert world.ran == [1, 2, 3]
    assert state(world) is State.FAILED
    drive(world.store.operate(call().key, OperatorCommand.RELEASE))
    assert process.answer(call(policy=policy)).attempt == 1


def test_crashes_between_releases_still_end_at_their_limit():
    """An operation that kills its workers now and then is given up like one that always does."""
    world = World()
    twice = Policy(attempt_limit=2)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            world.first.answer(call(policy=twice), world.first.raising(ConnectionError()))
        die(world, policy=twice)
        world.clock.advance(30)
    with pytest.raises(AttemptsExhausted, match="attempt_limit=2 is reached"):
        world.first.answer(call(policy=twice))
    assert world.ran == [1, 2, 3, 4]


def exhausted(world, policy):
    """What the caller of a key without attempts is told, and what was reported of it."""
    with pytest.raises(AttemptsExhausted) as caught:
        world.first.answer(call(policy=policy))
    (event,) = [item for item in world.heard if item.kind is EventKind.EXHAUSTED]
    assert str(caught.value).endswith(f"; {event.detail}")
    with pytest.raises(AttemptsExhausted) as replayed:
        world.process().answer(call(policy=policy))
    assert str(replayed.value) == str(caught.value)
    return event.detail


def test_giving_up_tells_the_last_failure_that_was_stored():
    """Also when a later attempt died without a word: its number shows that."""
    world = World()
    policy = Policy(attempt_limit=1)
    for error in (ConnectionError("refused"), TimeoutError("read timed out")):
        with pytest.raises(type(error)):
            world.first.answer(call(policy=policy), world.first.raising(error))
    die(world, policy=policy)
    world.clock.advance(30)
    assert exhausted(world, policy) == (
        "the last failure that was stored, of attempt 2: TimeoutError: read timed out"
    )


def test_giving_up_tells_that_no_attempt_left_an_error():
    """All died: what is known is that nothing is known, and the logs of the workers are next."""
    world = World()
    twice = Policy(attempt_limit=2)
    for _ in range(2):
        die(world, policy=twice)
        world.clock.advance(30)
    assert exhausted(world, twice) == "none of them left an error in the store"


def test_a_failure_that_an_operator_took_back_is_not_that_of_the_attempts_after_it():
    """They are counted anew, and the failure for good was not one of them."""
    world = World()
    once = Policy(attempt_limit=1, terminal=(ValueError,))
    with pytest.raises(ValueError, match="declined"):
        world.first.answer(call(policy=once), world.first.raising(ValueError("declined")))
    drive(world.store.operate(call().key, OperatorCommand.RELEASE))
    die(world, policy=once)
    world.clock.advance(30)
    assert exhausted(world, once) == "none of them left an error in the store"


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), RuntimeError("a broken driver")])
def test_a_key_is_given_up_also_when_its_last_failure_cannot_be_read(error):
    """The words are missing then; the operation still never runs again."""
    world = World()
    once = Policy(attempt_limit=1)
    die(world, policy=once)
    world.clock.advance(30)
    world.first.store.ending_faults.append(Fault(error))
    assert exhausted(world, once) == f"the last failure could not be read: {error}"
    assert state(world) is State.FAILED
    assert world.ran == [1]


def test_an_exhausted_operation_that_the_store_refuses_is_still_given_up():
    world = World()
    process = world.first
    once = Policy(attempt_limit=1)
    die(world, policy=once)
    world.clock.advance(30)
    process.writer.settle_faults.append(Fault(StoreRejected("no")))
    with pytest.raises(OutcomeUnavailable, match="the store refused it"):
        process.answer(call(policy=once))
    assert state(world) is State.FAILED


def test_giving_up_can_lose_the_claim():
    world = World()
    once = Policy(attempt_limit=1)
    die(world, policy=once)
    world.clock.advance(30)
    process = world.first
    process.writer.settle_faults.append(Fault(pauses=True))
    flow = process.start(call(policy=once))
    world.clock.advance(30)
    with pytest.raises(AttemptsExhausted):
        world.process().answer(call(policy=once))
    assert isinstance(flow.step().error, ClaimLost)


# Outcomes that cannot be shown.


def test_a_failure_that_is_no_longer_stored_is_not_told_as_done():
    """Nobody would pay the invoice again whose payment was declined."""
    world = World()
    with pytest.raises(Declined):
        world.first.answer(call(policy=TERMINAL), world.first.raising(Declined("no funds")))
    world.store._outcomes.clear()
    with pytest.raises(OperationFailed, match="failed for good, and its failure is no longer"):
        world.first.answer(call(policy=TERMINAL))
    assert world.ran == [1]


def test_an_outcome_that_is_no_longer_stored_is_not_run_again():
    world = World()
    world.first.answer(call())
    world.store._outcomes.clear()
    with pytest.raises(OutcomeUnavailable, match="no longer stored"):
        world.first.answer(call())
    assert world.ran == [1]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("json.9", "which this release does not know"),
        ("failure.9", "which this release does not know"),
        (codec.TAGGED, "could not be read"),
        (codec.WITHHELD, "was not kept"),
        (codec.FAILURE, "its failure cannot be read"),
    ],
)
def test_an_outcome_that_cannot_be_read_here_is_not_run_again(form, words):
    world = World()
    world.first.answer(call())
    (ending,) = world.store._outcomes[KEY.digest]
    world.store._outcomes[KEY.digest] = ((*ending[:3], form, ending[4], b"{", *ending[6:]),)
    with pytest.raises(OutcomeUnavailable, match=words) as caught:
        world.first.answer(call())
    assert caught.value.key == "order-1"
    assert world.ran == [1]


def test_the_answer_of_the_store_is_what_counts():
    """The engine decides nothing by its own clock: a replay is a replay when the store says so."""
    world = World()
    process = world.first

    async def claim(request):
        return ClaimAnswer(Decision.MISMATCH, Condition.RUNNING)

    process.writer.claim = claim
    with pytest.raises(KeyReused):
        process.answer(call())
