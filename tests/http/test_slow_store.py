"""A store that is slow: a request whose claim gets no answer is told so in time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from operator import itemgetter
from types import SimpleNamespace

import pytest

from retrysafe import AsyncIdempotency, InFlight, Policy
from retrysafe.core.events import UNFOLLOWED
from retrysafe.core.listing import RecordQuery
from retrysafe.core.ports import Waits
from retrysafe.errors import PolicyInvalid, StoreUnavailable
from retrysafe.http import Breaker, IdempotencyMiddleware, Rule, bearer_token
from retrysafe.http.claim_timeout import ClaimLookout
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from tests.http.driving import Shop, ask

SOON = timedelta(milliseconds=20)


class SlowStore:
    """A store whose commits wait for the test, one batch at a time."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.capabilities = replace(
            self._store.capabilities,
            waits=Waits.SUSPENDING,
            batches_in_flight=1,
            small_batches_in_flight=1,
        )
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.commits = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def commit(self, claims, settlements):
        self.commits += 1
        self.reached.set()
        await self.go_on.wait()
        return await self._store.commit(claims, settlements)


def in_a_loop(function):
    """Runs an async test with a slow store and a shop in front of it."""

    def run():
        async def whole():
            store, shop = SlowStore(), Shop()
            async with AsyncIdempotency(store) as idem:
                try:
                    await function(store, shop, idem)
                finally:
                    store.go_on.set()  # Closing waits for what is on its way.

        asyncio.run(whole())

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    return run


def protected(shop, idem, **options):
    options = {"caller": bearer_token, "store_timeout": SOON, **options}
    return IdempotencyMiddleware(shop.asgi, idem, **options)


def patient(shop, idem):
    """The same without a limit: a busy machine may take longer than a store that is well."""
    return protected(shop, idem, store_timeout=None)


@in_a_loop
async def test_a_claim_without_an_answer_is_refused_in_time(store, shop, idem):
    """503 with Retry-After, and the breaker hears of it. A claim that is granted after that runs
    nothing and is given back: the retry need not wait for its lease, and is the first attempt."""
    breaker = Breaker(failures_limit=1)
    app = protected(shop, idem, breaker=breaker)
    reply = await ask(app)
    assert (reply.status, reply.problem) == (503, "store-unavailable")
    assert reply.headers["retry-after"] == "1"
    assert breaker.is_open
    assert shop.runs == []
    store.go_on.set()
    assert (await ask(patient(shop, idem))).status == 201
    assert len(shop.runs) == 1
    stored = (await store.list_records(RecordQuery())).keys[0]
    assert (stored.condition, stored.record.attempt) == (Condition.SUCCEEDED, 1)


@in_a_loop
async def test_a_takeover_that_is_granted_too_late_is_left_to_its_lease(store, shop, idem):
    """It counts as an attempt; given back, every retry against a slow store would use one up."""
    store.go_on.set()
    shop.status = 500
    assert (await ask(patient(shop, idem))).status == 500
    store.go_on.clear()
    assert (await ask(protected(shop, idem))).problem == "store-unavailable"
    store.go_on.set()
    assert (await ask(patient(shop, idem))).problem == "in-flight"
    assert len(shop.runs) == 1


@in_a_loop
async def test_a_claim_that_has_not_left_for_the_store_never_does(store, shop, idem):
    """Its key is free at once when the store is back."""
    app = protected(shop, idem)
    first = asyncio.create_task(ask(app, key='"first"'))
    await store.reached.wait()
    assert (await ask(app, key='"second"')).status == 503
    assert (await first).status == 503
    assert store.commits == 1
    store.go_on.set()
    assert (await ask(patient(shop, idem), key='"second"')).status == 201
    assert len(shop.runs) == 1


@in_a_loop
async def test_a_request_that_has_ended_is_not_held_until_the_timer_rings(store, shop, idem):
    """Thousands in a second would each keep a response alive."""
    app = protected(shop, idem, store_timeout=timedelta(hours=1))
    store.go_on.set()
    assert (await ask(app)).status == 201
    assert not app._lookout._waiting


@in_a_loop
async def test_duplicates_of_a_claim_without_an_answer_are_told_as_well(store, shop, idem):
    app = protected(shop, idem)
    replies = await asyncio.gather(*(ask(app) for _ in range(3)))
    assert [reply.problem for reply in replies] == ["store-unavailable"] * 3
    assert store.commits == 1


@in_a_loop
async def test_a_service_that_fails_open_runs_when_the_claim_takes_too_long(store, shop, idem):
    reply = await ask(protected(shop, idem, fail_open=True))
    assert (reply.status, reply.headers["idempotency-protected"]) == (201, "false")
    # Its claim is granted after all, and keeps duplicates away: the application has run.
    store.go_on.set()
    assert (await ask(patient(shop, idem))).problem == "in-flight"
    assert len(shop.runs) == 1


@pytest.mark.parametrize("timeout", [None, timedelta(0)])
def test_without_a_limit_a_request_waits_for_its_store(timeout):
    @in_a_loop
    async def waits(store, shop, idem):
        app = protected(shop, idem, store_timeout=timeout)
        asyncio.get_running_loop().call_later(5 * SOON.total_seconds(), store.go_on.set)
        assert (await ask(app)).status == 201

    waits()


