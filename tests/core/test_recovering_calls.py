"""The engine's calls for a worker: they take over what was seen abandoned, or nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe.core.call import Call
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Condition, Ending, Fingerprint, OperatorCommand, Payload, State
from retrysafe.core.policy import Policy
from retrysafe.errors import (
    AttemptsExhausted,
    ClaimLost,
    CompensationFailed,
    KeyReused,
    OperationInFlight,
    StepNotStored,
    StoreUnavailable,
)
from tests.core.building import KEY, MARK, OTHER_MARK, call
from tests.core.driving import Fault, World, drive
from tests.core.sample_types import Declined
from tests.core.stepped import Effects, crash, crashed, in_order, run, stored_steps

ARGUMENTS = Payload("json.1", b"", b"[[1],{}]")
TERMINAL = Policy(terminal=Declined)


def abandoned(world: World, *, key: Key = KEY, **options: object) -> None:
    """A first attempt that ends with its process; its lease runs out."""
    other = world.process()
    flow = other.start(call(key=key, arguments=ARGUMENTS, **options), other.pausing(None))
    flow.throw(GeneratorExit())
    world.clock.advance(60)


def recovering(world: World, **options: object) -> Call:
    """The call of a worker that sees the key as it is now."""
    record = drive(world.store.read(KEY)).record
    mark = Fingerprint(record.rule, record.fingerprint)
    return call(mark, recovers=record.token, **options)


def stored(world: World):
    return drive(world.store.read(KEY))


def test_arguments_travel_with_the_claim_only():
    """They are stored when the claim is, and a call without them stores none."""
    world = World()
    abandoned(world)
    assert stored(world).arguments == ARGUMENTS
    other = Key("order-2", caller="tenant-1")
    world.first.answer(call(key=other))
    assert drive(world.store.read(other)).arguments is None


def test_a_worker_finishes_what_was_abandoned():
    """As the next attempt; the caller who comes back later gets its outcome."""
    world = World()
    abandoned(world)
    answer = world.first.answer(recovering(world))
    assert (answer.value, answer.replayed, answer.attempt) == (7, False, 2)
    assert world.ran == [1, 2]
    assert world.kinds[-2:] == ["taken over", "completed"]
    assert world.process().answer(call()).replayed


def test_a_worker_does_not_weaken_the_check_of_requests():
    """Whoever comes with another request is refused, while it runs and after."""
    world = World(cache=True)
    abandoned(world)
    process = world.first
    flow = process.start(recovering(world), process.pausing(7))
    with pytest.raises(KeyReused):
        process.answer(call(OTHER_MARK))
    with pytest.raises(OperationInFlight):
        process.answer(call(MARK))
    assert flow.step().value.value == 7
    with pytest.raises(KeyReused):
        process.answer(call(OTHER_MARK))
    assert process.answer(call(MARK)).replayed
    assert stored(world).record.fingerprint == MARK.digest


def test_a_worker_never_starts_a_new_life():
    """The key that it saw was ended, outlived and swept meanwhile: there is nothing to finish."""
    world = World()
    abandoned(world)
    seen = recovering(world)
    world.first.answer(call())
    world.clock.advance(Policy().active_window.total_seconds())
    with pytest.raises(ClaimLost, match="nothing was run"):
        world.first.answer(seen)
    assert drive(world.store.sweep(10)).keys == 1
    with pytest.raises(ClaimLost):
        world.first.answer(seen)
    assert stored(world) is None
    assert world.ran == [1, 2]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_worker_loses_to_a_retry(has_ended):
    """Whoever takes over first, runs; the worker runs nothing."""
    world = World()
    abandoned(world)
    seen = recovering(world)
    other = world.process()
    flow = other.start(call(), other.pausing(7))
    if has_ended:
        flow.step()
    with pytest.raises(ClaimLost):
        world.first.answer(seen)
    assert world.ran == [1, 2]


def test_a_retry_loses_to_a_worker():
    world = World()
    abandoned(world)
    worker = world.process()
    flow = worker.start(recovering(world), worker.pausing(7))
    with pytest.raises(OperationInFlight):
        world.first.answer(call())
    assert flow.step().value.value == 7
    assert world.first.answer(call()).replayed


def test_a_worker_leaves_what_an_operator_released():
    """The operator may have stopped it on purpose; a retry may still come."""
    world = World()
    abandoned(world)
    seen = recovering(world)
    drive(world.store.operate(KEY, OperatorCommand.RELEASE))
    with pytest.raises(ClaimLost):
        world.first.answer(seen)
    assert world.ran == [1]


def test_a_worker_leaves_an_owner_that_was_only_slow():
    """Its renewal came late, and before anybody took over."""
    world = World()
    process = world.first
    flow = process.start(call(arguments=ARGUMENTS), process.pausing(7))
    seen = recovering(world)
    with pytest.raises(OperationInFlight):
        world.process().answer(seen)
    assert flow.step().value.value == 7
    assert world.ran == [1]


@pytest.mark.parametrize("is_after", [False, True])
def test_a_takeover_whose_answer_was_lost_is_asked_for_again(is_after):
    """With the same token, so that it finds its own claim and counts no attempt twice."""
    world = World()
    abandoned(world)
    world.first.store.take_over_faults.append(Fault(StoreUnavailable("down"), is_after))
    answer = world.first.answer(recovering(world))
    assert (answer.attempt, world.ran) == (2, [1, 2])


def test_a_failure_for_good_is_stored():
    world = World()
    abandoned(world)
    with pytest.raises(Declined):
        world.first.answer(recovering(world, policy=TERMINAL), world.first.raising(Declined("no")))
    assert stored(world).record.state is State.FAILED


def test_a_failure_that_would_free_the_key_leaves_it_to_the_lease():
    """Nobody was told of it, so nobody would come back: the key is abandoned once more."""
    world = World()
    abandoned(world)
    with pytest.raises(ValueError, match="down"):
        world.first.answer(recovering(world), world.first.raising(ValueError("down")))
    record = stored(world).record
    assert (record.state, record.attempt) == (State.PENDING, 2)
    assert stored(world).condition is Condition.RUNNING
    assert world.first.renewals.running == []
    assert world.kinds[-1] == "postponed"
    assert world.heard[-1].detail == "down"
    world.clock.advance(Policy().lease.total_seconds())
    assert stored(world).condition is Condition.ABANDONED
    assert world.first.answer(recovering(world)).attempt == 3


def test_a_worker_gives_up_at_the_attempt_limit():
    world = World()
    abandoned(world)
    policy = Policy(attempt_limit=1)
    with pytest.raises(AttemptsExhausted):
        world.first.answer(recovering(world, policy=policy))
    assert stored(world).record.state is State.FAILED
    assert world.ran == [1]


def test_the_failures_of_a_worker_end_at_the_attempt_limit():
    """It frees no key, so what it runs in vain is left to its lease and counts as a crash."""
    world = World()
    abandoned(world)
    policy = Policy(attempt_limit=3)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            world.first.answer(
                recovering(world, policy=policy), world.first.raising(ConnectionError("down"))
            )
        world.clock.advance(policy.lease.total_seconds())
    with pytest.raises(AttemptsExhausted, match="attempt_limit=3 is reached"):
        world.first.answer(recovering(world, policy=policy))
    assert world.ran == [1, 2, 3]


def test_a_worker_goes_on_from_the_last_step():
    world = World()
    effects = Effects()
    crashed(world.first, in_order(effects, "reserve", "charge", then=crash))
    operation = in_order(effects, "reserve", "charge", "mail")
    answer = world.first.answer(recovering(world), world.first.operating(operation))
    assert effects.ran == ["reserve", "charge", "mail"]
    assert answer.value == ["reserve done", "charge done", "mail done"]


def test_a_worker_goes_on_undoing():
    """A failure that was stored before the crash is ended, and what cannot be undone waits."""
    world = World()
    effects = Effects()
    problems = [ConnectionError("down"), None]

    def undo(result):
        problem = problems.pop(0) if problems else None
        if problem is not None:
            raise problem
        effects.undo(result)

    async def operation(attempt):
        await attempt.step("charge", effects.do, "charge", compensate=undo)
        raise Declined("no")

    def stop_at_undo(result):
        crash()

    async def first(attempt):
        await attempt.step("charge", effects.do, "charge", compensate=stop_at_undo)
        raise Declined("no")

    crashed(world.first, first, policy=TERMINAL)
    seen = recovering(world, policy=TERMINAL)
    with pytest.raises(CompensationFailed):
        world.first.answer(seen, world.first.operating(operation))
    assert stored(world).record.state is State.PENDING
    world.clock.advance(60)
    with pytest.raises(Declined):
        world.first.answer(recovering(world, policy=TERMINAL), world.first.operating(operation))
    assert effects.ran == ["charge", "undo of charge done"]
    assert stored(world).record.state is State.FAILED
    assert [name for name, _ in stored_steps(world)] == ["charge", "!failed", "!undo charge"]


def test_a_caller_of_the_same_process_is_not_told_of_a_lost_takeover():
    """Its leader lost what it wanted to recover; the follower asks for itself, and runs."""
    world = World()
    abandoned(world)
    seen = recovering(world)
    drive(world.store.operate(KEY, OperatorCommand.RELEASE))
    process = world.first
    process.store.take_over_faults.append(Fault(pauses=True))
    leader = process.start(seen)
    follower = process.start(call())
    leader.step()
    assert isinstance(leader.error, ClaimLost)
    assert follower.step().value.value == 7
    # The operator's release starts the numbers over.
    assert world.ran == [1, 1]


def test_a_worker_that_is_cancelled_while_its_steps_are_stored_leaves_the_key_to_the_lease():
    """Its ending outlives it, and frees the key for nobody."""
    world = World()
    abandoned(world)
    process = world.first

    async def operation(attempt):
        try:
            await attempt.step("charge", lambda: "charged")
        except StepNotStored:
            raise ValueError("down") from None

    down = StoreUnavailable("down")
    patience = Policy(settle_patience=timedelta(0))
    process.store.write_faults.extend([Fault(down), Fault(pauses=True)])
    flow = process.start(recovering(world, policy=patience), process.operating(operation))
    flow.throw(Cancelled())
    assert isinstance(flow.error, Cancelled)
    (last_write,) = world.background
    drive(last_write)
    assert stored(world).record.state is State.PENDING
    assert [name for name, _ in stored_steps(world)] == ["charge"]
    assert world.kinds[-1] == "postponed"
    assert process.renewals.running == []


class Cancelled(BaseException):
    """A task that is cancelled."""


def test_a_retryable_ending_of_a_caller_still_frees_the_key():
    """Only a worker's own call is left to the lease."""
    world = World()
    with pytest.raises(ValueError, match="down"):
        world.first.answer(call(), world.first.raising(ValueError("down")))
    assert stored(world).record.state is State.RELEASED
    assert Policy(lease=timedelta(seconds=1)).unlisted is Ending.RELEASED
    assert run(world.first, in_order(Effects())).attempt == 2
