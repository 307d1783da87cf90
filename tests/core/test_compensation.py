"""How an operation with steps ends: what is terminal, what is undone, and what a crash leaves."""

from __future__ import annotations

from contextlib import suppress

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.model import Decision, Ending, Payload, State
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Fate
from retrysafe.core.steps.history import StepRetry
from retrysafe.core.values import codec
from retrysafe.errors import (
    ClaimLost,
    CompensationFailed,
    InvalidInput,
    OperationFailed,
    OperationUndone,
    OutcomeNotStored,
    StepReused,
    StepsChanged,
    StoreMissing,
    StoreUnavailable,
)
from tests.core.building import call
from tests.core.driving import Fault, Flow, World, drive, state
from tests.core.sample_types import Declined
from tests.core.stepped import Effects, Stop, crashed, plant, run, stored_steps
from tests.core.transacting import FakeTransaction

FINAL = Policy(terminal=Declined)
DOWN = StoreUnavailable("no answer")
ABSENT = StoreMissing("gone")


def undoable(effects: Effects, *names: str, error: BaseException | None = None, undo=None):
    """An operation of steps that can be undone, which then raises or returns."""

    async def operation(attempt: Attempt):
        for name in names:
            compensate = undo or effects.undo
            await attempt.step(name, effects.do, name, compensate=compensate)
        if error is not None:
            raise error
        return "complete"

    return operation


# Terminal for the operation.


def test_a_terminal_step_failure_ends_the_operation_for_good(world, effects):
    """Whatever the policy says of that exception; it is tried once, and never again."""

    async def operation(attempt: Attempt):
        def decline():
            effects.do("charge")
            raise Declined("no credit")

        await attempt.step("charge", decline, terminal=Declined, retry=StepRetry(tries=5))

    with pytest.raises(Declined):
        run(world.first, operation)
    assert state(world) is State.FAILED
    with pytest.raises(OperationFailed, match="no credit"):
        run(world.process(), operation)
    assert effects.ran == ["charge"]


def test_a_terminal_failure_that_is_handled_is_none(world, effects):
    """The operation may go another way; only what leaves it ends it."""

    async def operation(attempt: Attempt):
        def decline():
            raise Declined("no credit")

        try:
            await attempt.step("charge", decline, terminal=Declined)
        except Declined:
            raise OSError("another failure") from None

    with pytest.raises(OSError, match="another failure"):
        run(world.first, operation)
    assert state(world) is State.RELEASED


# Undoing.


def test_a_failure_for_good_undoes_the_steps_in_reverse(world, effects):
    """Each gets its step's result, and only then is the failure stored."""
    seen = []

    def undo(result):
        seen.append(state(world))
        effects.undo(result)

    with pytest.raises(Declined):
        run(
            world.first,
            undoable(effects, "reserve", "charge", error=Declined("no"), undo=undo),
            policy=FINAL,
        )
    assert effects.ran == ["reserve", "charge", "undo of charge done", "undo of reserve done"]
    assert seen == [State.PENDING] * 2
    assert state(world) is State.FAILED
    assert stored_steps(world) == [
        ("reserve", 1),
        ("charge", 2),
        ("!failed", 3),
        ("!undo charge", 4),
        ("!undo reserve", 5),
    ]
    with pytest.raises(Declined):
        run(world.process(), undoable(effects), policy=FINAL)


def test_nothing_is_undone_by_a_failure_that_may_be_tried_again(world, effects):
    """The retry needs the steps."""
    with pytest.raises(OSError, match="later"):
        run(world.first, undoable(effects, "reserve", error=OSError("later")))
    assert run(world.first, undoable(effects, "reserve")).value == "complete"
    assert effects.ran == ["reserve"]


def test_steps_without_a_way_back_are_left(world, effects):
    """A failure whose steps cannot be undone is simply stored."""

    async def operation(attempt: Attempt):
        await attempt.step("reserve", effects.do, "reserve")
        raise Declined("no")

    with pytest.raises(Declined):
        run(world.first, operation, policy=FINAL)
    assert stored_steps(world) == [("reserve", 1)]


