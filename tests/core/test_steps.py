"""Steps run once per key: what is stored is not run again, whoever asks and however it ended."""

from __future__ import annotations

import contextvars
import gc
from contextlib import suppress
from datetime import timedelta

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.events import EventKind
from retrysafe.core.model import Payload, State, Step
from retrysafe.core.policy import Policy
from retrysafe.core.steps.history import StepHistory, StepRetry, checked_name
from retrysafe.core.values import codec
from retrysafe.errors import (
    ClaimLost,
    InvalidInput,
    OperationInFlight,
    OutcomeNotStored,
    PolicyInvalid,
    StepNotStored,
    StepReused,
    StepsChanged,
    StepUnavailable,
    StoreMissing,
    StoreRejected,
    StoreUnavailable,
)
from tests.core.building import KEY, call
from tests.core.driving import Fault, Flow, Pause, World, drive
from tests.core.sample_types import Declined
from tests.core.stepped import (
    Effects,
    Stop,
    crash,
    crashed,
    in_order,
    plant,
    run,
    stored_steps,
)

DOWN = StoreUnavailable("no answer")
REFUSED = StoreRejected("too odd")


def record_of(world: World):
    return drive(world.store.read(KEY))


# Once.


def test_a_later_attempt_skips_what_is_done(world, effects):
    """After a crash the finished steps give their stored results, and only the rest runs."""
    crashed(world.first, in_order(effects, "reserve", "charge", then=crash))
    answer = run(world.process(), in_order(effects, "reserve", "charge", "receipt"))
    assert effects.ran == ["reserve", "charge", "receipt"]
    assert answer.value == ["reserve done", "charge done", "receipt done"]
    assert answer.attempt == 2
    assert stored_steps(world) == [("reserve", 1), ("charge", 2), ("receipt", 3)]


def test_steps_survive_a_clean_failure_too(world, effects):
    """A failure that frees the key leaves the steps for the retry."""

    def fail():
        raise Declined("not now")

    with pytest.raises(Declined):
        run(world.first, in_order(effects, "reserve", then=fail))
    assert run(world.first, in_order(effects, "reserve")).value == ["reserve done"]
    assert effects.ran == ["reserve"]


def test_a_first_attempt_reads_nothing_and_a_later_one_reads_once(world, effects):
    """Stored steps cost one read, and only where there can be some."""
    crashed(world.first, in_order(effects, "a", "b", "c", then=crash))
    assert world.first.store.reads == 0
    other = world.process()
    run(other, in_order(effects, "a", "b", "c"))
    assert other.store.reads == 1


def test_stored_steps_can_be_read_before_the_operation_asks(world, effects):
    """A later attempt reads them once, also when they are asked for early; a first one never."""

    def prepared(*names, then=None):
        async def operation(attempt):
            await attempt.load_steps()
            return await in_order(effects, *names, then=then)(attempt)

        return operation

    crashed(world.first, prepared("a", "b", then=crash))
    assert world.first.store.reads == 0
    other = world.process()
    run(other, prepared("a", "b", "c"))
    assert other.store.reads == 1
    assert effects.ran == ["a", "b", "c"]


def test_an_operation_without_steps_asks_the_step_store_nothing(world):
    """Whoever has no steps pays nothing for them, failures included."""
    with pytest.raises(Declined):
        run(world.first, world.first.raising(Declined("x")))
    assert (world.first.store.reads, world.first.store.writes) == (0, [])


def test_the_step_is_stored_before_the_operation_goes_on(world, effects):
    """Whatever comes after a step can rely on it."""
    seen = []

    async def operation(attempt: Attempt):
        await attempt.step("charge", effects.do, "charge")
        seen.extend(stored_steps(world))

    run(world.first, operation)
    assert seen == [("charge", 1)]


def test_an_exception_of_the_call_is_not_a_result(world, effects):
    """A failed step is tried again by the next attempt, and may be asked for again in this one."""
    tries = []

    async def operation(attempt: Attempt):
        def fail_once():
            tries.append(attempt.number)
            if len(tries) == 1:
                raise Declined("busy")
            return len(tries)

        with pytest.raises(Declined):
            await attempt.step("charge", fail_once)
        return await attempt.step("charge", fail_once)

    assert run(world.first, operation).value == 2
    assert stored_steps(world) == [("charge", 1)]


def test_awaitable_calls_are_awaited(world):
    """The port decides how a call is made; the result is what it gives."""

    async def charge(amount):
        return amount * 2

    async def operation(attempt: Attempt):
        return await attempt.step("charge", charge, 21)

    assert run(world.first, operation).value == 42


