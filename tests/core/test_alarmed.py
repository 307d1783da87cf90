"""A signal's handler that raises an `Exception` in our frames, around a call of the user's.

What the call came to is known or in doubt; the exception is never taken for the call's own failure,
for which the key would be freed and the work run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from retrysafe.core import handlers
from retrysafe.core.attempt import Attempt
from retrysafe.core.model import Decision, Ending, Payload, State
from retrysafe.core.one_call import OneCall
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Fate
from retrysafe.core.steps.history import StepRetry
from retrysafe.core.steps.run import StepRun
from retrysafe.core.values import codec
from retrysafe.errors import (
    InvalidInput,
    OperationFailed,
    OutcomeNotStored,
    StepNotStored,
    StepReused,
    StoreRejected,
    StoreUnavailable,
)
from retrysafe.runtime.group_commit.direct import as_store_error
from tests.core.building import KEY, call
from tests.core.driving import Fault, Process, World, drive
from tests.core.sample_types import Declined
from tests.core.stepped import Effects, run, stored_steps
from tests.core.transacting import FakeTransaction
from tests.interrupting import Alarmed


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def effects() -> Effects:
    return Effects()


def state(world: World) -> State:
    return drive(world.store.read(KEY)).record.state


def go_on(world: World) -> None:
    while world.background:
        drive(world.background.pop())


def _handler(number: int, frame: object) -> None:
    raise Alarmed


def _any_handler(*given: object) -> None:
    raise Alarmed


def alarmed_step(
    process: Process, *, knows: bool = True, of: str = "", is_before: bool = False
) -> None:
    """The handler raises after the next call of a step, once; before it is noted how that ended.

    Or before the first line of it.
    """
    usual = process.ports.executor.perform_step
    armed = [True]

    async def perform_step(called: Callable[..., Any], made: OneCall) -> Any:
        is_meant = armed and (not of or called.__name__ == of)
        if is_meant and is_before:
            armed.clear()
            _handler(1, sys._getframe())
        value = await usual(called, made)
        if is_meant:
            armed.clear()
            if not knows:
                made.go_on()
            raise Alarmed
        return value

    process.ports.executor.perform_step = perform_step


def alarmed_operation(
    process: Process, *, knows: bool = True, error: type[Exception] = Alarmed
) -> None:
    usual = process.engine._runner._perform

    async def perform(attempt: Attempt, *given: Any) -> Any:
        await usual(attempt, *given)
        assert attempt.made is not None
        if not knows:
            attempt.made.go_on()
        raise error("by a handler")

    process.engine._runner._perform = perform


# Operations.


@pytest.mark.parametrize("error", [Alarmed, StoreUnavailable])
def test_what_the_operation_returned_is_stored(world, error):
    """Also when the handler has called retrysafe, and let its refusal pass."""
    process = world.first
    alarmed_operation(process, error=error)
    with pytest.raises(error):
        process.answer(call())
    go_on(world)
    assert world.process().answer(call()).replayed
    assert world.ran == [1]


def test_with_its_steps_and_entries(world, effects):
    process = world.first
    alarmed_operation(process)

    async def operation(attempt: Attempt) -> str:
        attempt.outbox.stage("mail", {"to": "c1"}, name="receipt")
        return await attempt.step("charge", effects.do, "charge")

    with pytest.raises(Alarmed):
        run(process, operation)
    go_on(world)
    assert state(world) is State.SUCCEEDED
    assert len(world.store.outbox._entries) == 1


def refused_handler(number: int, frame: object) -> None:
    """It has called retrysafe while its own thread was at work in the store."""
    error = StoreUnavailable("this thread is at work in the store already")
    error.is_reentry = True
    raise error


def test_a_refusal_that_leaves_a_handler_is_not_the_stores(world):
    """The store is told all the same, in the background."""
    process = world.first
    settle = process.writer.settle

    async def settle_alarmed(settlement: object) -> None:
        process.writer.settle = settle
        refused_handler(1, sys._getframe())

    process.writer.settle = settle_alarmed
    with pytest.raises(StoreUnavailable):
        process.answer(call())
    go_on(world)
    assert world.process().answer(call()).replayed


def test_nor_while_steps_are_looked_after(world, effects, monkeypatch):
    end = StepRun.end

    async def end_alarmed(steps: StepRun) -> None:
        monkeypatch.setattr(StepRun, "end", end)
        refused_handler(1, sys._getframe())

    monkeypatch.setattr(StepRun, "end", end_alarmed)
    with pytest.raises(StoreUnavailable):
        run(world.first, lambda attempt: attempt.step("charge", effects.do, "charge"))
    go_on(world)
    assert state(world) is State.SUCCEEDED


def test_an_operation_in_doubt_is_left_to_its_lease(world):
    process = world.first
    alarmed_operation(process, knows=False)
    with pytest.raises(Alarmed):
        process.answer(call())
    assert not world.background
    assert state(world) is State.PENDING


@pytest.mark.parametrize(
    ("fate", "is_settled"),
    [(Fate.STANDS, False), (Fate.UNDONE, True), (StoreUnavailable("down"), True)],
)
def test_a_caller_who_is_gone_while_the_users_transaction_is_asked_for(fate, is_settled):
    """It is asked once more; what was rolled back is settled with what the operation returned."""
    transaction = FakeTransaction(settles=Decision.APPLY, fate_is=fate)
    world = World(join=lambda connection: transaction)
    process = world.first
    alarmed_operation(process)

    async def operation(attempt: Attempt) -> str:
        attempt.complete_in("connection", "paid")
        return "returned"

    with pytest.raises(Alarmed):
        run(process, operation)
    go_on(world)
    assert len(process.writer.settlements) == is_settled


@pytest.mark.parametrize("judge", [None, lambda _: Ending.SUCCEEDED])
def test_while_the_outcome_is_encoded(world, judge):
    """Nothing is wrong with the value, so it is not withheld; and the handler is not unheard."""
    encode, armed = call().codec.encode, [True]

    class Codec:
        def encode(self, value: object) -> Payload:
            if armed:
                armed.clear()
                raise Alarmed
            return encode(value)

    with pytest.raises(Alarmed):
        world.first.answer(call(codec=Codec(), judge=judge))
    go_on(world)
    assert world.process().answer(call()).value == 7
    assert "withheld" not in world.kinds


def test_signals_in_a_row_while_the_outcome_is_encoded_withhold_nothing():
    """Nothing is wrong with the value, however often the handler raises."""
    world = World()
    encode, armed = call().codec.encode, [True, True]

    class Codec:
        def encode(self, value: object) -> Payload:
            if armed:
                armed.pop()
                _handler(1, sys._getframe())
            return encode(value)

    with pytest.raises(Alarmed):
        world.first.answer(call(codec=Codec()))
    world.background.pop().close()
    assert state(world) is State.PENDING
    assert "withheld" not in world.kinds


def test_while_a_failure_is_encoded():
    """It is stored with all that rebuilds it; after signals in a row it is stored all the same."""
    assert type(_failure_told_after(1)).__name__ == "Slotted"
    assert isinstance(_failure_told_after(2), OperationFailed)


def _failure_told_after(strikes: int) -> Exception:
    armed = [True] * strikes

    class Slotted(Declined):
        __slots__ = ("_code",)

    error = Slotted("no")
    error._code = 7
    usual = codec._state

    def state_alarmed(of: BaseException) -> dict[str, Any]:
        if armed:
            armed.pop()
            _handler(1, sys._getframe())
        return usual(of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_state", state_alarmed)
        stored = codec.encode_failure(error, 10_000)
    return codec.decode_failure(stored, (Slotted,), "k")


def test_a_class_whose_cause_and_traceback_cannot_be_read_has_an_ending(world):
    """Whose exception it is must be told of every class."""

    class Odd(Exception):
        @property
        def __cause__(self) -> object:
            raise ZeroDivisionError

        @property
        def __traceback__(self) -> object:
            raise ZeroDivisionError

    def odd(attempt: Attempt) -> None:
        raise Odd

    with pytest.raises(Odd):
        run(world.first, odd)
    assert state(world) is State.RELEASED


# Steps.


def test_a_step_that_returned_is_recorded(world, effects):
    """Also before the operation, which takes the exception for the step's, has ended."""
    process = world.first
    alarmed_step(process)

    async def operation(attempt: Attempt) -> str:
        with pytest.raises(Alarmed):
            await attempt.step("charge", effects.do, "charge")
        go_on(world)
        assert stored_steps(world) == [("charge", 1)]
        raise OSError("later")

    with pytest.raises(OSError, match="later"):
        run(process, operation)
    run(world.process(), lambda attempt: attempt.step("charge", effects.do, "charge"))
    assert effects.ran == ["charge"]


