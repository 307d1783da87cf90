"""A store that goes down and comes back while one key is on its way with a claim and without one.

Attacked: a service with `fail_open`. One request has decided to run without a claim, another of the
same key holds one; each is stopped at every place where it could pass the other by.

What must hold: one of the two runs. The other is refused with 409 and gives back what it claimed,
or gets the outcome of the first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Ending, Idempotency, OperationInFlight, Policy
from retrysafe.core.keys.key import Key
from retrysafe.core.model import State
from retrysafe.http import Breaker, IdempotencyMiddleware, Rule, WSGIIdempotencyMiddleware
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.attacks.register import Register
from tests.http.driving import ask, ask_wsgi

LIMIT = 30
KEY = Key("k-1", caller="alice")


class Stop:
    """A place where a thread waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self._may_go = threading.Event(), threading.Event()

    def here(self) -> None:
        self.reached.set()
        assert self._may_go.wait(LIMIT)

    def go(self) -> None:
        self._may_go.set()


class TaskStop:
    """The same for a task."""

    def __init__(self) -> None:
        self.reached, self._may_go = asyncio.Event(), asyncio.Event()

    async def here(self) -> None:
        self.reached.set()
        await asyncio.wait_for(self._may_go.wait(), LIMIT)

    def go(self) -> None:
        self._may_go.set()


def options() -> dict:
    # Every exception ends an operation for good, and what gives a claim back must not.
    rule = Rule(policy=Policy(unlisted=Ending.FAILED, settle_patience=timedelta(0)))
    breaker = Breaker(failures_limit=1, open_seconds=600)
    return {
        "caller": lambda request: "alice",
        "fail_open": True,
        "rules": [rule],
        "breaker": breaker,
    }


def outage(protected) -> None:
    """From now on nobody asks the store."""
    protected.protection.breaker.failed(time.monotonic())


def recovery(protected) -> None:
    """From now on the store is asked again."""
    protected.protection.breaker.succeeded()


# In threads.


class Threads:
    """A service in threads, with a stop in its store and in its register."""

    def __init__(self) -> None:
        self.claim, self.unclaimed, self.app, self.ending = (Stop() for _ in range(4))
        self.is_claim_stopped = self.is_ending_stopped = self.is_app_stopped = False
        self.runs = 0
        service = self

        class Stopped(MemoryStore):
            async def commit(self, claims, settlements):
                answers = await super().commit(claims, settlements)
                if claims and service.is_claim_stopped:
                    service.claim.here()
                return answers

        class StoppedRuns(UnprotectedRuns):
            async def answer(self, *args):
                service.unclaimed.here()
                return await super().answer(*args)

            def end_claimed(self, *args):
                if service.is_ending_stopped:
                    service.ending.here()
                super().end_claimed(*args)

        self.store = FaultyStore(Stopped())
        self.idem = Idempotency(self.store)
        self.protected = WSGIIdempotencyMiddleware(self._serve, self.idem, **options())
        protection = self.protected.protection
        protection.unprotected = StoppedRuns(protection.breaker, protection._monotonic)

    def _serve(self, environ, start_response):
        self.runs += 1
        if self.is_app_stopped:
            self.app.here()
        start_response("201 Created", [])
        return [b"done"]

    def ask(self):
        return ask_wsgi(self.protected)

    def let_all_go(self) -> None:
        for stop in (self.claim, self.unclaimed, self.app, self.ending):
            stop.go()


@pytest.fixture
def threads():
    service = Threads()
    with service.idem, ThreadPoolExecutor(2) as pool:
        service.submit = lambda: pool.submit(service.ask)
        try:
            yield service
        finally:
            service.let_all_go()


def test_a_claim_that_is_granted_late_gives_way_to_a_run_without_one(threads):
    """The claimed request finds the other at work: it is told 409, and its key is free again."""
    threads.is_claim_stopped = threads.is_app_stopped = True
    claimed = threads.submit()
    assert threads.claim.reached.wait(LIMIT)
    outage(threads.protected)
    threads.unclaimed.go()
    without = threads.submit()
    assert threads.app.reached.wait(LIMIT)
    threads.claim.go()
    refused = claimed.result(LIMIT)
    assert (refused.problem, threads.runs) == ("in-flight", 1)
    assert 1 <= int(refused.headers["retry-after"]) <= 2
    assert threads.idem.read(KEY).record.state is State.RELEASED
    threads.app.go()
    assert without.result(LIMIT).headers["idempotency-protected"] == "false"
    recovery(threads.protected)
    assert threads.ask().is_replay
    assert threads.runs == 1


def test_a_claim_that_is_granted_after_the_other_run_has_ended_runs_nothing(threads):
    """409 as well; the retry gets what the other came to."""
    threads.is_claim_stopped = True
    claimed = threads.submit()
    assert threads.claim.reached.wait(LIMIT)
    outage(threads.protected)
    threads.unclaimed.go()
    assert threads.submit().result(LIMIT).status == 201
    threads.claim.go()
    assert claimed.result(LIMIT).problem == "in-flight"
    assert threads.ask().is_replay
    assert threads.runs == 1


def test_a_run_without_a_claim_gives_way_to_one_that_has_begun(threads):
    """It had looked for others before the store came back: it looks again when it begins."""
    threads.is_app_stopped = True
    outage(threads.protected)
    without = threads.submit()
    assert threads.unclaimed.reached.wait(LIMIT)
    recovery(threads.protected)
    claimed = threads.submit()
    assert threads.app.reached.wait(LIMIT)
    threads.unclaimed.go()
    assert (without.result(LIMIT).problem, threads.runs) == ("in-flight", 1)
    threads.app.go()
    assert claimed.result(LIMIT).status == 201