@pytest.mark.parametrize("value", [None, 0, "", {}, [], False])
def test_empty_results_are_results(world, value):
    """A step that returned nothing much is done all the same."""
    ran = []

    def call_once():
        ran.append(1)
        return value

    async def operation(attempt: Attempt):
        got = await attempt.step("charge", call_once)
        if attempt.is_first:
            crash()
        return [got]

    crashed(world.first, operation)
    assert run(world.process(), operation).value == [value]
    assert ran == [1]


# Names.


@pytest.mark.parametrize("name", ["", "!mine", "a\x00b", "\ud800", "x" * 256, 7, None])
def test_unusable_names_are_refused_before_anything_runs(world, effects, name):
    """A name that some store could not keep would lose the step after its effect."""

    async def operation(attempt: Attempt):
        await attempt.step(name, effects.do, "charge")

    with pytest.raises(InvalidInput):
        run(world.first, operation)
    assert effects.ran == []


def test_any_other_text_is_a_name():
    """Spaces and all alphabets are fine."""
    assert checked_name("naïve 日本 😀 " + "x" * 200)


def test_a_name_is_used_once_in_an_attempt(world, effects):
    """Two steps of one name could not be told apart by a later attempt."""
    with pytest.raises(StepReused, match="two steps named 'charge'"):
        run(world.first, in_order(effects, "charge", "charge"))
    assert effects.ran == ["charge"]
    with pytest.raises(StepReused):
        run(world.first, in_order(effects, "charge", "charge"))
    assert effects.ran == ["charge"]


def test_a_name_that_is_running_is_used_too(world):
    """The second of two steps side by side is refused while the first one runs."""
    refused = []

    async def operation(attempt: Attempt):
        async def slow():
            await Pause()

        first, second = Flow(attempt.step("charge", slow)), Flow(attempt.step("charge", slow))
        for flow in (first, second):
            contextvars.copy_context().run(flow.step)
        refused.append(second.error)
        first.step()

    run(world.first, operation)
    assert isinstance(refused[0], StepReused)


def test_steps_do_not_nest(world, effects):
    """A step inside a step would be forgotten with it; it is refused, and the outer one fails."""

    async def operation(attempt: Attempt):
        async def outer():
            return await attempt.step("inner", effects.do, "inner")

        await attempt.step("outer", outer)

    with pytest.raises(InvalidInput, match="inside another step"):
        run(world.first, operation)
    assert effects.ran == []
    assert stored_steps(world) == []


def test_an_operation_that_has_ended_takes_no_steps(world, effects):
    """Whoever kept the attempt for later is told."""
    kept = []

    async def operation(attempt: Attempt):
        await attempt.step("charge", effects.do, "charge")
        kept.append(attempt)

    run(world.first, operation)
    with pytest.raises(InvalidInput, match="has ended"):
        drive(kept[0].step("late", effects.do, "late"))
    assert effects.ran == ["charge"]


# Order.


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (("charge", "reserve"), "'charge'.*position 2.*position 1"),
        (("charge",), "'charge'.*position 2.*position 1"),
        (("reserve", "new", "charge"), "'charge'.*position 2.*position 3"),
    ],
    ids=["swapped", "left out before", "put in between"],
)
def test_a_changed_order_is_refused(world, effects, later, message):
    """Results are never mixed: the step whose place has changed raises instead of answering."""
    crashed(world.first, in_order(effects, "reserve", "charge", then=crash))
    with pytest.raises(StepsChanged, match=message):
        run(world.process(), in_order(effects, *later))
    assert record_of(world).record.state is State.RELEASED


def test_an_operation_may_not_complete_without_a_recorded_step(world, effects):
    """What an earlier attempt has done must be part of the outcome; the key is freed instead."""
    crashed(world.first, in_order(effects, "reserve", "charge", then=crash))
    with pytest.raises(StepsChanged, match="without asking for 'charge'"):
        run(world.process(), in_order(effects, "reserve"))
    with pytest.raises(StepsChanged, match="without asking for 'reserve', 'charge'"):
        run(world.process(), world.first.returning("no steps at all"))
    assert record_of(world).record.state is State.RELEASED
    assert run(world.process(), in_order(effects, "reserve", "charge")).attempt == 4
    assert effects.ran == ["reserve", "charge"]


def test_a_policy_may_end_a_changed_operation_for_good(world, effects):
    """The policy judges that error as it judges any other."""
    crashed(world.first, in_order(effects, "reserve", then=crash))
    policy = Policy(terminal=StepsChanged)
    for _ in range(2):
        with pytest.raises(StepsChanged):
            run(world.process(), world.first.returning(1), policy=policy)
    assert record_of(world).record.state is State.FAILED


