"""A service that fails open, while its store is down: the same key many times, at once and again.

Attacked: `fail_open`, which runs requests whose keys nobody can look up.

What must hold: in one process a key never runs beside itself, and what it came to is replayed, for
as long as the store is down and for a while after; another request under the key is refused. All of
it is bounded. What other processes run is not known, and nobody promises it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from itertools import islice

import pytest

from retrysafe import AsyncIdempotency, Idempotency, OperationInFlight, Policy, StoreUnavailable
from retrysafe.core.events import EventKind
from retrysafe.core.keys.key import GLOBAL, Key
from retrysafe.http import (
    Breaker,
    IdempotencyMiddleware,
    Rule,
    Streaming,
    WSGIIdempotencyMiddleware,
    bearer_token,
    unprotected,
)
from retrysafe.http.unprotected import KEPT_SECONDS
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.attacks.register import Register
from tests.http.driving import Shop, ask, ask_wsgi

OPTIONS = {"caller": bearer_token, "fail_open": True}


def down() -> FaultyStore:
    """A store that answers nothing, until it is healed."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", times=None)
    return store


# Five at once.


def test_tasks_do_not_run_one_key_beside_itself():
    """Of five simultaneous requests one runs; the others are told that it is in flight."""

    async def play() -> None:
        began, may_end, runs = asyncio.Event(), asyncio.Event(), []

        async def app(scope, receive, send):
            runs.append(await receive())
            began.set()
            await may_end.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})

        async with AsyncIdempotency(down()) as idem:
            protected = IdempotencyMiddleware(app, idem, **OPTIONS)
            asked = [asyncio.create_task(ask(protected)) for _ in range(5)]
            await began.wait()
            refused = [await reply for reply in islice(asyncio.as_completed(asked, timeout=20), 4)]
            assert {reply.problem for reply in refused} == {"in-flight"}
            # A 202 would send the client to a status that no store has.
            assert (await ask(protected, prefer="respond-async")).problem == "in-flight"
            may_end.set()
            replies = await asyncio.gather(*asked)
            again = await ask(protected)
        assert len(runs) == 1
        first = next(reply for reply in replies if reply.status == 201)
        assert first.headers["idempotency-protected"] == "false"
        assert (again.body, again.is_replay) == (b"done", True)
        assert again.headers["idempotency-protected"] == "false"

    asyncio.run(play())


def test_threads_do_not_run_one_key_beside_itself():
    """The same in threads."""
    began, may_end, runs = threading.Event(), threading.Event(), []

    def app(environ, start_response):
        runs.append(1)
        began.set()
        assert may_end.wait(30)
        start_response("201 Created", [])
        return [b"done"]

    with Idempotency(down()) as idem, ThreadPoolExecutor(5) as pool:
        protected = WSGIIdempotencyMiddleware(app, idem, **OPTIONS)
        asked = [pool.submit(ask_wsgi, protected) for _ in range(5)]
        assert began.wait(30)
        try:
            refused = [future.result() for future in islice(as_completed(asked, timeout=20), 4)]
            assert {reply.problem for reply in refused} == {"in-flight"}
        finally:
            may_end.set()
        assert sorted(future.result(30).status for future in asked) == [201, 409, 409, 409, 409]
        assert ask_wsgi(protected).is_replay
    assert len(runs) == 1


# Again and again.


@pytest.fixture(params=["asgi", "wsgi"])
def make_service(request):
    """A shop that fails open, on a store that is down, in either world."""
    closing = []
    with asyncio.Runner() as runner:

        def make(store=None, app=None, heard=(), **options):
            shop, store = Shop(), store or down()
            options = {**OPTIONS, "breaker": Breaker(failures_limit=1), **options}
            if request.param == "asgi":
                idem = AsyncIdempotency(store, observers=heard)
                closing.append(lambda: runner.run(idem.close()))
                made = IdempotencyMiddleware(app or shop.asgi, idem, **options)
                return shop, made, lambda *a, **b: runner.run(ask(made, *a, **b))
            blocking = Idempotency(store, observers=heard)
            closing.append(blocking.close)
            protected = WSGIIdempotencyMiddleware(app or shop.wsgi, blocking, **options)
            return shop, protected, lambda *a, **b: ask_wsgi(protected, *a, **b)

        yield make
        for close in closing:
            close()


