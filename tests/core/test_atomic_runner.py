"""Atomic runs led by the engine: when the transaction is opened, what it keeps, who hears of it."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import pytest

from retrysafe.core.keys.key import child_key
from retrysafe.core.model import Decision, Ending, State
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.run_times import UNKNOWN_SECONDS
from retrysafe.errors import (
    ClaimLost,
    InvalidInput,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeUnavailable,
    StoreUnavailable,
)
from tests.core.building import KEY, LEASE_MS, OTHER_MARK, call, record
from tests.core.driving import Flow, Pause, World, drive
from tests.core.transacting import Database, FakeTransaction

SECRET = b"0123456789abcdef"
WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=10))


class Outage(Exception):
    """What a driver raises for a server that does not answer."""


class Opened:
    """An open transaction of the user's: says how it ended."""

    def __init__(self, desk):
        self._desk = desk
        self._saved = None

    async def __aenter__(self):
        self._desk.ends.append("begin")
        if self._desk.open_error is not None:
            raise self._desk.open_error
        database = self._desk.database
        self._saved = (database.record, database.payload)
        return "connection"

    async def __aexit__(self, kind, error, trace):
        database = self._desk.database
        if kind is None and self._desk.commit_error is None:
            self._desk.ends.append("commit")
            return
        self._desk.ends.append("rollback")
        database.record, database.payload = self._saved
        if kind is None:
            raise self._desk.commit_error


class Desk:
    """An engine, and transactions on a database of one record."""

    def __init__(self, *, cache=False):
        self.world = World(cache=cache, secret=SECRET, join=self.join)
        self.join_error: Exception | None = None
        self.engine = self.world.first.engine
        self.database = Database(clock=self.world.clock)
        self.locks: deque[bool] = deque()
        self.ends: list[str] = []
        self.open_error: Exception | None = None
        self.commit_error: Exception | None = None
        self.settles = None
        self.transactions: list[FakeTransaction] = []

    # The ports.

    def open(self):
        return Opened(self)

    def join(self, connection):
        assert connection == "connection"
        if self.join_error is not None:
            raise self.join_error
        transaction = FakeTransaction(self.database, locks=self.locks, settles=self.settles)
        self.transactions.append(transaction)
        return transaction

    def is_outage(self, error):
        return isinstance(error, Outage)

    # What tests do.

    def answer(self, operation, made_call=None):
        return drive(self.engine.answer(made_call or call(), operation, transacting=self))

    def start(self, operation, made_call=None):
        return Flow(self.engine.answer(made_call or call(), operation, transacting=self)).step()

    @property
    def state(self):
        return self.database.record and self.database.record.state


async def seven(attempt):
    return 7


async def never(attempt):
    raise AssertionError("must not run")


async def paused_seven(attempt):
    await Pause()
    return 7


@pytest.fixture
def desk():
    return Desk()


def judged(ending, **changes):
    return call(judge=lambda value: ending, **changes)


def test_a_run_commits_its_outcome_and_a_retry_replays_it(desk):
    """One transaction carries the claim and the outcome; the next one only reads."""
    first = desk.answer(seven)
    assert (first.value, first.replayed, first.attempt) == (7, False, 1)
    assert desk.state is State.SUCCEEDED
    second = desk.answer(never)
    assert (second.value, second.replayed, second.attempt) == (7, True, 1)
    assert desk.ends == ["begin", "commit", "begin", "commit"]
    assert desk.transactions[0].calls == ["begin", "lock", "claim", "settle", "keep"]
    assert desk.world.kinds == ["claimed", "completed", "replayed"]


def test_the_operation_sees_its_attempt(desk):
    """It has the connection to write on, the outbox, and the keys for calls downstream."""
    seen = []

    async def operation(attempt):
        seen.append((attempt.connection, attempt.key, attempt.number, attempt.operation))
        seen.append(attempt.child_key("mail"))
        attempt.outbox.stage("mail", "sent")

    desk.answer(operation)
    assert seen == [("connection", KEY, 1, "shop.pay"), child_key(SECRET, KEY, "mail")]
    assert [each.topic for each in desk.transactions[0].staged] == ["mail"]


def test_a_replay_that_the_process_remembers_opens_no_transaction():
    """The cache of the engine holds for atomic runs as well, first runs and replays alike."""
    desk = Desk(cache=True)
    desk.answer(seven)
    assert desk.answer(never).replayed
    assert desk.ends == ["begin", "commit"]
    desk.engine.forget(KEY)
    assert desk.answer(never).replayed
    assert desk.answer(never).replayed
    assert desk.ends == ["begin", "commit"] * 2


