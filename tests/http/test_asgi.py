"""The ASGI middleware under abuse: clients that leave, servers that cancel, apps that misbehave."""

from __future__ import annotations

import asyncio
import gc
import gzip
import logging
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from retrysafe import FOREVER, AsyncIdempotency, FingerprintRule, InFlight, Policy, current_attempt
from retrysafe.http import Breaker, FieldsKey, IdempotencyMiddleware, Rule, Streaming, bearer_token
from retrysafe.http.asgi_run import ERROR_NAME
from retrysafe.observe import EventKind
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.http.driving import BODY, Connection, ask, headers_of, http_scope


def scenario(function):
    """Runs an async test in a loop of its own; nothing may be left running when it ends."""

    def run():
        async def whole():
            await function()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left

        asyncio.run(whole())

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    return run


@contextmanager
def listening():
    """What retrysafe logs meanwhile."""
    records = []

    class Listener(logging.Handler):
        def emit(self, record):
            records.append(record)

    listener = Listener()
    logging.getLogger("retrysafe").addHandler(listener)
    try:
        yield records
    finally:
        logging.getLogger("retrysafe").removeHandler(listener)


def protected(app, store=None, **options):
    idem = AsyncIdempotency(store or MemoryStore())
    options = {"caller": bearer_token, **options}
    return IdempotencyMiddleware(app, idem, **options)


async def respond(send, status=201, body=b"done", *, content_type=b"text/plain", **message):
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": status, "headers": headers} | message)
    await send({"type": "http.response.body", "body": body})


class Gated:
    """An application that waits for the test between its start and its answer."""

    def __init__(self):
        self.runs = 0
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()
        self.after_body = []

    async def __call__(self, scope, receive, send):
        self.runs += 1
        assert (await receive())["body"] == BODY
        self.started.set()
        await self.go_on.wait()
        await respond(send)


def exchange(app, connection, **options):
    scope = http_scope("POST", "/charges", headers_of('"k-1"', **options))
    return asyncio.get_running_loop().create_task(app(scope, connection.receive, connection.send))


@scenario
async def test_whatever_is_not_protected_is_not_even_wrapped():
    """Websockets, the lifespan and unprotected routes get the very callables of the server."""
    seen = []

    async def app(*given):
        seen.append(given)

    app = protected(app, rules=[Rule(path="/charges")])
    for scope in (
        {"type": "lifespan"},
        {"type": "websocket", "path": "/charges"},
        http_scope("POST", "/other", headers_of('"k"')),
        http_scope("GET", "/charges", headers_of('"k"')),
        http_scope("HEAD", "/charges", headers_of('"k"')),
        http_scope("OPTIONS", "/charges", headers_of('"k"')),
    ):
        given = (scope, object(), object())
        await app(*given)
        assert all(a is b for a, b in zip(seen[-1], given, strict=True))
        assert "state" not in scope


@scenario
async def test_a_client_that_leaves_before_its_body_is_there_claims_nothing():
    """Neither a whole body that never comes nor half of one runs anything or is remembered."""
    store = FaultyStore(MemoryStore())
    gated = Gated()
    app = protected(gated, store)
    for messages in (
        [{"type": "http.disconnect"}],
        [
            {"type": "http.request", "body": BODY[:5], "more_body": True},
            {"type": "http.disconnect"},
        ],
    ):
        connection = Connection(messages)
        await exchange(app, connection)
        assert connection.sent == []
    assert gated.runs == 0
    assert store.calls == []


@scenario
async def test_a_client_that_leaves_during_the_run_is_not_noticed_by_the_application():
    """The outcome is stored all the same, and the retry gets it."""
    gated = Gated()
    heard = []

    async def listening(scope, receive, send):
        async def listen():
            heard.append(await receive())

        body = await receive()

        async def first():
            return body

        listener = asyncio.create_task(listen())
        await gated(scope, first, send)
        await listener

    app = protected(listening)
    connection = Connection()
    task = exchange(app, connection)
    await gated.started.wait()
    connection.hang_up.set()
    await asyncio.sleep(0)
    assert heard == []
    gated.go_on.set()
    await task
    assert heard == [{"type": "http.disconnect"}]
    assert (await ask(app)).is_replay