def test_a_value_that_is_judged_a_failure_undoes_too(world, effects):
    """A refusal may be a value; the caller gets it, and so do the replays."""
    options = {"judge": lambda value: Ending.FAILED}
    assert run(world.first, undoable(effects, "reserve"), **options).value == "complete"
    assert effects.ran == ["reserve", "undo of reserve done"]
    assert state(world) is State.FAILED


def interrupted(effects: Effects, at: str):
    """A compensation that ends the process when it comes to the named step."""

    def undo(result):
        if result == f"{at} done":
            raise Stop
        effects.undo(result)

    return undo


@pytest.mark.parametrize("raised", [Declined("no"), None], ids=["exception", "value"])
def test_a_crash_while_undoing_goes_on_with_the_next_attempt(world, effects, raised):
    """What failed for good stays failed: no new step runs, and nothing is undone twice."""
    judge = None if raised is not None else lambda value: Ending.FAILED
    first = undoable(effects, "a", "b", "c", error=raised, undo=interrupted(effects, "b"))
    crashed(world.first, first, policy=FINAL, judge=judge)
    assert state(world) is State.PENDING
    assert effects.ran == ["a", "b", "c", "undo of c done"]
    # The second time everything would go well; it must not.
    again = undoable(effects, "a", "b", "c", "new")
    if raised is None:
        assert run(world.process(), again, policy=FINAL, judge=judge).value == "complete"
    else:
        with pytest.raises(Declined):
            run(world.process(), again, policy=FINAL)
    assert effects.ran[4:] == ["undo of b done", "undo of a done"]
    assert state(world) is State.FAILED


def test_a_doomed_operation_is_told_so_at_its_next_step(world, effects):
    """Code that could go on is stopped; what it makes of that does not matter."""
    told = []
    crashed(
        world.first,
        undoable(effects, "a", error=Declined("no"), undo=interrupted(effects, "a")),
        policy=FINAL,
    )

    async def operation(attempt: Attempt):
        await attempt.step("a", effects.do, "a", compensate=effects.undo)
        try:
            await attempt.step("new", effects.do, "new")
        except OperationUndone as error:
            told.append(error)
        return "as if nothing were wrong"

    with pytest.raises(Declined):
        run(world.process(), operation, policy=FINAL)
    assert len(told) == 1
    assert effects.ran == ["a", "undo of a done"]


def test_a_doomed_operation_whose_code_does_not_come_as_far_waits(world, effects):
    """A step that was not asked for cannot be undone; the key is freed for another attempt."""
    crashed(
        world.first,
        undoable(effects, "a", error=Declined("no"), undo=interrupted(effects, "a")),
        policy=FINAL,
    )
    with pytest.raises(OSError, match="early"):
        run(world.process(), world.first.raising(OSError("early")), policy=FINAL)
    with pytest.raises(Declined, match="early"):
        run(world.process(), world.first.raising(Declined("early")), policy=FINAL)
    assert state(world) is State.RELEASED
    with pytest.raises(StepsChanged, match="without asking for 'a'"):
        run(world.process(), world.first.returning(1), policy=FINAL)
    with pytest.raises(Declined, match="no"):
        run(world.process(), undoable(effects, "a"), policy=FINAL)
    assert effects.ran == ["a", "undo of a done"]


def test_a_retryable_failure_of_a_doomed_operation_ends_it_all_the_same(world, effects):
    """All steps were asked for, so everything can be undone; the first failure is the outcome."""
    crashed(
        world.first,
        undoable(effects, "a", error=Declined("no"), undo=interrupted(effects, "a")),
        policy=FINAL,
    )
    with pytest.raises(Declined, match="no"):
        run(world.process(), undoable(effects, "a", error=OSError("x")), policy=FINAL)
    assert state(world) is State.FAILED


def test_a_compensation_that_fails_is_tried_again_by_the_next_attempt(world, effects):
    """The caller hears that undoing is not done; the key is free, and the failure stands."""
    problems = [OSError("no route")]

    def undo(result):
        if problems and result == "a done":
            raise problems.pop()
        effects.undo(result)

    operation = undoable(effects, "a", "b", error=Declined("no"), undo=undo)
    with pytest.raises(
        CompensationFailed, match="step 'a' could not be undone: no route"
    ) as caught:
        run(world.first, operation, policy=FINAL)
    assert caught.value.retryable
    assert isinstance(caught.value.__cause__, OSError)
    assert isinstance(caught.value.__cause__.__context__, Declined)
    assert state(world) is State.RELEASED
    with pytest.raises(Declined):
        run(world.first, operation, policy=FINAL)
    assert effects.ran == ["a", "b", "undo of b done", "undo of a done"]


