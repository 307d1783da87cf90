"""The last write: retried within patience, fenced, and never lost with its caller."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.events import EventKind
from retrysafe.core.model import Ending, State
from retrysafe.core.policy import Policy
from retrysafe.core.values import codec
from retrysafe.errors import (
    ClaimLost,
    OutcomeNotStored,
    OutcomeUnavailable,
    StoreError,
    StoreRejected,
    StoreUnavailable,
)
from tests.core.building import KEY, call
from tests.core.driving import Fault, World, drive, state
from tests.core.sample_types import Declined, Mute

DOWN = StoreUnavailable("down")
BROKEN = StoreError("the database file is damaged")
TERMINAL = Policy(terminal=Declined)


@pytest.mark.parametrize("is_after", [False, True])
def test_an_unanswered_settle_is_repeated_until_it_stands(world, process, is_after):
    """The token makes repeating harmless: if the first one took effect, it is confirmed."""
    process.writer.settle_faults.extend([Fault(DOWN, is_after=is_after)] * 3)
    assert process.answer(call()).value == 7
    assert state(world) is State.SUCCEEDED
    assert len(process.writer.settlements) == 4
    assert process.clock.slept == [0.05, 0.1, 0.2]
    assert world.kinds == ["claimed", *["store unavailable"] * 3, "completed"]


def test_patience_ends_and_the_caller_learns_the_value(world, process):
    """The operation ran: its value is handed over with the news that it is not stored."""
    process.writer.settle_faults.extend([Fault(DOWN)] * 100)
    with pytest.raises(OutcomeNotStored, match="runs again") as caught:
        process.answer(call(), process.returning({"charge": 9}))
    assert caught.value.value == {"charge": 9}
    assert caught.value.key == "order-1"
    assert not caught.value.retryable
    assert caught.value.__cause__ is DOWN
    assert sum(process.clock.slept) <= 10.0
    assert max(process.clock.slept) == 1.0
    assert state(world) is State.PENDING
    assert world.kinds[-1] == "settle failed"
    assert process.renewals.running == []


def test_without_patience_there_is_one_try(process):
    impatient = Policy(settle_patience=timedelta(0))
    process.writer.settle_faults.append(Fault(DOWN))
    with pytest.raises(OutcomeNotStored):
        process.answer(call(policy=impatient))
    assert len(process.writer.settlements) == 1


def test_an_outcome_that_is_not_stored_is_not_shared(world):
    """Nobody may be shown an outcome that a takeover could still contradict."""
    cached = World(cache=True)
    process = cached.first
    process.writer.settle_faults.extend([Fault(DOWN)] * 100)
    with pytest.raises(OutcomeNotStored):
        process.answer(call(policy=Policy(settle_patience=timedelta(0))))
    cached.clock.advance(30)
    process.writer.settle_faults.clear()
    assert not process.answer(call()).replayed
    assert cached.ran == [1, 2]


# Results that the store or the codec cannot hold.


def test_a_refused_outcome_is_remembered_as_done(world, process):
    """The first caller gets the value; a retry is told, and nothing runs a second time."""
    process.writer.settle_faults.append(Fault(StoreRejected("row too large")))
    assert process.answer(call()).value == 7
    assert process.writer.payload_forms == [codec.JSON, codec.WITHHELD]
    assert state(world) is State.SUCCEEDED
    with pytest.raises(OutcomeUnavailable, match="row too large"):
        process.answer(call())
    assert world.ran == [1]
    assert world.kinds == ["claimed", "withheld", "completed", "replayed"]


def test_a_store_that_refuses_even_that_is_reported(world, process):
    process.writer.settle_faults.extend([Fault(StoreRejected("no"))] * 2)
    with pytest.raises(OutcomeNotStored) as caught:
        process.answer(call())
    assert caught.value.value == 7
    assert state(world) is State.PENDING


@pytest.mark.parametrize("value", [object(), b"x" * 101])
def test_a_value_that_cannot_be_stored_is_returned_and_never_run_again(world, process, value):
    small = Policy(outcome_limit_bytes=100)
    assert process.answer(call(policy=small), process.returning(value)).value is value
    assert world.kinds == ["claimed", "withheld", "completed"]
    with pytest.raises(OutcomeUnavailable, match="will not run again"):
        process.answer(call(policy=small))
    assert world.ran == [1]


def broken_judge(value: object) -> Ending:
    raise LookupError("no such status")


def mute_judge(value: object) -> Ending:
    raise Mute


@pytest.mark.parametrize("judge", [broken_judge, mute_judge, lambda value: "fine"])
def test_a_judge_that_fails_does_not_run_the_operation_again(world, process, judge):
    """Whatever it raises or returns, the operation has run, and that is what is remembered."""
    assert process.answer(call(judge=judge)).value == 7
    assert state(world) is State.SUCCEEDED
    with pytest.raises(OutcomeUnavailable):
        process.answer(call(judge=judge))
    assert world.ran == [1]


def test_a_judge_may_answer_with_the_number_of_an_ending(process):
    """A plain 4 means released, and what is released is never kept for a replay."""
    cached = World(cache=True)
    cached.first.answer(call(judge=lambda value: 4))
    assert state(cached) is State.RELEASED
    assert not cached.first.answer(call()).replayed


def test_other_errors_of_the_store_also_tell_that_the_operation_ran(world, process):
    """A database that breaks between claim and settle must not swallow the value."""
    process.writer.settle_faults.append(Fault(BROKEN))
    with pytest.raises(OutcomeNotStored, match="damaged") as caught:
        process.answer(call())
    assert caught.value.value == 7
    assert caught.value.__cause__ is BROKEN
    assert len(process.writer.settlements) == 1
    assert world.background == []


# Failures of the operation, and of the store as well.


@pytest.mark.parametrize("fault", [DOWN, BROKEN, StoreRejected("no")])
def test_a_release_that_fails_keeps_the_operations_own_error(world, process, fault):
    """The lease frees the key instead; what went wrong in the operation matters more."""
    error = ConnectionError("reset")
    process.writer.settle_faults.extend([Fault(fault)] * 100)
    with pytest.raises(ConnectionError) as caught:
        process.answer(call(), process.raising(error))
    assert caught.value is error
    assert state(world) is State.PENDING
    assert "settle failed" in world.kinds
    assert process.engine.flights_count == 0


def test_a_terminal_failure_that_is_not_stored_names_both(world, process):
    error = Declined("no funds")
    process.writer.settle_faults.extend([Fault(DOWN)] * 100)
    with pytest.raises(OutcomeNotStored) as caught:
        process.answer(call(policy=TERMINAL), process.raising(error))
    assert caught.value.__cause__ is error
    assert caught.value.value is None
    assert state(world) is State.PENDING


def test_a_refused_failure_is_remembered_as_failed(world, process):
    process.writer.settle_faults.append(Fault(StoreRejected("no")))
    with pytest.raises(Declined):
        process.answer(call(policy=TERMINAL), process.raising(Declined("x")))
    assert state(world) is State.FAILED
    with pytest.raises(OutcomeUnavailable):
        process.answer(call(policy=TERMINAL))
    assert world.ran == [1]


# Lost claims.


@pytest.mark.parametrize("ending", ["late", Declined("late"), ConnectionError("late")])
def test_a_zombie_loses_its_claim_and_changes_nothing(world, process, ending):
    """Stopped past its lease and taken over, the old owner's ending is refused."""
    zombie = process.start(call(policy=TERMINAL), process.pausing(ending))
    world.clock.advance(30)
    winner = world.process()
    assert winner.answer(call(policy=TERMINAL), winner.returning("new")).attempt == 2
    zombie.step()
    assert isinstance(zombie.error, ClaimLost)
    assert zombie.error.key == "order-1"
    assert zombie.error.__cause__ is (ending if isinstance(ending, Exception) else None)
    assert winner.answer(call(policy=TERMINAL)).value == "new"
    assert "lost" in world.kinds
    assert process.renewals.running == []