def test_more_steps_may_come_at_the_end(world, effects):
    """New code may go on where the old one stopped."""
    crashed(world.first, in_order(effects, "a", then=crash))
    assert run(world.process(), in_order(effects, "a", "b", "c")).attempt == 2
    assert effects.ran == ["a", "b", "c"]


def branch(flow_of):
    """A flow in a context of its own, as a task is; made when it is first stepped."""
    context = contextvars.copy_context()
    made: list[Flow] = []

    def step():
        if not made:
            made.append(Flow(flow_of()))
        context.run(made[0].step)
        if made[0].error is not None:
            raise made[0].error

    return step


def side_by_side(effects: Effects, order, *, then=None):
    """After `start`, two branches of two steps each, taken in the given order; then `end`."""

    async def operation(attempt: Attempt):
        await attempt.step("start", effects.do, "start")

        async def chain(*names):
            for name in names:
                await attempt.step(name, effects.do, name)
                await Pause()

        branches = {
            "x": branch(lambda: chain("x1", "x2")),
            "y": branch(lambda: chain("y1", "y2")),
        }
        for name in order:
            branches[name]()
        if then is not None:
            then()
        await attempt.step("end", effects.do, "end")
        return "done"

    return operation


@pytest.mark.parametrize("first", ["xyxyxy", "xxyyxy", "yxxxyy", "xy", "xxx", "x"])
@pytest.mark.parametrize("second", ["xyxyxy", "yyxxyx", "yyyxxx"])
def test_the_order_of_steps_side_by_side_does_not_matter(world, effects, first, second):
    """However two branches interleave in two attempts, every step runs once."""
    crashed(world.first, side_by_side(effects, first, then=crash))
    assert run(world.process(), side_by_side(effects, second)).value == "done"
    assert sorted(effects.ran) == ["end", "start", "x1", "x2", "y1", "y2"]
    positions = dict(stored_steps(world))
    assert positions == {"start": 1, "x1": 2, "y1": 2, "x2": 3, "y2": 3, "end": 2}


def test_a_thread_without_the_context_has_no_place(world, effects):
    """Its steps run once as well; only their order cannot be checked, nor does it move others."""

    def anywhere(attempt, name):
        contextvars.Context().run(lambda: drive(attempt.step(name, effects.do, name)))

    def operation_with(*names, then=None):
        async def operation(attempt: Attempt):
            await attempt.step("a", effects.do, "a")
            for name in names:
                anywhere(attempt, name)
            if then is not None:
                then()
            await attempt.step("b", effects.do, "b")

        return operation

    crashed(world.first, operation_with("x", "y", then=crash))
    run(world.process(), operation_with("y", "x", "z"))
    assert effects.ran == ["a", "x", "y", "z", "b"]
    assert dict(stored_steps(world)) == {"x": 0, "y": 0, "z": 0, "a": 1, "b": 2}


def test_an_operation_inside_an_operation_has_its_own_order(world, effects):
    """The inner one's steps do not move the outer one's, whether it runs or is replayed."""
    inner_process = world.process()
    inner_call = call(key=type(KEY)("inner", caller="tenant-1"))

    async def outer(attempt: Attempt):
        await attempt.step("a", effects.do, "a")
        inner = inner_process.operating(in_order(effects, "i1", "i2"))
        await inner_process.engine.answer(inner_call, inner)
        await attempt.step("b", effects.do, "b")
        if attempt.is_first:
            crash()

    crashed(world.first, outer)
    run(world.process(), outer)
    assert effects.ran == ["a", "i1", "i2", "b"]
    assert stored_steps(world) == [("a", 1), ("b", 2)]


def test_attempts_that_are_over_leave_nothing_in_the_context(world):
    """A thread that runs operations for years does not collect their steps."""

    def many():
        for number in range(5):
            book = StepHistory(str(number), is_first=True)
            book.advance(1)
            del book
            gc.collect()
        last = StepHistory("last", is_first=True)
        last.advance(3)
        (trail,) = [
            value for var, value in contextvars.copy_context().items() if "steps" in var.name
        ]
        assert len(trail) == 1
        assert last.place(is_known=False) == 3

    # An empty one: errors that are parameters of other tests keep their attempts alive.
    contextvars.Context().run(many)


