"""Corrected requests: what the engine and the atomic block make of them, and what they remember."""

from __future__ import annotations

import contextlib

import pytest

from retrysafe.core import transitions
from retrysafe.core.keys.key import child_key
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.model import Decision, Ending, SettleKind, State
from retrysafe.core.outbox.staging import Staging, entry_key
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.steps.history import StepRetry
from retrysafe.errors import (
    KeyReused,
    OutcomeNotStored,
    PolicyInvalid,
    StepNotStored,
    StoreMissing,
)
from tests.core.building import (
    KEY,
    MARK,
    NOW,
    OTHER_MARK,
    OTHER_TOKEN,
    TOKEN,
    call,
    record,
    request,
    settlement,
)
from tests.core.driving import Fault, World, drive
from tests.core.sample_types import Declined
from tests.core.test_atomic import Made
from tests.core.transacting import FakeTransaction

SECRET = b"s" * 32
KEPT = Policy(terminal=(Declined,), nothing_happened=(Declined,))
FREED = Policy(retryable=(Declined,), nothing_happened=(Declined,))
WAITING = KEPT.with_changes(in_flight=InFlight.WAIT)


def asked(*marks, policy=KEPT, **changes):
    """A call under a key that was made from its values."""
    return call(*marks, policy=policy, nothing_happened=policy.is_nothing_happened, **changes)


def declined(process, made=None):
    with pytest.raises(Declined):
        process.answer(made or asked(), process.raising(Declined("no")))


def marked(world):
    return world.store._records[KEY.digest].nothing_happened


# The engine.


@pytest.mark.parametrize("policy", [KEPT, FREED])
def test_a_listed_exception_is_written_with_its_mark(policy):
    """Kept or freed; a value that ends the attempt so as well, and nothing else."""
    world = World()
    declined(world.first, asked(policy=policy))
    assert marked(world)
    answer = world.first.answer(asked(OTHER_MARK, policy=policy))
    assert (answer.replayed, answer.attempt) == (False, 2)
    assert not marked(world)


@pytest.mark.parametrize("ending", [Ending.FAILED, Ending.RELEASED, Ending.SUCCEEDED])
def test_a_listed_value_is_written_with_its_mark(ending):
    """As the judge of values says: what succeeded has happened."""
    world = World()
    made = call(judge=lambda value: ending, nothing_happened=lambda came_to: came_to == "402")
    world.first.answer(made, world.first.returning("402"))
    assert marked(world) is (ending is not Ending.SUCCEEDED)


def test_only_what_the_call_lists_is_asked_for():
    """A call under a key that its client has sent marks nothing, whatever its policy lists."""
    world = World()
    with pytest.raises(Declined):
        world.first.answer(call(policy=KEPT), world.first.raising(Declined("no")))
    assert not marked(world)
    with pytest.raises(KeyReused):
        world.first.answer(asked(OTHER_MARK))


def test_an_outcome_that_may_be_replaced_is_not_remembered():
    """Neither by its owner nor by who replays it: a corrected request may come anywhere else."""
    world = World(cache=True)
    for process in (world.first, world.process()):
        for _ in range(2):
            declined(process)
    assert world.ran == [1]
    assert world.process().answer(asked(OTHER_MARK)).attempt == 2
    for process in (world.first, world.process()):
        with pytest.raises(KeyReused):
            process.answer(asked())


def test_an_outcome_that_may_be_replaced_is_not_remembered_after_a_step():
    """The steps' own way to the ending is no way around: here the step itself was declined."""
    world = World(cache=True)
    process = world.first

    def declining():
        raise Declined("no")

    async def operation(attempt):
        await attempt.step("charge", declining)

    with pytest.raises(Declined):
        process.answer(asked(), process.operating(operation))
    assert process.answer(asked(OTHER_MARK)).attempt == 2
    with pytest.raises(KeyReused):
        process.answer(asked())


@pytest.mark.parametrize("ending", ["exception", "value"])
def test_a_step_that_ran_and_could_not_be_stored_is_not_nothing(ending):
    """The operation went on without it, and no store knows that it has happened."""
    world = World(cache=True)
    process, done = world.first, []

    async def operation(attempt):
        process.store.write_faults.append(Fault(StoreMissing("gone")))
        with pytest.raises(StepNotStored):
            await attempt.step("reserve", done.append, 1)
        if ending == "exception":
            raise Declined("no")
        return "402"

    if ending == "exception":
        with pytest.raises(Declined):
            process.answer(asked(), process.operating(operation))
    else:
        made = call(judge=lambda _: Ending.FAILED, nothing_happened=lambda it: it == "402")
        process.answer(made, process.operating(operation))
    assert world.store._records[KEY.digest].state is State.FAILED
    assert not marked(world)
    for other in (process, world.process()):
        with pytest.raises(KeyReused):
            other.answer(asked(OTHER_MARK))
    assert done == [1]