def test_a_run_without_a_claim_gives_way_to_one_that_has_ended(threads):
    """It gets that one's outcome, which is not marked as unprotected: it was not."""
    outage(threads.protected)
    without = threads.submit()
    assert threads.unclaimed.reached.wait(LIMIT)
    recovery(threads.protected)
    assert threads.ask().status == 201
    threads.unclaimed.go()
    replay = without.result(LIMIT)
    assert (replay.body, replay.is_replay, threads.runs) == (b"done", True, 1)
    assert "idempotency-protected" not in replay.headers


def test_nothing_begins_between_an_ending_that_no_store_took_and_its_note(threads):
    """The flight has landed and the outcome is nowhere yet: the key is in flight all the same."""
    threads.is_ending_stopped = True
    threads.store.fail(
        Moment.BEFORE, method="commit", times=None, when=lambda call: bool(call.arguments[1])
    )
    claimed = threads.submit()
    assert threads.ending.reached.wait(LIMIT)
    outage(threads.protected)
    threads.unclaimed.go()
    assert (threads.ask().problem, threads.runs) == ("in-flight", 1)
    threads.ending.go()
    assert claimed.result(LIMIT).json["code"] == "idempotency_outcome_not_stored"
    assert threads.ask().is_replay
    assert threads.runs == 1


# On an event loop.


class Tasks:
    """The same on an event loop."""

    def __init__(self) -> None:
        self.claim, self.unclaimed, self.app = (TaskStop() for _ in range(3))
        self.is_claim_stopped = self.is_app_stopped = False
        self.runs = 0
        service = self

        class Stopped(MemoryStore):
            async def commit(self, claims, settlements):
                answers = await super().commit(claims, settlements)
                if claims and service.is_claim_stopped:
                    await service.claim.here()
                return answers

        class StoppedRuns(UnprotectedRuns):
            async def answer(self, *args):
                await service.unclaimed.here()
                return await super().answer(*args)

        self.idem = AsyncIdempotency(Stopped())
        self.protected = IdempotencyMiddleware(self._serve, self.idem, **options())
        protection = self.protected.protection
        protection.unprotected = StoppedRuns(protection.breaker, protection._monotonic)

    async def _serve(self, scope, receive, send):
        await receive()
        self.runs += 1
        if self.is_app_stopped:
            await self.app.here()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def ask(self):
        return await asyncio.wait_for(ask(self.protected), LIMIT)

    def submit(self):
        return asyncio.create_task(self.ask())


async def reached(stop: TaskStop) -> None:
    await asyncio.wait_for(stop.reached.wait(), LIMIT)


def test_on_a_loop_a_late_claim_gives_way_to_a_run_without_one():
    """As in threads."""

    async def play() -> None:
        tasks = Tasks()
        async with tasks.idem:
            tasks.is_claim_stopped = tasks.is_app_stopped = True
            claimed = tasks.submit()
            await reached(tasks.claim)
            outage(tasks.protected)
            tasks.unclaimed.go()
            without = tasks.submit()
            await reached(tasks.app)
            tasks.claim.go()
            assert ((await claimed).problem, tasks.runs) == ("in-flight", 1)
            assert (await tasks.idem.read(KEY)).record.state is State.RELEASED
            tasks.app.go()
            assert (await without).headers["idempotency-protected"] == "false"
            recovery(tasks.protected)
            assert (await tasks.ask()).is_replay
            assert tasks.runs == 1

    asyncio.run(play())


def test_on_a_loop_a_run_without_a_claim_gives_way_to_one_that_has_begun():
    """As in threads."""

    async def play() -> None:
        tasks = Tasks()
        async with tasks.idem:
            tasks.is_app_stopped = True
            outage(tasks.protected)
            without = tasks.submit()
            await reached(tasks.unclaimed)
            recovery(tasks.protected)
            claimed = tasks.submit()
            await reached(tasks.app)
            tasks.unclaimed.go()
            assert ((await without).problem, tasks.runs) == ("in-flight", 1)
            tasks.app.go()
            assert (await claimed).status == 201

    asyncio.run(play())


def test_on_a_loop_a_run_without_a_claim_gives_way_to_one_that_has_ended():
    """As in threads."""

    async def play() -> None:
        tasks = Tasks()
        async with tasks.idem:
            outage(tasks.protected)
            without = tasks.submit()
            await reached(tasks.unclaimed)
            recovery(tasks.protected)
            assert (await tasks.ask()).status == 201
            tasks.unclaimed.go()
            replay = await without
            assert (replay.body, replay.is_replay, tasks.runs) == (b"done", True, 1)
            assert "idempotency-protected" not in replay.headers

    asyncio.run(play())


# The register alone, by an injected clock.


def test_a_claimed_run_that_was_cut_off_keeps_others_from_running_without_a_claim():
    """Nobody knows how far it got: for a lease, as without a claim. The store is asked as ever."""
    register = Register()
    call, again = register.call(), register.call()
    register.begin_claimed(call)
    register.runs.end_claimed(call, asyncio.CancelledError())
    register.now += 29
    with pytest.raises(OperationInFlight):
        register.run()
    assert register.recall() is None
    register.begin_claimed(again)
    register.runs.end_claimed(again, None)
    register.now += 1
    assert not register.run().replayed


def test_an_owner_that_lost_its_key_here_takes_nothing_from_the_next():
    """The store has granted the key anew: the end of the old run is not the end of the new one."""
    register = Register()
    old, new = register.call(), register.call()
    register.begin_claimed(old)
    register.begin_claimed(new)
    register.runs.end_claimed(old, None)
    with pytest.raises(OperationInFlight):
        register.run()
    register.runs.end_claimed(new, None)
    assert not register.run().replayed
