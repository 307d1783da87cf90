"""A signal that raises inside the engine leaves no flight, no waiter and no lease behind.

Python looks for signals when it enters a function, so one may raise before the first line of what a
`finally` calls.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

import pytest

from retrysafe.core import handlers, insist, run, settle
from retrysafe.core.engine import POLL_MAXIMUM_SECONDS
from retrysafe.core.flights import Flight, Flights, Phase
from retrysafe.core.lease import Lease
from retrysafe.core.model import State
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.renewal import held_leases
from retrysafe.errors import OperationInFlight, StoreUnavailable
from tests.core.building import KEY, MARK, call
from tests.core.driving import Fault, RecordedRenewals, World, drive
from tests.core.sample_types import Declined
from tests.interrupting import at_every_place


class Interrupted(BaseException):
    """What the signal raises."""


class AlarmedLock:
    """A lock during whose taking as many signals come, one each time, as it is armed for."""

    def __init__(self) -> None:
        self.armed = 0

    def __enter__(self) -> None:
        if self.armed:
            self.armed -= 1
            raise Interrupted

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class AlarmedBell:
    """A waiter's signal; a process signal comes before its first setting takes effect."""

    def __init__(self, *, is_armed: bool = False) -> None:
        self._is_armed = is_armed
        self.rung = 0

    def set(self) -> None:
        if self._is_armed:
            self._is_armed = False
            raise Interrupted
        self.rung += 1


def test_a_signal_before_the_landing_leaves_no_flight():
    """The outcome stands; later callers get it, instead of being told that it still runs.

    However often the landing is interrupted.
    """
    for count in (1, 2):
        _interrupt_the_landing(count)


def _interrupt_the_landing(count: int) -> None:
    world = World()
    process = world.first
    lock = AlarmedLock()
    process.engine._flights._lock = lock
    leader = process.start(call(), process.pausing("first"))
    settle_row = process.writer.settle

    async def settle_and_arm(settlement: object) -> object:
        answer = await settle_row(settlement)
        lock.armed = count
        return answer

    process.writer.settle = settle_and_arm
    leader.step()
    assert isinstance(leader.error, Interrupted)
    assert process.engine.flights_count == 0
    lock.armed = 0
    assert process.answer(call()).replayed
    assert not process.engine._flights._by_digest
    assert world.ran == [1]


def test_a_follower_whose_leader_could_not_tell_it_goes_on():
    """Signals in a row keep the leader from landing; nobody else comes for that key."""
    world = World()
    process = world.first
    lock = process.engine._flights._lock = AlarmedLock()
    leader = process.start(call(), process.pausing("first"))
    follower = process.start(call(policy=Policy(in_flight=InFlight.WAIT)))
    settle = process.writer.settle

    async def settle_and_arm(settlement: object) -> object:
        answer = await settle(settlement)
        lock.armed = 2
        return answer

    process.writer.settle = settle_and_arm
    leader.step()
    assert isinstance(leader.error, Interrupted)
    lock.armed = 0
    world.clock.advance(POLL_MAXIMUM_SECONDS)
    follower.step()
    assert follower.value.replayed
    assert world.ran == [1]


def test_a_signal_among_the_wake_ups_leaves_nobody_asleep():
    """Landing, or landing again, goes on with those who were not told."""
    for armed in range(3):
        for is_entering in (True, False):
            sky = Flights(AlarmedLock())
            flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
            bells = [AlarmedBell(is_armed=number == armed) for number in range(3)]
            for bell in bells:
                assert sky.enlist(flight, Phase.CLAIMING, bell)
            with pytest.raises(Interrupted):
                if is_entering:
                    sky.enter(flight, Phase.RUNNING)
                else:
                    sky.land(b"a", flight)
            sky.land(b"a", flight)
            assert [bell.rung for bell in bells] == [1, 1, 1]
            assert len(sky) == 0


def test_waiters_are_told_in_the_order_in_which_they_came():
    """Where each must ask for itself, whoever waited longest asks first."""
    sky = Flights(AlarmedLock())
    flight = sky.join(b"a", Flight((MARK,), "charge"), 0.0)
    told: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self._name = name

        def set(self) -> None:
            told.append(self._name)

    for name in ("first", "second", "third"):
        sky.enlist(flight, Phase.CLAIMING, Named(name))
    sky.land(b"a", flight)
    assert told == ["first", "second", "third"]


def test_a_signal_before_the_end_of_the_renewals_leaves_no_lease():
    """Renewed for ever, it would block the key for as long as the process lives."""

    class AlarmedRenewals(RecordedRenewals):
        def remove(self, lease: Lease) -> None:
            raise Interrupted

    world = World()
    process = world.first
    process.engine._runner._renewals = renewals = AlarmedRenewals()
    with pytest.raises(Interrupted):
        process.answer(call())
    (lease,) = renewals.running
    assert not lease.may_renew(0.0)
    beat = {lease.token: lease}
    assert held_leases(beat) == []
    assert beat == {}
    assert process.engine.flights_count == 0


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("is_failing", [False, True])
def test_an_outcome_survives_a_signal_anywhere_in_its_settling(is_after, is_failing):
    """Also between an unanswered write and the next try: the operation is done, so somebody goes on
    with its ending, and nothing is renewed or blocked after that."""
    worlds: list[World] = []

    def act() -> None:
        worlds[:] = []
        world = World()
        worlds.append(world)
        process = world.first
        process.writer.settle_faults.append(Fault(StoreUnavailable("down"), is_after=is_after))
        invoke = process.raising(Declined("no")) if is_failing else process.returning(7)
        with suppress(Declined):
            process.answer(call(policy=Policy(terminal=Declined)), invoke)

    def has_returned(world: World) -> bool:
        return not is_failing and bool(world.ran)

    places_after_the_write = 0
    for place in at_every_place(act, run, settle, insist, handlers):
        if not worlds:
            continue
        world = worlds[0]
        if not (world.first.writer.settlements or world.background or has_returned(world)):
            continue
        places_after_the_write += bool(world.first.writer.settlements)
        for last_write in world.background:
            drive(last_write)
        state = drive(world.store.read(KEY)).record.state
        assert state is (State.FAILED if is_failing else State.SUCCEEDED), place
        assert world.first.renewals.running == []
        assert world.first.engine.flights_count == 0
    assert places_after_the_write > 3


def test_a_handler_that_comes_during_the_claim_of_its_own_thread_does_not_wait_for_it():
    """News of the claim come from the caller that the handler keeps from going on."""
    world = World()
    process = world.first
    process.engine._who = lambda: "the main thread"
    claim = process.writer.claim
    heard: list[BaseException] = []

    async def claim_interrupted(request: object) -> object:
        with pytest.raises(OperationInFlight) as caught:
            process.answer(call())
        heard.append(caught.value)
        return await claim(request)

    process.writer.claim = claim_interrupted
    process.answer(call())
    assert len(heard) == 1
    assert world.ran == [1]