def test_steps_side_by_side_read_the_stored_ones_once(world, effects):
    """The second branch waits for the first one's read, and asks itself if that failed."""
    crashed(world.first, in_order(effects, "a", then=crash))
    other = world.process()
    other.store.read_faults.append(Fault(pauses=True))
    reads = []

    async def operation(attempt: Attempt):
        flows = [Flow(attempt.step(name, effects.do, name)) for name in ("a", "b")]
        for _ in range(4):
            for flow in flows:
                if not flow.is_done:
                    contextvars.copy_context().run(flow.step)
        reads.append(other.store.reads)
        return [flow.value for flow in flows]

    assert run(other, operation).value == ["a done", "b done"]
    assert reads == [1]


def test_a_thread_that_comes_just_too_late_does_not_read_again(world, effects):
    """Somebody else has read the stored steps between its look and its lock."""
    crashed(world.first, in_order(effects, "a", then=crash))
    other = world.process()

    class LateLock:
        """A lock that is given while another thread finishes its reading."""

        def __enter__(self):
            steps = attempts[0].steps
            if steps is not None and steps.book.stored is None:
                steps.book.stored = {}

        def __exit__(self, *_):
            return None

    attempts = []

    async def operation(attempt: Attempt):
        attempts.append(attempt)
        await attempt.step("b", effects.do, "b")

    other.ports.executor.step_lock = LateLock()
    run(other, operation)
    assert other.store.reads == 0
    assert effects.ran == ["a", "b"]


# Results.


def test_a_result_without_a_form_is_done_without_result(world):
    """The first attempt goes on with it; a later one gets a clear error and runs nothing."""
    ran = []

    def odd():
        ran.append(1)
        return object()

    async def operation(attempt: Attempt):
        value = await attempt.step("charge", odd)
        assert type(value) is object
        crash()

    crashed(world.first, operation)
    assert EventKind.WITHHELD in world.kinds
    with pytest.raises(StepUnavailable, match=r"'charge'.*done and will not run again.*object"):
        run(world.process(), operation)
    assert ran == [1]


def test_a_result_over_the_limit_is_done_without_result(world):
    """The limit of outcomes holds for steps too."""
    policy = Policy(outcome_limit_bytes=100)

    async def operation(attempt: Attempt):
        await attempt.step("charge", lambda: "x" * 200)
        crash()

    crashed(world.first, operation, policy=policy)
    with pytest.raises(StepUnavailable, match="limit is 100"):
        run(world.process(), operation, policy=policy)


@pytest.mark.parametrize(
    "payload",
    [
        Payload("form.9", b"", b""),
        Payload(codec.JSON, b"", b"{"),
        Payload(codec.WITHHELD, b"", b"?"),
    ],
    ids=["unknown form", "damaged", "withheld for an unreadable reason"],
)
def test_a_stored_result_that_cannot_be_read_is_never_run_again(world, effects, payload):
    """Whatever is stored, the step is done."""
    plant(world, ("charge", 1, payload))
    with pytest.raises(StepUnavailable, match="will not run again"):
        run(world.process(), in_order(effects, "charge"))
    assert effects.ran == []


# The fence.


def taken_over(world: World) -> None:
    """Somebody else takes the key and ends it."""
    world.clock.advance(60)
    world.process().answer(call())


def test_a_zombie_records_no_step(world, effects):
    """Its write is refused, it is told, and its ending does not touch the successor's outcome."""

    async def operation(attempt: Attempt):
        def slow():
            effects.do("charge")
            taken_over(world)

        await attempt.step("charge", slow)

    with pytest.raises(ClaimLost, match="steps are another owner's"):
        run(world.first, operation)
    assert record_of(world).steps == []
    assert record_of(world).record.state is State.SUCCEEDED
    assert world.kinds.count(EventKind.LOST) == 1


def test_a_zombie_starts_no_step(world, effects):
    """An owner whose lease ran out asks the store before the next effect, and stops."""

    async def operation(attempt: Attempt):
        taken_over(world)
        await attempt.step("charge", effects.do, "charge")

    with pytest.raises(ClaimLost):
        run(world.first, operation)
    assert effects.ran == []


def test_an_owner_that_stood_still_goes_on_if_nobody_came(world, effects):
    """The store confirms the claim before the step starts, with a new lease."""

    async def operation(attempt: Attempt):
        world.clock.advance(60)
        await attempt.step("charge", effects.do, "charge")
        assert attempt.time_left.total_seconds() == 30

    run(world.first, operation)
    assert effects.ran == ["charge"]
    assert len(world.first.store.confirmed) == 1


