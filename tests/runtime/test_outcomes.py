"""Outcomes: values, failures, what cannot be stored, and a store that does not answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from retrysafe import (
    Ending,
    Idempotency,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeNotStored,
    OutcomeUnavailable,
    Policy,
    StoreUnavailable,
)
from retrysafe.core.ports import Waits
from retrysafe.errors import AttemptsExhausted, StoreRejected
from retrysafe.observe import EventKind, Result
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from tests.runtime.staged import KEY, StagedStore

NO_PATIENCE = Policy(settle_patience=timedelta(0))


class Declined(Exception):
    """A failure that is final, with something to tell."""

    def __init__(self, reason: str, *, code: int) -> None:
        super().__init__(f"declined: {reason}")
        self.code = code


class StolenCard(Declined):
    """A kind of it."""


class Calls:
    """An operation that plays what it is given, once each."""

    def __init__(self, *plays: object) -> None:
        self._plays = list(plays)
        self.count = 0

    def __call__(self) -> object:
        self.count += 1
        play = self._plays.pop(0)
        if isinstance(play, BaseException):
            raise play
        return play


# Values.


@pytest.mark.parametrize("value", [{}, [], 0, 0.0, "", None, False, b""])
@pytest.mark.parametrize("has_cache", [True, False])
def test_falsy_results_are_results(subject, url, value, has_cache):
    """Each replays as itself, type included, and the operation does not run again."""
    face = subject(url, cache=has_cache)
    operation = Calls(value)
    first, second = (face.answer(KEY, operation, request="r") for _ in range(2))
    assert first.value == value
    assert second.value == value
    assert type(second.value) is type(value)
    assert (first.replayed, second.replayed) == (False, True)
    assert operation.count == 1


@dataclass
class Receipt:
    number: int
    lines: list[str]


def test_dataclass_comes_back_as_itself(subject, url):
    """The return annotation, or `returns=`, says what a stored result is rebuilt as."""
    face = subject(url, cache=False)
    ran = []

    def operation() -> Receipt:
        ran.append(1)
        return Receipt(7, ["a"])

    assert [face.run(KEY, operation) for _ in range(2)] == [Receipt(7, ["a"])] * 2
    assert ran == [1]
    again = face.answer(KEY, Calls(), name=_name_of(operation), request=[], returns=Receipt)
    assert (again.value, again.replayed) == (Receipt(7, ["a"]), True)


def _name_of(operation) -> str:
    return f"{operation.__module__}.{operation.__qualname__}"


# Results that cannot be stored.


@pytest.mark.parametrize("has_cache", [True, False])
def test_unstorable_result_is_returned_once_and_never_run_again(subject, url, has_cache):
    """The first caller gets the value; a retry is told that it is done, and why it has none."""
    face = subject(url, cache=has_cache)
    value = threading.Lock()
    operation = Calls(value, "a second run")
    assert face.run(KEY, operation, request="r") is value
    for _ in range(2):
        with pytest.raises(OutcomeUnavailable, match="will not run again"):
            face.run(KEY, operation, request="r")
    assert operation.count == 1


def test_oversized_result_is_returned_once_and_never_run_again(subject, url):
    """The same for a result over the limit; the error says what the limit is."""
    face = subject(url, policy=Policy(outcome_limit_bytes=100), cache=False)
    operation = Calls("x" * 1000, "a second run")
    assert face.run(KEY, operation, request="r") == "x" * 1000
    with pytest.raises(OutcomeUnavailable, match="outcome_limit_bytes"):
        face.run(KEY, operation, request="r")
    assert operation.count == 1


def test_result_that_the_store_refuses_is_remembered_as_done(subject):
    """The row is rejected with its payload: that it is done is stored all the same."""
    store = StagedStore(waits=Waits.NEVER)

    def refuse(commit) -> None:
        if any(item.payload.form != "withheld.1" for item in commit.settlements):
            raise StoreRejected("too odd for me")

    store.before = refuse
    face = subject(store, cache=False)
    operation = Calls("odd", "a second run")
    assert face.run(KEY, operation, request="r") == "odd"
    with pytest.raises(OutcomeUnavailable, match="too odd for me"):
        face.run(KEY, operation, request="r")
    assert operation.count == 1


def test_unreadable_result_is_unavailable_and_never_run_again(subject, url):
    """A process that lacks the result's class is told so; the operation stays done."""
    face = subject(url, cache=False)

    @dataclass
    class Hidden:
        """Not to be found by its name, as after a deploy that removed it."""

        number: int

    face.run(KEY, Calls(Hidden(7)), name="", request="r")
    retry = Calls("a second run")
    with pytest.raises(OutcomeUnavailable, match="cannot be read here"):
        face.run(KEY, retry, request="r", name="")
    assert retry.count == 0


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_moment_comes_back_in_its_zone(subject, url, kind, request):
    """Also in the hour that its clock repeats."""
    if kind == "postgresql":
        url = request.getfixturevalue("migrated_url")
    # On that night the clock shows half past two twice; this is the second time.
    moment = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    first = subject(url, cache=False).run(KEY, Calls(moment), request="r", name="")
    for face in (subject(url, cache=False), subject(url)):
        back = face.run(KEY, Calls("a second run"), request="r", name="")
        assert back == first == moment
        assert repr(back) == repr(moment)