class _Cut(BaseException):
    """As a cancellation: no exception that an operation is judged by."""


@pytest.mark.parametrize(
    ("errors", "is_taken"),
    [
        ([TimeoutError()], False),
        ([TimeoutError(), Declined("no")], False),
        ([_Cut()], False),
        ([Declined("no")], True),
        ([], True),
    ],
)
def test_a_step_of_which_nobody_knows_what_it_did_is_not_nothing(errors, is_taken):
    """It timed out or was cancelled, whatever the operation says after that."""
    world, tries = World(), iter(errors)

    async def charge():
        error = next(tries, None)
        if error is not None:
            raise error

    async def operation(attempt):
        if errors:
            with contextlib.suppress(TimeoutError, _Cut, Declined):
                await attempt.step("charge", charge, retry=StepRetry(tries=len(errors)))
        raise Declined("no")

    process = world.first
    with pytest.raises(Declined):
        process.answer(asked(), process.operating(operation))
    assert marked(world) is is_taken


def test_an_outcome_that_stays_is_remembered():
    world = World(cache=True)
    with pytest.raises(ValueError, match="unclear"):
        world.first.answer(
            asked(policy=KEPT.with_changes(terminal=(ValueError,))),
            world.first.raising(ValueError("unclear")),
        )
    claims = len(world.first.writer.claims)
    with pytest.raises(KeyReused):
        world.first.answer(asked(OTHER_MARK))
    assert len(world.first.writer.claims) == claims


@pytest.mark.parametrize("policy", [KEPT, WAITING])
def test_a_corrected_request_behind_a_replay_asks_the_store(policy):
    """What its leader was told, and hands to all who ask the same, is not held against it."""
    world = World()
    declined(world.process())
    process = world.first
    process.writer.claim_faults.append(Fault(pauses=True))
    leader = process.start(asked())
    same = process.start(asked(policy=policy))
    corrected = process.start(asked(OTHER_MARK, policy=policy))
    client = process.start(call(OTHER_MARK, policy=policy))
    leader.step()
    assert isinstance(leader.error, Declined)
    assert isinstance(same.step().error, Declined)
    assert isinstance(client.step().error, KeyReused)
    assert corrected.step().value.attempt == 2
    assert world.ran == [1, 2]


def test_a_corrected_request_is_refused_while_another_one_runs():
    """As the table has it, and without a store call."""
    world = World()
    process = world.first
    process.start(asked(), process.pausing("first"))
    claims = len(process.writer.claims)
    with pytest.raises(KeyReused):
        process.answer(asked(OTHER_MARK, policy=WAITING))
    assert len(process.writer.claims) == claims


def test_child_keys_change_with_the_correction_and_with_nothing_else():
    """The same in every attempt of the corrected request, and those of others stay as they were."""
    world = World()
    seen = []

    def operation(process, error):
        async def invoke(attempt):
            attempt._secrets = Secrets(SECRET)
            seen.append(attempt.child_key("acquirer"))
            raise error

        return process.operating(invoke)

    for mark, error in (
        (MARK, Declined("no")),
        (MARK, Declined("no")),
        (OTHER_MARK, ConnectionError("down")),
        (OTHER_MARK, ConnectionError("down")),
    ):
        process = world.process()
        with pytest.raises(type(error)):
            process.answer(asked(mark, policy=FREED), operation(process, error))
    first, second, corrected, again = seen
    assert first == second == child_key(SECRET, KEY, "acquirer")
    assert corrected == again != first


def test_the_keys_of_entries_change_with_the_correction():
    """Else receivers would take the corrected request's for a repetition."""
    plain, corrected = (Staging(KEY, SECRET, lambda: None, it) for it in (b"", b"1:x"))
    assert plain.stage("mail", 1) == entry_key(SECRET, KEY, "mail", 1)
    assert corrected.stage("mail", 1) == entry_key(SECRET, KEY, "mail", 1, b"1:x")
    assert len({entry_key(SECRET, KEY, "mail", 1, it) for it in (b"", b"1:x", b"1:y")}) == 3
    assert len({child_key(SECRET, KEY, "a", correction=it) for it in (b"", b"1:x", b"1:y")}) == 3


# The atomic block.


def atomic(transaction, *marks):
    made = call(*marks, nothing_happened=lambda came_to: came_to == "402")
    return Made(transaction, made, secrets=Secrets(SECRET))