def test_no_step_starts_on_a_lease_that_nobody_can_confirm(world, effects):
    """Neither when the store says nothing, nor past the limit of the run."""

    async def silent(attempt: Attempt):
        world.clock.advance(60)
        world.first.store.is_silent = True
        await attempt.step("charge", effects.do, "charge")

    with pytest.raises(ClaimLost):
        run(world.first, silent)
    world.first.store.is_silent = False

    async def endless(attempt: Attempt):
        world.clock.advance(120)
        await attempt.step("charge", effects.do, "charge")

    with pytest.raises(ClaimLost):
        run(world.first, endless, policy=Policy(run_limit=timedelta(seconds=60)))
    assert effects.ran == []


def test_a_lost_claim_is_not_tried_again(world, effects):
    """No retry policy helps an owner that has lost its key."""

    async def operation(attempt: Attempt):
        def lose():
            effects.do("charge")
            attempt._lease.revoke()
            attempt.raise_if_lost()

        await attempt.step("charge", lose, retry=StepRetry(tries=5))

    with pytest.raises(ClaimLost):
        run(world.first, operation)
    assert effects.ran == ["charge"]


def test_a_successors_steps_are_not_taken_for_ones_own(world, effects):
    """Reading the stored steps also tells that the key has a new owner."""
    crashed(world.first, in_order(effects, "a", then=crash))

    async def operation(attempt: Attempt):
        world.clock.advance(60)
        run(world.process(), in_order(effects, "a", "theirs"))
        await attempt.step("a", effects.do, "mine")

    with pytest.raises(ClaimLost):
        run(world.process(), operation)
    assert effects.ran == ["a", "theirs"]


def test_a_claim_that_was_lost_stays_lost_for_its_steps(world, effects):
    """The store takes the write again, after a late copy of the claim; the step is not ours."""

    async def operation(attempt: Attempt):
        async def charge() -> str:
            attempt._lease.revoke()  # As a renewal does that the store has refused.
            return "charged"

        await attempt.step("charge", charge)
        effects.ran.append("went on")

    with pytest.raises(ClaimLost):
        run(world.first, operation)
    assert effects.ran == []


@pytest.mark.parametrize(("theirs", "goes_on"), [(b'"other"', False), (b'"charged"', True)])
def test_a_result_that_another_owner_has_stored_is_not_ones_own(world, effects, theirs, goes_on):
    """A late copy of the claim brings the token back; only an equal result can be gone on with."""

    async def operation(attempt: Attempt):
        async def charge() -> str:
            step = Step("charge", 1, Payload(codec.JSON, b"", theirs))
            await world.store.record_step(attempt._opened_steps().writer.write_of(step))
            return "charged"

        await attempt.step("charge", charge)
        effects.ran.append("went on")

    if goes_on:
        run(world.first, operation)
    else:
        with pytest.raises(ClaimLost):
            run(world.first, operation)
    assert effects.ran == (["went on"] if goes_on else [])
    assert [step.payload.body for step in drive(world.store.read(KEY)).steps] == [theirs]


def test_a_record_that_is_gone_is_a_lost_claim(world, effects):
    """A key that was removed under a running attempt has no steps to go on from."""
    crashed(world.first, in_order(effects, "a", then=crash))

    async def operation(attempt: Attempt):
        world.store._records.clear()
        await attempt.step("a", effects.do, "again")

    with pytest.raises(ClaimLost):
        run(world.process(), operation)
    assert effects.ran == ["a"]


# A store that fails.


def test_the_stored_steps_are_asked_for_again(world, effects):
    """Two lost answers are ridden out; nothing has run meanwhile."""
    crashed(world.first, in_order(effects, "a", then=crash))
    other = world.process()
    other.store.read_faults.extend([Fault(DOWN), Fault(DOWN)])
    assert run(other, in_order(effects, "a")).attempt == 2
    assert other.clock.slept == [0.05, 0.1]
    assert effects.ran == ["a"]


def test_a_silent_store_stops_the_operation_before_the_step(world, effects):
    """Without the stored steps nothing may run; the failure frees the key."""
    crashed(world.first, in_order(effects, "a", then=crash))
    other = world.process()
    other.store.read_faults.extend([Fault(DOWN)] * 3)
    with pytest.raises(StoreUnavailable):
        run(other, in_order(effects, "a"))
    assert effects.ran == ["a"]
    assert world.kinds.count(EventKind.STORE_UNAVAILABLE) == 3
    assert record_of(world).record.state is State.RELEASED