def test_purged_outcome_is_unavailable(subject, url):
    """A settled key whose payload is gone is done; nobody can say more, and nothing runs."""
    face = subject(url, cache=False)
    operation = Calls("first", "a second run")
    face.run(KEY, operation, request="r")
    store = SqliteStore(url.removeprefix("sqlite:///"))
    store._write(lambda connection: connection.execute("DELETE FROM retrysafe_outcomes"))
    run_sync(store.close())
    with pytest.raises(OutcomeUnavailable, match="no longer stored"):
        face.run(KEY, operation, request="r")
    assert operation.count == 1


# Failures.


@pytest.mark.parametrize("has_cache", [True, False])
def test_terminal_failure_is_replayed_as_its_type(subject, url, has_cache):
    """Declared as terminal: stored, and raised again with its message and attributes."""
    face = subject(url, policy=Policy(terminal=(Declined,)), cache=has_cache)
    operation = Calls(Declined("no funds", code=51), "a second run")
    for _ in range(2):
        with pytest.raises(Declined, match="declined: no funds") as caught:
            face.run(KEY, operation, request="r")
        assert type(caught.value) is Declined
        assert caught.value.code == 51
    assert operation.count == 1
    assert face.call("read", KEY).condition is Condition.FAILED


class Sold(StopIteration):
    """One of those that no coroutine raises."""


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("kind", [StopIteration, Sold, StopAsyncIteration])
def test_the_end_of_an_iteration_is_judged_by_its_own_type(subject, url, kind, has_cache):
    """Terminal where it is listed, by itself or by a base class; first caller and replay get what
    Python makes of it in a coroutine."""
    policy = Policy(terminal=(StopIteration, StopAsyncIteration), retryable=(RuntimeError,))
    face = subject(url, policy=policy, cache=has_cache)
    operation = Calls(kind("no seats"), "a second run")
    for _ in range(2):
        with pytest.raises((RuntimeError, StopAsyncIteration)) as caught:
            face.run(KEY, operation, request="r")
        raised = caught.value if kind is StopAsyncIteration else caught.value.__cause__
        assert (type(raised), raised.args) == (kind, ("no seats",))
    assert operation.count == 1
    assert face.call("read", KEY).condition is Condition.FAILED
    freed = Calls(kind("no seats"), "a second run")
    freeing = Policy(retryable=(kind,), unlisted=Ending.FAILED)
    other = subject(url, caller="shop", policy=freeing, cache=has_cache)
    with pytest.raises((RuntimeError, StopAsyncIteration)):
        other.run("k-2", freed, request="r")
    assert other.run("k-2", freed, request="r") == "a second run"


def test_subclass_of_a_terminal_failure_is_replayed_as_the_subclass(subject, url):
    """The declared base class covers it, and the replay is as exact as the first."""
    face = subject(url, policy=Policy(terminal=(Declined,)), cache=False)
    operation = Calls(StolenCard("reported", code=43))
    for _ in range(2):
        with pytest.raises(StolenCard) as caught:
            face.run(KEY, operation, request="r")
        assert caught.value.code == 43
    assert operation.count == 1


def test_failure_that_is_not_declared_here_is_told_by_name(subject, url):
    """A process without the declaration gets OperationFailed with type name and message."""
    face = subject(url, policy=Policy(unlisted=Ending.FAILED), cache=False)
    operation = Calls(Declined("no funds", code=51))
    with pytest.raises(Declined):
        face.run(KEY, operation, request="r")
    with pytest.raises(OperationFailed, match=r"Declined: declined: no funds") as caught:
        face.run(KEY, operation, request="r")
    assert caught.value.type_name == f"{__name__}:Declined"
    assert caught.value.key == KEY.text
    assert not caught.value.retryable
    assert operation.count == 1


def test_failure_that_cannot_be_rebuilt_is_told_by_name(subject, url):
    """An exception that carries what cannot be stored is still final."""
    face = subject(url, policy=Policy(terminal=(Declined,)), cache=False)
    error = Declined("locked", code=1)
    error.code = threading.Lock()
    operation = Calls(error, "a second run")
    with pytest.raises(Declined):
        face.run(KEY, operation, request="r")
    with pytest.raises(OperationFailed, match="declined: locked"):
        face.run(KEY, operation, request="r")
    assert operation.count == 1