def test_a_compensation_is_tried_as_its_step_is(world, effects):
    """The step's retry policy holds for its way back."""
    problems = [OSError("1"), OSError("2")]

    def undo(result):
        if problems:
            raise problems.pop()
        effects.undo(result)

    async def operation(attempt: Attempt):
        await attempt.step("a", effects.do, "a", compensate=undo, retry=StepRetry(tries=3))
        raise Declined("no")

    with pytest.raises(Declined):
        run(world.first, operation, policy=FINAL)
    assert effects.ran == ["a", "undo of a done"]


def test_a_failing_compensation_after_a_crash_frees_the_key_again(world, effects):
    """As often as it takes."""

    def fail(result):
        raise OSError("no route")

    crashed(
        world.first,
        undoable(effects, "a", error=Declined("no"), undo=interrupted(effects, "a")),
        policy=FINAL,
    )
    for _ in range(2):
        with pytest.raises(CompensationFailed):
            run(world.process(), undoable(effects, "a", undo=fail), policy=FINAL)
        assert state(world) is State.RELEASED


def test_a_step_whose_result_is_gone_cannot_be_undone(world, effects):
    """The compensation would be called with the wrong thing."""
    plant(
        world,
        ("a", 1, codec.withheld("too large")),
        ("!failed", 2, codec.encode_failure(Declined("no"), 1000)),
    )
    with pytest.raises(CompensationFailed, match="too large"):
        run(world.process(), undoable(effects, "a"), policy=FINAL)
    assert effects.ran == []


def test_undoing_stops_when_the_claim_is_lost(world, effects):
    """The new owner goes on with it."""

    def lose(result):
        world.clock.advance(60)
        with pytest.raises(OSError, match="theirs"):
            world.process().answer(call(policy=FINAL), world.first.raising(OSError("theirs")))
        effects.undo(result)

    operation = undoable(effects, "a", "b", error=Declined("no"), undo=lose)
    with pytest.raises(ClaimLost) as caught:
        run(world.first, operation, policy=FINAL)
    assert isinstance(caught.value.__cause__, Declined)
    assert effects.ran == ["a", "b", "undo of b done"]
    assert state(world) is State.RELEASED


def test_undoing_does_not_start_on_a_lease_that_ran_out(world, effects):
    """Somebody else may have begun it already."""

    async def operation(attempt: Attempt):
        await attempt.step("a", effects.do, "a", compensate=effects.undo)
        world.first.store.write_faults.append(Fault(stalls=True))
        raise Declined("no")

    flow = world.first.start(call(policy=FINAL), world.first.operating(operation))
    world.clock.advance(60)
    world.process().start(call(policy=FINAL), world.first.pausing("successor"))
    flow.step()
    assert isinstance(flow.error, ClaimLost)
    assert effects.ran == ["a"]


@pytest.mark.parametrize("ran", [0, 1], ids=["the failure", "an undone step"])
def test_an_ending_that_cannot_be_remembered_leaves_the_key_to_its_lease(world, effects, ran):
    """Undoing without a trace, or settling before it is done, would both be wrong."""

    async def operation(attempt: Attempt):
        await attempt.step("a", effects.do, "a", compensate=effects.undo)
        world.first.store.write_faults.extend([None] * ran + [Fault(ABSENT)])
        raise Declined("no")

    with pytest.raises(OutcomeNotStored, match="goes on from the last step") as caught:
        run(world.first, operation, policy=FINAL)
    assert isinstance(caught.value.__cause__, Declined)
    assert effects.ran[1:] == ["undo of a done"] * ran
    assert state(world) is State.PENDING