def test_a_transaction_of_the_applications_own_is_not_cut_off(tmp_path):
    """Its database was given time-outs of its own, and nothing is left behind by them."""

    async def scenario():
        store = SqliteStore(tmp_path / "shop.db")

        @asynccontextmanager
        async def slow():
            await asyncio.sleep(5 * SOON.total_seconds())  # Longer than the limit.
            raise ConnectionRefusedError("no route")
            yield

        async with AsyncIdempotency(store) as idem:
            begun = asyncio.get_running_loop().time()
            reply = await ask(protected(Shop(), idem, rules=[Rule(transaction=slow)]))
            assert reply.problem == "store-unavailable"
            assert asyncio.get_running_loop().time() - begun > 4 * SOON.total_seconds()

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout", [5, "5", timedelta(seconds=-1)])
def test_a_limit_that_is_none_is_refused(timeout):
    with pytest.raises(PolicyInvalid, match="store_timeout"):
        IdempotencyMiddleware(
            Shop().asgi, AsyncIdempotency(MemoryStore()), caller=bearer_token, store_timeout=timeout
        )


# The lookout by itself, with a clock that is set by hand.


class Clock:
    """As much of an event loop as a lookout needs."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers = []

    def time(self):
        return self.now

    def call_later(self, seconds, callback, *args):
        return self.call_at(self.now + seconds, callback, *args)

    def call_at(self, due, callback, *args):
        self.timers.append((due, callback, args))
        return object()

    def pass_to(self, instant):
        """Rings what is due by then, in order."""
        while self.timers and (timer := min(self.timers, key=itemgetter(0)))[0] <= instant:
            self.timers.remove(timer)
            self.now = timer[0]
            timer[1](*timer[2])
        self.now = instant


class Waiter:
    def __init__(self) -> None:
        self.error = None

    def done(self):
        return self.error is not None

    def set_exception(self, error):
        self.error = error


class Run:
    """A run that has not begun."""

    def __init__(self) -> None:
        self.task = None
        self.cancelled = 0
        self.answering = SimpleNamespace(cancel=self.cancel)

    def cancel(self):
        self.cancelled += 1


WAITING = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30))


def watched(lookout, clock, policy=None, key="k"):
    call = SimpleNamespace(
        policy=policy or Policy(), key=SimpleNamespace(text=key), progress=UNFOLLOWED
    )
    run, waiter = Run(), Waiter()
    lookout.watch(run, call, waiter, clock)
    return run, waiter


def test_one_timer_looks_after_all():
    """Each is given up when its own time is over, and the timer rings for the next of them."""
    clock = Clock()
    lookout = ClaimLookout(5, lambda call: True)
    first, first_waiter = watched(lookout, clock)
    clock.pass_to(102)
    second, second_waiter = watched(lookout, clock)
    assert len(clock.timers) == 1
    clock.pass_to(105)
    assert isinstance(first_waiter.error, StoreUnavailable)
    assert not first_waiter.error.is_in_flight
    assert (first.cancelled, second.cancelled) == (1, 0)
    clock.pass_to(107)
    assert second_waiter.error.key == "k"
    assert clock.timers == []


def test_what_has_begun_or_ended_is_left_alone():
    """Only the claim is bounded: neither the run nor the storing of its outcome is."""
    clock = Clock()
    lookout = ClaimLookout(5, lambda call: True)
    begun, begun_waiter = watched(lookout, clock)
    ended, ended_waiter = watched(lookout, clock)
    begun.task = object()
    lookout.forget(ended)
    clock.pass_to(200)
    assert (begun.cancelled, ended.cancelled) == (0, 0)
    assert (begun_waiter.error, ended_waiter.error) == (None, None)
    assert clock.timers == []


def test_a_request_that_waits_for_another_run_has_its_time():
    """The store has answered it; only when it is silent past the wait as well is it given up, and
    nobody runs what is known to be running."""
    clock = Clock()
    lookout = ClaimLookout(5, lambda call: False)
    run, waiter = watched(lookout, clock, WAITING)
    clock.pass_to(134)
    assert (run.cancelled, waiter.error) == (0, None)
    clock.pass_to(135)
    assert run.cancelled == 1
    assert waiter.error.is_in_flight


def test_a_request_that_would_wait_is_given_up_when_the_store_says_nothing():
    clock = Clock()
    lookout = ClaimLookout(5, lambda call: True)
    run, waiter = watched(lookout, clock, WAITING)
    clock.pass_to(105)
    assert (run.cancelled, waiter.done()) == (1, True)


def test_only_what_is_given_up_is_let_go_of():
    """What has begun, or still has time, keeps its claim."""
    clock, left = Clock(), []
    lookout = ClaimLookout(5, lambda call: True, lambda call: left.append(call.key.text))
    watched(lookout, clock, key="late")
    begun, _ = watched(lookout, clock, key="begun")
    begun.task = object()
    clock.pass_to(102)
    watched(lookout, clock, key="in time")
    clock.pass_to(105)
    assert left == ["late"]


def test_a_client_that_has_gone_is_not_told():
    """Its claim is let go of all the same."""
    clock = Clock()
    lookout = ClaimLookout(5, lambda call: True)
    run, waiter = watched(lookout, clock)
    gone = waiter.error = RuntimeError("gone")
    clock.pass_to(105)
    assert (run.cancelled, waiter.error) == (1, gone)


def test_another_loop_has_a_timer_of_its_own():
    """The first one has ended without ringing."""
    first, second = Clock(), Clock()
    lookout = ClaimLookout(5, lambda call: True)
    watched(lookout, first)
    run, _ = watched(lookout, second)
    second.pass_to(105)
    assert run.cancelled == 1