def test_an_outcome_that_a_corrected_request_may_replace_is_not_remembered():
    """It is replayed from the database alone, and there a corrected request takes its place."""
    desk = Desk(cache=True)
    listed = judged(Ending.FAILED, nothing_happened=lambda came_to: came_to == 7)
    desk.answer(seven, listed)
    assert desk.answer(never, listed).replayed
    assert desk.ends == ["begin", "commit"] * 2
    corrected = call(OTHER_MARK, nothing_happened=listed.nothing_happened)
    assert desk.answer(seven, corrected).attempt == 2


def test_a_value_that_is_a_failure_is_kept(desk):
    """Judged as failed: committed with what was written, and replayed."""
    assert desk.answer(seven, judged(Ending.FAILED)).value == 7
    assert desk.state is State.FAILED
    assert desk.answer(never, judged(Ending.FAILED)).replayed
    assert "failed" in desk.world.kinds


def test_a_value_that_frees_the_key_is_rolled_back(desk):
    """The caller gets it, nothing is kept, and the next call runs."""
    answer = desk.answer(seven, judged(Ending.RELEASED))
    assert (answer.value, answer.replayed) == (7, False)
    assert (desk.ends, desk.state) == (["begin", "rollback"], None)
    assert desk.world.kinds == ["claimed", "released"]
    assert desk.answer(seven).replayed is False


def test_an_exception_is_rolled_back_and_reaches_the_caller(desk):
    """The very error of the operation, also when it looks like one of ours."""
    error = KeyReused("of another key, inside", key="other")

    async def operation(attempt):
        raise error

    with pytest.raises(KeyReused) as caught:
        desk.answer(operation)
    assert caught.value is error
    assert (desk.ends, desk.state) == (["begin", "rollback"], None)


def test_an_outage_of_the_operation_is_its_own(desk):
    """What the operation raises is not taken for the transaction's."""

    async def operation(attempt):
        raise Outage

    with pytest.raises(Outage):
        desk.answer(operation)


def test_a_value_that_cannot_be_stored_is_kept_as_done(desk):
    """Its caller gets it; a retry hears that it is done and does not run again."""
    value = object()

    async def operation(attempt):
        return value

    assert desk.answer(operation).value is value
    assert desk.state is State.SUCCEEDED
    with pytest.raises(OutcomeUnavailable):
        desk.answer(never)


def test_a_commit_that_fails_is_no_answer(desk):
    """Nobody is told an outcome that is not there; the key is free."""
    desk.commit_error = Outage("the line is dead")
    with pytest.raises(StoreUnavailable, match="the line is dead") as caught:
        desk.answer(seven)
    assert caught.value.key == KEY.text
    assert desk.state is None
    assert "store unavailable" in desk.world.kinds
    desk.commit_error = None
    assert desk.answer(seven).replayed is False


def test_a_transaction_that_cannot_be_had_is_an_outage(desk):
    """Nothing runs, and a retry can help."""
    desk.open_error = Outage("no connection")
    with pytest.raises(StoreUnavailable, match="no connection"):
        desk.answer(never)


def test_a_fault_of_the_program_stays_one(desk):
    """An error that no retry cures is not called an outage."""
    desk.open_error = TypeError("no such argument")
    with pytest.raises(TypeError):
        desk.answer(never)


def test_a_claim_that_was_rolled_back_inside_is_lost(desk):
    """The outcome cannot be stored any more, so nothing is committed."""
    desk.settles = Decision.LOST
    with pytest.raises(ClaimLost):
        desk.answer(seven)
    assert desk.ends == ["begin", "rollback"]


def test_an_unknown_connection_is_reported(desk):
    """What joining raises ends the transaction."""
    desk.join_error = InvalidInput("unknown")
    with pytest.raises(InvalidInput, match="unknown"):
        desk.answer(never)
    assert desk.ends == ["begin", "rollback"]


# Followers in the same process.


def test_a_duplicate_of_a_running_one_opens_no_transaction(desk):
    """It is refused at once, told to come back in a second, and no lease is spoken of."""
    leader = desk.start(paused_seven)
    with pytest.raises(OperationInFlight) as caught:
        desk.answer(never)
    assert caught.value.retry_after == timedelta(seconds=UNKNOWN_SECONDS)
    assert "lease" not in str(caught.value)
    assert desk.ends == ["begin"]
    assert leader.step().value.value == 7


def test_another_request_under_a_running_key_is_a_mismatch(desk):
    """Within one process the running request is known, so it is told from the others."""
    leader = desk.start(paused_seven)
    with pytest.raises(KeyReused):
        desk.answer(never, call(OTHER_MARK))
    assert leader.step().value.value == 7