def test_a_verdict_that_cannot_be_settled_is_reported(world, effects):
    """The undone operation is settled by a later attempt; the first failure is the cause."""
    world.first.writer.settle_faults.extend([Fault(ABSENT)])
    with pytest.raises(OutcomeNotStored) as caught:
        run(world.first, undoable(effects, "a", error=Declined("no")), policy=FINAL)
    assert isinstance(caught.value.__cause__, Declined)
    crashed_later = world.process()
    world.clock.advance(60)
    crashed_later.writer.settle_faults.extend([Fault(ABSENT)])
    with pytest.raises(OutcomeNotStored) as caught:
        run(crashed_later, undoable(effects, "a"), policy=FINAL)
    assert isinstance(caught.value.__cause__, StoreMissing)
    assert effects.ran == ["a", "undo of a done"]


# In the user's transaction.


def joined_world(transaction: FakeTransaction) -> World:
    return World(join=lambda connection: transaction)


def booking(effects: Effects, *, then=None, **options):
    """An operation that books in a transaction, and then goes on."""

    async def operation(attempt: Attempt):
        value = await attempt.step(
            "book", effects.do, "book", in_transaction="connection", **options
        )
        if then is not None:
            value = await then(attempt)
        return value

    return operation


def test_a_step_in_a_transaction_is_recorded_there(effects):
    """Between savepoint and release, and nothing goes through the store's own door."""
    transaction = FakeTransaction()
    world = joined_world(transaction)
    assert run(world.first, booking(effects)).value == "book done"
    assert transaction.calls == ["begin", "record book", "keep", "fate of book"]
    assert world.first.store.writes == []
    assert state(world) is State.SUCCEEDED


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ({"settle_error": OSError("connection lost")}, OSError),
        ({"settles": Decision.LOST}, ClaimLost),
        ({"undo_error": OSError("also lost"), "settles": Decision.LOST}, ClaimLost),
    ],
    ids=["an error", "a lost claim", "an undo that fails too"],
)
def test_what_cannot_be_recorded_is_undone(effects, problem, expected):
    """The savepoint is rolled back, and the reason reaches the user's transaction."""
    transaction = FakeTransaction(**problem)
    world = joined_world(transaction)
    with pytest.raises(expected):
        run(world.first, booking(effects))
    assert transaction.calls == ["begin", "record book", "undo"]


def test_a_result_that_cannot_be_stored_is_refused_in_a_transaction(effects):
    """Nothing is committed yet, so refusing is better than remembering half of it."""
    transaction = FakeTransaction()
    world = joined_world(transaction)

    async def operation(attempt: Attempt):
        await attempt.step("book", object, in_transaction="connection")

    with pytest.raises(InvalidInput, match="cannot be stored"):
        run(world.first, operation)
    assert transaction.calls == ["begin", "undo"]


def test_each_try_in_a_transaction_has_its_own_savepoint(effects):
    """Nothing of a failed try stays behind."""
    transaction = FakeTransaction()
    world = joined_world(transaction)
    tries = []

    async def operation(attempt: Attempt):
        def fail_once():
            tries.append(1)
            if len(tries) == 1:
                raise OSError("deadlock")

        await attempt.step("book", fail_once, in_transaction="connection", retry=StepRetry())

    run(world.first, operation)
    assert transaction.calls[:5] == ["begin", "undo", "begin", "record book", "keep"]


@pytest.mark.parametrize("problem", [None, OSError("could not serialize access")])
def test_renewals_keep_off_the_record_until_a_step_has_locked_it(effects, problem):
    """Then the lock does that, until the transaction is over. After a failed try they still keep
    off: the next one has a snapshot before it has the lock."""
    seen = []

    class Looking(FakeTransaction):
        async def record_step(self, write):
            (lease,) = world.first.renewals.running
            seen.append(lease.is_joined)
            return await super().record_step(write)

    async def operation(attempt: Attempt):
        with suppress(OSError):
            await booking(effects)(attempt)
        (lease,) = world.first.renewals.running
        seen.append(lease.is_joined)

    world = joined_world(Looking(settle_error=problem))
    run(world.first, operation)
    assert seen == [True, problem is not None]


def test_a_recorded_step_does_not_touch_the_transaction(effects):
    """A later attempt gets the result without the connection."""
    transaction = FakeTransaction()
    world = joined_world(transaction)
    plant(world, ("book", 1, Payload(codec.JSON, b"", b"7")))
    assert run(world.process(), booking(effects)).value == 7
    assert transaction.calls == []


