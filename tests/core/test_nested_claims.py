"""Nested claims: what every level stores, whatever the next one says or whoever dies between."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import product

import pytest

from retrysafe.core.attempt import Attempt
from retrysafe.core.keys.key import GLOBAL, Key, child_key
from retrysafe.core.keys.secret import Secret, Secrets
from retrysafe.core.model import Condition, Decision, OperatorCommand, State
from retrysafe.core.nested_claims import nested
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.ports import Fate
from retrysafe.errors import (
    AttemptsExhausted,
    ClaimLost,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeNotStored,
    OutcomeUnavailable,
    SecretMissing,
    StoreRejected,
    StoreUnavailable,
)
from tests.core.building import MARK, OTHER_MARK, call
from tests.core.driving import Fault, Pause, World, drive
from tests.core.sample_types import Declined
from tests.core.test_atomic import Made
from tests.core.transacting import FakeTransaction

OLD, NEW = b"the old secret, 16 or more", b"the new secret, 16 or more"
THIRD = b"the 3rd secret, 16 or more"
KEYS = {Secret(value).tag: Key("k-1", caller=value.decode()[4:7]) for value in (OLD, NEW, THIRD)}
# The secrets by the place of their keys.
OUTER_SECRET, INNER_SECRET = sorted((OLD, NEW), key=lambda value: Secret(value).tag)
OUTER, INNER = (KEYS[Secret(value).tag] for value in (OUTER_SECRET, INNER_SECRET))
POLICY = Policy(
    terminal=(Declined,), lease=timedelta(seconds=30), settle_patience=timedelta(seconds=1)
)


def asked(*secrets, mark=MARK, **changes):
    """The call of a process with these secrets."""
    listed = Secrets(*secrets)
    marks = listed.fingerprints((mark,))
    made = call(*marks, key=KEYS[listed.listed[0].tag], **{"policy": POLICY, **changes})
    return nested(made, [(secret.tag, KEYS[secret.tag]) for secret in listed.listed])


def both(**changes):
    return asked(OLD, NEW, **changes)


def made_world(**options):
    """A world whose first process knows both secrets."""
    world = World(**options)
    return world, world.process(OLD, NEW)


def states(world):
    """What the outer and the inner record are."""
    found = [drive(world.store.read(key)) for key in (OUTER, INNER)]
    return [None if item is None else item.record.state for item in found]


def conditions(world):
    found = [drive(world.store.read(key)) for key in (OUTER, INNER)]
    return [None if item is None else item.condition for item in found]


DONE = [State.SUCCEEDED, State.SUCCEEDED]
PENDING = [State.PENDING, State.PENDING]


def test_the_order_of_the_levels_is_that_of_the_tags():
    """However a process lists its secrets."""
    for made in (asked(OLD, NEW), asked(NEW, OLD)):
        assert (made.key, made.inner.key, made.inner.inner) == (OUTER, INNER, None)
    alone = call()
    assert nested(alone, [(b"a", alone.key), (b"b", alone.key)]) is alone


def test_every_level_has_the_outcome_and_observers_hear_of_it_once():
    world, process = made_world(cache=True)
    first = process.answer(both())
    assert (first.value, first.replayed, world.ran) == (7, False, [1])
    assert world.kinds == ["claimed", "completed"]
    assert states(world) == DONE
    assert process.renewals.running == []
    assert process.answer(both()).replayed
    for secret in (OLD, NEW):
        again = world.process(secret).answer(asked(secret))
        assert (again.value, again.replayed) == (7, True)
    assert world.ran == [1]


@pytest.mark.parametrize("settle_fault", [None, Fault(StoreUnavailable("down"))])
def test_a_running_inner_level_frees_the_outer_one_as_if_never_claimed(settle_fault):
    """Also when that cannot be written: the lease frees it then."""
    world, process = made_world()
    rival = world.process(INNER_SECRET)
    running = rival.start(asked(INNER_SECRET), rival.pausing(7))
    process.writer.settle_faults.append(settle_fault)
    with pytest.raises(OperationInFlight):
        process.answer(both())
    freed = Condition.OUTLIVED if settle_fault is None else Condition.RUNNING
    assert conditions(world) == [freed, Condition.RUNNING]
    running.step()
    world.clock.advance(31)
    assert process.answer(both()).replayed
    assert world.ran == [1]
    assert states(world) == DONE


def test_another_request_leaves_no_fingerprint_behind():
    world, process = made_world()
    world.process(INNER_SECRET).answer(asked(INNER_SECRET))
    with pytest.raises(KeyReused):
        process.answer(both(mark=OTHER_MARK))
    assert process.answer(both()).replayed


def test_a_refused_claim_keeps_what_an_earlier_attempt_has_done():
    """Its outer lease ended first; a duplicate took that over, and was refused by the inner one."""
    world, charged = World(), []

    async def dying(attempt: Attempt):
        await attempt.step("charge", charged.append, True)
        await Pause()

    one, other = world.process(OLD, NEW), world.process(OLD, NEW)
    one.writer.claim_faults.extend([None, Fault(pauses=True)])
    running = one.start(both(), one.operating(dying))
    world.clock.advance(1)
    died(running.step())
    world.clock.advance(29.5)
    assert conditions(world) == [Condition.ABANDONED, Condition.RUNNING]
    with pytest.raises(OperationInFlight):
        other.answer(both())
    assert conditions(world) == [Condition.RELEASED, Condition.RUNNING]
    alone = world.process(OUTER_SECRET)
    with pytest.raises(KeyReused):
        alone.answer(asked(OUTER_SECRET, mark=OTHER_MARK))
    died(alone.start(asked(OUTER_SECRET), alone.operating(dying)))
    assert charged == [True]
    assert drive(world.store.read(OUTER)).record.attempt == 3


def test_a_refusal_inside_leaves_no_fingerprint_at_any_of_three_levels():
    """The level in the middle frees its key, which is no ending for the one around it."""
    world = World()
    secrets = sorted((OLD, NEW, THIRD), key=lambda value: Secret(value).tag)
    innermost, process = world.process(secrets[-1]), world.process(*secrets)
    innermost.answer(asked(secrets[-1]))
    with pytest.raises(KeyReused):
        process.answer(asked(*secrets, mark=OTHER_MARK))
    assert process.answer(asked(*secrets)).replayed
    assert world.ran == [1]


def test_an_inner_claim_without_an_answer_leaves_the_outer_one_to_its_lease():
    """Nobody knows whether it arrived."""
    world, process = made_world()
    process.writer.claim_faults.extend([None, *[Fault(StoreUnavailable("down"))] * 3])
    with pytest.raises(StoreUnavailable):
        process.answer(both())
    assert states(world) == [State.PENDING, None]
    assert world.ran == []


def test_a_failure_for_good_is_stored_by_every_level():
    world, process = made_world()
    with pytest.raises(Declined):
        process.answer(both(), process.raising(Declined("no")))
    assert states(world) == [State.FAILED, State.FAILED]


def test_a_stored_failure_of_the_inner_level_becomes_the_outer_ones():
    """Also one that comes back as another exception, which the policy would take for a release."""
    world, process = made_world()
    rival = world.process(INNER_SECRET)
    with pytest.raises(Declined):
        rival.answer(asked(INNER_SECRET), rival.raising(Declined("no")))
    with pytest.raises(Exception, match="no") as caught:
        process.answer(both(rebuilds_failures=False))
    assert not isinstance(caught.value, Declined)
    assert states(world) == [State.FAILED, State.FAILED]


def test_a_failure_that_is_no_longer_stored_is_one_at_every_level():
    """Stored as done, it would be told as done by a process that knows only the outer key."""
    world, process = made_world()
    rival = world.process(INNER_SECRET)
    with pytest.raises(Declined):
        rival.answer(asked(INNER_SECRET), rival.raising(Declined("no")))
    world.store._outcomes.clear()
    for asking, wanted in ((process, both()), (world.process(OUTER_SECRET), asked(OUTER_SECRET))):
        with pytest.raises(OperationFailed, match="its failure is no longer stored"):
            asking.answer(wanted)
    assert states(world) == [State.FAILED, State.FAILED]
    assert world.ran == [1]


def test_an_outcome_that_is_no_longer_stored_is_done_at_every_level():
    """Freed, the outer key would let a process run it that knows only that one."""
    world, process = made_world()
    world.process(INNER_SECRET).answer(asked(INNER_SECRET))
    world.store._outcomes.clear()
    for _ in range(2):
        with pytest.raises(OutcomeUnavailable):
            process.answer(both())
    assert states(world) == DONE
    with pytest.raises(OutcomeUnavailable):
        world.process(OUTER_SECRET).answer(asked(OUTER_SECRET))
    assert world.ran == [1]


@pytest.mark.parametrize("secrets", [(OLD, NEW), (OLD, NEW, THIRD)])
@pytest.mark.parametrize("error", [None, Declined("no")])
def test_a_replay_of_the_inner_level_makes_no_window_longer(secrets, error):
    """All levels end with the one that ran; also what the process itself remembers does."""
    world = World(cache=True)
    policy = POLICY.with_changes(active_window=timedelta(minutes=5))
    innermost = max(secrets, key=lambda value: Secret(value).tag)
    first, process = world.process(innermost), world.process(*secrets)
    asking = asked(innermost, policy=policy)
    ending = first.start(asking, first.raising(error) if error else None)
    assert ending.is_done
    world.clock.advance(299)
    for _ in range(2):
        replay = process.start(asked(*secrets, policy=policy))
        assert replay.error is not None if error else replay.value.replayed
    assert world.ran == [1]
    world.clock.advance(1)
    assert not process.answer(asked(*secrets, policy=policy)).replayed


def test_a_replay_that_a_local_caller_waited_for_makes_no_window_longer():
    world, process = made_world()
    policy = POLICY.with_changes(active_window=timedelta(minutes=5))
    world.process(INNER_SECRET).answer(asked(INNER_SECRET, policy=policy))
    world.clock.advance(299)
    process.writer.claim_faults.append(Fault(stalls=True))
    leader = process.start(asked(INNER_SECRET, policy=policy))
    follower = process.start(both(policy=policy))
    leader.step()
    assert follower.step().value.replayed
    world.clock.advance(1)
    assert not process.answer(both(policy=policy)).replayed


def test_a_failure_that_frees_the_key_frees_every_level():
    world, process = made_world()
    with pytest.raises(ConnectionError):
        process.answer(both(), process.raising(ConnectionError("again")))
    assert states(world) == [State.RELEASED, State.RELEASED]
    assert process.answer(both()).attempt == 2


def test_an_ending_that_the_inner_level_could_not_store_leaves_both_to_their_leases():
    world, process = made_world()
    process.writer.settle_faults.extend([Fault(StoreUnavailable("down"))] * 20)
    with pytest.raises(OutcomeNotStored) as caught:
        process.answer(both())
    assert caught.value.value == 7
    assert states(world) == PENDING


def test_an_ending_that_the_outer_level_could_not_store_is_told_and_resumed():
    """The next attempt finds the inner outcome: nothing runs again."""
    world, process = made_world()
    process.writer.settle_faults.extend([None, *[Fault(StoreUnavailable("down"))] * 20])
    with pytest.raises(OutcomeNotStored) as caught:
        process.answer(both())
    assert caught.value.value == 7
    assert states(world) == [State.PENDING, State.SUCCEEDED]
    process.writer.settle_faults.clear()
    world.clock.advance(31)
    assert process.answer(both()).replayed
    assert (states(world), world.ran) == (DONE, [1])


@pytest.mark.parametrize(
    "faults", [[StoreUnavailable("down")], [StoreUnavailable("down")] * 3, [StoreRejected("no")]]
)
def test_a_value_is_stored_although_the_inner_ending_cannot_be_read(faults):
    """It is known what it was: the caller must not hear that nothing ran."""
    world, process = made_world()
    process.store.ending_faults.extend(map(Fault, faults))
    assert process.answer(both()).value == 7
    assert states(world) == DONE


def test_a_failure_whose_ending_cannot_be_read_leaves_the_outer_level_to_its_lease():
    world, process = made_world()
    process.store.ending_faults.extend([Fault(StoreUnavailable("down"))] * 3)
    with pytest.raises(Declined):
        process.answer(both(), process.raising(Declined("no")))
    assert states(world) == [State.PENDING, State.FAILED]
    world.clock.advance(31)
    with pytest.raises(Declined):
        process.answer(both())
    assert (states(world), world.ran) == ([State.FAILED, State.FAILED], [1])


def test_the_ending_of_another_attempt_is_not_copied():
    """The inner claim was lost to somebody who has ended it."""
    world, process = made_world()
    rival = world.process(INNER_SECRET)
    running = process.start(both(), process.pausing(Declined("late")))
    world.clock.advance(31)
    rival.answer(asked(INNER_SECRET))
    running.step()
    assert isinstance(running.error, ClaimLost)
    assert states(world) == [State.PENDING, State.SUCCEEDED]


def test_a_lost_outer_claim_is_reported():
    """Somebody who knows only the outer key may have run it."""
    world, process = made_world()
    running = process.start(both(), process.pausing(7))
    world.clock.advance(31)
    world.process(OUTER_SECRET).answer(asked(OUTER_SECRET))
    running.step()
    assert isinstance(running.error, ClaimLost)


def test_nothing_starts_when_the_outer_lease_is_over():
    """The process stood still between the two claims."""
    world, process = made_world()
    process.writer.claim_faults.extend([None, Fault(pauses=True)])
    running = process.start(both())
    world.clock.advance(31)
    world.process(OUTER_SECRET).answer(asked(OUTER_SECRET))
    running.step()
    assert isinstance(running.error, ClaimLost)
    assert world.ran == [2]  # Of the other process, which has taken the outer key over.


def test_an_outer_lease_that_nobody_has_taken_is_the_owners_again():
    world, process = made_world()
    process.writer.claim_faults.extend([None, Fault(pauses=True)])
    running = process.start(both())
    world.clock.advance(31)
    running.step()
    assert running.value.value == 7
    assert states(world) == DONE


def test_an_attempt_is_lost_with_any_of_its_claims():
    _, process = made_world()
    seen = []

    async def operation(attempt: Attempt):
        outer, inner = process.renewals.running
        assert (outer.key, inner.key) == (OUTER, INNER)
        outer.ends_monotonic -= 20
        seen.append((attempt.time_left, attempt.is_lost))
        outer.revoke()
        seen.append((attempt.time_left, attempt.is_lost))

    with pytest.raises(ClaimLost):
        # The store still has it: what is written is confirmed by the store alone.
        process.writer.settle_faults.append(Fault(ClaimLost("gone")))
        process.answer(both(), operation)
    assert seen == [(timedelta(seconds=10), False), (timedelta(0), True)]


# Cancellation.


def test_a_cancelled_operation_frees_no_level():
    world, process = made_world()
    running = process.start(both(), process.pausing(7))
    running.throw(asyncio.CancelledError())
    assert isinstance(running.error, asyncio.CancelledError)
    assert (states(world), world.background) == (PENDING, [])
    assert process.renewals.running == []


def test_a_caller_that_leaves_while_the_inner_outcome_is_written_loses_neither():
    world, process = made_world()
    process.writer.settle_faults.append(Fault(pauses=True))
    running = process.start(both())
    running.throw(asyncio.CancelledError())
    assert len(world.background) == 2
    for last_write in world.background:
        drive(last_write)
    assert states(world) == DONE
    assert world.kinds == ["claimed", "completed"]
    assert process.renewals.running == []


@pytest.mark.parametrize(
    ("faults", "outer"), [([], State.SUCCEEDED), ([ClaimLost("gone")], State.PENDING)]
)
def test_a_caller_that_leaves_before_the_outer_outcome_is_written_loses_none(faults, outer):
    world, process = made_world()
    process.store.ending_faults.append(Fault(pauses=True))
    running = process.start(both())
    running.throw(asyncio.CancelledError())
    process.writer.settle_faults.extend(map(Fault, faults))
    (last_write,) = world.background
    drive(last_write)
    assert world.kinds == ["claimed", "completed"]
    assert states(world) == [outer, State.SUCCEEDED]
    assert process.renewals.running == []


def test_a_caller_that_leaves_before_the_outer_failure_is_written_loses_none():
    world, process = made_world()
    process.store.ending_faults.append(Fault(pauses=True))
    running = process.start(both(), process.raising(Declined("no")))
    running.throw(asyncio.CancelledError())
    (last_write,) = world.background
    drive(last_write)
    assert world.kinds == ["claimed", "failed"]
    assert states(world) == [State.FAILED, State.FAILED]
    assert process.renewals.running == []


def test_a_caller_that_leaves_while_its_refused_claim_is_given_back_blocks_nobody():
    world, process = made_world()
    rival = world.process(INNER_SECRET)
    rival.start(asked(INNER_SECRET), rival.pausing(7))
    process.writer.settle_faults.append(Fault(pauses=True))
    running = process.start(both())
    running.throw(asyncio.CancelledError())
    (last_write,) = world.background
    drive(last_write)
    assert conditions(world) == [Condition.OUTLIVED, Condition.RUNNING]
    assert process.renewals.running == []


def test_a_caller_that_leaves_between_three_levels_loses_none():
    """The last write of the level in the middle settles the one around it, too."""
    world = World()
    secrets = (OLD, NEW, THIRD)
    process = world.process(*secrets)
    process.store.ending_faults.append(Fault(pauses=True))
    running = process.start(asked(*secrets))
    running.throw(asyncio.CancelledError())
    (last_write,) = world.background
    drive(last_write)
    for secret in secrets:
        assert world.process(secret).answer(asked(secret)).replayed
    assert process.renewals.running == []


def test_a_caller_that_leaves_an_operation_with_steps_loses_no_level():
    """While its stored steps are read: the outcome is known, and all levels get it."""
    world, process = made_world()
    died(process.start(both(), process.pausing(7)))
    world.clock.advance(31)
    process.store.read_faults.append(Fault(pauses=True))
    running = process.start(both())
    running.throw(asyncio.CancelledError())
    (last_write,) = world.background
    drive(last_write)
    assert states(world) == DONE
    assert process.renewals.running == []
    assert world.process(OUTER_SECRET).answer(asked(OUTER_SECRET)).replayed


def test_a_signal_leaves_no_lease_that_is_renewed_for_ever():
    world, process = made_world()
    remove, raised = process.renewals.remove, []

    def interrupted(lease):
        if lease.key == OUTER and not raised:
            raised.append(lease)
            raise KeyboardInterrupt
        remove(lease)

    process.renewals.remove = interrupted
    with pytest.raises(KeyboardInterrupt):
        process.answer(both())
    assert not [lease for lease in process.renewals.running if lease.may_renew(0.0)]
    assert states(world) == DONE


# Who goes on with what.


def test_a_local_run_of_the_inner_key_is_waited_for():
    world, process = made_world()
    waiting = POLICY.with_changes(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=9))
    running = process.start(asked(INNER_SECRET), process.pausing(7))
    follower = process.start(both(policy=waiting))
    running.step()
    follower.step()
    assert (follower.value.value, follower.value.replayed) == (7, True)
    assert (states(world), world.ran) == (DONE, [1])


def died(running):
    """Ends a flow as the death of its process does: nothing is settled."""
    assert not running.is_done
    running.throw(asyncio.CancelledError())


LISTS = [(OLD,), (NEW,), (OLD, NEW), (NEW, OLD)]


# Two processes that share no secret share no key, and never run side by side.
@pytest.mark.parametrize(
    ("first", "second"), [pair for pair in product(LISTS, LISTS) if set(pair[0]) & set(pair[1])]
)
def test_a_later_attempt_has_the_steps_and_the_child_keys_of_the_first(first, second):
    """After a crash, on any process that shares a key with it; who cannot make them says so."""
    world, charged, keys = World(), [], []

    async def operation(attempt: Attempt):
        # Before the child key, which who cannot make it refuses.
        assert attempt.key in KEYS.values()
        keys.append(attempt.child_key("charge"))
        assert attempt.key == KEYS[Secret(first[0]).tag]
        assert attempt.is_first is (len(keys) == 1)
        await attempt.step("charge", charge)
        if len(keys) == 1:
            await Pause()
        return "paid"

    def charge():
        charged.append(True)

    one, other = world.process(*first), world.process(*second)
    died(one.start(asked(*first), one.operating(operation)))
    world.clock.advance(31)
    if first[0] in second:
        assert other.answer(asked(*second), other.operating(operation)).value == "paid"
        third = world.process(OLD, NEW)
        assert third.answer(both()).replayed
    else:
        with pytest.raises(SecretMissing):
            other.answer(asked(*second), other.operating(operation))
    assert charged == [True]
    assert set(keys) == {child_key(first[0], KEYS[Secret(first[0]).tag], "charge")}


@pytest.mark.parametrize("secrets", [(OLD, NEW), (OLD, NEW, THIRD)])
def test_crashes_of_one_level_count_for_the_others(secrets):
    """The operation may have killed its workers, whichever keys they knew."""
    world = World()
    policy = POLICY.with_changes(attempt_limit=3)
    outermost = min(secrets, key=lambda value: Secret(value).tag)
    for listed in [(outermost,)] * 2 + [secrets]:
        process = world.process(*listed)
        died(process.start(asked(*listed, policy=policy), process.pausing(7)))
        world.clock.advance(31)
    with pytest.raises(AttemptsExhausted):
        world.process(*secrets).answer(asked(*secrets, policy=policy))
    assert len(world.ran) == 3
    for secret in secrets:
        with pytest.raises(AttemptsExhausted):
            world.process(secret).answer(asked(secret, policy=policy))


def test_steps_of_one_level_are_copied_to_the_others():
    """The attempt after the next may know only the other key."""
    world = World()
    charged = []

    async def dying(attempt: Attempt):
        await attempt.step("charge", charged.append, True)
        await Pause()

    one = world.process(OLD)
    died(one.start(asked(OLD), one.operating(dying)))
    world.clock.advance(31)
    two = world.process(OLD, NEW)
    died(two.start(both(), two.operating(dying)))
    assert two.store.writes == ["charge"]  # Where it was missing, and nowhere else.
    steps = [drive(world.store.read(key)).steps for key in (OUTER, INNER)]
    assert [[step.name for step in each] for each in steps] == [["charge"], ["charge"]]
    assert charged == [True]


@pytest.mark.parametrize("first", [OUTER_SECRET, INNER_SECRET])
def test_a_step_that_cannot_be_copied_to_a_lost_level_stops_the_attempt(first):
    """The level's new owner does not know of the step, and may run it."""
    world, charged = World(), []

    async def dying(attempt: Attempt):
        await attempt.step("charge", charged.append, True)
        await Pause()

    one = world.process(first)
    died(one.start(asked(first), one.operating(dying)))
    world.clock.advance(31)
    two = world.process(OLD, NEW)
    two.store.write_faults.append(Fault(pauses=True))
    running = two.start(both(), two.operating(dying))
    other = INNER if first == OUTER_SECRET else OUTER
    drive(world.store.operate(other, OperatorCommand.FORCE_RELEASE))
    running.step()
    assert isinstance(running.error, ClaimLost)
    assert charged == [True]


