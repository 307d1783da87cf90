"""The WSGI middleware: threads, iterables, streams and the standard's odd corners."""

from __future__ import annotations

import io
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest

from retrysafe import FOREVER, GLOBAL, Idempotency, InvalidInput, Policy, current_attempt
from retrysafe.http import (
    Breaker,
    FieldsKey,
    Limits,
    Response,
    Rule,
    Streaming,
    WSGIIdempotencyMiddleware,
    bearer_token,
)
from retrysafe.http.wsgi_run import ATTEMPT_NAME
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.http.driving import BODY, Shop, ask_wsgi


@pytest.fixture
def protect():
    """Protects an application; what it made is closed when the test ends."""
    made = []

    def make(app, store=None, **options):
        idem = Idempotency(store or MemoryStore())
        made.append(idem)
        return WSGIIdempotencyMiddleware(app, idem, **{"caller": bearer_token, **options})

    yield make
    for idem in made:
        idem.close()


def test_a_request_that_no_rule_protects_gets_the_servers_own_callables(protect):
    """Neither the environ nor start_response is touched."""
    seen = []

    def app(environ, start_response):
        seen.append((environ, start_response))
        return iter([b"x"])

    app = protect(app, rules=[Rule(path="/charges")])
    environ, start = {"REQUEST_METHOD": "POST", "PATH_INFO": "/other"}, object()
    app(environ, start)
    assert seen[0][0] is environ
    assert seen[0][1] is start
    assert environ.keys() == {"REQUEST_METHOD", "PATH_INFO"}


def test_the_application_finds_its_attempt_and_its_body(protect):
    """In the environ and through current_attempt(); the body can be read again."""

    def app(environ, start_response):
        assert environ[ATTEMPT_NAME] is current_attempt()
        assert environ["wsgi.input"].read() == BODY
        assert environ["CONTENT_LENGTH"] == str(len(BODY))
        start_response("201 Created", [])
        return [b"done"]

    assert ask_wsgi(protect(app)).body == b"done"


def test_duplicates_in_other_threads_do_not_run(protect):
    """409 while the first runs, or its response for those who wait; two store calls in all."""
    started, go_on = threading.Event(), threading.Event()
    runs = []

    def app(environ, start_response):
        runs.append(1)
        started.set()
        assert go_on.wait(10)
        start_response("201 Created", [])
        return [b"done"]

    store = FaultyStore(MemoryStore())
    app = protect(app, store, rules=[Rule(wait=True)], limits=Limits(waiters=8))
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(ask_wsgi, app)
        assert started.wait(10)
        refused = ask_wsgi(app)
        assert refused.problem == "in-flight"
        assert int(refused.headers["retry-after"]) >= 1
        accepted = ask_wsgi(app, prefer="respond-async")
        assert (accepted.status, accepted.headers["location"]) == (202, "/idempotency-status/k-1")
        waiting = [pool.submit(ask_wsgi, app, prefer="wait=10") for _ in range(8)]
        go_on.set()
        assert {future.result().body for future in waiting} == {b"done"}
        assert not first.result().is_replay
    assert runs == [1]
    assert len(store.calls) == 2


def test_what_the_process_knows_does_not_close_the_breaker(protect):
    """Duplicates that are refused without the store say nothing of it: it stays left alone."""
    started, go_on = threading.Event(), threading.Event()

    def app(environ, start_response):
        started.set()
        assert go_on.wait(10)
        start_response("201 Created", [])
        return [b"done"]

    breaker = Breaker(failures_limit=1, open_seconds=1000)
    app = protect(app, breaker=breaker)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask_wsgi, app)
        assert started.wait(10)
        breaker.failed(time.monotonic())
        assert ask_wsgi(app).status == 409
        assert ask_wsgi(app, body=b"{}").status == 422
        assert ask_wsgi(app, prefer="respond-async").status == 202
        assert breaker.is_open
        go_on.set()
        assert first.result().status == 201
    assert not breaker.is_open


def test_iterables_are_consumed_and_closed(protect):
    """Generators run inside the attempt; write() and empty chunks are taken as well."""
    closed = []

    class Result:
        def __iter__(self):
            assert current_attempt().number == 1
            yield b""
            yield b"c"

        def close(self):
            closed.append(1)

    def app(environ, start_response):
        write = start_response("201 Created", [])
        write(b"a")
        write(b"b")
        return Result()

    app = protect(app)
    assert ask_wsgi(app).body == b"abc"
    assert closed == [1]
    assert ask_wsgi(app).body == b"abc"


