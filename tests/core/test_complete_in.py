"""Settling a leased attempt in the user's transaction: what the engine makes of its fate."""

from __future__ import annotations

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.model import Decision, Ending, SettleKind, State
from retrysafe.core.ports import Fate
from retrysafe.errors import ClaimLost, InvalidInput, StoreUnavailable
from tests.core.building import call
from tests.core.driving import World, state
from tests.core.sample_types import Declined
from tests.core.transacting import FakeTransaction


def world_with(transaction: FakeTransaction, **options) -> World:
    return World(join=lambda connection: transaction, **options)


def completing(world, value, *, then="returned", error=None):
    """An operation that completes in a transaction, and then returns or raises."""

    async def operation(attempt: Attempt):
        world.ran.append(attempt.number)
        attempt.complete_in("connection", value)
        if error is not None:
            raise error
        return then

    return operation


def applied(**options) -> FakeTransaction:
    """A transaction whose settling is applied without looking at the world's store."""
    return FakeTransaction(settles=Decision.APPLY, **options)


def test_what_the_transaction_committed_is_the_outcome():
    """The engine writes nothing, the caller and its followers get the value of complete_in."""
    transaction = applied(fate_is=Fate.STANDS)
    world = world_with(transaction, cache=True)
    answer = world.first.answer(call(), completing(world, {"id": 1}))
    assert (answer.value, answer.replayed) == ({"id": 1}, False)
    assert transaction.calls == ["begin", "settle", "keep"]
    assert world.first.writer.settlements == []
    assert world.kinds == ["claimed", "completed"]
    assert world.first.answer(call()).value == {"id": 1}


def test_an_exception_after_the_commit_frees_nothing():
    """The business write stands, so the key must stay settled whatever the operation raises."""
    world = world_with(applied(fate_is=Fate.STANDS), cache=True)
    with pytest.raises(Declined):
        world.first.answer(call(), completing(world, 1, error=Declined("late")))
    assert world.first.writer.settlements == []
    assert world.first.answer(call()).value == 1


@pytest.mark.parametrize("error", [None, Declined("no")])
def test_an_open_transaction_is_left_to_its_owner(error):
    """Writing would wait for the caller's commit, and the caller waits for this answer."""
    world = world_with(applied(fate_is=Fate.OPEN))
    if error is None:
        assert world.first.answer(call(), completing(world, 1)).value == 1
    else:
        with pytest.raises(Declined):
            world.first.answer(call(), completing(world, 1, error=error))
    assert world.first.writer.settlements == []
    assert state(world) is State.PENDING


def test_after_a_rollback_the_attempt_is_settled_as_usual():
    """What the transaction undid never happened; the operation's own value is the outcome."""
    world = world_with(applied(fate_is=Fate.UNDONE))
    assert world.first.answer(call(), completing(world, 1, then="other way")).value == "other way"
    assert state(world) is State.SUCCEEDED
    assert world.process().answer(call()).value == "other way"


def test_after_a_rollback_an_exception_is_judged_as_usual():
    world = world_with(applied(fate_is=Fate.UNDONE))
    with pytest.raises(Declined):
        world.first.answer(call(), completing(world, 1, error=Declined("no")))
    assert state(world) is State.RELEASED


def test_an_unknown_fate_frees_nothing():
    """A key whose business write may have been committed is not released by an exception; a value
    is settled, because an outcome that stands confirms it."""
    world = world_with(applied(fate_is=StoreUnavailable("down")))
    with pytest.raises(Declined):
        world.first.answer(call(), completing(world, 1, error=Declined("no")))
    assert state(world) is State.PENDING
    world = world_with(applied(fate_is=StoreUnavailable("down")))
    assert world.first.answer(call(), completing(world, 1, then=2)).value == 2
    assert state(world) is State.SUCCEEDED


