"""The reference application in plain WSGI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from retrysafe import Idempotency
from retrysafe.http import WSGIIdempotencyMiddleware
from tests.http_cases.apps.performing import Performance
from tests.http_cases.configuration import Mount


def perform(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Answers every method of every path as its act says."""
    performance = Performance(
        environ.get("HTTP_X_ACT"),
        environ.get("HTTP_X_PLAY"),
        environ["REQUEST_METHOD"],
        environ["wsgi.input"].read(),
    )
    reply = performance.reply
    write = start_response(f"{reply.status} As Told", reply.headers)
    if performance.act.writes:
        for chunk in performance.chunks():
            write(chunk)
        return ()
    return performance.chunks()


def make(mount: Mount) -> Any:
    """The application behind the middleware, as one mount has it."""
    idempotency = Idempotency(mount.store(), **mount.face_options())
    return WSGIIdempotencyMiddleware(perform, idempotency, **mount.middleware_options())
