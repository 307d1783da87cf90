"""Requests that a rule is meant for, written so that it might not see them.

Attacked: the match of rules. `post` for POST, slashes at the end of a path or twice in it, escaped
letters, dot segments, and mounts; on every framework, because each serves other spellings.

What must hold: whatever the framework serves runs once for its key, also when the retry comes by
another spelling. A spelling that it does not serve leaves the key free for the one that it does.
And a key that no rule looks at is never ignored in silence.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import unquote

import pytest

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.core.events import EventKind
from retrysafe.http import IdempotencyMiddleware, Rule, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.http.ignored_keys import LOGGED_LIMIT
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.http.driving import Reply, ask, ask_wsgi

SPELLINGS = [
    ("post", "/charges"),
    ("Post", "/charges"),
    ("POST", "/charges/"),
    ("POST", "//charges"),
    ("POST", "/charges//"),
    ("POST", "/%63harges"),
    ("POST", "/charges%2F"),
    ("POST", "/x/../charges"),
    ("POST", "/./charges"),
    ("post", "/%63harges/"),
    # A route is a regular expression, whose `$` matches before a last line feed as well.
    ("POST", "/charges%0A"),
]
RULES = [Rule(path="/charges"), Rule(path="/*", protected=False)]


class Runs:
    """What an application carried out."""

    def __init__(self) -> None:
        self.count = 0

    def made(self) -> dict[str, int]:
        self.count += 1
        return {"run": self.count}


# Applications. Each serves POST /charges as its framework does by default, or as it can be told to.


def raw_asgi(runs: Runs):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": str(runs.made()).encode()})

    return app


def starlette_route(runs: Runs):
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def charge(request):
        return JSONResponse(runs.made(), 201)

    return Starlette(routes=[Route("/charges", charge, methods=["POST"])])


def starlette_endpoint(runs: Runs):
    from starlette.applications import Starlette
    from starlette.endpoints import HTTPEndpoint
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    class Charges(HTTPEndpoint):
        async def post(self, request):
            return JSONResponse(runs.made(), 201)

    return Starlette(routes=[Route("/charges", Charges), Route("/charges/", Charges)])


def fastapi_app(runs: Runs):
    from fastapi import FastAPI

    app = FastAPI()
    app.post("/charges", status_code=201)(runs.made)
    return app


def litestar_app(runs: Runs):
    from litestar import Litestar, post

    @post("/charges", status_code=201)
    async def charge() -> dict[str, int]:
        return runs.made()

    return Litestar([charge])


def raw_wsgi(runs: Runs):
    def app(environ, start_response):
        start_response("201 Created", [])
        return [str(runs.made()).encode()]

    return app


def flask_app(runs: Runs, **options):
    from flask import Flask

    app = Flask("shop")
    app.add_url_rule("/charges", "charge", lambda: (runs.made(), 201), methods=["POST"], **options)
    return app


def lenient_flask(runs: Runs):
    return flask_app(runs, strict_slashes=False, merge_slashes=False)


ASGI_APPS = [raw_asgi, starlette_route, starlette_endpoint, fastapi_app, litestar_app]
WSGI_APPS = [raw_wsgi, flask_app, lenient_flask]


class Subject:
    """An application behind the middleware, with a store and what is reported."""

    def __init__(self, make_app, runner: asyncio.Runner, *, rules=RULES) -> None:
        self.runs = Runs()
        self.heard: list = []
        self._runner = runner
        self._is_asgi = make_app in ASGI_APPS
        store, app = MemoryStore(), make_app(self.runs)
        options = {"caller": bearer_token, "rules": rules}
        if self._is_asgi:
            self.idem = AsyncIdempotency(store, observers=[self.heard.append])
            self.app = IdempotencyMiddleware(app, self.idem, **options)
        else:
            self.idem = Idempotency(store, observers=[self.heard.append])
            self.app = WSGIIdempotencyMiddleware(app, self.idem, **options)

    def ask(self, method: str, path: str, key: str = "k", body: bytes = b"{}") -> Reply:
        # As servers do it: decoded, with the bytes as they were sent beside it.
        if not self._is_asgi:
            return ask_wsgi(self.app, method, unquote(path), key=key, body=body)
        scope = {"raw_path": path.encode()}
        made = ask(self.app, method, unquote(path), key=key, body=body, scope=scope)
        return self._runner.run(made)

    def close(self) -> None:
        if isinstance(self.idem, AsyncIdempotency):
            self._runner.run(self.idem.close())
        else:
            self.idem.close()


@pytest.fixture
def make_subject():
    made: list[Subject] = []
    with asyncio.Runner() as runner:

        def make(make_app, **options) -> Subject:
            made.append(Subject(make_app, runner, **options))
            return made[-1]

        yield make
        for subject in made:
            subject.close()


# An application that looks at no path serves dot segments as well, as another path. To all others
# they are 404.
SERVED = [
    pytest.param(make_app, spelling, id=f"{make_app.__name__}-{' '.join(spelling)}")
    for make_app in (*ASGI_APPS, *WSGI_APPS)
    for spelling in SPELLINGS
    if not (make_app in (raw_asgi, raw_wsgi) and "." in spelling[1])
]


@pytest.mark.parametrize(("make_app", "spelling"), SERVED)
def test_no_spelling_runs_twice(make_subject, make_app, spelling):
    """Sent three times and then as the rule has it, a key runs once, whatever is served."""
    subject = make_subject(make_app)
    replies = [subject.ask(*spelling) for _ in range(3)]
    last = subject.ask("POST", "/charges")
    assert subject.runs.count == 1
    assert last.status == 201
    # The first one that was served is what all others are told.
    served = [reply for reply in (*replies, last) if reply.status == 201]
    assert len({reply.body for reply in served}) == 1
    assert [reply.is_replay for reply in served] == [False] + [True] * (len(served) - 1)


@pytest.mark.parametrize("make_app", [*ASGI_APPS, *WSGI_APPS])
@pytest.mark.parametrize("spelling", SPELLINGS[2:5], ids=" ".join)
def test_another_request_by_another_spelling_is_refused(make_subject, make_app, spelling):
    """The same key with another body is 422, by whatever spelling."""
    subject = make_subject(make_app)
    assert subject.ask("POST", "/charges").status == 201
    assert subject.ask(*spelling, body=b'{"other": 1}').status == 422
    assert subject.runs.count == 1


@pytest.mark.parametrize("make_app", [raw_asgi, starlette_route, raw_wsgi, flask_app])
def test_a_key_that_no_rule_looks_at_is_reported(make_subject, make_app, caplog):
    """Each such request is reported, each path is logged once; a path that is off is neither."""
    subject = make_subject(
        make_app, rules=[Rule(path="/refunds"), Rule(path="/open", protected=False)]
    )
    with caplog.at_level(logging.WARNING, "retrysafe"):
        for method, path in [("POST", "/charges")] * 3 + [("GET", "/charges"), ("POST", "/open")]:
            subject.ask(method, path)
        subject.ask("DELETE", "/charges", key='"unread')
    told = [event for event in subject.heard if event.kind is EventKind.UNMATCHED]
    assert [(event.key.text, event.operation) for event in told] == [("k", "(no rule)")] * 3 + [
        ("(unreadable)", "(no rule)")
    ]
    lines = [record.message for record in caplog.records if "no rule protects" in record.message]
    assert len(lines) == 2
    assert "POST '/charges'" in lines[0]


def test_the_log_of_such_paths_is_bounded(make_subject, caplog):
    """A client that makes paths up fills neither the log nor the memory."""
    subject = make_subject(raw_wsgi, rules=[Rule(path="/refunds")])
    with caplog.at_level(logging.WARNING, "retrysafe"):
        for number in range(LOGGED_LIMIT + 50):
            subject.ask("POST", f"/made/{number}")
    lines = [record for record in caplog.records if "no rule" in record.message]
    assert len(lines) == LOGGED_LIMIT + 1
    assert "the others are not logged" in lines[-1].message
    told = [event for event in subject.heard if event.kind is EventKind.UNMATCHED]
    assert len(told) == LOGGED_LIMIT + 50


def test_a_rule_further_in_looks_at_the_key(make_subject):
    """Two protections, of which only the inner one has a rule for the path: nothing is told of."""
    heard: list = []

    async def play() -> None:
        runs = Runs()
        async with AsyncIdempotency(MemoryStore(), observers=[heard.append]) as idem:
            inner = IdempotencyMiddleware(raw_asgi(runs), idem, caller=bearer_token)
            outer = IdempotencyMiddleware(
                inner, idem, caller=bearer_token, rules=[Rule(path="/other")]
            )
            replies = [await ask(outer, key="k") for _ in range(2)]
        assert (runs.count, replies[1].is_replay) == (1, True)

    asyncio.run(play())
    inner = WSGIIdempotencyMiddleware(
        raw_wsgi(Runs()),
        idem := Idempotency(MemoryStore(), observers=[heard.append]),
        caller=bearer_token,
    )
    outer = WSGIIdempotencyMiddleware(inner, idem, caller=bearer_token, rules=[Rule(path="/other")])
    assert [ask_wsgi(outer, key="k").is_replay for _ in range(2)] == [False, True]
    assert EventKind.UNMATCHED not in {event.kind for event in heard}


# A middleware further out that runs a request looks after its key, with a claim or without one.


def _down() -> FaultyStore:
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", times=None)
    return store


@pytest.mark.parametrize("store", [MemoryStore, _down], ids=["claimed", "failing open"])
@pytest.mark.parametrize("make_inner", ["wsgi", "flask"])
def test_what_is_run_from_further_out_is_not_told_of_in_threads(store, make_inner):
    """The inner protection has no rule for the path, and need not have one."""
    from retrysafe.contrib.flask import Retrysafe

    heard: list = []
    with (
        Idempotency(store(), observers=[heard.append]) as outside,
        Idempotency(MemoryStore(), observers=[heard.append]) as inside,
    ):
        rules = [Rule(path="/other")]
        if make_inner == "flask":
            inner = flask_app(Runs())
            Retrysafe().init_app(inner, inside, caller=bearer_token, rules=rules)
        else:
            inner = WSGIIdempotencyMiddleware(
                raw_wsgi(Runs()), inside, caller=bearer_token, rules=rules
            )
        outer = WSGIIdempotencyMiddleware(inner, outside, caller=bearer_token, fail_open=True)
        environ = {"SERVER_NAME": "shop", "SERVER_PORT": "80"}
        assert ask_wsgi(outer, environ=environ).status == 201
    assert EventKind.UNMATCHED not in {event.kind for event in heard}


@pytest.mark.parametrize("store", [MemoryStore, _down], ids=["claimed", "failing open"])
@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
def test_what_is_run_from_further_out_is_not_told_of_on_a_loop(store, framework):
    """The same for endpoints without a rule of their own."""
    from fastapi import FastAPI
    from litestar import Litestar, post

    from retrysafe.contrib.fastapi import Retrysafe
    from retrysafe.contrib.litestar import RetrysafePlugin

    heard: list = []

    async def play() -> None:
        async with (
            AsyncIdempotency(store(), observers=[heard.append]) as outside,
            AsyncIdempotency(MemoryStore(), observers=[heard.append]) as inside,
        ):
            if framework == "fastapi":
                inner = FastAPI()
                Retrysafe(inside, caller=bearer_token).install(inner)
                inner.post("/charges", status_code=201)(Runs().made)
            else:

                @post("/charges", status_code=201)
                async def charge() -> dict[str, int]:
                    return Runs().made()

                inner = Litestar([charge], plugins=[RetrysafePlugin(inside, caller=bearer_token)])
            outer = IdempotencyMiddleware(inner, outside, caller=bearer_token, fail_open=True)
            assert (await ask(outer)).status == 201

    asyncio.run(play())
    assert EventKind.UNMATCHED not in {event.kind for event in heard}
