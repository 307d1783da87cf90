"""Callers of one process for one key: one leads and asks the store, the others follow."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.model import Ending, Fingerprint
from retrysafe.core.policy import InFlight, Policy
from retrysafe.errors import (
    ClaimLost,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    StoreRejected,
    StoreUnavailable,
)
from tests.core.building import MARK, OTHER_MARK, call
from tests.core.driving import Fault, Process, World
from tests.core.sample_types import Declined

WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=10), terminal=Declined)
DOWN = StoreUnavailable("down")


def claiming(process: Process, *marks: Fingerprint, **options: object) -> object:
    """A leader whose claim is under way."""
    process.writer.claim_faults.append(Fault(pauses=True))
    return process.start(call(*marks, **options), process.pausing("first"))


def owned_elsewhere(world: World) -> object:
    """The key is running in another process; stepping the flow ends it."""
    other = world.process()
    return other.start(call(), other.pausing("theirs"))


# While the leader runs the operation.


def test_a_duplicate_of_a_running_operation_is_told_without_a_store_call(world, process):
    leader = process.start(call(), process.pausing("first"))
    world.clock.advance(5)
    with pytest.raises(OperationInFlight) as caught:
        process.answer(call())
    assert caught.value.retry_after == timedelta(seconds=5)
    assert caught.value.is_known_here
    assert len(process.writer.claims) == 1
    assert (world.kinds[-1], world.heard[-1].source) == ("in flight", "process")
    assert leader.step().value.value == "first"
    assert world.ran == [1]


def test_another_request_is_refused_while_the_first_runs(world, process):
    process.start(call(), process.pausing("first"))
    for policy in (Policy(), WAITING):
        with pytest.raises(KeyReused):
            process.answer(call(OTHER_MARK, policy=policy))
    assert len(process.writer.claims) == 1
    assert world.heard[-1].source == "process"


def test_followers_who_wait_get_the_leaders_outcome(world, process):
    """One claim, one run, one settle, however many wait."""
    leader = process.start(call(), process.pausing("first"))
    followers = [process.start(call(policy=WAITING)) for _ in range(3)]
    assert not any(follower.is_done for follower in followers)
    leader.step()
    for follower in followers:
        answer = follower.step().value
        assert (answer.value, answer.replayed, answer.attempt) == ("first", True, 1)
    assert leader.value.replayed is False
    assert world.ran == [1]
    assert (len(process.writer.claims), len(process.writer.settlements)) == (1, 1)


def test_followers_get_the_leaders_failure(world, process):
    leader = process.start(call(policy=WAITING), process.pausing(Declined("no funds")))
    follower = process.start(call(policy=WAITING))
    leader.step()
    follower.step()
    assert isinstance(follower.error, Declined)
    assert follower.error is not leader.error
    assert world.ran == [1]


def test_when_the_leader_frees_the_key_those_who_waited_are_reported(world, process):
    """They share the failed attempt; the next call makes the next one."""
    leader = process.start(call(), process.pausing(ConnectionError("reset")))
    second, third = (process.start(call(policy=WAITING), process.pausing(n)) for n in (2, 3))
    stranger = process.start(call(OTHER_MARK, policy=WAITING), process.pausing(4))
    leader.step()
    assert isinstance(leader.error, ConnectionError)
    for follower in (second, third):
        follower.step()
        assert isinstance(follower.error, OperationFailed)
        assert follower.error.retryable
        assert follower.error.type_name == "builtins:ConnectionError"
    assert isinstance(stranger.error, KeyReused)
    assert world.ran == [1]
    assert process.start(call(), process.returning("next")).value.attempt == 2


def test_a_failure_that_the_store_refuses_is_told_as_it_was(world, process):
    """The key is free, so nobody must be told that the operation is done and will not run again."""
    leader = process.start(call(), process.pausing(ConnectionError("reset")))
    follower = process.start(call(policy=WAITING), process.pausing(2))
    process.writer.settle_faults.append(Fault(StoreRejected("row too large")))
    leader.step()
    follower.step()
    assert isinstance(follower.error, OperationFailed)
    assert follower.error.retryable
    assert process.start(call(), process.returning("next")).value.attempt == 2


def test_a_stored_failure_is_final_for_those_who_waited(world, process):
    policy = WAITING.with_changes(unlisted=Ending.FAILED)
    leader = process.start(call(policy=policy), process.pausing(ConnectionError("reset")))
    follower = process.start(call(policy=policy), process.pausing(2))
    leader.step()
    follower.step()
    assert isinstance(follower.error, OperationFailed)
    assert not follower.error.retryable


def test_a_hung_operation_does_not_hold_its_own_process_back(world, process):
    """Past its run limit its flight is replaced: this process may take over as any other may."""
    limited = Policy(run_limit=timedelta(seconds=30))
    hung = process.start(call(policy=limited), process.pausing("late"))
    world.clock.advance(30)
    successor = process.start(call(), process.returning("second"))
    assert (successor.value.value, successor.value.attempt) == ("second", 2)
    hung.step()
    assert isinstance(hung.error, ClaimLost)
    assert process.start(call()).value.value == "second"


def test_a_lease_that_only_ran_out_is_not_taken_over_by_its_own_process(world, process):
    """Renewals failed, or the process stood still: the operation still runs here, and is known to.

    Another process cannot know, and may take over; this one must not run it beside itself.
    """
    running = process.start(call(), process.pausing("first"))
    world.clock.advance(30)
    rival = process.start(call(), process.returning("second"))
    assert isinstance(rival.error, OperationInFlight)
    waiter = process.start(call(policy=WAITING), process.returning("second"))
    running.step()
    waiter.step()
    assert (running.value.value, waiter.value.value) == ("first", "first")
    assert world.ran == [1]


def test_when_the_leader_is_cancelled_a_follower_asks_the_store(world, process):
    """The claim of the cancelled leader still stands, so the follower waits for its lease."""
    leader = process.start(call(), process.pausing("first"))
    follower = process.start(call(policy=WAITING))
    leader.throw(KeyboardInterrupt())
    follower.step()
    assert isinstance(follower.error, OperationInFlight)
    assert sum(process.clock.slept) == pytest.approx(10.0)
    assert world.ran == [1]


def test_when_the_leaders_outcome_is_not_stored_a_follower_is_not_shown_it(world, process):
    leader = process.start(
        call(policy=Policy(settle_patience=timedelta(0))), process.pausing("unstored")
    )
    follower = process.start(call(policy=WAITING))
    process.writer.settle_faults.append(Fault(DOWN))
    leader.step()
    follower.step()
    assert isinstance(follower.error, OperationInFlight)


def test_a_followers_wait_has_a_limit(world, process):
    leader = process.start(call(), process.pausing("first"))
    follower = process.start(call(policy=WAITING))
    world.clock.advance(9.9)
    assert not follower.step().is_done
    world.clock.advance(0.1)
    follower.step()
    assert isinstance(follower.error, OperationInFlight)
    assert follower.error.retry_after == timedelta(seconds=10)
    assert world.kinds[-1] == "wait timed out"
    assert leader.step().value.value == "first"


def test_an_outcome_that_arrives_with_the_end_of_the_wait_is_still_given(world, process):
    """The wait ran out, and the leader landed before the follower could say so."""
    leader = process.start(call(), process.pausing("first"))
    late = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(0))
    process.clock.on_signal = leader.step
    # The leader ends between the follower's look at the phase and its enlisting.
    assert process.answer(call(policy=late)).value == "first"


def test_a_wait_that_ends_as_the_leader_lands_takes_the_outcome(world, process):
    leader = process.start(call(), process.pausing("first"))
    follower = process.start(call(policy=WAITING))
    world.clock.advance(10)
    signal_waiters = process.engine._flights._by_digest[call().key.digest].waiters
    signal_waiters.clear()  # The wake-up is under way to a follower whose time is over.
    leader.step()
    assert follower.step().value.value == "first"


# While the leader's claim is under way.


def test_a_duplicate_during_the_claim_waits_for_its_answer_only(world, process):
    """It asks no store; as soon as the leader runs, it is told that the operation is in flight."""
    leader = claiming(process)
    follower = process.start(call())
    assert not follower.is_done
    leader.step()
    follower.step()
    assert isinstance(follower.error, OperationInFlight)
    assert follower.error.retry_after == timedelta(seconds=1)
    assert len(process.writer.claims) == 1
    assert leader.step().value.value == "first"


def test_another_request_during_the_claim_is_refused_once_the_leader_runs(world, process):
    leader = claiming(process)
    follower = process.start(call(OTHER_MARK))
    leader.step()
    assert isinstance(follower.step().error, KeyReused)


def test_the_operation_that_runs_here_is_named_to_another_one(world, process):
    """While it runs, and to those who were there before it ran."""
    leader = claiming(process, operation="charge")
    early = process.start(call(OTHER_MARK, operation="refund"))
    leader.step()
    assert early.step().error.first_operation == "charge"
    with pytest.raises(KeyReused, match="the operation 'charge'"):
        process.answer(call(OTHER_MARK, operation="refund"))


def test_the_operation_of_a_shared_replay_is_named_to_another_one(world, process):
    """A follower learns what its leader has read."""
    world.process().answer(call(operation="charge"))
    leader = claiming(process, operation="charge")
    stranger = process.start(call(OTHER_MARK, operation="refund"))
    leader.step()
    assert stranger.step().error.first_operation == "charge"
    assert len(process.writer.claims) == 1


def test_a_shared_mismatch_names_the_operation_of_the_key(world, process):
    """The followers hear what the store has told their leader."""
    world.process().answer(call(operation="charge"))
    leader = claiming(process, OTHER_MARK, operation="refund")
    same = process.start(call(OTHER_MARK, operation="refund"))
    leader.step()
    assert leader.error.first_operation == same.step().error.first_operation == "charge"
    assert len(process.writer.claims) == 1


def test_a_replay_is_shared_with_the_followers(world, process):
    world.process().answer(call())
    leader = claiming(process)
    follower, stranger = process.start(call()), process.start(call(OTHER_MARK))
    leader.step()
    assert leader.value.replayed
    assert follower.step().value.value == 7
    assert isinstance(stranger.step().error, KeyReused)
    assert len(process.writer.claims) == 1


def test_a_mismatch_is_shared_with_those_who_ask_the_same(world, process):
    """Others ask for themselves: what the leader was told does not hold for them."""
    world.process().answer(call())
    leader = claiming(process, OTHER_MARK)
    same, honest = process.start(call(OTHER_MARK)), process.start(call(MARK))
    leader.step()
    assert isinstance(leader.error, KeyReused)
    assert isinstance(same.step().error, KeyReused)
    assert len(process.writer.claims) == 1
    assert honest.step().value.replayed
    assert len(process.writer.claims) == 2


def test_a_conflict_is_shared_with_those_who_do_not_wait(world, process):
    owned_elsewhere(world)
    world.clock.advance(10)
    leader = claiming(process)
    follower, stranger = process.start(call()), process.start(call(OTHER_MARK))
    leader.step()
    assert isinstance(leader.error, OperationInFlight)
    follower.step()
    assert isinstance(follower.error, OperationInFlight)
    assert follower.error.retry_after == timedelta(seconds=10)
    assert len(process.writer.claims) == 1
    assert isinstance(stranger.step().error, KeyReused)
    assert len(process.writer.claims) == 2


def test_after_a_conflict_a_follower_who_waits_leads_the_polling(world, process):
    theirs = owned_elsewhere(world)
    leader = claiming(process)
    follower = process.start(call(policy=WAITING))
    leader.step()
    process.clock.meanwhile.append(theirs.step)
    assert follower.step().value.value == "theirs"


def test_when_the_claim_fails_a_follower_is_told_of_the_outage(world, process):
    leader = claiming(process)
    follower = process.start(call())
    process.writer.claim_faults.extend([Fault(DOWN), Fault(DOWN)])
    leader.throw(DOWN)  # The first of its three tries.
    assert isinstance(leader.error, StoreUnavailable)
    assert isinstance(follower.step().error, StoreUnavailable)
    assert not follower.error.is_in_flight
    assert world.ran == []


def test_when_the_polling_fails_a_follower_is_told_that_the_key_is_in_flight(world, process):
    """The leader had heard of an owner before the store fell silent."""
    owned_elsewhere(world)
    process.clock.pauses = True
    leader = process.start(call(policy=WAITING))
    follower = process.start(call(policy=WAITING))
    process.writer.claim_faults.extend([Fault(StoreUnavailable("down"))] * 3)
    while not leader.is_done:
        leader.step()
    assert isinstance(follower.step().error, StoreUnavailable)
    assert (leader.error.is_in_flight, follower.error.is_in_flight) == (True, True)


def test_a_process_knows_what_runs_elsewhere_while_it_waits_for_it(world, process):
    """Nobody here has to ask the store for it then."""
    owned_elsewhere(world)
    process.clock.pauses = True
    waiting = call(policy=WAITING)
    leader = process.start(waiting)
    assert process.engine.is_in_flight(waiting)
    assert not process.engine.is_claiming(waiting)
    world.clock.advance(60)
    while not leader.is_done:
        leader.step()
    assert not process.engine.is_in_flight(waiting)


def test_a_process_knows_what_it_runs(world, process):
    """Not while it claims, and not when it has ended."""
    running = call()
    assert not process.engine.is_in_flight(running)
    leader = claiming(process)
    assert not process.engine.is_in_flight(running)
    assert process.engine.is_claiming(running)
    leader.step()
    assert process.engine.is_in_flight(running)
    assert not process.engine.is_claiming(running)
    leader.step()
    assert not process.engine.is_in_flight(running)


def test_a_follower_whose_wait_ends_during_the_claim_is_reported(world, process):
    claiming(process)
    follower = process.start(call(policy=WAITING))
    world.clock.advance(10)
    follower.step()
    assert isinstance(follower.error, OperationInFlight)
    # Nothing is known of the lease yet; zero would be an invitation to a tight loop.
    assert follower.error.retry_after == timedelta(seconds=0.1)


# While the leader waits for another process.


def test_followers_of_a_polling_leader_share_its_news(world, process):
    theirs = owned_elsewhere(world)
    process.clock.pauses = True
    leader = process.start(call(policy=WAITING))
    hurried = process.start(call())
    assert isinstance(hurried.error, OperationInFlight)
    assert hurried.error.retry_after == timedelta(seconds=1)
    stranger = process.start(call(OTHER_MARK, policy=WAITING))
    assert isinstance(stranger.error, KeyReused)
    follower = process.start(call(policy=WAITING))
    theirs.step()
    leader.step()
    assert (leader.value.value, leader.value.replayed) == ("theirs", True)
    assert follower.step().value.value == "theirs"
    assert len(process.writer.claims) == 2


def test_a_conflict_that_is_over_is_not_told_to_a_late_follower(world, process):
    """The leader waited, took over, ran and freed the key: the follower may run at once."""
    owned_elsewhere(world)
    world.clock.advance(29.99)
    leader = claiming(process, policy=WAITING)
    follower = process.start(call(), process.returning("second"))
    process.clock.pauses = True
    leader.step()  # In flight elsewhere: it sleeps until the lease is over.
    leader.step()  # It takes over and runs; the follower has not woken up yet.
    leader.throw(ConnectionError("reset"))
    assert isinstance(leader.error, ConnectionError)
    follower.step()
    assert follower.error is None
    assert follower.value.value == "second"