def test_those_who_wait_get_the_outcome_without_a_transaction(desk):
    """It is handed over when the transaction has committed, and not before."""
    leader = desk.start(paused_seven)
    follower = desk.start(never, call(policy=WAITING))
    assert not follower.is_done
    leader.step()
    follower.step()
    assert (follower.value.value, follower.value.replayed) == (7, True)
    assert desk.ends == ["begin", "commit"]


def test_those_who_wait_hear_of_a_failure(desk):
    """They do not run it again, one after the other."""

    async def failing(attempt):
        await Pause()
        raise ValueError("no stock")

    leader = desk.start(failing)
    follower = desk.start(never, call(policy=WAITING))
    leader.step()
    assert isinstance(leader.error, ValueError)
    follower.step()
    assert isinstance(follower.error, OperationFailed)
    assert follower.error.retryable


def test_those_who_wait_get_the_answer_that_freed_the_key(desk):
    """The value itself, as the first caller got it."""
    leader = desk.start(paused_seven, judged(Ending.RELEASED))
    follower = desk.start(never, judged(Ending.RELEASED, policy=WAITING))
    leader.step()
    assert leader.value.value == 7
    follower.step()
    assert follower.value.value == 7
    assert desk.ends == ["begin", "rollback"]


class PausingDesk(Desk):
    """Its transactions take a moment to open, so that followers come while the leader claims."""

    def open(self):
        opened = Opened(self)
        enter = opened.__aenter__

        class Slow(Opened):
            async def __aenter__(self):
                await Pause()
                return await enter()

            async def __aexit__(self, *error):
                return await opened.__aexit__(*error)

        return Slow(self)


@pytest.mark.parametrize(
    ("put", "refusal"),
    [
        ({"fingerprint": OTHER_MARK.digest, "operation": "shop.refund"}, KeyReused),
        ({"fingerprint": OTHER_MARK.digest}, KeyReused),
        ({}, OperationInFlight),
    ],
    ids=["other operation", "mismatch", "in flight"],
)
def test_what_the_leader_is_told_holds_for_those_who_came_meanwhile(put, refusal):
    """A refusal by the database is shared: the followers open no transaction of their own."""
    desk = PausingDesk()
    ends = desk.world.clock.now_ms() + LEASE_MS
    desk.database.record = record(token=b"L" * 16, lease_ends_at_ms=ends, **put)
    leader, follower = desk.start(never), desk.start(never)
    assert not leader.is_done
    assert not follower.is_done
    leader.step()
    follower.step()
    assert isinstance(leader.error, refusal)
    assert isinstance(follower.error, refusal)
    assert desk.ends == ["begin", "rollback"]
    if refusal is OperationInFlight:
        assert follower.error.retry_after == leader.error.retry_after
    else:
        assert leader.error.first_operation == put.get("operation")
        assert follower.error.first_operation == put.get("operation")


def test_an_outage_is_shared_with_those_who_came_meanwhile():
    """A thousand followers do not try a silent database one after the other."""
    desk = PausingDesk()
    desk.open_error = Outage("no connection")
    leader, follower = desk.start(never), desk.start(never)
    leader.step()
    follower.step()
    assert isinstance(leader.error, StoreUnavailable)
    assert isinstance(follower.error, StoreUnavailable)
    assert desk.ends == ["begin"]


def test_an_answer_that_freed_the_key_is_not_for_those_who_came_meanwhile():
    """Who did not ask to wait runs for itself: the key is free."""
    desk = PausingDesk()
    leader = desk.start(seven, judged(Ending.RELEASED))

    async def eight(attempt):
        return 8

    follower = desk.start(eight)
    leader.step()
    assert leader.value.value == 7
    while not follower.is_done:
        follower.step()
    assert (follower.value.value, follower.value.replayed) == (8, False)


def test_a_commit_that_fails_is_no_execution():
    """Whether the database says no or nothing: the outcome that was told of before is undone."""
    for error, result in ((ValueError("deferred"), "released"), (Outage(), "store_unavailable")):
        desk = Desk()
        desk.commit_error = error
        with pytest.raises((ValueError, StoreUnavailable)):
            desk.answer(seven)
        assert desk.world.heard.results == [result]


@pytest.mark.parametrize("cache", [True, False])
def test_a_replay_hears_of_the_trace_of_its_first_run(cache):
    desk = Desk(cache=cache)
    heard = []

    def hear(event):
        if event.kind == "called":
            event.call.trace = f"trace-{len(heard)}"
        elif event.kind == "answered":
            heard.append(event.call.first_trace)

    desk.world.first.ports.report._emit = hear
    for _ in range(3):
        desk.answer(seven)
    assert heard == ["", "trace-0", "trace-0"]