def test_it_is_recorded_before_the_key_is_freed(world, effects):
    """Where signals in a row have kept everybody else from it."""
    process = world.first
    alarmed_step(process)
    with pytest.raises(Alarmed):
        run(process, lambda attempt: attempt.step("charge", effects.do, "charge"))
    world.background.pop().close()
    assert state(world) is State.RELEASED
    assert stored_steps(world) == [("charge", 1)]


def test_a_step_that_returned_is_not_tried_again():
    world, effects = World(), Effects()
    alarmed_step(world.first)
    with pytest.raises(Alarmed):
        run(
            world.first,
            lambda attempt: attempt.step("charge", effects.do, "charge", retry=StepRetry(tries=3)),
        )
    go_on(world)
    assert effects.ran == ["charge"]


def test_a_step_that_has_not_begun_is_not_tried_again():
    """Nothing of it has run, and no try of it is used up: its caller hears of the handler."""
    world, effects = World(), Effects()
    alarmed_step(world.first, is_before=True)

    async def operation(attempt: Attempt) -> str:
        twice = StepRetry(tries=2)
        with pytest.raises(Alarmed):
            await attempt.step("charge", effects.do, "charge", retry=twice)
        assert effects.ran == []
        return await attempt.step("charge", effects.do, "charge", retry=twice)

    assert run(world.first, operation).value == "charge done"


