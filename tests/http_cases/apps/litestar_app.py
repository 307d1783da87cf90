"""The reference application in Litestar, with a rule on every route handler."""

from __future__ import annotations

from typing import Any

from litestar import Litestar, Request, route
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse

from retrysafe import AsyncIdempotency
from retrysafe.contrib.litestar import RetrysafePlugin, idempotent
from tests.http_cases.acts import ACT_HEADER, PLAY_HEADER
from tests.http_cases.apps.performing import AsyncPerformance
from tests.http_cases.configuration import METHODS, NUMBERED_PATH, RULES, Mount, options_of


def _path_of(path: str) -> str:
    """A rule's path as Litestar writes it."""
    if path.endswith("*"):
        return path.removesuffix("*") + "{rest:path}"
    return path.replace("{id}", "{id:int}" if path == NUMBERED_PATH else "{id:str}")


async def _perform(request: Request[Any, Any, Any]) -> ASGIResponse:
    performance = await AsyncPerformance.begin(
        request.headers.get(ACT_HEADER),
        request.headers.get(PLAY_HEADER),
        request.method,
        await request.body(),
    )
    reply = performance.reply
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers]
    if performance.act.is_streamed:
        return ASGIStreamingResponse(
            iterator=performance.chunks(), status_code=reply.status, encoded_headers=lines
        )
    return ASGIResponse(
        body=await performance.body(), status_code=reply.status, encoded_headers=lines
    )


def _handler(path: str, **options: Any) -> Any:
    """A route handler of its own: one that is used twice would be one handler of two paths."""

    @route(path, http_method=METHODS, **options)
    async def perform(request: Request[Any, Any, Any]) -> ASGIResponse:
        return await _perform(request)

    return perform


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    handlers = [
        _handler(_path_of(rule.path), guards=[idempotent(**options_of(rule))])
        for rule in RULES
        if rule.path is not None
    ]
    idempotency = AsyncIdempotency(mount.store(), **mount.face_options())
    return Litestar(
        [*handlers, _handler("/{rest:path}")],
        plugins=[RetrysafePlugin(idempotency, **mount.options())],
        openapi_config=None,
    )