def test_a_step_that_an_outer_level_refuses_is_lost():
    world, process = made_world()

    async def operation(attempt: Attempt):
        drive(world.store.operate(OUTER, OperatorCommand.FORCE_RELEASE))
        await attempt.step("charge", lambda: None)

    with pytest.raises(ClaimLost):
        process.answer(both(), process.operating(operation))


# The user's transactions.


@pytest.mark.parametrize("fate", [Fate.STANDS, Fate.OPEN])
def test_an_outcome_in_the_users_transaction_is_that_of_every_level(fate):
    """Nothing is written beside it: its commit or its rollback decides."""
    transaction = FakeTransaction(settles=Decision.APPLY, fate_is=fate)
    world = World(join=lambda connection: transaction)
    process = world.process(OLD, NEW)

    async def operation(attempt: Attempt):
        attempt.complete_in("connection", "paid")

    assert process.answer(both(), operation).value == "paid"
    assert transaction.calls == ["begin", "settle", "settle", "keep"]
    assert process.writer.settlements == []


def test_a_lost_outer_claim_refuses_the_users_transaction():
    transaction = FakeTransaction(settles=Decision.LOST)
    world = World(join=lambda connection: transaction)
    process = world.process(OLD, NEW)

    async def operation(attempt: Attempt):
        attempt.complete_in("connection", "paid")

    with pytest.raises(ClaimLost):
        process.answer(both(), operation)
    assert transaction.calls == ["begin", "settle", "undo"]


