"""Properties of HTTP that hold because of single lines; `test_guards` takes each line out."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from contextlib import suppress

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from retrysafe import Answer, AsyncIdempotency, Ending, Idempotency, OperationInFlight, Policy
from retrysafe.core.listing import RecordQuery
from retrysafe.http import IdempotencyMiddleware, Rule, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.http.large_bodies import LARGE_BODY_BYTES
from retrysafe.http.protection import Protection
from retrysafe.http.responses import Response
from retrysafe.runtime.calls import calls_of
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.attacks.growth import LIMIT, growth
from tests.attacks.hostile_inputs import BODIES, mark
from tests.attacks.register import Register
from tests.attacks.test_endless_responses import SlowStore
from tests.http.driving import Connection, ask, ask_wsgi, headers_of, http_scope

SECRET = b"0123456789abcdef0123456789abcdef"
_RULE = Rule(policy=Policy(outcome_limit_bytes=100))


def _protected(app, store=None, rule=_RULE):
    idempotency = AsyncIdempotency(store or MemoryStore())
    return IdempotencyMiddleware(app, idempotency, caller=bearer_token, rule=rule)


def _stored_caller(secret):
    """The caller in the store, of a request with the token that `headers_of` sends."""

    async def run():
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async with AsyncIdempotency(MemoryStore(), secret=secret) as idempotency:
            await _exchange(
                IdempotencyMiddleware(app, idempotency, caller=bearer_token), Connection()
            )
            (found,) = (await calls_of(idempotency).store.list_records(RecordQuery())).keys
            return found.record.caller

    return asyncio.run(run())


def test_a_credential_is_stored_as_a_digest():
    assert "alice" not in _stored_caller(None) + _stored_caller(SECRET)


def test_a_stored_digest_cannot_be_compared_with_guesses():
    guess = hashlib.sha256(b"alice").hexdigest()[:40]
    assert guess in _stored_caller(None)
    assert guess not in _stored_caller(SECRET)


async def _exchange(app, connection):
    scope = http_scope("POST", "/charges", headers_of('"k-1"'))
    try:
        await app(scope, connection.receive, connection.send)
    except (LookupError, OSError):
        pass  # What the application raised, as a server would hear it.


def test_a_stream_is_durable_before_its_first_byte():
    """When the first message leaves, the ending is in the store."""

    async def run():
        store, connection = SlowStore(), Connection()
        sending, settled = connection.send, []

        async def send(message):
            settled.append(store.settled)
            await sending(message)

        connection.send = send

        async def app(scope, receive, send):
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n"})

        await _exchange(_protected(app, store), connection)
        assert settled == [1, 1]

    asyncio.run(run())


def test_an_endless_response_is_not_collected():
    """Its client gets the first bytes when the limit is reached, and not at its end."""

    async def run():
        connection, sent = Connection(), []

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not connection.sent:
                assert len(sent) < 100
                await send({"type": "http.response.body", "body": b"x" * 20, "more_body": True})
                sent.append(1)
            await send({"type": "http.response.body", "body": b""})

        await _exchange(_protected(app), connection)
        assert len(sent) < 10

    asyncio.run(run())


class _Passing(BaseHTTPMiddleware):
    async def dispatch(self, request, call_next):
        return await call_next(request)


def _starlette(endpoint):
    routes = [Route("/charges", endpoint, methods=["POST"])]
    return _protected(Starlette(routes=routes, middleware=[Middleware(_Passing)]), rule=Rule())


def test_a_response_that_was_cut_short_is_not_stored():
    """A middleware ends it as if it were whole; a retry runs and gets all of it."""

    async def run():
        runs = []

        async def rows():
            yield b"1\n"
            if len(runs) == 1:
                raise LookupError("cursor")
            yield b"2\n"

        async def export(request):
            runs.append(1)
            return StreamingResponse(rows())

        app = _starlette(export)
        await _exchange(app, Connection())
        assert (await ask(app)).body == b"1\n2\n"

    asyncio.run(run())


def test_a_failure_after_the_response_does_not_run_it_again():
    """Whatever a background task does to its response, the operation is done."""

    async def run():
        runs = []

        async def background():
            raise LookupError("mail")

        async def charge(request):
            runs.append(1)
            return JSONResponse({}, background=BackgroundTask(background))

        app = _starlette(charge)
        await _exchange(app, Connection())
        await ask(app)
        assert runs == [1]

    asyncio.run(run())


def test_a_large_body_does_not_hold_the_loop():
    """It is compared in another thread."""
    made, threads = Protection.call, []

    def call(protection, plan):
        threads.append(threading.get_ident())
        return made(protection, plan)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run():
        Protection.call = call
        try:
            body = b" " * LARGE_BODY_BYTES
            message = {"type": "http.request", "body": body, "more_body": False}
            await _exchange(_protected(app), Connection([message]))
        finally:
            Protection.call = made

    asyncio.run(run())
    assert threads[0] != threading.get_ident()


def test_blanks_in_a_part_take_time_in_proportion():
    """Eight times the blanks are about eight times the work, and not 64 times."""
    make, size = BODIES["part head of b' ', a header"]
    assert growth(make, mark, size) < LIMIT


# Requests that are written so that a rule might not see them, and runs without a claim.


def _sent(store, requests) -> list[str]:
    """Sends requests of one key, one after the other; gives the paths of those that ran."""
    runs = []

    def counted(environ, start_response):
        runs.append(environ["PATH_INFO"])
        start_response("201 Created", [])
        return [b"done"]

    with Idempotency(store) as idem:
        protected = WSGIIdempotencyMiddleware(
            counted, idem, caller=bearer_token, rules=[Rule(path="/charges")], fail_open=True
        )
        for method, path in requests:
            ask_wsgi(protected, method, path)
    return runs


def test_no_spelling_of_a_path_runs_twice():
    """A retry with a slash at the end is the same request."""
    assert len(_sent(MemoryStore(), [("POST", "/charges"), ("POST", "/charges/")])) == 1
    assert len(_sent(MemoryStore(), [("POST", "/charges/"), ("POST", "/charges/")])) == 1


def test_no_spelling_of_a_method_runs_twice():
    """`post` is POST to the rule, as it is to frameworks."""
    assert len(_sent(MemoryStore(), [("post", "/charges"), ("post", "/charges")])) == 1


def test_an_endpoint_that_answers_404_does_not_run_again():
    """Reached by another spelling than the rule's, it has done its work all the same."""
    runs = []

    def app(environ, start_response):
        runs.append(1)
        start_response("404 Not Found", [])
        return [b"done"]

    with Idempotency(MemoryStore()) as idem:
        rules = [Rule(path="/charges")]
        protected = WSGIIdempotencyMiddleware(app, idem, caller=bearer_token, rules=rules)
        for _ in range(2):
            ask_wsgi(protected, path="/charges/")
    assert len(runs) == 1


