"""Duplicates within one process ask no store while the first run is in flight, or just ended."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    InFlight,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    Policy,
    StoreUnavailable,
)
from retrysafe.core.ports import Waits
from retrysafe.runtime.thread_ports import ThreadClock
from tests.runtime.staged import (
    KEY,
    PATIENCE_SECONDS,
    Hold,
    StagedStore,
    TaskHold,
    Worker,
    drive,
    turns,
    until,
)

FAIL = Policy()
WAIT = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=PATIENCE_SECONDS))
DUPLICATES = 1000


def _followers(idem) -> int:
    """How many callers wait for the flight of the key."""
    engine = idem._calls._engine if isinstance(idem, Idempotency) else idem._calls._bound.engine
    flight = engine._flights._by_digest.get(KEY.digest)
    return 0 if flight is None or flight.waiters is None else len(flight.waiters)


def _run(idem, operation, *, policy=None, request="r"):
    return idem.answer(KEY, operation, name="", request=request, policy=policy)


def _running(idem, **options):
    """The thread of a first run that is in its operation, and what holds it there."""
    hold = Hold()

    def operation() -> str:
        hold()
        return "first"

    first = Worker(_run, idem, operation, **options)
    hold.reached()
    return first, hold


def test_failing_duplicate_costs_no_store_call():
    """A thread that wants a running key is refused at once, with the rest of the lease."""
    store = StagedStore()
    with Idempotency(store) as idem:
        first, hold = _running(idem)
        calls = store.calls_count
        for _ in range(3):
            with pytest.raises(OperationInFlight) as caught:
                _run(idem, lambda: "second", policy=FAIL)
            assert timedelta(0) < caught.value.retry_after <= FAIL.lease
            assert caught.value.retryable
            assert caught.value.key == KEY.text
        assert store.calls_count == calls
        hold.open()
        assert first.result().replayed is False


def test_waiting_duplicate_costs_no_store_call():
    """A thread that waits for a running key gets the outcome from the thread that runs it."""
    store = StagedStore()
    with Idempotency(store, cache=False) as idem:
        first, hold = _running(idem)
        second = Worker(_run, idem, lambda: "second", policy=WAIT)
        until(lambda: _followers(idem) == 1)
        hold.open()
        assert (second.result().value, second.result().replayed) == ("first", True)
        assert first.result().replayed is False
        assert store.kinds == [["claim"], ["complete"]]


def test_wait_that_runs_out_is_in_flight():
    """After its limit a waiting duplicate is told that the first run has not ended."""
    store = StagedStore()
    with Idempotency(store) as idem:
        first, hold = _running(idem)
        calls = store.calls_count
        with pytest.raises(OperationInFlight):
            brief = WAIT.with_changes(wait_limit=timedelta(milliseconds=20))
            _run(idem, lambda: "second", policy=brief)
        assert store.calls_count == calls
        hold.open()
        first.result()


def test_thousand_waiting_threads_cost_two_commits():
    """One claim and one completion, whatever the number of duplicates."""
    store = StagedStore()
    with Idempotency(store) as idem:
        first, hold = _running(idem, policy=WAIT)
        others = [Worker(_run, idem, lambda: "other", policy=WAIT) for _ in range(DUPLICATES - 1)]
        until(lambda: _followers(idem) == DUPLICATES - 1)
        hold.open()
        answers = [worker.result() for worker in (first, *others)]
        assert {answer.value for answer in answers} == {"first"}
        assert [answer.replayed for answer in answers] == [False] + [True] * (DUPLICATES - 1)
        assert store.kinds == [["claim"], ["complete"]]
        assert store.other_calls == []


@pytest.mark.parametrize("waits", [Waits.NEVER, Waits.SUSPENDING, Waits.BLOCKING])
def test_thousand_tasks_cost_two_commits(waits):
    """The same for tasks that start in one turn of the loop, on every kind of store."""
    store = StagedStore(waits=waits)

    async def main() -> None:
        async with AsyncIdempotency(store, policy=WAIT) as idem:
            hold = TaskHold()

            async def operation() -> str:
                await hold()
                return "first"

            tasks = [
                asyncio.create_task(_run(idem, operation, policy=WAIT)) for _ in range(DUPLICATES)
            ]
            await hold.reached()
            await turns()
            assert _followers(idem) == DUPLICATES - 1
            hold.open()
            answers = await asyncio.gather(*tasks)
            assert {answer.value for answer in answers} == {"first"}
            assert sum(not answer.replayed for answer in answers) == 1
            assert store.kinds == [["claim"], ["complete"]]

    drive(main())


def test_failing_tasks_cost_no_store_call():
    """With the policy FAIL a thousand tasks are refused by the process itself."""
    store = StagedStore(waits=Waits.SUSPENDING)

    async def main() -> None:
        async with AsyncIdempotency(store) as idem:
            hold = TaskHold()
            first = asyncio.create_task(_run(idem, hold))
            await hold.reached()
            results = await asyncio.gather(
                *(_run(idem, hold) for _ in range(DUPLICATES)), return_exceptions=True
            )
            assert {type(result) for result in results} == {OperationInFlight}
            assert store.kinds == [["claim"]]
            hold.open()
            await first

    drive(main())


def test_duplicate_during_the_claim_waits_for_its_answer():
    """Nobody knows yet whether the key runs here, so the duplicate asks no second time."""
    store = StagedStore()
    claims = Hold()
    store.before = lambda commit: claims() if commit.claims else None
    with Idempotency(store) as idem:
        operation = Hold()
        first = Worker(_run, idem, operation)
        claims.reached()
        second = Worker(_run, idem, lambda: "second", policy=FAIL)
        until(lambda: _followers(idem) == 1)
        claims.open()
        assert isinstance(second.ended(), OperationInFlight)
        assert store.kinds == [["claim"]]
        operation.open()
        first.result()


def test_different_request_is_refused_while_the_first_runs():
    """The mismatch is found in the process, and neither waits nor asks the store."""
    store = StagedStore()
    with Idempotency(store) as idem:
        first, hold = _running(idem)
        calls = store.calls_count
        for policy in (FAIL, WAIT):
            with pytest.raises(KeyReused):
                _run(idem, lambda: "other", request="another", policy=policy)
        assert store.calls_count == calls
        hold.open()
        first.result()


def test_nested_run_of_the_same_key_is_in_flight():
    """An operation that runs its own key again is refused; it does not wait for itself."""
    store = StagedStore()
    with Idempotency(store) as idem:
        refused = []

        def operation() -> str:
            for policy in (FAIL, WAIT.with_changes(wait_limit=timedelta(milliseconds=20))):
                with pytest.raises(OperationInFlight):
                    _run(idem, operation, policy=policy)
                refused.append(policy.in_flight)
            # A nested run of another key is an operation like any other.
            assert (
                idem.run("another key", lambda: "inner", caller="tester", request=None) == "inner"
            )
            return "outer"

        assert _run(idem, operation).value == "outer"
        assert refused == [InFlight.FAIL, InFlight.WAIT]


def test_nested_async_run_of_the_same_key_is_in_flight():
    """The same for tasks."""

    async def main() -> None:
        async with AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING)) as idem:

            async def operation() -> str:
                for policy in (FAIL, WAIT.with_changes(wait_limit=timedelta(milliseconds=20))):
                    with pytest.raises(OperationInFlight):
                        await _run(idem, operation, policy=policy)
                return "outer"

            assert (await _run(idem, operation)).value == "outer"

    drive(main())


def test_waiting_duplicate_shares_a_clean_failure():
    """The first run failed in a retryable way: who waited for it is told, and may try again."""
    with Idempotency(StagedStore()) as idem:
        hold = Hold()

        def operation() -> str:
            hold()
            raise ConnectionError("try again")

        first = Worker(_run, idem, operation)
        hold.reached()
        second = Worker(_run, idem, lambda: "second", policy=WAIT)
        until(lambda: _followers(idem) == 1)
        hold.open()
        assert isinstance(first.ended(), ConnectionError)
        error = second.ended()
        assert isinstance(error, OperationFailed)
        assert error.retryable
        again = Worker(_run, idem, lambda: "third", policy=WAIT)
        assert (again.result().value, again.result().attempt) == ("third", 2)


def test_store_that_is_down_refuses_every_duplicate_soon():
    """Duplicates of a claim that failed do not queue up for claims of their own, one by one."""
    store = StagedStore()
    claims = Hold()
    ran = []

    def fail(commit) -> None:
        claims()
        raise StoreUnavailable("down")

    store.before = fail
    with Idempotency(store) as idem:
        first = Worker(_run, idem, lambda: ran.append(1))
        claims.reached()
        others = [Worker(_run, idem, lambda: ran.append(1)) for _ in range(20)]
        until(lambda: _followers(idem) == 20)
        claims.open()
        for worker in (first, *others):
            assert isinstance(worker.ended(), StoreUnavailable)
        assert ran == []
        assert len(store.commits) == 3


class MovableTime:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time(monkeypatch) -> MovableTime:
    clock = MovableTime()
    monkeypatch.setattr(ThreadClock, "monotonic", staticmethod(clock))
    return clock


def test_replay_is_served_from_the_process_for_two_seconds(time):
    """Within two seconds a replay asks no store; after them it does, and is still a replay."""
    store = StagedStore()
    with Idempotency(store) as idem:
        _run(idem, lambda: "first")
        calls = store.calls_count
        time.seconds += 1.9
        assert _run(idem, lambda: "second").replayed
        assert store.calls_count == calls
        time.seconds += 0.1
        assert _run(idem, lambda: "second").value == "first"
        assert store.calls_count == calls + 1
        # That answer of the store is kept as well.
        assert _run(idem, lambda: "second").value == "first"
        assert store.calls_count == calls + 1


def test_cached_outcome_is_not_shown_to_another_request(time):
    """The cache compares requests as the store does."""
    with Idempotency(StagedStore()) as idem:
        _run(idem, lambda: "secret")
        with pytest.raises(KeyReused) as caught:
            _run(idem, lambda: "other", request="another")
        assert "secret" not in str(caught.value)


def test_without_cache_each_replay_asks_the_store():
    """`cache=False` means what it says."""
    store = StagedStore()
    with Idempotency(store, cache=False) as idem:
        for _ in range(3):
            assert _run(idem, lambda: "first").value == "first"
        assert store.kinds == [["claim"], ["complete"], ["claim"], ["claim"]]


def test_expire_takes_effect_at_once_in_the_same_process(time):
    """An expired key runs anew, although its outcome was cached a moment ago."""
    with Idempotency(StagedStore()) as idem:
        assert _run(idem, lambda: "first").value == "first"
        idem.expire(KEY)
        assert _run(idem, lambda: "second").value == "second"


def test_release_takes_effect_at_once_in_the_same_process(time):
    """A released failure is tried again, although it was cached a moment ago."""
    policy = Policy(terminal=(ValueError,))
    with Idempotency(StagedStore(), policy=policy) as idem:

        def fail() -> None:
            raise ValueError("no")

        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                _run(idem, fail)
        idem.release(KEY)
        assert _run(idem, lambda: "second").value == "second"


def test_expire_of_an_async_object_takes_effect_at_once():
    """The same for tasks."""

    async def first() -> str:
        return "first"

    async def second() -> str:
        return "second"

    async def main() -> None:
        async with AsyncIdempotency(StagedStore(waits=Waits.SUSPENDING)) as idem:
            assert (await _run(idem, first)).value == "first"
            assert (await _run(idem, second)).value == "first"
            await idem.expire(KEY)
            assert (await _run(idem, second)).value == "second"

    drive(main())
