"""The reference application in FastAPI, with a rule on every endpoint."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from retrysafe import AsyncIdempotency
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from tests.http_cases.apps.starlette_app import path_of, perform
from tests.http_cases.configuration import METHODS, NUMBERED_PATH, RULES, Mount, options_of


async def perform_numbered(id: int, request: Request) -> Response:  # noqa: A002 — as the path has it.
    """Answers as `perform`; FastAPI converts the path by the type that stands here."""
    del id
    return await perform(request)


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    app = FastAPI(openapi_url=None)
    idempotency = AsyncIdempotency(mount.store(), **mount.face_options())
    Retrysafe(idempotency, **mount.options()).install(app)
    for rule in RULES:
        assert rule.path is not None
        app.api_route(
            path_of(rule.path),
            methods=list(METHODS),
            dependencies=[idempotent(**options_of(rule))],
            response_model=None,
        )(perform_numbered if rule.path == NUMBERED_PATH else perform)
    app.api_route("/{rest:path}", methods=list(METHODS), response_model=None)(perform)
    return app