def test_a_run_without_a_claim_is_not_run_again():
    """While the store is down, the process itself remembers."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", times=None)
    assert len(_sent(store, [("POST", "/charges")] * 2)) == 1


def test_a_run_without_a_claim_does_not_run_beside_itself():
    """A request that comes while the first one runs is refused."""
    runs = []

    def nested(environ, start_response):
        runs.append(1)
        if len(runs) == 1:
            assert ask_wsgi(protected).status == 409
        start_response("201 Created", [])
        return [b"done"]

    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", times=None)
    with Idempotency(store) as idem:
        protected = WSGIIdempotencyMiddleware(nested, idem, caller=bearer_token, fail_open=True)
        ask_wsgi(protected)
    assert len(runs) == 1


def test_a_run_without_a_claim_does_not_run_beside_a_claimed_one():
    """It looks for one in the same step in which it notes itself."""
    register = Register()
    register.begin_claimed(register.call())
    with suppress(OperationInFlight):
        register.run()
    assert register.count == 0


def test_a_claimed_run_does_not_run_beside_one_without_a_claim():
    """Also when the other has ended: it has run."""
    register = Register()
    register.run()
    with pytest.raises(OperationInFlight):
        register.begin_claimed(register.call())


def test_a_run_without_a_claim_does_not_follow_a_claimed_one():
    """What the process remembers by then is replayed."""
    register = Register()
    register.remembered = Answer(Response(201, [], b""), True, 1)
    assert register.run().replayed


def test_a_claim_that_gives_way_is_released():
    """No policy takes the refusal of a run for the failure of its operation."""
    register = Register()
    register.run()
    with pytest.raises(OperationInFlight) as refusal:
        register.begin_claimed(register.call())
    assert Policy(unlisted=Ending.FAILED).judge(refusal.value) is Ending.RELEASED
