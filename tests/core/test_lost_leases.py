"""An owner that may have lost its key neither starts nor ends anything."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.engine import LATE_ANSWERS_LIMIT
from retrysafe.core.events import Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.model import Condition, Ending
from retrysafe.core.policy import InFlight, Policy
from retrysafe.errors import ClaimLost, OperationInFlight, StoreUnavailable
from tests.core.building import KEY, call
from tests.core.driving import Fault, Flow, Process, World, drive


@pytest.fixture
def process(world: World) -> Process:
    return Process(world)


def test_a_process_that_stood_still_after_its_claim_asks_again(world, process):
    """Nobody else came, so its own claim is granted anew; it is still the first attempt."""
    process.writer.claim_faults.append(Fault(stalls=True))
    flow = process.start(call(), process.returning("done"))
    world.clock.advance(30)
    flow.step()
    assert (flow.value.value, flow.value.attempt) == ("done", 1)
    assert len(process.writer.claims) == 2
    assert world.ran == [1]


def test_a_store_that_is_slower_than_the_lease_is_reported(world, process):
    """Nothing runs, no attempt is used up, and the caller does not wait for ever."""
    process.writer.claim_faults.extend([Fault(stalls=True)] * LATE_ANSWERS_LIMIT)
    flow = process.start(call())
    for _ in range(LATE_ANSWERS_LIMIT):
        world.clock.advance(30)
        flow.step()
    assert isinstance(flow.error, StoreUnavailable)
    assert "later than their lease" in str(flow.error)
    assert world.ran == []
    assert drive(world.store.read(KEY)).record.attempt == 1


def test_a_process_that_stood_still_does_not_run_next_to_its_successor(world, process):
    process.writer.claim_faults.append(Fault(stalls=True))
    flow = process.start(call(), process.returning("late"))
    world.clock.advance(30)
    successor = Process(world).start(call(), process.pausing("second"))
    flow.step()
    assert isinstance(flow.error, OperationInFlight)
    assert successor.step().value.value == "second"


@pytest.mark.parametrize("comes", [False, True], ids=["nobody came", "taken over"])
def test_a_process_that_stood_still_after_its_grant_asks_before_it_runs(world, process, comes):
    """A machine was suspended between the answer of the store and the operation."""
    is_asleep = [True]

    def sleep(event):
        if is_asleep:
            is_asleep.clear()
            world.clock.advance(30)
            if comes:
                Process(world).answer(call(), process.returning("second"))

    process.engine._runner._report = Reporter(sleep)
    flow = process.start(call(), process.returning("first"))
    assert len(process.store.confirmed) == 1
    if comes:
        assert isinstance(flow.error, ClaimLost)
        assert process.writer.settlements == []
    else:
        assert flow.value.value == "first"


@pytest.mark.parametrize(("failures", "is_held"), [(1, True), (2, False)])
def test_a_store_that_did_not_answer_is_asked_once_more(world, process, failures, is_held):
    """The connection may have died while the process stood still; nobody took the key."""
    extend, faults = world.store.extend, [StoreUnavailable("gone")] * failures

    async def extend_later(extensions, timeout_seconds):
        if faults:
            raise faults.pop()
        return await extend(extensions, timeout_seconds)

    async def operation(attempt):
        world.clock.advance(30)
        world.store.extend = extend_later
        await attempt.hold()
        return "done"

    flow = process.start(call(), operation)
    assert len(process.store.confirmed) == 2
    assert (flow.value.value == "done") if is_held else isinstance(flow.error, ClaimLost)


def test_a_lease_that_holds_is_not_asked_for(world, process):
    """A look costs nothing while there is no doubt."""

    async def operation(attempt):
        await attempt.hold()
        return "done"

    assert process.start(call(), operation).value.value == "done"
    assert process.store.confirmed == []


@pytest.mark.parametrize("unlisted", [Ending.FAILED, Ending.RELEASED])
def test_an_operation_that_stops_because_it_lost_its_claim_ends_nothing(world, process, unlisted):
    async def careful(attempt):
        world.clock.advance(30)
        attempt.raise_if_lost()

    flow = process.start(call(policy=Policy(unlisted=unlisted)), careful)
    assert isinstance(flow.error, ClaimLost)
    assert process.writer.settlements == []
    assert drive(world.store.read(KEY)).condition is Condition.ABANDONED


def test_the_lost_claim_of_another_key_is_an_ordinary_failure(world, process):
    """An operation may use other keys; what happens to those does not touch its own claim."""

    async def nested(attempt):
        raise ClaimLost("another key", key="another")

    flow = process.start(call(), nested)
    assert isinstance(flow.error, ClaimLost)
    assert drive(world.store.read(KEY)).condition is Condition.RELEASED


def test_a_waiting_duplicate_takes_over_when_the_local_run_hangs(world, process):
    """Its wait lasts as long as the run may: then it is as free to take over as anybody else."""
    limited = Policy(run_limit=timedelta(seconds=30))
    hung = process.start(call(policy=limited), process.pausing("late"))
    patient = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(minutes=5))
    waiter = process.start(call(policy=patient), process.returning("second"))
    world.clock.advance(30)
    waiter.step()
    assert (waiter.value.value, waiter.value.attempt) == ("second", 2)
    hung.step()
    assert isinstance(hung.error, ClaimLost)


def test_an_outcome_that_outlives_its_caller_keeps_its_lease(world, process):
    """While a cancelled caller's outcome is still being written, nobody may take over."""
    process.writer.settle_faults.extend([Fault(pauses=True), Fault(pauses=True)])
    flow = process.start(call(), process.returning("done"))
    flow.throw(GeneratorExit())
    (flow_without_caller,) = world.background
    last_write = Flow(flow_without_caller).step()
    assert len(process.renewals.running) == 1
    while not last_write.is_done:
        last_write.step()
    assert process.renewals.running == []
    assert drive(world.store.read(KEY)).condition is Condition.SUCCEEDED


def test_a_last_write_that_was_never_begun_leaves_no_lease(world, process):
    """Whoever cancels all tasks may cancel the one that was to write the outcome: a lease that is
    renewed without it would block the key for as long as the process lives.
    """
    process.writer.settle_faults.append(Fault(pauses=True))
    flow = process.start(call(), process.returning("done"))
    flow.throw(GeneratorExit())
    (flow_without_caller,) = world.background
    with pytest.raises(GeneratorExit):
        flow_without_caller.throw(GeneratorExit())
    assert process.renewals.running == []


def test_a_clock_that_was_set_back_does_not_lengthen_a_lease(world):
    """The store answers with an hour; the owner believes no more than it asked for."""
    lease = Lease(KEY, b"t" * 16, 30_000, 30_000, 0, 100.0)
    lease.renewed(3_600_000, 0, 110.0)
    assert lease.ends_monotonic == 140.0
    assert lease.renew_monotonic == 120.0
