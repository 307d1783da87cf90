"""Applications that never stop to answer, for real servers: plain ASGI, plain WSGI, and Flask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.contrib.flask import Retrysafe
from retrysafe.http import IdempotencyMiddleware, Rule, WSGIIdempotencyMiddleware, bearer_token

PIECE = b"x" * 65_536
_RULES = [Rule(path="/endless")]


def _store() -> str:
    return f"sqlite:///{os.environ['ENDLESS_STORE']}"


def make_asgi() -> Any:
    """Listens to nobody: only what its send raises can end it."""

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return IdempotencyMiddleware(
        endless, AsyncIdempotency(_store()), caller=bearer_token, rules=_RULES
    )


def _pieces() -> Iterator[bytes]:
    while True:
        yield PIECE


def make_wsgi() -> Any:
    """Goes on for as long as it is asked."""

    def endless(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return _pieces() if environ["PATH_INFO"] == "/endless" else []

    return WSGIIdempotencyMiddleware(
        endless, Idempotency(_store()), caller=bearer_token, rules=_RULES
    )


def make_flask() -> Any:
    """The same as a view."""
    app = Flask("endless")
    retrysafe = Retrysafe(app, Idempotency(_store()), caller=bearer_token)

    @app.post("/endless")
    @retrysafe.idempotent()
    def endless() -> Response:
        return Response(_pieces())

    return app


# Which of them this server serves; none where a test only takes constants from here.
_kind = os.environ.get("ENDLESS_APP")
if _kind is not None:
    application = {"asgi": make_asgi, "wsgi": make_wsgi, "flask": make_flask}[_kind]()