def test_retries_during_an_outage_replay(make_service):
    """137 keys, three times each: 137 runs. What is reported says which were which."""
    events = []
    shop, _, send = make_service(heard=[events.append])
    for _ in range(3):
        for number in range(137):
            assert send(key=f"k-{number}").status == 201
    assert len(shop.runs) == 137
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.UNPROTECTED) == 137
    assert kinds.count(EventKind.REPLAYED) == 274


def test_what_ran_with_a_claim_and_could_not_be_stored_is_not_run_without_one(make_service):
    """The store took the claim and went down before the ending: this process knows what it ran."""
    store = FaultyStore(MemoryStore())
    rule = Rule(policy=Policy(settle_patience=timedelta(0)))
    shop, _, send = make_service(store, rules=[rule])
    # The first commit is the claim's.
    store.fail(
        Moment.BEFORE, method="commit", times=None, when=lambda call: bool(call.arguments[1])
    )
    assert send().json["code"] == "idempotency_outcome_not_stored"
    again = send()
    assert (again.status, again.is_replay) == (201, True)
    assert send(body=b'{"amount":1}').problem == "key-reused"
    assert len(shop.runs) == 1


def test_another_request_under_the_key_is_refused(make_service):
    """422, while it runs and after; keys of two callers are two."""
    shop, _, send = make_service()
    assert send().status == 201
    assert send(body=b'{"amount":1}').problem == "key-reused"
    assert send(caller="bob").status == 201
    assert len(shop.runs) == 2


def test_what_ran_is_replayed_when_the_store_is_back(make_service):
    """The store knows nothing of it: without the memory of the process it would run again."""
    store = down()
    shop, protected, send = make_service(store)
    first = send()
    store.heal()
    protected.protection.breaker.succeeded()
    again = send()
    assert (again.body, again.is_replay) == (first.body, True)
    assert again.headers["idempotency-protected"] == "false"
    protected_reply = send(key="other")
    assert "idempotency-protected" not in protected_reply.headers
    assert len(shop.runs) == 2


def test_what_frees_a_key_with_a_claim_frees_it_without_one(make_service):
    """A 503 and an exception may be tried again; a 402 stands."""
    shop, _, send = make_service()
    for status, runs in ((503, 2), (402, 1)):
        shop.runs.clear()
        shop.status = status
        assert [send(key=f"k-{status}").status for _ in range(2)] == [status, status]
        assert len(shop.runs) == runs
    shop.runs.clear()
    shop.error = RuntimeError("boom")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            send(key="raising")
    assert len(shop.runs) == 2


def test_an_exception_that_ends_the_operation_for_good_stands(make_service):
    """As the policy says it: the retry is told 500, and nothing runs."""
    shop, _, send = make_service(rules=[Rule(policy=Policy(terminal=(RuntimeError,)))])
    shop.error = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        send()
    assert send().problem == "operation-failed"
    assert len(shop.runs) == 1


def test_a_stream_is_done_from_its_first_byte(make_service):
    """It is marked and passed on; a retry is told that nothing was kept, and runs nothing."""
    shop, _, send = make_service(rules=[Rule(streaming=Streaming.PASS)])
    first = send()
    assert (first.status, first.headers["idempotency-protected"]) == (201, "false")
    assert send().problem == "outcome-unavailable"
    assert len(shop.runs) == 1


def test_a_protection_further_in_leaves_the_run_alone(make_service):
    """Two middlewares that fail open: the inner one does not find the key in flight."""
    shop, inner, _ = make_service()
    _, _, send = make_service(app=inner)
    first, again = send(), send()
    assert (first.status, again.is_replay) == (201, True)
    assert len(shop.runs) == 1