def test_a_step_in_the_users_transaction_is_recorded_by_every_level():
    transaction = FakeTransaction()
    world = World(join=lambda connection: transaction)
    process = world.process(OLD, NEW)
    written = []

    async def record_step(write):
        written.append(write.key)
        return Decision.APPLY

    transaction.record_step = record_step

    async def operation(attempt: Attempt):
        await attempt.step("charge", lambda: 1, in_transaction="connection")

    process.answer(both(), process.operating(operation))
    assert written == [OUTER, INNER]


class TwoRecords(FakeTransaction):
    """A transaction on a database with a record for each key."""

    def __init__(self, records=None):
        super().__init__()
        self.records = {} if records is None else records

    async def claim(self, request):
        self.database.record, self.database.payload = self.records.get(
            request.key.digest, (None, None)
        )
        answer = await super().claim(request)
        self.records[request.key.digest] = (self.database.record, self.database.payload)
        return answer

    async def settle(self, settlement):
        self.database.record, self.database.payload = self.records[settlement.key.digest]
        decision = await super().settle(settlement)
        self.records[settlement.key.digest] = (self.database.record, self.database.payload)
        return decision


def test_an_atomic_block_claims_and_settles_all_keys_in_one_transaction():
    secrets = Secrets(NEW, OLD)
    transaction = TwoRecords()
    made = Made(transaction, asked(NEW, OLD), secrets=secrets).enter()
    assert made.block.child_key("x") == child_key(NEW, KEYS[Secret(NEW).tag], "x")
    made.complete(7).leave()
    assert transaction.calls == [
        *("begin", "lock", "claim", "lock", "claim", "settle", "settle", "keep")
    ]
    assert [record.state for record, _ in transaction.records.values()] == DONE
    for secret in (OLD, NEW):
        again = Made(TwoRecords(transaction.records), asked(secret), secrets=Secrets(secret))
        assert again.enter().block.value == 7
    # Found at the first level, the second is not asked.
    again = Made(TwoRecords(transaction.records), asked(OLD, NEW), secrets=secrets).enter()
    assert again.block.replayed
    assert again.transaction.calls == ["begin", "lock", "claim", "undo"]