def test_an_error_while_the_response_is_made_has_sent_nothing(protect):
    """The iterable is closed, the server hears the error, and the key is free."""
    closed = []

    def chunks():
        try:
            yield b"half"
            raise LookupError("no ledger")
        finally:
            closed.append(1)

    def app(environ, start_response):
        start_response("201 Created", [])
        return chunks()

    app = protect(app)
    for _ in range(2):
        with pytest.raises(LookupError):
            ask_wsgi(app)
    assert closed == [1, 1]


def test_an_application_may_start_over_after_an_error(protect):
    """With exc_info, what it had begun is dropped; without, it is an error."""

    def app(environ, start_response):
        write = start_response("200 OK", [("X-A", "1")])
        write(b"half")
        try:
            raise LookupError("late")
        except LookupError as error:
            start_response("404 Not Found", [("X-B", "2")], (type(error), error, None))
        return [b"gone"]

    reply = ask_wsgi(protect(app))
    assert (reply.status, reply.body, reply.headers) == (404, b"gone", {"x-b": "2"})

    def twice(environ, start_response):
        start_response("200 OK", [])
        start_response("200 OK", [])
        return []

    with pytest.raises(RuntimeError, match="twice"):
        ask_wsgi(protect(twice))


def test_an_application_without_a_response_is_an_error(protect):
    """The server hears of it, and the key is free."""
    app = protect(lambda environ, start_response: [])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="without a response"):
            ask_wsgi(app)
    app = protect(lambda environ, start_response: [b"body"])
    with pytest.raises(RuntimeError, match="before its response"):
        ask_wsgi(app)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (Rule(streaming=Streaming.PASS), "application/x-ndjson"),
        (Rule(), "text/event-stream"),
    ],
)
@pytest.mark.parametrize("chunks", [[b"1", b"2"], []])
def test_a_stream_passes_on_and_is_remembered_as_done(protect, rule, kind, chunks):
    """Chunk by chunk as the server asks for them; a retry gets no second run, nor meanwhile."""
    runs = []
    arrived = []

    def app(environ, start_response):
        runs.append(1)
        start_response("200 OK", [("Content-Type", kind)])
        for number, chunk in enumerate(chunks):
            assert len(arrived) == number
            yield chunk

    app = protect(app, rule=rule)

    def watched(environ, start_response):
        result = app(environ, start_response)
        for chunk in result:
            if chunk:
                assert ask_wsgi(app).problem == "outcome-unavailable"
                arrived.append(chunk)
            yield chunk

    reply = ask_wsgi(watched)
    assert (reply.status, reply.body, arrived) == (200, b"".join(chunks), chunks)
    assert ask_wsgi(app).problem == "outcome-unavailable"
    assert runs == [1]


