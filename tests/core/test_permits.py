"""A bounded number of callers waits; whoever finds no place is told to come back at once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import timedelta

import pytest

from retrysafe.core.permits import Permits
from retrysafe.core.policy import InFlight, Policy
from retrysafe.errors import OperationInFlight
from tests.core.building import call
from tests.core.driving import World
from tests.core.test_atomic import Made, pending
from tests.core.transacting import FakeTransaction

WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=10))


def waiting_call(places: Permits):
    return replace(call(policy=WAITING), waiters=places)


def test_places_are_kept_and_given_back():
    """One for each who comes; leaving twice, or without one, harms nobody."""
    places = Permits(2)
    assert [places.enter(who) for who in "aabcc"] == [True, True, True, False, False]
    places.leave("c")
    places.leave("a")
    places.leave("a")
    assert (places.enter("c"), places.enter("d"), len(places)) == (True, False, 2)


def test_a_follower_without_a_place_is_refused_at_once():
    """The one with a place gets the outcome, and gives the place back."""
    world, places = World(), Permits(1)
    process = world.first
    leader = process.start(call(), process.pausing("first"))
    first = process.start(waiting_call(places))
    with pytest.raises(OperationInFlight) as caught:
        process.answer(waiting_call(places))
    assert not caught.value.has_waited
    assert world.kinds[-1] == "in flight"
    leader.step()
    assert first.step().value.value == "first"
    assert len(places) == 0


def test_a_leader_that_waits_for_another_process_needs_a_place_too():
    """It polls the store, and holds its thread as a follower does."""
    world, places = World(), Permits(0)
    other = world.process()
    running = other.start(call(), other.pausing("done"))
    with pytest.raises(OperationInFlight) as caught:
        world.first.answer(waiting_call(places))
    assert (caught.value.has_waited, world.first.clock.slept) == (False, [])
    places.limit = 1
    world.first.clock.meanwhile.append(running.step)
    assert world.first.answer(waiting_call(places)).value == "done"
    assert len(places) == 0


@pytest.mark.parametrize("limit", [0, 1])
def test_a_block_needs_a_place_to_wait_for_a_rivals_transaction(limit):
    """Without one it looks once and is refused; with one it waits for the lock."""
    places = Permits(limit)
    transaction = FakeTransaction(locks=deque([False, False]))
    with pytest.raises(OperationInFlight):
        Made(transaction, waiting_call(places)).enter()
    waited = ["begin", "lock", "lock 10", "undo"]
    assert transaction.calls == (waited if limit else ["begin", "lock", "look", "undo"])
    assert len(places) == 0


def test_a_block_needs_a_place_to_wait_for_a_leased_owner():
    """Without one it asks once."""
    places = Permits(0)
    made = Made(pending(FakeTransaction()), waiting_call(places))
    with pytest.raises(OperationInFlight):
        made.enter()
    assert (made.clock.slept, len(places)) == ([], 0)