def test_a_silent_store_at_the_end_leaves_the_key_to_its_lease(world):
    """Whether steps were left out cannot be told, so nothing is settled."""
    crashed(world.first, in_order(Effects(), then=crash))
    other = world.process()
    other.store.read_faults.extend([Fault(DOWN)] * 3)
    with pytest.raises(OutcomeNotStored, match="no answer") as caught:
        run(other, other.returning("value"))
    assert caught.value.value == "value"
    assert record_of(world).record.state is State.PENDING


def test_a_step_is_written_until_it_stands(world, effects):
    """A lost answer is asked for again; the first result stands, and the step ran once."""
    world.first.store.write_faults.extend([Fault(DOWN), Fault(DOWN, is_after=True)])
    assert run(world.first, in_order(effects, "charge")).value == ["charge done"]
    assert world.first.clock.slept == [0.05, 0.1]
    assert effects.ran == ["charge"]
    assert stored_steps(world) == [("charge", 1)]


def test_patience_ends_and_the_operation_is_reported(world, effects):
    """The step ran and is not remembered: its value comes with the error; only the lease frees."""
    world.first.store.write_faults.extend([Fault(DOWN)] * 100)
    policy = Policy(settle_patience=timedelta(seconds=1))
    with pytest.raises(StepNotStored, match="ran, but its result could not be stored") as caught:
        run(world.first, in_order(effects, "charge"), policy=policy)
    assert caught.value.value == "charge done"
    assert max(world.first.clock.slept) <= 1.0
    with pytest.raises(OperationInFlight):
        run(world.process(), in_order(effects, "charge"))
    assert effects.ran == ["charge"]
    world.clock.advance(60)
    run(world.process(), in_order(effects, "charge"))
    assert effects.ran == ["charge", "charge"]


@pytest.mark.parametrize("is_after", [False, True])
def test_a_step_of_which_nobody_knows_is_written_again_when_it_is_asked_for_again(
    world, effects, is_after
):
    """It is the attempt's own, whether it stands or not: no second step, and no second run."""
    world.first.store.write_faults.extend([Fault(DOWN, is_after=is_after)] * 2)
    values = []

    async def operation(attempt: Attempt):
        for _ in range(2):
            with pytest.raises(StepNotStored):
                await attempt.step("charge", effects.do, "charge")
        values.append(await attempt.step("charge", effects.do, "charge"))
        await attempt.step("mail", effects.do, "mail")
        with pytest.raises(StepReused):
            await attempt.step("charge", effects.do, "charge")

    run(world.first, operation, policy=Policy(settle_patience=timedelta(0)))
    assert values == ["charge done"]
    assert effects.ran == ["charge", "mail"]
    assert stored_steps(world) == [("charge", 1), ("mail", 2)]


class _Incomparable:
    def __eq__(self, other: object) -> bool:
        raise TypeError("no")

    __hash__ = object.__hash__


@pytest.mark.parametrize("asked", ["another", _Incomparable()])
def test_a_step_of_which_nobody_knows_is_not_taken_for_another_call(world, effects, asked):
    """The name is the same and what is asked for is not: nothing is given back in silence."""
    world.first.store.write_faults.append(Fault(DOWN))

    async def operation(attempt: Attempt):
        with pytest.raises(StepNotStored):
            await attempt.step("charge", effects.do, "charge")
        with pytest.raises(StepReused):
            await attempt.step("charge", effects.do, asked)

    run(world.first, operation, policy=Policy(settle_patience=timedelta(0)))
    assert effects.ran == ["charge"]


def test_an_attempt_that_has_ended_takes_no_step(world, effects):
    """The step would run, and then hear that another owner has the key."""
    kept = []

    async def operation(attempt: Attempt):
        kept.append(attempt)

    run(world.first, operation)
    assert kept[0].time_left == timedelta()
    with pytest.raises(InvalidInput, match="attempt 1 of 'order-1' has ended"):
        kept[0].step("charge", effects.do, "charge")
    assert effects.ran == []


def test_the_rest_is_written_before_the_key_is_freed(world, effects):
    """A store that is back by then remembers the step after all, and the retry skips it."""
    world.first.store.write_faults.append(Fault(StoreMissing("gone")))
    with pytest.raises(StepNotStored):
        run(world.first, in_order(effects, "charge"))
    assert world.first.store.writes == ["charge", "charge"]
    run(world.process(), in_order(effects, "charge"))
    assert effects.ran == ["charge"]


def test_the_rest_tells_of_a_lost_claim(world, effects):
    """A zombie whose store was silent learns at the end that it has nothing to say."""
    world.first.store.write_faults.append(Fault(StoreMissing("gone")))

    async def operation(attempt: Attempt):
        try:
            await attempt.step("charge", effects.do, "charge")
        finally:
            taken_over(world)

    with pytest.raises(ClaimLost) as caught:
        run(world.first, operation)
    assert isinstance(caught.value.__cause__, StepNotStored)
    assert world.first.writer.settlements == []