def test_an_atomic_run_takes_a_corrected_request():
    """The mark is written with the outcome, in the user's transaction, and read in the next."""
    transaction = FakeTransaction()
    first = atomic(transaction).enter()
    plain = first.block.child_key("acquirer")
    payload = first.block.call.codec.encode("402")
    drive(first.block.conclude(SettleKind.FAIL, payload, "402"))
    first.leave()
    assert transaction.database.record.nothing_happened
    # What is replayed may be replaced at any moment.
    again = atomic(transaction).enter()
    assert (again.block.replayed, again.block.replayed_ms) == (True, 0)
    second = atomic(transaction, OTHER_MARK).enter()
    assert second.block.attempt == 2
    assert second.block.child_key("acquirer") != plain
    second.complete("paid").leave()
    assert not transaction.database.record.nothing_happened


# The table's record.


def test_a_correction_keeps_the_life_and_replaces_the_request():
    old = record(State.FAILED, nothing_happened=True, attempt=2, releases=1)
    wish = request(OTHER_TOKEN, OTHER_MARK)
    wish.takes_corrections = True
    made, answer = transitions.claim(old, wish, NOW - 5)
    assert (answer.decision, answer.attempt, answer.releases) == (Decision.TAKE_OVER, 3, 2)
    assert (made.rule, made.fingerprint) == (OTHER_MARK.rule, OTHER_MARK.digest)
    assert (made.first_claimed_at_ms, made.is_uncertain) == (NOW, False)
    # By a clock that was set back, too.
    assert made.corrected_at_ms == NOW
    assert answer.correction == transitions.correction_of(made) != b""
    assert transitions.is_new_request(old, made, answer.decision)


def test_what_an_earlier_life_has_left_of_a_correction_does_not_count():
    """A release that does not know of corrections leaves the instant where it was."""
    left = record(corrected_at_ms=NOW - 1)
    assert transitions.correction_of(left) == b""


@pytest.mark.parametrize(
    ("old", "kind", "is_marked"),
    [
        (record(), SettleKind.FAIL, True),
        (record(), SettleKind.RELEASE, True),
        (record(is_uncertain=True), SettleKind.FAIL, False),
    ],
)
def test_the_mark_speaks_for_the_whole_life(old, kind, is_marked):
    made, _ = transitions.settle(old, settlement(kind, TOKEN, nothing_happened=True), NOW)
    assert made.nothing_happened is is_marked


# The policy.


def test_what_retrysafe_raises_is_never_nothing():
    """A step that ran and could not be stored, for one, even where its class is listed."""
    policy = Policy(nothing_happened=(Declined, StepNotStored, OutcomeNotStored))
    assert policy.is_nothing_happened(Declined("no"))
    assert not policy.is_nothing_happened(StepNotStored("x", key="k", value=1))
    assert not policy.is_nothing_happened(None)


class Unanswered(Declined, TimeoutError):
    """What a client library raises when the answer did not come."""


class CutOff(Declined, ConnectionResetError):
    """The same, when the connection broke."""


class DeclinedTogether(ExceptionGroup, Declined):
    """What a library raises that tries several cards at once."""

    def __new__(cls, message):
        return super().__new__(cls, message, [Declined("no"), ValueError("something else")])


@pytest.mark.parametrize("kind", [Unanswered, CutOff, DeclinedTogether])
def test_what_is_uncertain_does_not_count_by_another_class(kind):
    """An exception may be of a listed class and a time-out, or a group, at once."""
    assert not KEPT.is_nothing_happened(kind("no answer"))
    world = World()
    with pytest.raises(kind):
        world.first.answer(asked(), world.first.raising(kind("no answer")))
    assert not marked(world)
    with pytest.raises(KeyReused):
        world.first.answer(asked(OTHER_MARK))


@pytest.mark.parametrize(
    "kind",
    [
        Exception,
        OSError,
        TimeoutError,
        ConnectionError,
        ConnectionResetError,
        BrokenPipeError,
        Unanswered,
        CutOff,
    ],
)
def test_what_leaves_everything_open_cannot_be_listed(kind):
    """Nobody knows what happened after it, and a wide class takes it in."""
    with pytest.raises(PolicyInvalid, match="nobody knows what happened"):
        Policy(nothing_happened=(kind,))


@pytest.mark.parametrize("kind", [ExceptionGroup, DeclinedTogether])
def test_a_group_of_exceptions_cannot_be_listed(kind):
    """One of them may have come after an effect, and a cancelled task may have had one."""
    with pytest.raises(PolicyInvalid, match="catch the group in the operation"):
        Policy(nothing_happened=(kind,))
    assert not KEPT.is_nothing_happened(ExceptionGroup("both", [Declined("no"), Declined("no")]))
