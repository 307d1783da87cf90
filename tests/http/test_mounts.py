"""Inside a mounted application, every URL that clients are told leads somewhere."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from retrysafe import AsyncIdempotency
from retrysafe.http import ACCEPT, IdempotencyMiddleware, Rule, bearer_token
from retrysafe.stores import MemoryStore

ALICE = {"authorization": "Bearer alice"}


def mounted(kind: str, idem: AsyncIdempotency, may_end: asyncio.Event):
    """An application with the middleware, inside another one that has it at /api/v1."""
    if kind == "starlette":
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Mount, Route

        async def report(request):
            await may_end.wait()
            return JSONResponse({}, 201)

        inner = Starlette(routes=[Route("/reports", report, methods=["POST"])])
        outer = Starlette(routes=[Mount("/api", routes=[Mount("/v1", app=inner)])])
    else:
        from fastapi import FastAPI

        inner, outer = FastAPI(), FastAPI()

        @inner.post("/reports", status_code=201)
        async def report():
            await may_end.wait()
            return {}

        outer.mount("/api/v1", inner)
    inner.add_middleware(
        IdempotencyMiddleware,
        idempotency=idem,
        caller=bearer_token,
        rules=[Rule(path="/reports", in_flight=ACCEPT)],
    )
    return outer


@pytest.mark.parametrize("root_path", ["", "/proxied"])
@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
def test_the_links_of_a_mounted_application_lead_to_its_pages(kind, root_path):
    """`Location`, `type`, `Link` and `instance` have the mount in front, and are served."""

    async def play() -> None:
        may_end = asyncio.Event()
        async with AsyncIdempotency(MemoryStore()) as idem:
            outer = mounted(kind, idem, may_end)
            transport = httpx.ASGITransport(outer, root_path=root_path)
            url = f"{root_path}/api/v1"
            async with httpx.AsyncClient(
                transport=transport, base_url="http://shop", headers=ALICE
            ) as client:
                refused = await client.post(f"{url}/reports")
                problem = refused.json()
                assert problem["type"] == f"{url}/idempotency-policy#key-missing"
                assert problem["instance"] == f"{url}/reports"
                assert refused.headers["link"] == (f'<{url}/idempotency-policy>; rel="describedby"')
                assert (await client.get(f"{url}/idempotency-policy")).status_code == 200
                accepted = await client.post(
                    f"{url}/reports", headers={"idempotency-key": "k", "prefer": "respond-async"}
                )
                assert accepted.status_code == 202
                location = accepted.headers["location"]
                assert location == accepted.json()["status_url"] == f"{url}/idempotency-status/k"
                assert (await client.get(location)).json()["state"] == "running"
                may_end.set()
                # A duplicate that waits comes back when the outcome is stored.
                waited = {"idempotency-key": "k", "prefer": "wait=10"}
                await client.post(f"{url}/reports", headers=waited)
                found = await client.get(location)
                assert (found.status_code, found.json()) == (201, {})
                assert found.headers["cache-control"] == "no-store"
                assert found.headers["vary"] == "Authorization"

    asyncio.run(play())


def test_a_middleware_around_one_endpoint_names_the_pages_of_its_application():
    """Where routers lie in between, the pages are not below them."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async def endpoint(scope, receive, send):
        raise AssertionError

    async def play() -> None:
        async with AsyncIdempotency(MemoryStore()) as idem:
            protected = IdempotencyMiddleware(endpoint, idem, caller=bearer_token, rule=Rule())
            app = Starlette(routes=[Mount("/shop", app=protected)])
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://shop", headers=ALICE
            ) as client:
                refused = await client.post("/shop/charges")
                assert refused.json()["type"] == "/idempotency-policy#key-missing"

    asyncio.run(play())