def test_the_rest_is_insisted_on_before_the_key_is_freed(world, effects):
    """A store that is silent for longer than one patience is asked for another one."""
    world.first.store.write_faults.extend([Fault(StoreMissing("gone")), Fault(DOWN), Fault(DOWN)])
    with pytest.raises(StepNotStored):
        run(world.first, in_order(effects, "charge"))
    assert world.first.store.writes == ["charge"] * 4
    assert world.first.clock.slept == [0.05, 0.1]
    assert record_of(world).record.state is State.RELEASED
    assert stored_steps(world) == [("charge", 1)]


def test_a_key_whose_step_cannot_be_recorded_is_not_freed(world, effects):
    """Its retry would run the step again at once; the lease frees it, and the caller is told."""
    world.first.store.write_faults.extend([Fault(StoreMissing("gone"))] * 2)
    with pytest.raises(StepNotStored) as caught:
        run(world.first, in_order(effects, "charge"))
    assert caught.value.value == "charge done"
    assert record_of(world).record.state is State.PENDING
    assert world.first.writer.settlements == []
    assert EventKind.SETTLE_FAILED in world.kinds


def test_another_failure_after_a_step_that_cannot_be_recorded_is_the_cause(world, effects):
    """What the operation made of it does not free the key either."""
    world.first.store.write_faults.extend([Fault(StoreMissing("gone"))] * 2)

    async def operation(attempt: Attempt):
        try:
            await attempt.step("charge", effects.do, "charge")
        except StepNotStored:
            raise OSError("the operation's own") from None

    with pytest.raises(OutcomeNotStored, match="'charge'") as caught:
        run(world.first, operation)
    assert isinstance(caught.value.__cause__, OSError)
    assert record_of(world).record.state is State.PENDING


@pytest.mark.parametrize("is_gone", [True, False], ids=["the store is gone", "the store is back"])
def test_a_changed_operation_is_not_freed_without_its_steps(world, effects, is_gone):
    """The refusal of an ending frees the key as any failure does."""
    crashed(world.first, in_order(effects, "a", then=crash))
    other = world.process()
    other.store.write_faults.extend([Fault(StoreMissing("gone"))] * (1 + is_gone))

    async def operation(attempt: Attempt):
        with pytest.raises(StepNotStored):
            await attempt.step("b", effects.do, "b")

    with pytest.raises(OutcomeNotStored if is_gone else StepsChanged):
        run(other, operation)
    assert record_of(world).record.state is (State.PENDING if is_gone else State.RELEASED)
    assert ("b", 1) in stored_steps(world) or is_gone


def test_a_step_is_recorded_before_its_operation_is_undone(world, effects):
    """A crash while undoing leaves the rest to an attempt that knows recorded steps only."""
    world.first.store.write_faults.append(Fault(StoreMissing("gone")))

    async def operation(attempt: Attempt):
        with suppress(StepNotStored):
            await attempt.step("charge", effects.do, "charge", compensate=lambda _: crash())
        raise Declined("no")

    policy = Policy(terminal=Declined)
    crashed(world.first, operation, policy=policy)
    assert stored_steps(world) == [("charge", 1), ("!failed", 2)]

    async def again(attempt: Attempt):
        await attempt.step("charge", effects.do, "charge", compensate=effects.undo)

    with pytest.raises(Declined):
        run(world.process(), again, policy=policy)
    assert effects.ran == ["charge", "undo of charge done"]


def test_a_cancelled_write_is_repeated_before_the_key_is_freed(world, effects):
    """A task group cancels the sibling of a failed step while it is being recorded."""
    world.first.store.write_faults.append(Fault(pauses=True))

    async def operation(attempt: Attempt):
        task = Flow(attempt.step("charge", effects.do, "charge"))
        context = contextvars.copy_context()
        context.run(task.step)
        context.run(task.throw, Stop())
        raise OSError("the sibling's")

    with pytest.raises(OSError, match="sibling"):
        run(world.first, operation)
    assert stored_steps(world) == [("charge", 1)]
    assert record_of(world).record.state is State.RELEASED
    assert drive(world.background.pop()) is None


def test_a_refused_result_is_done_without_result(world, effects):
    """What the store cannot hold is remembered without its value."""
    world.first.store.write_faults.append(Fault(REFUSED))
    crashed(world.first, in_order(effects, "charge", then=crash))
    with pytest.raises(StepUnavailable, match="refused it: too odd"):
        run(world.process(), in_order(effects, "charge"))
    assert effects.ran == ["charge"]