class AlarmedTransaction(FakeTransaction):
    """The handler raises right after this method, once."""

    after = ""

    async def keep(self) -> None:
        await super().keep()
        self._strike("keep")

    async def undo(self) -> None:
        await super().undo()
        self._strike("undo")

    def _strike(self, place: str) -> None:
        if self.after == place:
            self.after = ""
            _handler(1, sys._getframe())


def joined_runs(after: str, operation: Callable[[Attempt, Callable[[], object]], Any]) -> int:
    """How often a step ran that is recorded in the user's transaction."""
    transaction = AlarmedTransaction(fate_is=Fate.OPEN)
    transaction.after = after
    world, ran = World(join=lambda connection: transaction), [0]

    def book() -> None:
        ran[0] += 1
        if after == "undo" and ran[0] == 1:
            raise OSError("once")

    async def operate(attempt: Attempt) -> None:
        step = partial(
            attempt.step, "book", book, in_transaction="connection", retry=StepRetry(tries=3)
        )
        await operation(attempt, step)

    with pytest.raises((Alarmed, StepReused, OutcomeNotStored)):
        run(world.first, operate)
    while world.background:
        world.background.pop().close()
    return ran[0]


def test_a_step_that_its_transaction_has_kept_is_not_tried_again():
    """Nor run for who catches that and asks again: both would be committed."""

    async def asks_again(attempt: Attempt, step: Callable[[], Any]) -> None:
        with pytest.raises(Alarmed):
            await step()
        await step()

    assert joined_runs("keep", lambda attempt, step: step()) == 1
    assert joined_runs("keep", asks_again) == 1


def test_a_step_that_may_not_be_undone_is_not_tried_again():
    """What the first try has written may still be there."""
    assert joined_runs("undo", lambda attempt, step: step()) == 1


def test_who_asks_again_gets_its_result(world, effects):
    process = world.first
    alarmed_step(process)

    async def operation(attempt: Attempt) -> str:
        with pytest.raises(Alarmed):
            await attempt.step("charge", effects.do, "charge")
        with pytest.raises(StepReused):
            await attempt.step("charge", effects.do, "another")
        return await attempt.step("charge", effects.do, "charge")

    assert run(process, operation).value == "charge done"
    world.background.pop().close()
    assert effects.ran == ["charge"]
    assert stored_steps(world) == [("charge", 1)]


def test_an_unstored_step_of_a_caller_who_is_gone_is_insisted_on(world, effects):
    process = world.first
    alarmed_step(process)
    process.store.write_faults.append(Fault(StoreUnavailable("down")))

    async def operation(attempt: Attempt) -> str:
        with pytest.raises(Alarmed):
            await attempt.step("charge", effects.do, "charge")
        go_on(world)
        assert stored_steps(world) == []
        raise OSError("later")

    with pytest.raises(OSError, match="later"):
        run(process, operation, policy=Policy(settle_patience=Policy().lease * 0))
    assert stored_steps(world) == [("charge", 1)]


def test_a_step_in_doubt_leaves_the_key_to_its_lease(world, effects):
    process = world.first
    alarmed_step(process, knows=False)

    async def operation(attempt: Attempt) -> None:
        with pytest.raises(Alarmed):
            await attempt.step("charge", effects.do, "charge")
        await attempt.step("charge", effects.do, "charge")

    with pytest.raises((OutcomeNotStored, StepNotStored), match="nobody knows whether it ran"):
        run(process, operation)
    assert effects.ran == ["charge"]
    assert state(world) is State.PENDING


def test_a_step_that_raised_may_be_asked_for_again(world, effects):
    process = world.first

    def declined() -> None:
        effects.ran.append("declined")
        raise Declined("no")

    async def operation(attempt: Attempt) -> None:
        for _ in range(2):
            with pytest.raises(Declined):
                await attempt.step("charge", declined)

    run(process, operation)
    assert effects.ran == ["declined", "declined"]