@scenario
async def test_a_client_that_leaves_while_the_answer_is_sent_gets_it_on_retry():
    """What the server's send raises comes after the outcome is stored."""
    gated = Gated()
    gated.go_on.set()
    app = protected(gated)
    connection = Connection(send_error=OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await exchange(app, connection)
    reply = await ask(app)
    assert (reply.is_replay, reply.body) == (True, b"done")


@scenario
async def test_cancelling_the_request_never_cancels_the_run():
    """Servers and timeouts cancel the outer task; the run ends, and its outcome is stored."""
    gated = Gated()
    app = protected(gated)
    task = exchange(app, Connection())
    await gated.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await ask(app)).status == 409
    gated.go_on.set()
    waiting = await ask(app, prefer="wait=5")
    assert (waiting.status, waiting.body, waiting.is_replay) == (201, b"done", True)
    assert gated.runs == 1
    await app.idempotency.close()


@scenario
async def test_cancelling_the_request_while_it_is_claimed_leaves_no_orphaned_claim():
    """The claim is on its way when the server cancels: the run still takes place."""
    gate = asyncio.Event()
    gated = Gated()
    gated.go_on.set()

    class SlowStore(MemoryStore):
        async def commit(self, claims, settlements):
            if claims:
                await gate.wait()
            return await super().commit(claims, settlements)

    app = protected(gated, SlowStore())
    task = exchange(app, Connection())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await gated.started.wait()
    reply = await ask(app, prefer="wait=5")
    assert (reply.status, reply.is_replay) == (201, True)
    assert gated.runs == 1


@scenario
async def test_a_cancellation_before_there_is_a_run_passes_on_as_it_is():
    """An observer is the service's own; a replay from the process is answered without any run."""
    cancelled = asyncio.CancelledError("in the service's own function")

    def observe(event):
        if event.kind is EventKind.REPLAYED:
            raise cancelled

    gated = Gated()
    gated.go_on.set()
    idem = AsyncIdempotency(MemoryStore(), observers=[observe])
    app = IdempotencyMiddleware(gated, idem, caller=bearer_token)
    assert (await ask(app)).status == 201
    with pytest.raises(asyncio.CancelledError) as caught:
        await ask(app)
    assert caught.value is cancelled
    assert gated.runs == 1


@scenario
async def test_an_error_after_the_client_has_gone_is_logged():
    """Nobody is left to raise it to; the key is free again."""
    gated = Gated()

    async def failing(scope, receive, send):
        await receive()
        gated.started.set()
        await gated.go_on.wait()
        raise LookupError("no ledger")

    app = protected(failing)
    task = exchange(app, Connection())
    await gated.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with listening() as records:
        gated.go_on.set()
        await app.idempotency.close()
        await asyncio.sleep(0)
    assert [str(record.exc_info[1]) for record in records if record.exc_info] == ["no ledger"]


@scenario
async def test_an_application_that_fails_after_it_began_to_respond_has_sent_nothing():
    """Half a response is held back: the server can still answer 500, and the retry runs."""
    runs = []

    async def app(scope, receive, send):
        runs.append(1)
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if len(runs) == 1:
            raise LookupError("no ledger")
        await send({"type": "http.response.body", "body": b" whole"})

    app = protected(app)
    connection = Connection()
    with pytest.raises(LookupError):
        await exchange(app, connection)
    assert connection.sent == []
    assert (await ask(app)).body == b"half whole"


@pytest.mark.parametrize("messages", [[], ["start"], ["start", "more"]])
def test_an_application_that_never_completes_its_response_is_an_error(messages):
    """The server hears of it, and the key is free."""

    async def run():
        async def app(scope, receive, send):
            if "start" in messages:
                await send({"type": "http.response.start", "status": 201, "headers": []})
            if "more" in messages:
                await send({"type": "http.response.body", "body": b"", "more_body": True})

        app = protected(app)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="before its response was complete"):
                await exchange(app, Connection())

    asyncio.run(run())


@pytest.mark.parametrize(
    "kinds", [["body"], ["start", "start"], ["start", "body", "body"]], ids=str
)
def test_messages_out_of_order_are_an_error_of_the_application(kinds):
    """As servers do, we refuse what is no response."""

    async def run():
        async def app(scope, receive, send):
            for kind in kinds:
                await send({"type": f"http.response.{kind}", "status": 201})

        with pytest.raises(RuntimeError, match="the application"):
            await exchange(protected(app), Connection())

    asyncio.run(run())