def test_a_run_that_is_cancelled_keeps_its_key_for_a_lease():
    """The server gives the request up: the run goes on, and a retry does not run beside it."""

    async def play() -> None:
        began, may_end, runs = asyncio.Event(), asyncio.Event(), []

        async def app(scope, receive, send):
            runs.append(1)
            began.set()
            await may_end.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})

        async with AsyncIdempotency(down()) as idem:
            protected = IdempotencyMiddleware(app, idem, **OPTIONS)
            first = asyncio.create_task(ask(protected))
            await began.wait()
            first.cancel()
            await asyncio.wait([first])
            assert (await ask(protected)).problem == "in-flight"
            may_end.set()
            for _ in range(100):
                await asyncio.sleep(0)  # Nothing waits, so a few turns of the loop do.
            reply = await ask(protected)
        assert (reply.body, reply.is_replay, len(runs)) == (b"done", True, 1)

    asyncio.run(play())


# The bounds, by an injected clock.


def test_it_is_remembered_for_as_long_as_the_outage_and_then_some():
    """Counted from the last time that the store did not answer."""
    register = Register()
    register.run()
    register.now += KEPT_SECONDS - 1
    assert register.run().replayed
    register.breaker.failed(register.now)
    register.now += KEPT_SECONDS - 1
    assert register.run().replayed
    register.now += 1
    assert not register.run().replayed
    assert register.count == 2


def test_one_that_was_cut_off_blocks_for_a_lease():
    """Nobody knows how far it got."""
    register = Register()
    with pytest.raises(KeyboardInterrupt):
        register.run(error=KeyboardInterrupt())
    register.now += 29
    with pytest.raises(OperationInFlight) as caught:
        register.run()
    assert timedelta(0) < caught.value.retry_after <= timedelta(seconds=30)
    register.now += 1
    assert not register.run().replayed
    assert register.count == 2


def test_the_number_of_keys_is_bounded(monkeypatch):
    """What ended first is forgotten first; when all of them run, nothing more is run."""
    monkeypatch.setattr(unprotected, "RUNS_LIMIT", 3)
    register = Register()
    for key in "abcd":
        register.run(key)
    assert len(register.runs.ended) == 3
    assert register.run("d").replayed
    assert not register.run("a").replayed
    register.runs.running, register.runs.ended = dict(register.runs.ended), OrderedDict()
    with pytest.raises(StoreUnavailable):
        register.run("e")
    assert register.count == 5


def test_room_is_made_without_a_look_at_what_runs(monkeypatch):
    """Thousands may run; to go through all of them for every request would take the square."""

    class Unread(dict):
        def __iter__(self):
            raise AssertionError("all that runs was gone through")

        items = values = keys = __iter__

    monkeypatch.setattr(unprotected, "RUNS_LIMIT", 3)
    register = Register()
    register.runs.running = Unread()
    for key in "abcd":
        register.run(key)
    assert len(register.runs.ended) == 3


def test_the_bytes_are_bounded(monkeypatch):
    """The oldest outcomes go, and the count is right when they have gone."""
    monkeypatch.setattr(unprotected, "BYTES_LIMIT", 1_000)
    register = Register()
    for key in "abcde":
        register.run(key, body=b"x" * 400)
    assert [key for key in "abcde" if Key(key, caller=GLOBAL).digest in register.runs.ended] == [
        "d",
        "e",
    ]
    held = sum(run.payload.size_bytes for run in register.runs.ended.values())
    assert register.runs._bytes == held <= 1_000


def test_an_outcome_that_is_too_large_is_done_without_it():
    """As with a claim: it is not run again, and the retry is told so."""
    register = Register()
    register.run(body=b"x" * (Policy().outcome_limit_bytes + 1))
    with pytest.raises(Exception, match="bytes and the limit is"):
        register.run()
    assert register.count == 1