def test_a_store_that_refuses_even_that_is_reported(world, effects):
    """Nothing is left to be written, and waiting would not help."""
    world.first.store.write_faults.extend([Fault(REFUSED)] * 2)
    with pytest.raises(StepNotStored):
        run(world.first, in_order(effects, "charge"))
    assert world.first.clock.slept == []


# Cancellation.


def test_a_cancelled_caller_does_not_lose_a_finished_step(world, effects):
    """The write goes on without the caller."""
    world.first.store.write_faults.append(Fault(pauses=True))
    flow = world.first.start(call(), world.first.operating(in_order(effects, "charge")))
    assert isinstance(flow.throw(Stop()).error, Stop)
    assert stored_steps(world) == []
    drive(world.background.pop())
    assert stored_steps(world) == [("charge", 1)]
    world.clock.advance(60)
    run(world.process(), in_order(effects, "charge"))
    assert effects.ran == ["charge"]


def test_a_step_that_nobody_can_write_any_more_is_reported(world, effects):
    """The loop or the process is about to end: the step runs again, and somebody should know."""
    world.first.store.write_faults.append(Fault(pauses=True))
    flow = world.first.start(call(), world.first.operating(in_order(effects, "charge")))
    flow.throw(Stop())
    world.abandon.pop()("the loop has ended")
    told = world.heard[-1]
    assert told.kind is EventKind.SETTLE_FAILED
    assert told.detail == "the result of step 'charge': the loop has ended"
    world.background.pop().close()


def test_a_background_ending_gives_up_quietly(world, effects):
    """There is nobody to tell; the step runs again, as after a crash."""
    world.first.store.write_faults.extend([Fault(pauses=True), Fault(StoreMissing("gone"))])
    flow = world.first.start(call(), world.first.operating(in_order(effects, "charge")))
    flow.throw(Stop())
    assert drive(world.background.pop()) is None
    assert stored_steps(world) == []


# Retries.


def test_a_step_has_its_own_retries(world):
    """Pauses grow up to the limit, by the waiting port; the last failure is the step's."""
    tries = []

    def fail():
        tries.append(1)
        raise Declined(f"try {len(tries)}")

    retry = StepRetry(
        tries=5, pause=timedelta(seconds=1), growth=3, pause_limit=timedelta(seconds=5)
    )

    async def operation(attempt: Attempt):
        await attempt.step("charge", fail, retry=retry)

    with pytest.raises(Declined, match="try 5"):
        run(world.first, operation)
    assert world.first.clock.slept == [1.0, 3.0, 5.0, 5.0]


def test_a_later_try_may_succeed(world):
    """Its result is the step's."""
    tries = []

    def fail_twice():
        tries.append(1)
        if len(tries) < 3:
            raise Declined("busy")
        return "done"

    async def operation(attempt: Attempt):
        return await attempt.step("charge", fail_twice, retry=StepRetry())

    assert run(world.first, operation).value == "done"


def test_only_the_named_exceptions_are_tried_again(world, effects):
    """Anything else is the step's failure at once."""

    async def operation(attempt: Attempt):
        def fail():
            effects.do("charge")
            raise Declined("no")

        await attempt.step("charge", fail, retry=StepRetry(on=OSError))

    with pytest.raises(Declined):
        run(world.first, operation)
    assert effects.ran == ["charge"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tries": 0},
        {"tries": True},
        {"tries": "3"},
        {"pause": 1},
        {"pause": timedelta(seconds=-1)},
        {"pause_limit": None},
        {"growth": 0.5},
        {"growth": "2"},
        {"on": BaseException},
        {"on": (Declined, 3)},
        {"on": 3},
    ],
    ids=str,
)
def test_a_retry_that_makes_no_sense_is_refused(wrong):
    """When it is made, not when it is needed."""
    with pytest.raises(PolicyInvalid):
        StepRetry(**wrong)


def test_pauses_never_overflow():
    """However many tries there were."""
    assert StepRetry(tries=10_000).pause_seconds(9_999) == 10.0


@pytest.mark.parametrize("wrong", [{"retry": 3}, {"terminal": (3,)}], ids=str)
def test_options_that_make_no_sense_are_refused(world, effects, wrong):
    """Before the call is made."""

    async def operation(attempt: Attempt):
        await attempt.step("charge", effects.do, "charge", **wrong)

    with pytest.raises(PolicyInvalid):
        run(world.first, operation)
    assert effects.ran == []
