"""A step that was asked for and never awaited has not run, whatever its operation says."""

from __future__ import annotations

import gc

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.steps.pending import PendingStep
from retrysafe.errors import AwaitForgotten
from tests.core.driving import Flow, World
from tests.core.stepped import Effects, run, stored_steps


class Asked:
    """One step that was asked for, and what became of it."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.not_begun: dict[PendingStep, None] = {}
        self.step = PendingStep("charge", self._flow, self.not_begun)

    async def _flow(self) -> str:
        self.ran.append("charge")
        return "done"


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_step_is_missed_until_it_is_awaited(asked):
    """By whoever awaits it."""

    async def awaiting() -> str:
        return await asked.step

    assert list(asked.not_begun) == [asked.step]
    assert Flow(awaiting()).step().value == "done"
    assert asked.not_begun == {}


def test_a_step_that_is_used_as_its_result_says_what_is_missing(asked):
    with pytest.raises(AwaitForgotten, match=r"'charge' was not awaited.*'async def'"):
        list(asked.step)
    assert asked.ran == []


def test_a_step_is_missed_until_a_task_sends_to_it(asked):
    """A task does not await its coroutine: it sends to it."""
    assert Flow(asked.step).step().value == "done"
    assert asked.not_begun == {}
    with pytest.raises(RuntimeError, match="cannot reuse"):
        asked.step.send(None)
    assert asked.ran == ["charge"]


def test_a_step_whose_task_is_cancelled_before_it_began_is_not_missed(asked):
    """Somebody decided that it shall not run; that is not a forgotten await."""
    with pytest.raises(KeyboardInterrupt):
        asked.step.throw(KeyboardInterrupt)
    assert asked.not_begun == {}
    assert asked.ran == []


def test_a_step_that_is_closed_is_not_missed(asked):
    """The same for those who close it themselves."""
    asked.step.close()
    assert asked.not_begun == {}
    assert asked.ran == []


def test_an_operation_is_told_which_steps_it_did_not_await():
    """By name and in order; those that ran are recorded, and those that did not leave no trace."""
    world, effects = World(), Effects()

    async def operation(attempt: Attempt) -> None:
        attempt.step("reserve", effects.do, "reserve")
        await attempt.step("charge", effects.do, "charge")
        attempt.step("mail", effects.do, "mail")
        attempt.steps.require_begun()

    with pytest.raises(AwaitForgotten, match="asked for 'reserve', 'mail' and did not await it"):
        run(world.first, operation)
    gc.collect()  # A coroutine that was never awaited would be warned of now.
    assert effects.ran == ["charge"]
    assert stored_steps(world) == [("charge", 1)]


def test_all_steps_awaited_is_nothing_to_tell():
    """The check that every operation with steps goes through."""
    world, effects = World(), Effects()

    async def operation(attempt: Attempt) -> str:
        await attempt.step("charge", effects.do, "charge")
        attempt.steps.require_begun()
        await attempt.steps.check_complete()
        return "value"

    assert run(world.first, operation).value == "value"


def test_an_operation_does_not_complete_without_a_step_that_it_asked_for():
    """In the user's transaction too: the refusal comes before anything is committed."""
    world, effects = World(), Effects()

    async def operation(attempt: Attempt) -> None:
        attempt.step("charge", effects.do, "charge")
        await attempt.steps.check_complete()

    with pytest.raises(AwaitForgotten, match="asked for 'charge' and did not await it"):
        run(world.first, operation)
    assert effects.ran == []