def test_a_stream_whose_reader_has_gone_is_closed_and_done(protect):
    """Servers close what they no longer send; the operation is not run again."""
    closed = []

    def app(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            closed.append(1)

    app = protect(app)

    def leaving(environ, start_response):
        result = app(environ, start_response)
        read = [next(result) for _ in range(5)]
        assert (closed, read) == ([], [b"data: 1\n\n"] * 5)
        result.close()
        assert closed == [1]
        result.close()
        return read

    assert ask_wsgi(leaving).status == 200
    assert ask_wsgi(app).problem == "outcome-unavailable"
    assert closed == [1]


def test_what_an_application_writes_by_itself_passes_when_it_must(protect):
    """The old way of PEP 3333: within the limit it is stored, past it written as it comes."""
    for size, replay in ((10, True), (1_000, False)):
        written = []

        def app(environ, start_response, size=size, written=written):
            write = start_response("200 OK", [])
            for number in range(4):
                write(b"%d" % number * (size // 4))
                written.append(number)
            return [b"end"]

        policy = Policy(outcome_limit_bytes=600)
        app = protect(app, rule=Rule(policy=policy), store=MemoryStore())
        first = ask_wsgi(app)
        assert (len(first.body), first.body[-3:]) == (size // 4 * 4 + 3, b"end")
        again = ask_wsgi(app)
        assert again.body == first.body if replay else again.problem == "outcome-unavailable"
        assert written == [0, 1, 2, 3]


def test_a_writing_application_without_a_reader_is_done(protect):
    """What the server's write raises ends the application; the operation is not run again."""

    def app(environ, start_response):
        write = start_response("200 OK", [("Content-Type", "text/event-stream")])
        while True:
            write(b"data: 1\n\n")

    def gone(chunk):
        raise BrokenPipeError

    app = protect(app)

    def server(environ, start_response):
        def start(*args):
            start_response(*args)
            return gone

        return app(environ, start)

    assert ask_wsgi(server).body == b""
    assert ask_wsgi(app).problem == "outcome-unavailable"


def test_a_stream_that_fails_half_way_is_done(protect):
    """Its error reaches the server, also through start_response with exc_info; a retry runs
    nothing."""
    runs = []

    def app(environ, start_response):
        runs.append(1)
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        yield b"1"
        try:
            raise LookupError("feed")
        except LookupError as error:
            start_response("500 Oops", [], (type(error), error, None))

    app = protect(app)
    with pytest.raises(LookupError, match="feed"):
        ask_wsgi(app)
    assert ask_wsgi(app).problem == "outcome-unavailable"
    assert len(runs) == 1


def test_a_stream_that_the_server_does_not_begin_is_closed_and_done(protect):
    """It was remembered before the server was asked: its work is done, whoever reads it."""
    closed = []

    def app(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        try:
            yield b"1"
        finally:
            closed.append(1)

    def refusing(*_):
        raise LookupError("headers")

    app = protect(app)
    with pytest.raises(LookupError, match="headers"):
        ask_wsgi(lambda environ, _: app(environ, refusing))
    assert closed == [1]
    assert ask_wsgi(app).problem == "outcome-unavailable"


def test_a_stream_that_cannot_be_remembered_is_not_begun(protect):
    """Its ending could not be stored: the client is told so, and sees no byte of it."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", number=2)
    closed = []

    def app(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        try:
            yield b"1"
        finally:
            closed.append(1)

    app = protect(app, store, rule=Rule(policy=Policy(settle_patience=timedelta(0))))
    assert ask_wsgi(app).problem == "outcome-not-stored"
    assert closed == [1]


def test_headers_are_told_once(protect):
    """Servers may give the content's headers under two names."""
    seen = []

    def caller(request):
        seen.append(request)
        return "a"

    app = protect(lambda environ, start_response: [], caller=caller)
    names = {"HTTP_CONTENT_TYPE": "application/json", "HTTP_CONTENT_LENGTH": "32"}
    with pytest.raises(RuntimeError):
        ask_wsgi(app, environ=names)
    assert seen[0].header_lines(b"content-type") == [b"application/json"]
    assert seen[0].header_lines(b"content-length") == [b"32"]


def test_no_more_than_the_body_is_read(protect):
    """The declared length, or to the end where the server says that there is one."""

    def app(environ, start_response):
        start_response("200 OK", [])
        return [environ["wsgi.input"].read()]

    app = protect(app, rule=Rule(request_limit_bytes=8))

    def with_input(key, data, **environ):
        return ask_wsgi(
            app, key=key, environ={"wsgi.input": io.BytesIO(data), "CONTENT_LENGTH": "", **environ}
        )

    assert with_input("a", b"12345next", CONTENT_LENGTH="5").body == b"12345"
    assert with_input("c", b"12345").body == b""
    assert with_input("f", b"12345", CONTENT_LENGTH="five").body == b""
    assert with_input("d", b"12345678", **{"wsgi.input_terminated": True}).body == b"12345678"
    reply = with_input("e", b"123456789", **{"wsgi.input_terminated": True})
    assert reply.problem == "body-too-large"


def test_half_a_body_was_never_asked_for(protect):
    """A client that leaves in the middle of its body has run nothing, and its key stays free."""
    store, runs = FaultyStore(MemoryStore()), []

    def app(environ, start_response):
        runs.append(environ["wsgi.input"].read())
        start_response("201 Created", [])
        return [b""]

    app = protect(app, store)
    reply = ask_wsgi(app, body=BODY[:5], environ={"CONTENT_LENGTH": str(len(BODY))})
    assert (reply.status, reply.problem) == (400, "body-incomplete")
    assert reply.json["retryable"] is True
    assert (runs, store.calls) == ([], [])
    assert ask_wsgi(app).status == 201
    assert runs == [BODY]


def test_paths_are_text_for_rules(protect):
    """WSGI hands over bytes in disguise."""

    def app(environ, start_response):
        start_response("201 Created", [])
        return [b""]

    app = protect(app, rules=[Rule(path="/zählen")])
    assert ask_wsgi(app, path="/zählen", key=None).status == 400
    assert ask_wsgi(app, path="/zahlen", key=None).status == 201


def test_interruption_of_the_worker_leaves_the_key_to_its_lease(protect):
    """A worker that is told to exit is no outcome."""

    def app(environ, start_response):
        raise SystemExit

    app = protect(app)
    with pytest.raises(SystemExit):
        ask_wsgi(app)
    assert ask_wsgi(app).problem == "in-flight"


@pytest.fixture
def database(tmp_path):
    """An object on a file, and a connection of the application's own to the same file."""
    path = tmp_path / "shop.db"
    with (
        Idempotency(f"sqlite:///{path}") as idem,
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
    ):
        yield idem, connection


def test_an_endpoint_may_complete_in_its_own_transaction(database):
    """Business write and response commit together; the first caller gets the whole response."""
    idem, connection = database
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT)")
    late_status = ["201 Created"]

    def app(environ, start_response):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders (name) VALUES ('pen')")
        made = Response(201, [(b"location", b"/orders/1")], b"made")
        current_attempt().complete_in(connection, made)
        connection.execute("COMMIT")
        start_response(late_status[0], [("Location", "/orders/1"), ("Set-Cookie", "a=b")])
        return [b"made"]

    app = WSGIIdempotencyMiddleware(app, idem, caller=bearer_token)
    first, second = ask_wsgi(app), ask_wsgi(app)
    assert first.headers == {"location": "/orders/1", "set-cookie": "a=b"}
    assert (second.is_replay, second.body) == (True, b"made")
    assert second.headers["location"] == "/orders/1"
    late_status[0] = "500 Template Broken"
    committed = ask_wsgi(app, key="k-2")
    assert (committed.status, committed.body) == (201, b"made")
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (2,)


def test_a_value_that_is_no_response_cannot_complete_a_request(database):
    """The endpoint is told at once, and its transaction can be rolled back."""
    idem, connection = database

    def app(environ, start_response):
        connection.execute("BEGIN IMMEDIATE")
        try:
            current_attempt().complete_in(connection, {"id": 1})
        finally:
            connection.execute("ROLLBACK")

    app = WSGIIdempotencyMiddleware(app, idem, caller=bearer_token)
    with pytest.raises(InvalidInput, match="is a response, got dict"):
        ask_wsgi(app)


def test_a_response_in_a_transaction_is_judged_by_its_status(database):
    """A decline is a failure that is kept; one that asks for a retry must not be committed."""
    idem, connection = database
    statuses = []

    def app(environ, start_response):
        connection.execute("BEGIN IMMEDIATE")
        try:
            current_attempt().complete_in(connection, Response(statuses[-1], [], b"no"))
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        start_response(f"{statuses[-1]} No", [])
        return [b"no"]

    app = WSGIIdempotencyMiddleware(app, idem, caller=GLOBAL)
    statuses.append(402)
    assert ask_wsgi(app).status == 402
    assert ask_wsgi(app).is_replay
    assert idem.read("k-1", caller=GLOBAL).condition is Condition.FAILED
    statuses.append(503)
    with pytest.raises(InvalidInput, match="frees the key"):
        ask_wsgi(app, key="k-2")
    assert idem.read("k-2", caller=GLOBAL).condition is Condition.RELEASED


def _path(sent):
    """A path of WSGI: its bytes in disguise."""
    return {"PATH_INFO": sent.decode("latin-1")}


def test_a_natural_key_tells_paths_apart_that_are_no_utf_8(protect):
    """Replaced by one character, two resources would have one key, and the second never run."""
    rule = Rule(path="/close/{name}", key=FieldsKey("{name}", window=FOREVER))
    shop = Shop()
    app = protect(shop.wsgi, rules=[rule])
    for sent, is_replay in ((b"caf\xe9", False), (b"caf\xe8", False), (b"caf\xe9", True)):
        reply = ask_wsgi(app, key=None, environ=_path(b"/close/" + sent))
        assert (reply.status, reply.is_replay) == (201, is_replay)
    assert len(shop.runs) == 2


def test_a_refusal_shows_the_bytes_of_a_path_that_is_no_utf_8(protect):
    """Escaped as they were sent, also below a mount that is no text itself."""
    app = protect(Shop().wsgi)
    mount = {"SCRIPT_NAME": "/caf\xe9"}
    reply = ask_wsgi(app, key=None, environ=_path(b"/\xff") | mount)
    assert (reply.problem, reply.json["instance"]) == ("key-missing", "/caf%E9/%FF")
    status = ask_wsgi(app, "GET", environ=_path(b"/idempotency-status/\xff"))
    assert status.problem == "key-unknown"