def test_an_open_transaction_takes_more_steps_of_its_own(effects):
    """Two steps of one transaction commit together."""
    transaction = FakeTransaction(fate_is=Fate.OPEN)
    world = joined_world(transaction)

    async def more(attempt):
        await attempt.step("bill", effects.do, "bill", in_transaction="connection")
        transaction.fate_is = Fate.STANDS

    run(world.first, booking(effects, then=more))
    assert effects.ran == ["book", "bill"]


def test_a_step_outside_an_open_transaction_is_refused(effects):
    """Its write would wait for the lock of that transaction, which waits for the operation."""
    world = joined_world(FakeTransaction(fate_is=Fate.OPEN))

    async def more(attempt):
        await attempt.step("mail", effects.do, "mail")

    with pytest.raises(OutcomeNotStored, match=r"step 'book'.* is still open") as caught:
        run(world.first, booking(effects, then=more))
    assert isinstance(caught.value.__cause__, InvalidInput)
    assert effects.ran == ["book"]
    assert state(world) is State.PENDING


def test_an_operation_that_leaves_its_transaction_open_is_not_settled(effects):
    """Settling would wait for it for ever."""
    world = joined_world(FakeTransaction(fate_is=Fate.OPEN))
    with pytest.raises(OutcomeNotStored, match="still open") as caught:
        run(world.first, booking(effects))
    assert caught.value.value == "book done"


def test_a_step_that_was_rolled_back_may_come_again(effects):
    """At the place that it had, and what follows keeps its place."""
    transaction = FakeTransaction(fate_is=Fate.UNDONE)
    world = joined_world(transaction)
    positions = []

    async def again(attempt):
        await attempt.step("book", effects.do, "book", in_transaction="connection")
        transaction.fate_is = Fate.STANDS
        await attempt.step("mail", effects.do, "mail")
        positions.extend(stored_steps(world))
        with pytest.raises(StepReused):
            await attempt.step("book", effects.do, "book")

    run(world.first, booking(effects, then=again))
    assert effects.ran == ["book", "book", "mail"]
    assert positions == [("mail", 2)]


def test_a_step_that_was_rolled_back_is_not_undone(effects):
    """There is nothing to undo."""
    world = joined_world(FakeTransaction(fate_is=Fate.UNDONE))

    async def decline(attempt):
        raise Declined("no")

    with pytest.raises(Declined):
        run(world.first, booking(effects, then=decline, compensate=effects.undo), policy=FINAL)
    assert effects.ran == ["book"]
    assert state(world) is State.FAILED


def test_a_step_that_was_committed_is_undone(effects):
    """As any other finished step is."""
    world = joined_world(FakeTransaction(fate_is=Fate.STANDS))

    async def decline(attempt):
        raise Declined("no")

    with pytest.raises(Declined):
        run(world.first, booking(effects, then=decline, compensate=effects.undo), policy=FINAL)
    assert effects.ran == ["book", "undo of book done"]


# Completing in a transaction.


def completing(effects: Effects, *names: str):
    async def operation(attempt: Attempt):
        for name in names:
            await attempt.step(name, effects.do, name)
        attempt.complete_in("connection", "complete")

    return operation


def test_completing_in_a_transaction_leaves_no_step_out(effects):
    """The check comes before the write; the transaction is not touched."""
    transaction = FakeTransaction(settles=Decision.APPLY)
    world = joined_world(transaction)
    plant(world, ("a", 1, Payload(codec.JSON, b"", b"1")))
    with pytest.raises(StepsChanged):
        run(world.process(), completing(effects))
    assert transaction.calls == []
    assert run(world.process(), completing(effects, "a")).value == "complete"


def test_a_doomed_operation_is_not_completed_in_a_transaction(effects):
    """Its failure is the outcome."""
    transaction = FakeTransaction(settles=Decision.APPLY)
    world = joined_world(transaction)
    plant(world, ("!failed", 1, codec.encode_failure(Declined("no"), 1000)))
    with pytest.raises(Declined):
        run(world.process(), completing(effects), policy=FINAL)
    assert transaction.calls == []
    assert state(world) is State.FAILED


