"""An operation that ends while one of its steps still runs: nothing is settled before that step."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.model import State
from retrysafe.core.policy import Policy
from retrysafe.core.steps import run as step_run
from retrysafe.errors import ClaimLost, InvalidInput, StepsChanged
from tests.core.building import call
from tests.core.driving import Fault, Flow, Pause, World, state
from tests.core.sample_types import Declined
from tests.core.stepped import Effects, Stop, crash, crashed, in_order, run, stored_steps

FINAL = Policy(terminal=Declined)


class Task(Flow):
    """A flow with a context of its own, as the tasks of an event loop have."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        super().__init__(coroutine)
        self._context = contextvars.copy_context()

    def _run(self, resume: Callable[[], Any]) -> Flow:
        return self._context.run(super()._run, resume)


class Beside:
    """An operation that leaves its steps to tasks of their own, and ends before they do."""

    def __init__(self, effects: Effects, *names: str, ending: Any, **options: Any) -> None:
        self._effects = effects
        self._names = names
        self._ending = ending
        self._options = options
        self.tasks: list[Flow] = []

    async def operation(self, attempt: Attempt) -> Any:
        for name in self._names:
            task = Task(attempt.step(name, self._slow, name, **self._options))
            self.tasks.append(task.step())
        if isinstance(self._ending, Exception):
            raise self._ending
        return self._ending

    async def _slow(self, name: str) -> Any:
        await Pause()
        return self._effects.do(name)

    def started(self, world: World, **options: Any) -> Flow:
        """The call, up to where it waits for the steps."""
        return world.first.start(call(**options), world.first.operating(self.operation))


@pytest.mark.parametrize(
    ("ending", "settled"),
    [
        (OSError("mail server down"), State.RELEASED),
        (Declined("no"), State.FAILED),
        ("value", State.SUCCEEDED),
    ],
    ids=["released", "failed", "succeeded"],
)
def test_no_ending_is_settled_before_the_last_step_is_recorded(world, effects, ending, settled):
    """However it ended: the lease goes on until the slowest step stands in the store."""
    beside = Beside(effects, "a", "b", ending=ending)
    flow = beside.started(world, policy=FINAL)
    beside.tasks[0].step()
    flow.step()
    assert not flow.is_done
    assert state(world) is State.PENDING
    assert len(world.first.renewals.running) == 1
    beside.tasks[1].step()
    assert beside.tasks[1].value == "b done"
    assert state(world) is State.PENDING
    flow.step()
    assert flow.value.value == "value" if ending == "value" else flow.error is ending
    assert state(world) is settled
    assert stored_steps(world) == [("a", 1), ("b", 1)]
    assert world.first.renewals.running == []


def test_a_retry_does_not_run_a_step_beside_itself(world, effects):
    """While it is under way the key is not free; afterwards the retry has its result."""
    beside = Beside(effects, "charge", ending=OSError("mail server down"))
    flow = beside.started(world)
    beside.tasks[0].step()
    flow.step()
    assert run(world.process(), in_order(effects, "charge")).value == ["charge done"]
    assert effects.ran == ["charge"]


def test_a_step_that_ends_last_is_undone_too(world, effects):
    """A failure for good takes back what was still under way when it happened."""
    beside = Beside(effects, "charge", ending=Declined("fraud"), compensate=effects.undo)
    flow = beside.started(world, policy=FINAL)
    beside.tasks[0].step()
    flow.step()
    assert isinstance(flow.error, Declined)
    assert effects.ran == ["charge", "undo of charge done"]
    assert stored_steps(world) == [("charge", 1), ("!failed", 2), ("!undo charge", 3)]


def test_a_step_that_fails_last_ends_the_wait(world, effects):
    """There is nothing to record of it."""
    beside = Beside(effects, "charge", ending=OSError("first"))
    flow = beside.started(world)
    beside.tasks[0].throw(OSError("second"))
    flow.step()
    assert flow.error.args == ("first",)
    assert state(world) is State.RELEASED