def test_an_atomic_block_that_loses_one_key_keeps_nothing():
    transaction = TwoRecords()
    made = Made(transaction, asked(NEW, OLD)).enter()
    transaction.settles = Decision.LOST
    with pytest.raises(ClaimLost):
        made.complete(7)
    assert transaction.calls.count("settle") == 1


def test_another_key_of_the_same_caller():
    assert Key("a", caller="acme").renamed("b") == Key("b", caller="acme")
    assert Key("a", caller=GLOBAL).renamed("b") == Key("b", caller=GLOBAL)


def test_a_key_with_several_forms_takes_no_corrected_request():
    """Its forms could be of different requests then, so the next one is refused as ever."""
    world, process = made_world()
    listed = {"nothing_happened": lambda came_to: True}
    with pytest.raises(Declined):
        process.answer(both(**listed), process.raising(Declined("no")))
    assert not any(drive(world.store.read(key)).record.nothing_happened for key in (OUTER, INNER))
    with pytest.raises(KeyReused):
        process.answer(both(mark=OTHER_MARK, **listed))
    assert world.ran == [1]


@pytest.mark.parametrize("is_atomic", [False, True])
def test_what_was_corrected_before_a_rotation_keeps_its_child_keys(is_atomic):
    """The record around tells that it was; the claims inside it are new."""
    world, process = made_world()
    first = world.process(OUTER_SECRET)
    seen = []

    def charging(error):
        async def operation(attempt):
            seen.append(attempt.child_key("bank"))
            raise error

        return operation

    listed = {"nothing_happened": lambda came_to: True, "policy": Policy()}
    with pytest.raises(Declined):
        first.answer(asked(OUTER_SECRET, **listed), first.operating(charging(Declined("no"))))
    corrected = asked(OUTER_SECRET, mark=OTHER_MARK, **listed)
    with pytest.raises(ConnectionError):
        first.answer(corrected, first.operating(charging(ConnectionError("down"))))
    again = both(mark=OTHER_MARK, policy=Policy())
    if is_atomic:
        record = drive(world.store.read(OUTER)).record
        transaction = TwoRecords({OUTER.digest: (record, None)})
        transaction.database.clock = world.clock
        made = Made(transaction, again, secrets=Secrets(OLD, NEW)).enter()
        seen.append(made.block.child_key("bank"))
    else:
        with pytest.raises(ConnectionError):
            process.answer(again, process.operating(charging(ConnectionError("down"))))
    assert seen[0] != seen[1] == seen[2]