@pytest.mark.parametrize("policy", [Policy(), Policy(retryable=(ConnectionError,))])
def test_retryable_failure_frees_the_key(subject, url, policy):
    """The first caller gets the exception; the next call is the next attempt."""
    face = subject(url, policy=policy)
    operation = Calls(ConnectionResetError("gone"), "second")
    with pytest.raises(ConnectionResetError, match="gone"):
        face.run(KEY, operation, request="r")
    assert face.call("read", KEY).condition is Condition.RELEASED
    answer = face.answer(KEY, operation, request="r")
    assert (answer.value, answer.attempt, answer.replayed) == ("second", 2, False)


def test_nearest_declared_class_decides(subject, url):
    """Terminal base, retryable subclass: the subclass is retryable."""
    policy = Policy(terminal=(Declined,), retryable=(StolenCard,))
    face = subject(url, policy=policy)
    operation = Calls(StolenCard("maybe", code=1), Declined("no", code=2))
    for kind in (StolenCard, Declined, Declined):
        with pytest.raises(Declined) as caught:
            face.run(KEY, operation, request="r")
        assert type(caught.value) is kind
    assert operation.count == 2


def test_attempts_run_out(subject, url):
    """After the limit the operation is given up for good, also for later calls."""
    events = []
    face = subject(url, policy=Policy(release_limit=3), observers=[events.append], cache=False)
    operation = Calls(*(ConnectionError(str(number)) for number in range(10)))
    for number in range(3):
        with pytest.raises(ConnectionError, match=str(number)):
            face.run(KEY, operation, request="r")
    for _ in range(2):
        with pytest.raises(AttemptsExhausted, match="release_limit=3 is reached") as caught:
            face.run(KEY, operation, request="r")
        assert str(caught.value).endswith("stored, of attempt 3: ConnectionError: 2")
        assert caught.value.key == KEY.text
    assert operation.count == 3
    assert [event.kind for event in events].count(EventKind.EXHAUSTED) == 1
    # An operator who mended the cause can let it run again.
    face.call("release", KEY)
    mended = Calls("mended")
    assert face.answer(KEY, mended, request="r").attempt == 1


# A store that does not answer.


@pytest.mark.parametrize("waits", [Waits.NEVER, Waits.BLOCKING])
def test_unavailable_store_fails_closed(subject, waits):
    """Without a claim nothing runs, and the caller may retry."""
    store = StagedStore(waits=waits)

    def fail(commit) -> None:
        raise StoreUnavailable("down")

    store.before = fail
    face = subject(store)
    operation = Calls("first")
    with pytest.raises(StoreUnavailable, match="down") as caught:
        face.run(KEY, operation)
    assert caught.value.retryable
    assert operation.count == 0
    assert len(store.commits) == 3
    # It came back: nothing is left of the failed call.
    store.before = None
    assert face.run(KEY, operation) == "first"


def test_claim_whose_answer_was_lost_is_found_again(subject):
    """The claim was made, the answer lost: asking again with the same token gets the key."""
    store = StagedStore(waits=Waits.NEVER)
    lost = [StoreUnavailable("the answer was lost")]

    def lose(commit) -> None:
        if lost:
            raise lost.pop()

    store.after = lose
    face = subject(store)
    operation = Calls("first")
    answer = face.answer(KEY, operation)
    assert (answer.value, answer.attempt, operation.count) == ("first", 1, 1)


def test_settle_whose_answer_was_lost_is_confirmed(subject):
    """The outcome was stored, the answer lost: the second write is confirmed, not refused."""
    store = StagedStore(waits=Waits.NEVER)
    lost = [StoreUnavailable("the answer was lost")]

    def lose(commit) -> None:
        if commit.settlements and lost:
            raise lost.pop()

    store.after = lose
    face = subject(store, cache=False)
    operation = Calls("first")
    assert face.run(KEY, operation, request="r") == "first"
    assert face.answer(KEY, operation, request="r").replayed
    assert store.kinds == [["claim"], ["complete"], ["complete"], ["claim"]]


def _down_for_settling(store: StagedStore) -> None:
    def fail(commit) -> None:
        if commit.settlements:
            raise StoreUnavailable("down")

    store.before = fail


