"""The reference application in Starlette, with a rule on every endpoint."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from retrysafe import AsyncIdempotency
from retrysafe.contrib.starlette import Retrysafe, idempotent
from tests.http_cases.acts import ACT_HEADER, PLAY_HEADER
from tests.http_cases.apps.performing import AsyncPerformance
from tests.http_cases.configuration import METHODS, NUMBERED_PATH, RULES, Mount, options_of


def path_of(path: str) -> str:
    """A rule's path as Starlette writes it."""
    return path.removesuffix("*") + "{rest:path}" if path.endswith("*") else path


def converted_path_of(path: str) -> str:
    """The same, with a converter where there is one in other frameworks."""
    return path.replace("{id}", "{id:int}") if path == NUMBERED_PATH else path_of(path)


async def perform(request: Request) -> Response:
    """Answers every method of every path as its act says."""
    performance = await AsyncPerformance.begin(
        request.headers.get(ACT_HEADER),
        request.headers.get(PLAY_HEADER),
        request.method,
        await request.body(),
    )
    reply = performance.reply
    response: Response
    if performance.act.is_streamed:
        response = StreamingResponse(performance.chunks(), reply.status)
        response.raw_headers = []
    else:
        response = Response(await performance.body(), reply.status)
        length = [line for line in response.raw_headers if line[0] == b"content-length"]
        response.raw_headers = length
    # As they are, some on several lines.
    response.raw_headers += [
        (name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers
    ]
    return response


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    routes = [
        Route(
            converted_path_of(rule.path), idempotent(**options_of(rule))(perform), methods=METHODS
        )
        for rule in RULES
        if rule.path is not None
    ]
    app = Starlette(routes=[*routes, Route("/{rest:path}", perform, methods=METHODS)])
    idempotency = AsyncIdempotency(mount.store(), **mount.face_options())
    Retrysafe(idempotency, **mount.options()).install(app)
    return app