def test_a_zombie_is_refused_and_its_run_does_not_end_the_key():
    """The refusal is raised inside the user's transaction, which rolls its writes back."""
    transaction = FakeTransaction(settles=Decision.LOST)
    world = world_with(transaction)
    with pytest.raises(ClaimLost):
        world.first.answer(call(), completing(world, 1))
    assert transaction.calls == ["begin", "settle", "undo"]
    assert world.first.writer.settlements == []
    assert world.first.renewals.count == 1


def test_the_lease_is_renewed_beside_the_record_before_that_is_locked():
    """The next renewal may come at any moment, and must not meet the lock that the user's
    transaction has for as long as it lasts."""
    seen = []

    class Looking(FakeTransaction):
        async def settle(self, settlement):
            (lease,) = world.first.renewals.running
            seen.append((lease.is_joined, lease.may_be_settled))
            return Decision.APPLY

    world = world_with(Looking())
    world.first.answer(call(), completing(world, 1))
    assert seen == [(True, True)]


def test_renewal_goes_on_when_the_transaction_did_not_take_the_outcome():
    """A database error that is not a lost claim leaves the operation running on its lease."""
    transaction = FakeTransaction(settle_error=OSError("gone"), undo_error=OSError("gone too"))
    world = world_with(transaction)
    seen = []

    async def operation(attempt: Attempt):
        with pytest.raises(OSError, match=r"gone$"):
            attempt.complete_in("connection", 1)
        seen.append(len(world.first.renewals.running))
        return "after all"

    assert world.first.answer(call(), operation).value == "after all"
    assert seen == [1]


def test_completing_a_second_time_after_the_commit_is_refused():
    """The first outcome stands, and the second transaction is told before it commits."""
    transaction = FakeTransaction(settles=Decision.CONFIRM)
    world = world_with(transaction)
    with pytest.raises(InvalidInput, match="already"):
        world.first.answer(call(), completing(world, 1))
    assert transaction.calls == ["begin", "settle", "undo"]


def test_a_value_without_a_stored_form_is_refused_before_anything_is_written():
    transaction = applied()
    world = world_with(transaction)
    with pytest.raises(InvalidInput):
        world.first.answer(call(), completing(world, object()))
    assert transaction.calls == []


def test_a_store_without_transactions_says_so():
    world = World()
    with pytest.raises(InvalidInput, match="cannot work"):
        world.first.answer(call(), completing(world, 1))


def test_a_judged_outcome_ends_the_attempt_as_it_would_have_when_returned():
    """What the judge calls a failure is stored as one, and told as one."""
    transaction = applied(fate_is=Fate.STANDS)
    world = world_with(transaction)
    judged = call(judge=lambda value: Ending.FAILED)
    assert world.first.answer(judged, completing(world, 1)).value == 1
    assert transaction.settled == [SettleKind.FAIL]
    assert world.kinds == ["claimed", "failed"]


def test_an_outcome_that_frees_the_key_cannot_be_committed_with_the_writes():
    """They would stand, and the retry that the free key invites would write them again."""
    transaction = applied()
    world = world_with(transaction)
    with pytest.raises(InvalidInput, match="frees the key"):
        world.first.answer(
            call(judge=lambda value: Ending.RELEASED), completing(world, 1, error=None)
        )
    assert transaction.calls == []


def test_what_an_adapter_makes_of_the_value_is_the_outcome():
    """It is judged, stored and answered as if the operation had returned it."""
    world = world_with(applied(fate_is=Fate.STANDS), cache=True)
    judged = []

    def judge(value):
        judged.append(value)
        return Ending.SUCCEEDED

    made = call(judge=judge, outcome_of=lambda value: [value])
    assert world.first.answer(made, completing(world, 1)).value == [1]
    assert world.first.answer(call()).value == [1]
    assert judged == [[1]]


def test_a_value_that_an_adapter_cannot_use_is_refused_before_anything_is_written():
    transaction = applied()
    world = world_with(transaction)
    with pytest.raises(InvalidInput, match=r"cannot be stored: division by zero"):
        world.first.answer(call(outcome_of=lambda value: 1 / value), completing(world, 0))
    assert transaction.calls == []