def test_outcome_that_could_not_be_stored_is_handed_over(subject):
    """The operation ran: the error carries its value, and the key stays pending."""
    store = StagedStore(waits=Waits.NEVER)
    _down_for_settling(store)
    face = subject(store, policy=NO_PATIENCE)
    operation = Calls("first", "a second run")
    with pytest.raises(OutcomeNotStored, match="could not be stored") as caught:
        face.run(KEY, operation, request="r")
    assert caught.value.value == "first"
    assert not caught.value.retryable
    assert isinstance(caught.value.__cause__, StoreUnavailable)
    # Until its lease ends nobody runs it again.
    with pytest.raises(OperationInFlight):
        face.run(KEY, operation, request="r")
    assert operation.count == 1


def test_terminal_failure_that_could_not_be_stored(subject):
    """The operation's exception is the cause of what the caller is told."""
    store = StagedStore(waits=Waits.NEVER)
    _down_for_settling(store)
    face = subject(store, policy=NO_PATIENCE.with_changes(terminal=(Declined,)))
    with pytest.raises(OutcomeNotStored) as caught:
        face.run(KEY, Calls(Declined("no", code=1)))
    assert isinstance(caught.value.__cause__, Declined)
    assert caught.value.value is None


def test_retryable_failure_that_could_not_be_stored_is_raised_itself(subject):
    """The lease frees the key instead, so the operation's own error matters more."""
    store = StagedStore(waits=Waits.NEVER)
    _down_for_settling(store)
    face = subject(store, policy=NO_PATIENCE)
    with pytest.raises(ConnectionError, match="gone"):
        face.run(KEY, Calls(ConnectionError("gone")))
    assert face.call("read", KEY).condition is Condition.RUNNING


# Mismatch.


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("end", ["value", "failure", "release"])
def test_other_request_never_sees_the_outcome(subject, url, has_cache, end):
    """Whatever the state of the key, another request is refused and told nothing."""
    face = subject(url, policy=Policy(terminal=(Declined,)), cache=has_cache)
    play = {"value": "secret", "failure": Declined("secret", code=1), "release": OSError("secret")}
    try:
        face.run(KEY, Calls(play[end]), request="r")
    except (Declined, OSError):
        assert end != "value"
    other = Calls("other")
    with pytest.raises(KeyReused) as caught:
        face.run(KEY, other, request="another")
    error = caught.value
    assert other.count == 0
    assert "secret" not in f"{error} {error.__dict__} {error.__cause__} {error.__context__}"
    assert not error.retryable


def test_other_request_is_refused_in_flight_by_the_store():
    """A rival with its own object is refused while the first still runs, waiting or not."""
    store = MemoryStore()
    with Idempotency(store) as first, Idempotency(store) as rival:

        def operation() -> str:
            with pytest.raises(KeyReused):
                rival.run(KEY, Calls("other"), name="", request="another")
            with pytest.raises(OperationInFlight):
                rival.run(KEY, Calls("other"), name="", request="r")
            return "first"

        assert first.run(KEY, operation, name="", request="r") == "first"


# Listeners.


def test_observer_that_fails_disturbs_nothing(subject, url, caplog):
    """What a listener raises is logged; the operation's outcome is the operation's."""

    def broken(event) -> None:
        raise RuntimeError("a listener's bug")

    face = subject(url, observers=[broken])
    assert face.run(KEY, Calls("first"), request="r") == "first"
    assert face.run(KEY, Calls(), request="r") == "first"
    assert "an observer of retrysafe failed" in caplog.text


def test_observers_hear_the_story_of_a_key(subject, url):
    """Claimed, released, claimed, completed, replayed: in this order, with attempts."""
    events = []
    face = subject(url, observers=[events.append])
    operation = Calls(ConnectionError("again"), "second")
    with pytest.raises(ConnectionError):
        face.run(KEY, operation, name="pay", request="r")
    for _ in range(2):
        face.run(KEY, operation, name="pay", request="r")
    assert [(event.kind, event.attempt, event.source, event.result) for event in events] == [
        (EventKind.CALLED, 0, "store", Result.RELEASED),
        (EventKind.CLAIMED, 1, "store", Result.RELEASED),
        (EventKind.RELEASED, 1, "store", Result.RELEASED),
        (EventKind.ANSWERED, 1, "store", Result.RELEASED),
        (EventKind.CALLED, 0, "store", Result.EXECUTED),
        (EventKind.CLAIMED, 2, "store", Result.EXECUTED),
        (EventKind.COMPLETED, 2, "store", Result.EXECUTED),
        (EventKind.ANSWERED, 2, "store", Result.EXECUTED),
        (EventKind.CALLED, 0, "store", Result.REPLAYED),
        (EventKind.REPLAYED, 2, "process", Result.REPLAYED),
        (EventKind.ANSWERED, 2, "process", Result.REPLAYED),
    ]
    assert {(event.key, event.operation) for event in events} == {(KEY, "pay")}
