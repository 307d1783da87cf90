"""Endpoints that do their work and answer as a router does: 404, 405 or a redirect.

Attacked: the freedom of keys at a path that is not spelled like its rule's. There a 404 of the
framework frees the key, so that the right spelling can be sent under it.

What must hold: only what no endpoint has answered frees the key. Where nobody can say whether one
was found (a plain application, a router behind a copied scope), the answer is kept: a key that is
used up does less harm than a second run.
"""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI
from flask import Flask
from litestar import Litestar, post
from litestar import Response as LitestarResponse
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, Router

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.contrib.flask import Retrysafe
from retrysafe.http import (
    IdempotencyMiddleware,
    Rule,
    StatusRule,
    WSGIIdempotencyMiddleware,
    bearer_token,
)
from retrysafe.stores import MemoryStore
from tests.http.driving import ask, ask_wsgi

STATUSES = [301, 404, 405]
OPTIONS = {"caller": bearer_token, "rules": [Rule(path="/charges")]}
# At the rule's own spelling last.
PATHS = ["/charges/", "/charges/", "/charges"]


class Work:
    """What an endpoint does before it answers."""

    def __init__(self, status: int) -> None:
        self.count = 0
        self.status = status

    async def asgi(self, scope, receive, send):
        self.count += 1
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def wsgi(self, environ, start_response):
        self.count += 1
        start_response(f"{self.status} Done", [])
        return [b"done"]

    def flask(self, name: str = "") -> tuple[str, int]:
        self.count += 1
        return "done", self.status


# Applications that have an endpoint for every path, or hide from us whether they have one.


def endpoint_of(work: Work):

    async def endpoint(request):
        work.count += 1
        return PlainTextResponse("done", work.status)

    return endpoint


def starlette_route(work: Work):

    return Starlette(routes=[Route("/{path:path}", endpoint_of(work), methods=["POST"])])


def starlette_mount(work: Work):

    return Starlette(routes=[Mount("/", app=work.asgi)])


def behind_a_copied_scope(work: Work):
    """The router leaves its marks where nobody looks, and Starlette its own where we do."""

    class Copying:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            await self.app(dict(scope), receive, send)

    routes = [Route("/{path:path}", endpoint_of(work), methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(Copying)])


def starlette_default(work: Work):

    return Router(default=work.asgi)


def fastapi_route(work: Work):

    app = FastAPI()

    @app.post("/{path:path}")
    async def endpoint(path: str):
        work.count += 1
        return PlainTextResponse("done", work.status)

    return app


def litestar_route(work: Work):

    @post("/charges")
    async def endpoint() -> LitestarResponse[str]:
        work.count += 1
        return LitestarResponse("done", status_code=work.status)

    return Litestar([endpoint])


ASGI_APPS = [
    lambda work: work.asgi,
    starlette_route,
    starlette_mount,
    starlette_default,
    behind_a_copied_scope,
    fastapi_route,
    litestar_route,
]


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("make_app", ASGI_APPS, ids=lambda made: made.__name__.strip("<>"))
def test_what_an_endpoint_answered_is_kept(make_app, status):
    """By whatever spelling it was reached, it runs once."""

    async def play() -> None:
        work = Work(status)
        async with AsyncIdempotency(MemoryStore()) as idem:
            app = IdempotencyMiddleware(make_app(work), idem, **OPTIONS)
            replies = [await ask(app, path=path) for path in PATHS]
        assert [reply.status for reply in replies] == [status] * 3
        assert ([reply.is_replay for reply in replies], work.count) == ([False, True, True], 1)

    asyncio.run(play())


def test_inside_a_mount_the_marks_of_the_router_outside_say_nothing():
    """They were there before, and the application inside leaves its own on a copy."""

    async def play() -> None:
        work = Work(404)
        inner = starlette_route(work)

        async def copying(scope, receive, send):
            scope = dict(scope)
            for mark in ("endpoint", "route"):
                scope.pop(mark, None)
            await inner(scope, receive, send)

        async def unmarked(scope, receive, send):
            for mark in ("endpoint", "route"):
                scope.pop(mark, None)
            await protected(scope, receive, send)

        async with AsyncIdempotency(MemoryStore()) as idem:
            protected = IdempotencyMiddleware(copying, idem, **OPTIONS)
            app = Starlette(routes=[Mount("/", app=unmarked)])
            replies = [await ask(app, path=path) for path in PATHS]
        assert ([reply.is_replay for reply in replies], work.count) == ([False, True, True], 1)

    asyncio.run(play())


def flask_route(work: Work):

    app = Flask("shop")
    rule = {"methods": ["POST"], "strict_slashes": False}
    app.add_url_rule("/charges", "charge", work.flask, **rule)
    return app


def flask_behind_a_copied_environ(work: Work):
    app = flask_route(work)
    return lambda environ, start_response: app(dict(environ), start_response)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize(
    "make_app", [lambda work: work.wsgi, flask_route, flask_behind_a_copied_environ]
)
def test_what_a_view_answered_is_kept(make_app, status):
    """The same behind the WSGI middleware."""
    work = Work(status)
    with Idempotency(MemoryStore()) as idem:
        app = WSGIIdempotencyMiddleware(make_app(work), idem, **OPTIONS)
        replies = [ask_wsgi(app, path=path) for path in PATHS]
    assert ([reply.is_replay for reply in replies], work.count) == ([False, True, True], 1)


@pytest.mark.parametrize("status", STATUSES)
def test_what_a_view_of_the_extension_answered_is_kept(status):
    """The same under the rules of Flask's own integration."""
    work = Work(status)
    app = flask_route(work)
    with Idempotency(MemoryStore()) as idem:
        Retrysafe().init_app(app, idem, **OPTIONS)
        environ = {"SERVER_NAME": "shop", "SERVER_PORT": "80"}
        replies = [ask_wsgi(app, path=path, environ=environ) for path in PATHS]
    assert ([reply.is_replay for reply in replies], work.count) == ([False, True, True], 1)


def test_a_plain_application_can_say_which_answers_are_its_routers():
    """It leaves no marks, so its rule names the statuses that free the key."""
    work = Work(404)
    rule = Rule(path="/charges", stored=StatusRule(freed=[404]))
    with Idempotency(MemoryStore()) as idem:
        app = WSGIIdempotencyMiddleware(work.wsgi, idem, caller=bearer_token, rules=[rule])
        assert ask_wsgi(app, path="/charges/").status == 404
        work.status = 201
        assert ask_wsgi(app).status == 201