@scenario
async def test_an_application_that_raises_stop_iteration_is_answered():
    """Before it can be awaited, or noted for us by its framework: no future takes such an error,
    and the request would never end. It is judged by its own type."""

    def raising(scope, receive, send):
        heard.append("run")
        raise StopIteration("no seats")

    async def noting(scope, receive, send):
        heard.append("run")
        scope[ERROR_NAME] = StopIteration("no seats")
        await respond(send, 500)

    heard = []
    rule = Rule(policy=Policy(terminal=(StopIteration,)))
    for application in (raising, noting):
        heard.clear()
        idem = AsyncIdempotency(MemoryStore(), observers=[lambda event: heard.append(event.kind)])
        app = IdempotencyMiddleware(application, idem, caller=bearer_token, rule=rule)
        if application is raising:
            with pytest.raises(RuntimeError, match="coroutine raised StopIteration"):
                await asyncio.wait_for(ask(app), 10)
        else:
            assert (await asyncio.wait_for(ask(app), 10)).status == 500
        story = [EventKind.CALLED, EventKind.CLAIMED, "run", EventKind.FAILED, EventKind.ANSWERED]
        assert heard == story
        await idem.close()


@scenario
async def test_background_tasks_do_not_delay_the_response():
    """The response is stored and sent first; the exchange ends with the background task."""
    seen = []
    go_on = asyncio.Event()

    async def later():
        await go_on.wait()
        seen.append("later")

    async def endpoint(request):
        return JSONResponse({}, background=BackgroundTask(later))

    inner = Starlette(routes=[Route("/charges", endpoint, methods=["POST"])])

    class Watching(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            return await call_next(request)

    for app in (inner, Watching(inner)):
        seen.clear()
        go_on.clear()
        connection = Connection()
        task = exchange(protected(app), connection)
        await asyncio.wait_for(connection.answered.wait(), 5)
        assert seen == []
        assert not task.done()
        go_on.set()
        await task
        assert seen == ["later"]


@scenario
async def test_a_failing_background_task_does_not_undo_the_outcome():
    """Its error reaches the server after the response, as it does without us."""

    async def fail():
        raise LookupError("mail")

    async def endpoint(request):
        return JSONResponse({}, background=BackgroundTask(fail))

    app = protected(Starlette(routes=[Route("/charges", endpoint, methods=["POST"])]))
    connection = Connection()
    with pytest.raises(LookupError, match="mail"):
        await exchange(app, connection)
    assert connection.reply.status == 200
    assert (await ask(app)).is_replay


@scenario
async def test_background_tasks_outlive_a_cancelled_request():
    """They run to their end, their error is logged, and nothing is held for longer than that."""
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def later():
        begun.set()
        await go_on.wait()
        ended.set()
        raise LookupError("mail")

    async def endpoint(request):
        return JSONResponse({}, background=BackgroundTask(later))

    app = protected(Starlette(routes=[Route("/charges", endpoint, methods=["POST"])]))
    connection = Connection()
    task = exchange(app, connection)
    await begun.wait()
    await connection.answered.wait()
    assert connection.reply.status == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with listening() as records:
        go_on.set()
        await ended.wait()
        await asyncio.sleep(0)
    assert [str(record.exc_info[1]) for record in records if record.exc_info] == ["mail"]
    assert not app._runs


@scenario
async def test_middlewares_inside_may_chunk_and_compress():
    """Responses in pieces are stored whole; compressed bytes are replayed with their encoding."""

    class Chunking(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            response = await call_next(request)
            response.headers["x-seen"] = "yes"
            return response

    async def endpoint(request):
        assert await request.body() == BODY
        return Response(b"x" * 5000, status_code=201, media_type="text/plain")

    app = protected(
        Starlette(
            routes=[Route("/charges", endpoint, methods=["POST"])],
            middleware=[Middleware(Chunking), Middleware(GZipMiddleware)],
        )
    )
    first = await ask(app, accept_encoding="gzip")
    second = await ask(app, accept_encoding="gzip")
    assert first.headers["x-seen"] == "yes"
    assert second.is_replay
    assert first.body == second.body
    assert gzip.decompress(second.body) == b"x" * 5000
    assert second.headers["content-encoding"] == "gzip"
    assert second.headers["vary"] == "Accept-Encoding, Authorization"
    assert second.headers["content-length"] == str(len(second.body))


@scenario
async def test_the_application_finds_its_attempt():
    """In the request's state and through current_attempt(), also in threads and middlewares."""

    def endpoint(request):
        attempt = request.state.idempotency
        assert attempt is current_attempt()
        return JSONResponse({"key": attempt.key.text, "number": attempt.number})

    app = protected(Starlette(routes=[Route("/charges", endpoint, methods=["POST"])]))
    reply = await ask(app)
    assert reply.json == {"key": "k-1", "number": 1}


@scenario
async def test_what_routers_write_into_the_scope_is_seen_outside():
    """Middlewares around us read the endpoint; the scope is not a copy."""

    async def endpoint(request):
        request.state.found = 7
        return JSONResponse({})

    app = protected(Starlette(routes=[Route("/charges", endpoint, methods=["POST"])]))
    scope = http_scope("POST", "/charges", headers_of('"k-1"'))
    connection = Connection()
    await app(scope, connection.receive, connection.send)
    assert scope["endpoint"] is endpoint
    assert scope["state"]["found"] == 7


@scenario
async def test_ways_to_send_a_body_past_us_are_hidden():
    """An application that would hand over a file path sends the bytes instead."""
    seen = {}

    async def app(scope, receive, send):
        seen.update(scope["extensions"])
        await respond(send)

    extensions = {
        "http.response.pathsend": {},
        "http.response.zerocopysend": {},
        "http.response.trailers": {},
        "tls": {"a": 1},
    }
    await ask(protected(app), scope={"extensions": extensions})
    assert seen == {"tls": {"a": 1}}
    assert len(extensions) == 4


@scenario
async def test_other_messages_pass_on_to_the_server():
    """Early hints and the like are the server's business; trailers end here."""

    async def app(scope, receive, send):
        await send({"type": "http.response.early_hint"})
        await respond(send)
        await send({"type": "http.response.trailers"})

    connection = Connection()
    await exchange(protected(app), connection)
    assert [message["type"] for message in connection.sent] == [
        "http.response.early_hint",
        "http.response.start",
        "http.response.body",
    ]


@scenario
async def test_a_stream_passes_on_and_is_remembered_as_done():
    """By rule, and for server-sent events always; a retry gets no second run."""
    for options, content_type in (
        ({"rule": Rule(streaming=Streaming.PASS)}, b"application/x-ndjson"),
        ({}, b"text/event-stream; charset=utf-8"),
    ):
        connection = Connection()
        runs = []

        async def app(scope, receive, send, connection=connection, runs=runs, kind=content_type):
            runs.append(1)
            headers = [(b"content-type", kind)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for number in (1, 2):
                await send({"type": "http.response.body", "body": b"%d\n" % number, "more_body": 1})
                assert connection.sent[-1]["body"] == b"%d\n" % number
            await send({"type": "http.response.body", "body": b""})

        app = protected(app, **options)
        await exchange(app, connection)
        assert connection.reply.body == b"1\n2\n"
        reply = await ask(app)
        assert (reply.status, reply.problem) == (409, "outcome-unavailable")
        assert runs == [1]


@scenario
async def test_a_stream_is_remembered_before_its_first_byte():
    """A crash while it is sent must not run the operation again: its client has seen a part."""
    store = FaultyStore(MemoryStore())
    connection = Connection()
    seen = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # The claim, and what it came to.
        seen.append((len(connection.sent), len(store.calls)))
        await send({"type": "http.response.body", "body": b"all", "more_body": False})

    app = protected(app, store, rule=Rule(streaming=Streaming.PASS))
    sending = connection.send

    async def send(message):
        assert len(store.calls) == 2
        await sending(message)

    connection.send = send
    await exchange(app, connection)
    assert seen == [(1, 2)]
    assert connection.reply.body == b"all"


@scenario
async def test_a_stream_that_cannot_be_remembered_is_not_begun():
    """Its client is told so, and sees no byte of it; the application hears that nobody reads."""
    store = FaultyStore(MemoryStore())
    connection = Connection()
    heard = []

    async def app(scope, receive, send):
        store.fail(Moment.BEFORE, method="commit", times=None)
        with pytest.raises(OSError, match="gone"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
        heard.append((await receive(), await receive())[1]["type"])

    policy = Policy(settle_patience=timedelta(0))
    app = protected(app, store, rule=Rule(streaming=Streaming.PASS, policy=policy))
    await exchange(app, connection)
    assert connection.reply.problem == "outcome-not-stored"
    assert heard == ["http.disconnect"]


@scenario
async def test_a_stream_that_fails_half_way_is_done():
    """Its error reaches the server, which cuts the connection; a retry runs nothing."""
    runs = []

    async def app(scope, receive, send):
        runs.append(1)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise LookupError("feed")

    app = protected(app)
    connection = Connection()
    with pytest.raises(LookupError, match="feed"):
        await exchange(app, connection)
    # Nothing says that this was its end.
    assert [message["type"] for message in connection.sent] == ["http.response.start"]
    assert (await ask(app)).problem == "outcome-unavailable"
    assert len(runs) == 1


@scenario
async def test_a_stream_that_fails_when_its_client_has_gone_is_done():
    """There is no server to raise it to, and most such errors only say that nobody reads."""
    started, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        started.set()
        await go_on.wait()
        raise LookupError("feed")

    app = protected(app)
    task = exchange(app, Connection())
    await started.wait()
    task.cancel()
    await asyncio.wait((task,))
    go_on.set()
    assert (await ask(app, prefer="wait=10")).problem == "outcome-unavailable"


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("way", ["disconnect", "send fails", "cancelled"])
def test_an_endless_stream_ends_with_its_reader(spec_version, way):
    """Whatever way the server tells of it, the application stops and the operation is done."""

    async def run():
        running = asyncio.Event()

        async def events():
            while True:
                yield b"data: 1\n\n"
                running.set()
                await asyncio.sleep(0)

        async def endpoint(request):
            await request.body()
            return StreamingResponse(events(), media_type="text/event-stream")

        app = protected(Starlette(routes=[Route("/charges", endpoint, methods=["POST"])]))
        connection = Connection()
        scope = http_scope("POST", "/charges", headers_of('"k-1"'))
        scope["asgi"]["spec_version"] = spec_version
        task = asyncio.create_task(app(scope, connection.receive, connection.send))
        await running.wait()
        if way == "cancelled":
            task.cancel()
        elif way == "disconnect" and spec_version == "2.3":
            connection.hang_up.set()
        else:
            connection.send_error = OSError("gone")
        await asyncio.wait((task,), timeout=5)
        assert task.done()
        reply = await ask(app, prefer="wait=5")
        assert reply.problem == "outcome-unavailable"
        await app.idempotency.close()

    asyncio.run(run())


@scenario
async def test_a_stream_that_begins_after_its_reader_has_gone_hears_of_it():
    """The server's receive may never say so: the connection is no longer ours."""
    started, go_on = asyncio.Event(), asyncio.Event()
    heard = []

    async def app(scope, receive, send):
        await receive()
        listener = asyncio.create_task(receive())
        started.set()
        await go_on.wait()
        headers = [(b"content-type", b"text/event-stream")]
        with pytest.raises(OSError, match="gone"):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        heard.append(await listener)

    app = protected(app)
    task = exchange(app, Connection())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    reply = await asyncio.wait_for(ask(app, prefer="wait=5"), 10)
    assert reply.problem == "outcome-unavailable"
    assert heard == [{"type": "http.disconnect"}]


@scenario
async def test_a_run_without_a_client_is_not_collected_as_garbage():
    """Nobody but us holds a run whose request was cancelled; a loop holds its tasks weakly."""
    made = []
    started = asyncio.Event()

    async def app(scope, receive, send):
        future = asyncio.get_running_loop().create_future()
        made.append(weakref.ref(future))
        started.set()
        await future
        await respond(send)

    app = protected(app)
    task = exchange(app, Connection())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await asyncio.sleep(0)
    gc.collect()
    future = made[0]()
    assert future is not None
    future.set_result(None)
    del future
    assert (await ask(app, prefer="wait=5")).is_replay
    gc.collect()
    assert not app._runs


@scenario
async def test_streams_of_unprotected_routes_are_untouched():
    """Chunks arrive one by one, and the disconnect reaches the application."""
    connection = Connection([])

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        assert connection.sent[-1]["body"] == b"1"
        connection.hang_up.set()
        assert (await receive())["type"] == "http.disconnect"

    app = protected(app, rules=[Rule(path="/charges")])
    scope = http_scope("GET", "/events", headers_of(None))
    await app(scope, connection.receive, connection.send)


@scenario
async def test_bodies_in_pieces_are_read_up_to_the_limit():
    """Past it nothing runs; within it the application gets it whole."""
    bodies = []

    async def app(scope, receive, send):
        bodies.append((await receive())["body"])
        await respond(send)

    app = protected(app, rule=Rule(request_limit_bytes=8))

    def pieces(*bodies):
        return [
            {"type": "http.request", "body": body, "more_body": number < len(bodies)}
            for number, body in enumerate(bodies, 1)
        ]

    connection = Connection(pieces(b"1234", b"5678"))
    await exchange(app, connection)
    assert connection.reply.status == 201
    assert bodies == [b"12345678"]
    for messages in (
        pieces(b"1234", b"56789", b"rest"),
        pieces(b"123456789", b"rest"),
        pieces(b"1234", b"56789"),
        pieces(b"123456789"),
    ):
        connection = Connection(messages)
        await exchange(app, connection)
        assert connection.reply.problem == "body-too-large"
        assert connection.messages == []
    assert len(bodies) == 1


REFUSED_BY_THE_HEAD = pytest.mark.parametrize(
    ("headers", "status"),
    [
        (headers_of(None), 400),
        (headers_of('"k"', None), 401),
        (headers_of('"k"', content_length="2000000"), 413),
    ],
)


@REFUSED_BY_THE_HEAD
def test_a_refusal_by_the_head_does_not_wait_for_100_continue(headers, status):
    """A client that asks first is refused before it sends anything."""

    @scenario
    async def refused():
        connection = Connection()
        scope = http_scope("POST", "/charges", [*headers, (b"expect", b"100-continue")])
        await protected(None)(scope, connection.receive, connection.send)
        assert connection.reply.status == status
        assert len(connection.messages) == 1

    refused()


@REFUSED_BY_THE_HEAD
def test_a_refusal_by_the_head_is_sent_at_once_and_ends_with_the_body(headers, status):
    """Servers drop a connection, and all of HTTP/2's requests on it, when an answer ends first."""

    @scenario
    async def refused():
        connection = Connection()
        scope = http_scope("POST", "/charges", headers)
        pieces = [
            {"type": "http.request", "body": b"1", "more_body": True},
            {"type": "http.request", "body": b"2", "more_body": False},
        ]
        ends_seen = []

        async def receive():
            ends_seen.append([message.get("more_body") for message in connection.sent])
            return pieces.pop(0)

        await protected(None)(scope, receive, connection.send)
        assert ends_seen == [[None, True], [None, True]]
        assert connection.reply.status == status

    refused()


@scenario
async def test_a_refused_body_that_goes_on_is_not_waited_for():
    """Nobody is made to read without end."""
    connection = Connection(
        [{"type": "http.request", "body": bytes(40_000), "more_body": True} for _ in range(3)]
    )
    scope = http_scope("POST", "/charges", headers_of(None))
    await protected(None)(scope, connection.receive, connection.send)
    assert connection.reply.status == 400
    assert len(connection.messages) == 1


@scenario
async def test_a_refused_client_that_leaves_is_not_answered_further():
    """The end of an answer is for those who are there."""
    connection = Connection([{"type": "http.disconnect"}])
    scope = http_scope("POST", "/charges", headers_of(None))
    await protected(None)(scope, connection.receive, connection.send)
    assert connection.sent[-1]["more_body"] is True


@scenario
async def test_a_thousand_duplicates_cost_two_store_calls():
    """One claim and one settlement, however many ask at once; all others get 409 or the outcome."""
    store = FaultyStore(MemoryStore())
    gated = Gated()
    app = protected(gated, store)
    first = asyncio.create_task(ask(app))
    await gated.started.wait()
    refused = await asyncio.gather(*(ask(app) for _ in range(500)))
    assert {reply.problem for reply in refused} == {"in-flight"}
    assert all(1 <= int(reply.headers["retry-after"]) <= 30 for reply in refused)
    waiting = [asyncio.create_task(ask(app, prefer="wait=10")) for _ in range(500)]
    await asyncio.sleep(0)
    gated.go_on.set()
    replies = await asyncio.gather(*waiting)
    assert {(reply.status, reply.body, reply.is_replay) for reply in replies} == {
        (201, b"done", True)
    }
    assert not (await first).is_replay
    assert gated.runs == 1
    assert len(store.calls) == 2


@scenario
async def test_what_the_process_knows_does_not_close_the_breaker():
    """Duplicates that are refused without the store say nothing of it: it stays left alone."""
    gated = Gated()
    breaker = Breaker(failures_limit=1, open_seconds=1000)
    app = protected(gated, breaker=breaker)
    first = asyncio.create_task(ask(app))
    await gated.started.wait()
    breaker.failed(time.monotonic())
    assert (await ask(app)).status == 409
    assert (await ask(app, body=b"{}")).status == 422
    assert (await ask(app, prefer="respond-async")).status == 202
    assert breaker.is_open
    gated.go_on.set()
    assert (await first).status == 201
    assert not breaker.is_open


@scenario
async def test_the_mismatch_of_a_running_request_is_told_at_once():
    """422 comes before 409."""
    gated = Gated()
    app = protected(gated)
    first = asyncio.create_task(ask(app))
    await gated.started.wait()
    assert (await ask(app, body=b"{}")).status == 422
    gated.go_on.set()
    await first


@scenario
async def test_waiting_ends_at_its_limit_with_409():
    """And wait=0 does not wait at all, not even where the route waits by itself."""
    for limit, headers in (
        (timedelta(milliseconds=10), {}),
        (timedelta(hours=1), {"prefer": "wait=0"}),
    ):
        gated = Gated()
        policy = Policy(in_flight=InFlight.WAIT, wait_limit=limit)
        app = protected(gated, rule=Rule(policy=policy))
        first = asyncio.create_task(ask(app))
        await gated.started.wait()
        reply = await asyncio.wait_for(ask(app, **headers), 5)
        assert reply.problem == "in-flight"
        gated.go_on.set()
        await first


@scenario
async def test_respond_async_promises_the_outcome_and_keeps_the_promise():
    """202 with a URL at once, the state while it runs, the response when it is there."""
    gated = Gated()
    app = protected(gated)
    for _ in range(2):  # The first request, and one that finds it running.
        reply = await ask(app, key='"a/b c"', prefer="respond-async")
        assert reply.status == 202
        assert reply.headers["preference-applied"] == "respond-async"
        assert reply.headers["location"] == "/idempotency-status/a%2Fb%20c"
        assert reply.json["status_url"] == reply.headers["location"]
    status = "/idempotency-status/a/b c"
    running = await ask(app, "GET", status, key=None)
    assert (running.status, running.json["state"]) == (200, "running")
    assert running.headers["retry-after"] == "1"
    assert (await ask(app, "GET", status, key=None, caller="bob")).problem == "key-unknown"
    assert (await ask(app, "GET", status, key=None, caller=None)).status == 401
    gated.go_on.set()
    await app.idempotency.close()
    done = await ask(app, "GET", status, key=None)
    assert (done.status, done.body, done.is_replay) == (201, b"done", True)
    assert gated.runs == 1


@scenario
async def test_respond_async_answers_in_time_when_it_can():
    """A run that ends within the wait is answered as ever."""
    gated = Gated()
    gated.go_on.set()
    app = protected(gated)
    reply = await ask(app, prefer="respond-async, wait=10")
    assert (reply.status, reply.body) == (201, b"done")


@scenario
async def test_respond_async_promises_nothing_that_was_refused():
    """A mismatch, an outage or an immediate error is told as it is."""
    store = FaultyStore(MemoryStore())
    gated = Gated()
    gated.go_on.set()
    app = protected(gated, store)
    await ask(app)
    assert (await ask(app, body=b"{}", prefer="respond-async")).status == 422
    store.fail(Moment.BEFORE, method="commit", times=None)
    assert (await ask(app, key='"k-2"', prefer="respond-async")).status == 503


@scenario
async def test_respond_async_does_not_outlive_a_cancelled_request():
    """A server that cancels while the run is awaited leaves the run alone."""
    gated = Gated()
    app = protected(gated)
    task = exchange(app, Connection(), prefer="respond-async, wait=10")
    await gated.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gated.go_on.set()
    await app.idempotency.close()
    assert (await ask(app)).is_replay


@scenario
async def test_a_cancelled_application_leaves_the_key_to_its_lease():
    """Nobody knows how far it got: a retry is told that it is in flight."""

    async def app(scope, receive, send):
        raise asyncio.CancelledError

    app = protected(app)
    with pytest.raises(asyncio.CancelledError):
        await exchange(app, Connection())
    assert (await ask(app)).problem == "in-flight"


@scenario
async def test_one_endpoint_can_be_protected_alone():
    """Around a single route, with a fixed rule; links lead to the application's own pages."""

    async def endpoint(scope, receive, send):
        await receive()
        await respond(send)

    route = Route("/charges", protected(endpoint, rule=Rule()), methods=["POST"])
    inner = Starlette(routes=[route])
    app = Starlette(routes=[Mount("/v1", app=inner)])
    assert (await ask(app, path="/v1/charges")).status == 201
    assert (await ask(app, path="/v1/charges")).is_replay
    reply = await ask(app, path="/v1/charges", key=None)
    assert reply.json["type"] == "/idempotency-policy#key-missing"


@scenario
async def test_an_ordinary_client_gets_along():
    """httpx in process: first call, replay, mismatch."""
    gated = Gated()
    gated.go_on.set()
    transport = httpx.ASGITransport(protected(gated))
    headers = {"authorization": "Bearer a", "idempotency-key": '"k"'}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://shop", headers=headers
    ) as client:
        replies = [await client.post("/charges", content=BODY) for _ in range(2)]
        replies.append(await client.post("/charges", content=b"other"))
    assert [reply.status_code for reply in replies] == [201, 201, 422]
    assert replies[1].headers["idempotent-replayed"] == "true"


@scenario
async def test_two_mounts_are_two_places_even_when_the_path_leaves_them_out():
    """The same key under another mount is another request, with or without the mount's path in
    `path`."""
    app = protected(lambda scope, receive, send: respond(send))
    assert (await ask(app, scope={"root_path": "/v1"})).status == 201
    replayed = await ask(app, scope={"root_path": "/v1", "path": "/v1/charges"})
    assert replayed.is_replay
    assert (await ask(app, scope={"root_path": "/v2"})).problem == "key-reused"


@scenario
async def test_a_mount_ends_at_a_slash():
    """`/payments` does not lie below `/pay`: cut off there, its rule would not be found."""
    runs = []

    async def app(scope, receive, send):
        runs.append(scope["path"])
        await respond(send)

    app = protected(app, rules=[Rule(path="/payments")])
    for path in ("/payments", "/pay/payments"):
        for root in ("/pay", "/pay/"):
            connection = Connection()
            scope = http_scope("POST", path, headers_of('"k-1"'), root_path=root)
            await app(scope, connection.receive, connection.send)
            assert connection.reply.status == 201
    # The two paths are the same place, because the first one only lacks the mount.
    assert runs == ["/payments"]


@scenario
async def test_another_route_with_a_rule_of_its_own_gets_no_foreign_replay():
    """Fingerprints of two rules cannot be compared, and two operations are two requests."""
    runs = []

    async def app(scope, receive, send):
        runs.append(scope["path"])
        await respond(send)

    rules = [
        Rule(path="/charges"),
        Rule(path="/refunds", fingerprint=FingerprintRule(version=2, exclude=("/at",))),
    ]
    for face in ({}, {"cache": False}):
        runs.clear()
        app_ = IdempotencyMiddleware(
            app, AsyncIdempotency(MemoryStore(), **face), caller=bearer_token, rules=rules
        )
        statuses = []
        for path in ("/charges", "/refunds"):
            connection = Connection()
            scope = http_scope("POST", path, headers_of('"k-1"'))
            await app_(scope, connection.receive, connection.send)
            statuses.append(connection.reply.status)
        assert (statuses, runs) == ([201, 422], ["/charges"])


@scenario
async def test_a_stream_that_is_under_way_is_not_answered_with_202_as_well():
    """It is the answer already, whatever the client preferred."""
    started, go_on = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        started.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"b", "more_body": False})

    connection = Connection()
    task = exchange(protected(app), connection, prefer="respond-async")
    await started.wait()
    go_on.set()
    await task
    assert (connection.reply.status, connection.reply.body) == (200, b"ab")


@scenario
async def test_a_natural_key_tells_paths_apart_that_are_no_utf_8():
    """Servers replace such bytes in the path; what was sent is in the raw one."""
    runs = []

    async def app(scope, receive, send):
        runs.append(scope["raw_path"])
        await respond(send)

    rule = Rule(path="/close/{name}", key=FieldsKey("{name}", window=FOREVER))
    app = protected(app, rules=[rule])
    for raw_path in (b"/close/caf%E9", b"/close/caf%E8?a=1", b"/close/caf%E9"):
        scope = {"path": "/close/caf\ufffd", "raw_path": raw_path}
        assert (await ask(app, key=None, scope=scope)).status == 201
    assert runs == [b"/close/caf%E9", b"/close/caf%E8?a=1"]


@scenario
async def test_a_server_that_gives_no_raw_path_is_taken_at_its_word():
    """The application sees one path as well."""
    runs = []

    async def app(scope, receive, send):
        runs.append(scope["path"])
        await respond(send)

    app = protected(app)
    for _ in range(2):
        reply = await ask(app, scope={"path": "/caf\ufffd", "raw_path": None})
        assert reply.status == 201
    assert runs == ["/caf\ufffd"]
