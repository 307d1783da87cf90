"""Callers in the frameworks: async ones are awaited, and OpenAPI documents name the credential."""

from __future__ import annotations

import asyncio
from functools import partial

import flask
import pytest

from retrysafe import Idempotency
from retrysafe.contrib import flask as contrib_flask
from retrysafe.errors import InvalidInput
from retrysafe.http import Credential, Rule, WSGIIdempotencyMiddleware, api_key, basic_user
from retrysafe.stores import MemoryStore
from tests.contrib.conftest import is_replay, made, problem
from tests.contrib.django_visits import MIDDLEWARE, open_shop
from tests.contrib.django_visits import is_replay as is_django_replay
from tests.contrib.django_visits import problem as django_problem
from tests.contrib.shops import Till


async def looked_up(request):
    """A caller that takes its time, as one that asks a session store does."""
    await asyncio.sleep(0)
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return Credential("session", token) if token != "nobody" else None


class Lookup:
    """A caller with a connection of its own would be an object like this."""

    async def __call__(self, request):
        return await looked_up(request)


async def with_prefix(prefix, request):
    await asyncio.sleep(0)
    return prefix + request.headers["Authorization"]


@pytest.mark.parametrize("caller", [looked_up, Lookup(), partial(with_prefix, "acct:")])
def test_an_async_caller_is_awaited(visit, caller):
    """Its keys are its own, and the status page is for it alone."""

    async def scenario(shop):
        first, second = await shop.post(), await shop.post()
        assert (is_replay(first), is_replay(second)) == (False, True)
        assert not is_replay(await shop.post(caller="bob"))
        url = "/idempotency-status/k-1"
        for holder, status in (("alice", 201), ("mallory", 404)):
            headers = {"Authorization": f"Bearer {holder}"}
            shown = await shop.client.get(url, headers=headers)
            assert shown.status_code == status
        assert len(shop.till.runs) == 2

    visit(scenario, caller=caller)


def test_an_async_caller_that_finds_nobody_is_refused(visit):
    """Before the body is read, and before anything is claimed."""

    async def scenario(shop):
        assert problem(await shop.post(caller="nobody")) == "caller-unknown"
        nobody = {"Authorization": "Bearer nobody"}
        shown = await shop.client.get("/idempotency-status/k-1", headers=nobody)
        assert problem(shown) == "caller-unknown"
        assert shop.till.runs == []

    visit(scenario, caller=looked_up)


@pytest.mark.parametrize("world", ["wsgi", "asgi"])
@pytest.mark.parametrize("path", ["/plain", "/async-plain"])
def test_django_awaits_an_async_caller(world, path):
    """For views of both kinds, behind servers of both kinds."""
    with open_shop(
        world, middleware=[MIDDLEWARE], RULES=[Rule(path=path)], CALLER=looked_up
    ) as shop:
        assert django_problem(shop.post(path, caller="nobody")) == "caller-unknown"
        assert [is_django_replay(shop.post(path)) for _ in range(2)] == [False, True]
        assert not is_django_replay(shop.post(path, caller="bob"))
        assert shop.ask("GET", "/idempotency-status/k-1").status_code == 200
        assert shop.ask("GET", "/idempotency-status/k-1", caller="mallory").status_code == 404


@pytest.mark.parametrize("caller", [looked_up, Lookup(), partial(with_prefix, "a")])
def test_threads_refuse_an_async_caller_when_they_are_configured(caller):
    """Nobody would await it."""
    with Idempotency(MemoryStore()) as idem:
        with pytest.raises(InvalidInput, match="plain function"):
            WSGIIdempotencyMiddleware(lambda environ, start: [], idem, caller=caller)
        with pytest.raises(InvalidInput, match="plain function"):
            contrib_flask.Retrysafe(flask.Flask("shop"), idem, caller=caller)


def document_of(framework, tmp_path, **options):
    app, _ = made(framework, Till(tmp_path / "shop.db"), MemoryStore(), **options)
    return app.openapi() if framework == "fastapi" else app.openapi_schema.to_schema()


@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
@pytest.mark.parametrize(
    ("options", "name", "scheme"),
    [
        ({}, "BearerToken", {"type": "http", "scheme": "bearer"}),
        ({"caller": basic_user}, "BasicUser", {"type": "http", "scheme": "basic"}),
        (
            {"caller": api_key("X-Key")},
            "ApiKey",
            {"type": "apiKey", "in": "header", "name": "X-Key"},
        ),
    ],
)
def test_the_document_names_the_credential(framework, tmp_path, options, name, scheme):
    """On protected endpoints, which refuse requests without it, and on no others."""
    document = document_of(framework, tmp_path, **options)
    assert document["components"]["securitySchemes"] == {name: scheme}
    assert document["paths"]["/charges"]["post"]["security"] == [{name: []}]
    assert "security" not in document["paths"]["/plain"]["post"]


@pytest.mark.parametrize("framework", ["fastapi", "litestar"])
def test_of_a_caller_that_is_not_ours_the_document_says_nothing(framework, tmp_path):
    document = document_of(framework, tmp_path, caller=lambda request: "alice")
    assert "securitySchemes" not in document["components"]
    assert "security" not in document["paths"]["/charges"]["post"]
