"""The applications that the HTTP benchmark serves, each by a server of its own.

What to serve is in the environment as JSON: a framework, a layer around it, and the layer's store.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_ids = itertools.count(1)


class Charge(BaseModel):
    amount: int
    currency: str
    customer: str


def _charged(amount: int, currency: str) -> dict[str, Any]:
    return {
        "id": f"ch_{next(_ids)}",
        "amount": amount,
        "currency": currency,
        "description": "x" * 200,
    }


def starlette_app(lifespan: Any) -> Any:
    async def charge(request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse(_charged(body["amount"], body["currency"]), 201)

    return Starlette(routes=[Route("/charges", charge, methods=["POST"])], lifespan=lifespan)


def fastapi_app(lifespan: Any) -> Any:
    made = FastAPI(lifespan=lifespan)

    @made.post("/charges", status_code=201)
    async def charge(body: Charge) -> dict[str, Any]:
        return _charged(body.amount, body.currency)

    return made


def made(framework: str, layer: str, store: str) -> Any:
    factory = {"starlette": starlette_app, "fastapi": fastapi_app}[framework]
    if layer == "bare":
        return factory(None)
    if layer == "retrysafe":
        from retrysafe import AsyncIdempotency
        from retrysafe.http import IdempotencyMiddleware, bearer_token

        idempotency = AsyncIdempotency(store)

        @asynccontextmanager
        async def lifespan(_app: Any) -> AsyncIterator[None]:
            async with idempotency:
                yield

        return IdempotencyMiddleware(factory(lifespan), idempotency, caller=bearer_token)
    if layer == "by hand":
        from benchmarks.http_by_hand import ByHand, Postgres

        return ByHand(factory(None), Postgres(store))
    if layer == "idemkit":
        from idemkit import IdempotencyMiddleware as Idemkit
        from idemkit import InMemoryBackend
        from idemkit.backends.postgres import PostgresBackend

        is_memory = store == "memory://"
        backend = InMemoryBackend() if is_memory else PostgresBackend.from_url(store)
        return Idemkit(factory(None), backend=backend)
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import MemoryBackend

    return IdempotencyHeaderMiddleware(factory(None), backend=MemoryBackend())


app = made(**json.loads(os.environ["RETRYSAFE_BENCH_APP"]))