def test_a_step_that_the_handler_kept_from_its_name_counts_nobody_in(world, effects):
    """Else the operation would wait for it for ever."""
    process = world.first

    async def operation(attempt: Attempt) -> str:
        steps = attempt._opened_steps()
        begin = steps.book.__class__.begin

        def alarmed(*given: Any) -> Any:
            begin(*given)
            raise Alarmed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps.book.__class__, "begin", alarmed)
            with pytest.raises(Alarmed):
                await attempt.step("charge", effects.do, "charge")
        return await attempt.step("charge", effects.do, "charge")

    assert run(process, operation).value == "charge done"


def test_a_refund_is_not_paid_twice():
    """It was paid when the handler raised."""
    assert refunds(knows=True) == 1


def test_a_refund_in_doubt_is_paid_after_the_lease():
    """As after a crash at that point."""
    assert refunds(knows=False) == 2


def test_a_refund_that_has_not_begun_is_paid_after_the_lease():
    """The key is not freed: nobody has tried to undo anything, and the next attempt does."""
    assert refunds(is_before=True) == 1


def refunds(*, knows: bool = True, is_before: bool = False) -> int:
    world, effects = World(), Effects()
    alarmed_step(world.first, knows=knows, of="undo", is_before=is_before)

    async def operation(attempt: Attempt) -> None:
        await attempt.step("charge", effects.do, "charge", compensate=effects.undo)
        raise Declined("no")

    final = Policy(terminal=Declined)
    with pytest.raises(Alarmed):
        run(world.first, operation, policy=final)
    go_on(world)
    assert state(world) is State.PENDING
    world.clock.advance(60)
    with pytest.raises(Declined):
        run(world.process(), operation, policy=final)
    return effects.ran.count("undo of charge done")


def test_a_step_that_cannot_be_compared_is_another_one(world, effects):
    process = world.first
    alarmed_step(process)

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise InvalidInput("no")

        __hash__ = None

    async def operation(attempt: Attempt) -> None:
        with pytest.raises(Alarmed):
            await attempt.step("charge", lambda _: 1, Odd())
        with pytest.raises(StepReused):
            await attempt.step("charge", lambda _: 1, Odd())

    run(process, operation)
    world.background.pop().close()


def test_a_note_that_could_not_be_taken_back_stands_in_nobodys_way(world, effects):
    """The step has raised by itself: it may be asked for again, and the key may be freed."""
    process = world.first

    class AlarmedNotes(dict):
        def pop(self, *given: Any) -> Any:
            raise Alarmed

    def declined() -> None:
        raise Declined("no")

    async def operation(attempt: Attempt) -> None:
        attempt._opened_steps()._unstored = AlarmedNotes()
        for _ in range(2):
            with pytest.raises(Alarmed):
                await attempt.step("charge", declined)
        raise OSError("later")

    with pytest.raises(OSError, match="later"):
        run(process, operation)
    assert state(world) is State.RELEASED


# Whose exception it is.

# As if this file were one of ours.
OWN_FILES = (handlers._OWN_FILES, __file__)


@pytest.mark.parametrize("handler", [_handler, _any_handler])
def test_what_a_handler_raises_in_the_function_is_the_functions(handler):
    """The function was at work: nobody but it could have caught it there."""

    def function() -> None:
        handler(1, sys._getframe())

    made = OneCall(function, ())
    with pytest.raises(Alarmed) as caught:
        made.make()
    assert made.is_own(caught.value)


def test_what_a_handler_raises_in_the_function_of_an_adapter_is_not():
    """Only our own frames were at work; the application's work may be done."""

    def adapter(handler: Callable[..., None]) -> None:
        ask(handler)

    def ask(handler: Callable[..., None]) -> None:
        handler(1, sys._getframe())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers, "_OWN_FILES", OWN_FILES)
        for handler in (_handler, _any_handler):
            made = OneCall(adapter, (handler,))
            with pytest.raises(Alarmed) as caught:
                made.make()
            assert not made.is_own(caught.value)


def test_an_adapters_own_exception_is_its_own(monkeypatch):
    monkeypatch.setattr(handlers, "_OWN_FILES", OWN_FILES)

    def adapter(*given: object) -> None:
        raise Declined("no")

    made = OneCall(adapter, ((1, 2),))
    with pytest.raises(Declined) as caught:
        made.make()
    assert made.is_own(caught.value)


def test_what_a_handler_raises_in_a_commit_is_no_word_about_its_rows():
    """The store has rejected nothing: who waits for another row of the batch tries again."""

    def reject(number: int, frame: object) -> None:
        raise StoreRejected("by a handler")

    with pytest.raises(StoreRejected) as caught:
        reject(1, sys._getframe())
    assert type(as_store_error(caught.value)) is StoreUnavailable
