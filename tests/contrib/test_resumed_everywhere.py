"""Requests are resumed in every framework on an event loop: mounts, hosts, layers around."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Annotated

import pytest
from fastapi import APIRouter, FastAPI
from litestar import Litestar, Router, post
from litestar import Request as LitestarRequest
from litestar.params import FromPath
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from retrysafe import AsyncIdempotency, Attempt, Policy, current_attempt
from retrysafe.contrib import fastapi as for_fastapi
from retrysafe.contrib import litestar as for_litestar
from retrysafe.contrib import starlette as for_starlette
from retrysafe.http import IdempotencyMiddleware, Rule, resumed_caller
from retrysafe.http.asgi_resume import Lifespan
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from retrysafe.workers import WorkerPolicy
from tests.http.driving import ask

LEASE = timedelta(seconds=30)
WORKER = WorkerPolicy(back_off=timedelta(0))
# Long enough to be compressed.
LONG = "x" * 2_000


def account(request):
    return request.headers.get("Authorization")


class Shop:
    """What the endpoint of each framework does: it notes its attempt, and dies in the first."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(now_ms=self.clock)
        self.seen: list[tuple] = []

    def idem(self) -> AsyncIdempotency:
        return AsyncIdempotency(self.store, policy=Policy(lease=LEASE), cache=False)

    def serve(self, request) -> dict:
        number = current_attempt().number
        self.seen.append((number, str(request.url), resumed_caller(request)))
        if number == 1:
            raise asyncio.CancelledError
        return {"attempt": number, "long": LONG}

    # Applications; each is made anew for each process.

    def by_middleware(self):
        """Rules for paths, inside of a layer that compresses and one that checks hosts."""
        idem = self.idem()

        async def charge(request):
            return JSONResponse(self.serve(request), 201)

        rules = [Rule(path="/v1/charges/{id}", resumable=True)]
        layers = [
            Middleware(GZipMiddleware),
            Middleware(TrustedHostMiddleware, allowed_hosts=["shop.example"]),
            Middleware(IdempotencyMiddleware, idem, caller=account, rules=rules),
        ]
        routes = [Mount("/v1", routes=[Route("/charges/{id}", charge, methods=["POST"])])]
        return Starlette(routes=routes, middleware=layers), idem

    def by_starlette(self):
        """An endpoint below a mount, which moves the root path."""
        idem = self.idem()

        @for_starlette.idempotent(resumable=True)
        async def charge(request):
            return JSONResponse(self.serve(request), 201)

        routes = [Mount("/v1", routes=[Route("/charges/{id}", charge, methods=["POST"])])]
        app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware)])
        for_starlette.Retrysafe(idem, caller=account).install(app)
        return app, idem

    def by_fastapi(self):
        """An endpoint of a router."""
        idem, app = self.idem(), FastAPI()
        for_fastapi.Retrysafe(idem, caller=account).install(app)
        router = APIRouter(prefix="/v1", route_class=for_fastapi.IdempotentRoute)

        @router.post("/charges/{number}", status_code=201)
        async def charge(
            number: int,
            request: Request,
            attempt: Annotated[Attempt, for_fastapi.idempotent(resumable=True)],
        ) -> dict:
            return self.serve(request)

        app.include_router(router)
        return app, idem

    def by_litestar(self):
        """A handler of a router."""
        idem = self.idem()

        @post("/charges/{number:int}", guards=[for_litestar.idempotent(resumable=True)])
        async def charge(number: FromPath[int], request: LitestarRequest) -> dict:
            return self.serve(request)

        plugin = for_litestar.RetrysafePlugin(idem, caller=account)
        router = Router("/v1", route_handlers=[charge])
        return Litestar([router], plugins=[plugin]), idem


@pytest.mark.parametrize("root", ["", "/api"], ids=["plain", "mounted"])
@pytest.mark.parametrize("how", ["by_middleware", "by_starlette", "by_fastapi", "by_litestar"])
def test_a_request_is_resumed_where_it_first_ran(how, root):
    """By its whole path, below a mount of the server's and one of the application's."""

    async def main():
        shop = Shop()
        path = f"{root}/v1/charges/7?x=1"
        asked = {
            "path": path,
            "scope": {"root_path": root},
            "host": "shop.example",
            "accept_encoding": "gzip",
        }
        app, _ = getattr(shop, how)()
        with pytest.raises(asyncio.CancelledError):
            await ask(app, **asked)
        shop.clock.advance(LEASE)
        app, idem = getattr(shop, how)()
        if hasattr(app.state, "retrysafe"):
            app.state.retrysafe.refresh()
        # As the command does: the start of an application builds what stands around it.
        async with Lifespan(app) as started:
            report = (await idem.worker(WORKER, app=started).run_once())["recovery"]
            replay = await ask(app, **{**asked, "accept_encoding": "identity"})
        assert (report.resumed, report.failed) == (1, 0)
        (_, first, nobody), (_, second, caller) = shop.seen
        assert first == second == f"http://shop.example{path}"
        assert (nobody, caller) == (None, "Bearer alice")
        assert (replay.is_replay, replay.json) == (True, {"attempt": 2, "long": LONG})

    asyncio.run(main())
