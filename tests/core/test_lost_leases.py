"""An owner that may have lost its key neither starts nor ends anything."""

from __future__ import annotations

import pytest

from retrysafe.core.model import Condition, Ending
from retrysafe.core.policy import Policy
from retrysafe.errors import ClaimLost, OperationInFlight
from tests.core.building import KEY, call
from tests.core.driving import Fault, Process, World, drive


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def process(world: World) -> Process:
    return Process(world)


def test_a_process_that_stood_still_after_its_claim_asks_again(world, process):
    """Nobody else came, so it takes its own expired claim over and runs as attempt 2."""
    process.writer.claim_faults.append(Fault(stalls=True))
    flow = process.start(call(), process.returning("done"))
    world.clock.advance(30)
    flow.step()
    assert (flow.value.value, flow.value.attempt) == ("done", 2)
    assert world.ran == [2]


def test_a_process_that_stood_still_does_not_run_next_to_its_successor(world, process):
    process.writer.claim_faults.append(Fault(stalls=True))
    flow = process.start(call(), process.returning("late"))
    world.clock.advance(30)
    successor = Process(world).start(call(), process.pausing("second"))
    flow.step()
    assert isinstance(flow.error, OperationInFlight)
    assert successor.step().value.value == "second"


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