def test_the_write_of_the_step_is_waited_for(world, effects):
    """A step that has run and is not in the store yet is under way as well."""
    world.first.store.write_faults.append(Fault(pauses=True))
    beside = Beside(effects, "charge", ending=OSError("first"))
    flow = beside.started(world)
    beside.tasks[0].step()
    assert effects.ran == ["charge"]
    flow.step()
    assert state(world) is State.PENDING
    beside.tasks[0].step()
    flow.step()
    assert state(world) is State.RELEASED
    assert stored_steps(world) == [("charge", 1)]


def test_a_step_that_could_not_begin_is_not_waited_for(world, effects, monkeypatch):
    """Whatever went wrong with it, the operation ends."""

    def fail(call, returns):
        raise InvalidInput("no such type")

    monkeypatch.setattr(step_run, "codec_of_step", fail)

    async def operation(attempt: Attempt):
        await attempt.step("charge", effects.do, "charge")

    with pytest.raises(InvalidInput, match="no such type"):
        run(world.first, operation)
    assert state(world) is State.RELEASED


def test_a_step_that_is_refused_is_not_waited_for(world, effects):
    """It never was under way."""
    crashed(world.first, in_order(effects, "a", "b", then=crash))
    with pytest.raises(StepsChanged):
        run(world.process(), in_order(effects, "b"))
    assert state(world) is State.RELEASED


def test_no_step_begins_while_the_ending_waits(world, effects):
    """Its task comes too late: the operation has ended."""
    beside = Beside(effects, "charge", ending=OSError("first"))
    attempts = []

    async def operation(attempt: Attempt):
        attempts.append(attempt)
        return await beside.operation(attempt)

    flow = world.first.start(call(), world.first.operating(operation))
    late = Task(attempts[0].step("mail", effects.do, "mail")).step()
    assert isinstance(late.error, InvalidInput)
    beside.tasks[0].step()
    flow.step()
    assert effects.ran == ["charge"]


def test_a_step_that_does_not_end_is_left_to_the_lease(world, effects):
    """Nobody waits for longer than the key is theirs, and nothing is settled with it running."""
    beside = Beside(effects, "charge", ending=OSError("first"))
    flow = beside.started(world, policy=Policy(lease=timedelta(seconds=30)))
    world.clock.advance(29)
    assert not flow.step().is_done
    world.clock.advance(1)
    flow.step()
    assert isinstance(flow.error, ClaimLost)
    assert flow.error.__cause__.args == ("first",)
    assert state(world) is State.PENDING
    assert world.first.writer.settlements == []


def test_a_renewed_lease_is_waited_on(world, effects):
    """The wait is as long as the key is held, not as long as it was held at first."""
    beside = Beside(effects, "charge", ending=OSError("first"))
    flow = beside.started(world, policy=Policy(lease=timedelta(seconds=30)))
    (lease,) = world.first.renewals.running
    world.clock.advance(29)
    lease.renewed(30_000, world.clock.now_ms() + 30_000, world.clock.seconds)
    world.clock.advance(2)
    assert not flow.step().is_done
    beside.tasks[0].step()
    flow.step()
    assert flow.error.args == ("first",)


def test_a_cancelled_caller_frees_nothing_while_a_step_is_under_way(world, effects):
    """The ending goes on without the caller, and it waits for the step too."""
    beside = Beside(effects, "charge", ending=OSError("first"))
    flow = beside.started(world)
    assert isinstance(flow.throw(Stop()).error, Stop)
    last_write = Flow(world.background.pop()).step()
    assert not last_write.is_done
    assert state(world) is State.PENDING
    assert len(world.first.renewals.running) == 1
    beside.tasks[0].step()
    last_write.step()
    assert last_write.is_done
    assert state(world) is State.RELEASED
    assert stored_steps(world) == [("charge", 1)]
    assert world.first.renewals.running == []


def test_a_background_ending_that_is_cancelled_too_leaves_the_key_to_its_lease(world, effects):
    """It was the last that could have waited for the step."""
    beside = Beside(effects, "charge", ending=OSError("first"))
    beside.started(world).throw(Stop())
    last_write = Flow(world.background.pop()).step()
    assert isinstance(last_write.throw(Stop()).error, Stop)
    beside.tasks[0].step()
    assert state(world) is State.PENDING
    assert world.first.renewals.running == []