# Cancelled at the end.


def cancelled_while_reading(world: World, operation, **options) -> None:
    """A later attempt whose caller is cancelled while the stored steps are read at its end."""
    other = world.process()
    other.store.read_faults.extend([Fault(pauses=True), Fault(pauses=True)])
    flow = other.start(call(**options), other.operating(operation))
    assert isinstance(flow.throw(Stop()).error, Stop)
    last_write = Flow(world.background.pop()).step()
    # Its lease goes on being renewed until the ending is written.
    assert len(other.renewals.running) == 1
    while not last_write.is_done:
        last_write.step()
    assert last_write.error is None
    assert other.renewals.running == []


def test_a_cancelled_caller_does_not_lose_the_outcome(world):
    """The stored steps are read and the outcome is settled without the caller."""
    plant(world)
    cancelled_while_reading(world, world.first.returning("value"))
    assert state(world) is State.SUCCEEDED
    assert [kind for kind in world.kinds if kind == "completed"] == ["completed"]
    assert world.process().answer(call()).value == "value"


def test_a_cancelled_caller_does_not_hide_a_changed_operation(world):
    """What the steps say of the ending is settled instead."""
    plant(world, ("a", 1, Payload(codec.JSON, b"", b"1")))
    cancelled_while_reading(world, world.first.returning("value"))
    assert state(world) is State.RELEASED


def test_a_background_ending_that_cannot_read_leaves_the_key_to_its_lease(world):
    """There is nobody left to tell."""
    plant(world)
    other = world.process()
    other.store.read_faults.extend([Fault(pauses=True), Fault(ABSENT)])
    flow = other.start(call(), other.returning("value"))
    flow.throw(Stop())
    assert drive(world.background.pop()) is None
    assert state(world) is State.PENDING


def test_a_background_ending_undoes_nothing(world, effects):
    """Nothing of the user's is called after a cancellation; that it failed is remembered."""
    world.first.store.write_faults.extend([None, Fault(pauses=True)])
    operation = undoable(effects, "a", error=Declined("no"))
    flow = world.first.start(call(policy=FINAL), world.first.operating(operation))
    assert isinstance(flow.throw(Stop()).error, Stop)
    for last_write in reversed(world.background):
        drive(last_write)
    assert effects.ran == ["a"]
    assert [name for name, _ in stored_steps(world)] == ["a", "!failed"]
    assert state(world) is State.PENDING
    world.clock.advance(60)
    with pytest.raises(Declined, match="no"):
        run(world.process(), undoable(effects, "a"), policy=FINAL)
    assert effects.ran == ["a", "undo of a done"]


def test_a_background_ending_goes_on_undoing_nothing(world, effects):
    """Nor does the last write of an attempt that was undoing an earlier one's steps."""
    crashed(
        world.first,
        undoable(effects, "a", error=Declined("no"), undo=interrupted(effects, "a")),
        policy=FINAL,
    )
    other = world.process()
    other.store.write_faults.append(Fault(pauses=True))
    flow = other.start(call(policy=FINAL), other.operating(undoable(effects, "a")))
    flow.throw(Stop())
    for last_write in reversed(world.background):
        drive(last_write)
    assert effects.ran == ["a", "undo of a done"]
    assert state(world) is State.PENDING
    world.clock.advance(60)
    with pytest.raises(Declined, match="no"):
        run(world.process(), undoable(effects, "a"), policy=FINAL)
    assert effects.ran == ["a", "undo of a done"]


@pytest.mark.parametrize("fate", [Fate.STANDS, Fate.UNDONE])
def test_no_step_follows_a_completion_that_stands(effects, fate):
    """It would run, and then hear that another owner has the key."""
    transaction = FakeTransaction(settles=Decision.APPLY, fate_is=fate)
    world = joined_world(transaction)

    async def operation(attempt: Attempt):
        attempt.complete_in("connection", "complete")
        if fate is Fate.UNDONE:
            await attempt.step("mail", effects.do, "mail")
            return
        with pytest.raises(InvalidInput, match="step 'mail' comes too late"):
            await attempt.step("mail", effects.do, "mail")

    run(world.first, operation)
    assert effects.ran == (["mail"] if fate is Fate.UNDONE else [])
