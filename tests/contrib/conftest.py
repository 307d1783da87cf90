"""The shop of each framework, driven through httpx without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import httpx
import pytest

from retrysafe import AsyncIdempotency
from retrysafe.http import bearer_token
from tests.contrib.shops import Till

FRAMEWORKS = {
    "starlette": "Retrysafe",
    "fastapi": "Retrysafe",
    "litestar": "RetrysafePlugin",
}


@dataclass
class Shop:
    """A running shop of one framework."""

    framework: str
    app: Any
    till: Till
    retrysafe: Any
    client: httpx.AsyncClient

    async def post(self, path: str = "/charges", key: str | None = '"k-1"', **options: Any):
        """One request of alice's, with a body that suits every endpoint."""
        headers = {"Authorization": f"Bearer {options.pop('caller', 'alice')}"}
        if key is not None:
            headers["Idempotency-Key"] = key
        headers |= options.pop("headers", {})
        options.setdefault("json", {"amount": 7})
        return await self.client.post(path, headers=headers, **options)


def is_replay(response: httpx.Response) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def problem(response: httpx.Response) -> str:
    """The slug of a problem's type; fails for anything that is no problem."""
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == response.status_code
    return response.json()["type"].partition("#")[2]


def made(framework: str, till: Till, store: Any, **options: Any) -> tuple[Any, Any]:
    """The shop's application and its protection."""
    contrib = import_module(f"retrysafe.contrib.{framework}")
    kind = getattr(contrib, FRAMEWORKS[framework])
    retrysafe = kind(AsyncIdempotency(store), **{"caller": bearer_token, **options})
    shop = import_module(f"tests.contrib.{framework}_shop")
    return shop.make_app(retrysafe, till), retrysafe


@pytest.fixture(params=FRAMEWORKS)
def visit(request, tmp_path) -> Callable[..., None]:
    """Runs an async test with a shop on SQLite; nothing may be left running when it ends."""

    def run(scenario: Callable[[Shop], Any], **options: Any) -> None:
        async def whole() -> None:
            till = Till(tmp_path / "shop.db")
            till.open_for_business()
            app, retrysafe = made(request.param, till, f"sqlite:///{till.path}", **options)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                async with asyncio.timeout(60):
                    await scenario(Shop(request.param, app, till, retrysafe, client))
            await retrysafe.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(whole())

    return run