def test_a_late_owner_that_nobody_took_over_from_still_counts(world, process):
    flow = process.start(call(), process.pausing("late"))
    world.clock.advance(1_000)
    assert flow.step().value.value == "late"
    assert state(world) is State.SUCCEEDED


# Cancellation during the last write.


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), ZeroDivisionError()])
def test_an_outcome_is_not_lost_with_its_caller(world, process, error):
    """The operation is done: whoever is left finishes the write, and the caller goes."""
    process.writer.settle_faults.append(Fault(pauses=True))
    flow = process.start(call(), process.returning("done"))
    flow.throw(error)
    assert flow.error is error
    (last_write,) = world.background
    assert state(world) is State.PENDING
    drive(last_write)
    assert state(world) is State.SUCCEEDED
    assert world.kinds == ["claimed", "completed"]
    assert process.answer(call()).value == "done"
    assert world.ran == [1]


def test_a_background_ending_confirms_a_write_that_stood_already(world, process):
    process.writer.settle_faults.append(Fault(KeyboardInterrupt(), is_after=True))
    flow = process.start(call(), process.returning("done"))
    assert isinstance(flow.error, KeyboardInterrupt)
    drive(world.background[0])
    assert world.kinds == ["claimed", "completed"]
    assert process.answer(call()).value == "done"


@pytest.mark.parametrize("fault", [DOWN, BROKEN])
def test_a_background_ending_that_cannot_be_stored_is_reported_and_raises_nothing(
    world, process, fault
):
    process.writer.settle_faults.append(Fault(KeyboardInterrupt()))
    process.start(call())
    process.writer.settle_faults.extend([Fault(fault)] * 100)
    drive(world.background[0])
    assert world.kinds[-1] == "settle failed"
    assert state(world) is State.PENDING


def test_a_background_ending_that_lost_its_claim_is_reported_and_raises_nothing(world, process):
    process.writer.settle_faults.append(Fault(KeyboardInterrupt()))
    process.start(call())
    world.clock.advance(30)
    assert world.process().answer(call()).attempt == 2
    drive(world.background[0])
    assert world.kinds[-1] == "lost"


def test_a_background_ending_that_nobody_can_run_is_reported(world, process):
    """The loop or the process is about to end: the key and the operation are named."""
    process.writer.settle_faults.append(Fault(KeyboardInterrupt()))
    process.start(call())
    world.abandon[0]("the loop has ended")
    told = world.heard[-1]
    assert (told.kind, told.key, told.attempt) == (EventKind.SETTLE_FAILED, KEY, 1)
    assert (told.operation, told.detail) == (call().operation, "the loop has ended")
    world.background[0].close()


def test_a_failure_is_not_lost_with_its_caller_either(world, process):
    process.writer.settle_faults.append(Fault(KeyboardInterrupt()))
    flow = process.start(call(policy=TERMINAL), process.raising(Declined("x")))
    assert isinstance(flow.error, KeyboardInterrupt)
    drive(world.background[0])
    assert world.kinds == ["claimed", "failed"]
    with pytest.raises(Declined):
        process.answer(call(policy=TERMINAL))
    assert world.ran == [1]


def test_what_nobody_wants_to_hear_is_not_told(world, process):
    """An observer of failures alone pays nothing for an operation that goes well."""
    process.engine._report.kinds = frozenset({EventKind.FAILED})
    assert process.answer(call()).value == 7
    assert process.answer(call()).replayed
    assert world.heard == []
