"""Endpoints that stand in several routes, and routes of several hosts."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from flask import Flask
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Host, Mount, Route, Router

from retrysafe import FOREVER, GLOBAL, AsyncIdempotency, BodyKey, FingerprintRule, Idempotency
from retrysafe.contrib.flask import Retrysafe as FlaskRetrysafe
from retrysafe.contrib.starlette import Retrysafe, idempotent
from retrysafe.errors import PolicyInvalid
from retrysafe.http import FieldsKey, HeaderKey, Rule
from retrysafe.stores import MemoryStore
from tests.contrib.conftest import is_replay

SECRET = "0123456789abcdef"
ORDER = FieldsKey("{id}", window=FOREVER)
PAID = {"paid": True}


async def pay(request):
    return JSONResponse(PAID, 201)


def shop(*routes):
    app = Starlette(routes=list(routes))
    retrysafe = Retrysafe(AsyncIdempotency(MemoryStore(), secret=SECRET), caller=GLOBAL)
    retrysafe.install(app)
    return app, retrysafe


def ask(app, *requests, **headers):
    """Whether each of the requests was replayed; None for one that was refused."""

    async def whole():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [
                await client.request(method, path, headers=headers) for method, path in requests
            ]

    return [
        is_replay(reply) if reply.status_code == 201 else None for reply in asyncio.run(whole())
    ]


# Starlette: one decorated endpoint in several routes.


@pytest.mark.parametrize("is_late", [False, True], ids=["from the start", "added later"])
def test_an_endpoint_is_protected_in_every_route_that_it_stands_in(is_late):
    """By the methods of the first route, PUT would run unprotected, once for every retry."""
    endpoint = idempotent()(pay)
    first, second = Route("/a", endpoint, methods=["POST"]), Route("/b", endpoint, methods=["PUT"])
    app, _ = shop(*((first,) if is_late else (first, second)))
    assert ask(app, ("POST", "/a"), **{"Idempotency-Key": "a"}) == [False]
    if is_late:
        app.router.routes.append(second)
    assert ask(app, *[("PUT", "/b")] * 2, **{"Idempotency-Key": "b"}) == [False, True]
    assert ask(app, ("PUT", "/b")) == [None]


def test_every_route_of_an_endpoint_has_natural_keys_of_its_own():
    """Under the path of the first one, order 7 of the other shop would be another request."""
    endpoint = idempotent(key=ORDER)(pay)
    app, _ = shop(
        Route("/a/{id:int}", endpoint, methods=["POST"]),
        Mount("/b/{id}", routes=[Route("/{id:int}", endpoint, methods=["POST"])]),
    )
    asked = [("POST", "/a/7"), ("POST", "/b/1/7"), ("POST", "/a/07"), ("POST", "/b/1/7")]
    assert ask(app, *asked) == [False, False, None, True]


def test_one_wrong_place_keeps_the_others_from_being_taken_for_all():
    """The first request fails at the wrong rule; a second one must not find half of the places."""
    endpoint, wrong = idempotent()(pay), idempotent(key=FieldsKey("{no}", window=FOREVER))(pay)
    app, _ = shop(
        Route("/a", endpoint, methods=["POST"]),
        Route("/wrong", wrong, methods=["POST"]),
        Route("/b", endpoint, methods=["PUT"]),
    )
    for _ in range(2):
        with pytest.raises(PolicyInvalid, match=r"\{no\} from the path"):
            ask(app, ("PUT", "/b"), **{"Idempotency-Key": "b"})


# Hosts, which keys that are made here do not tell apart.

MADE = [FieldsKey("{id}", window=FOREVER), BodyKey(), HeaderKey(otherwise=BodyKey())]
made = pytest.mark.parametrize("key", MADE, ids=lambda key: type(key).__name__)


def at_host(host, **options):
    route = Route("/pay/{id}", idempotent(**options)(pay), methods=["POST"])
    return Host(host, app=Router(routes=[route]))


def at_subdomain(*hosts, **options):
    """A Flask application whose view stands at these subdomains."""
    app = Flask("shop", subdomain_matching=True)
    app.config.update(SERVER_NAME="shop.test", PROPAGATE_EXCEPTIONS=True)
    retrysafe = FlaskRetrysafe()
    rules = options.pop("rules", ())
    for host in hosts:
        view = retrysafe.idempotent(**options)(lambda **ids: (PAID, 201)) if options else taken
        app.add_url_rule("/pay/<id>", host, view, methods=["POST"], subdomain=host)
    idempotency = Idempotency(MemoryStore(), secret=SECRET)
    retrysafe.init_app(app, idempotency, caller=GLOBAL, rules=rules)
    return app


def taken(**ids):
    return PAID, 201


def ask_flask(app, *subdomains):
    client = app.test_client()
    return [
        "Idempotent-Replayed" in client.post("/pay/7", base_url=f"http://{name}.shop.test").headers
        for name in subdomains
    ]


@made
def test_one_name_is_of_one_host(key):
    """Shop B would get the response of shop A."""
    _, retrysafe = shop(
        at_host("a.test", key=key, name="pay"), at_host("b.test", key=key, name="pay")
    )
    with pytest.raises(PolicyInvalid, match="have the name 'pay' at several hosts"):
        retrysafe.refresh()
    with pytest.raises(PolicyInvalid, match="have the name 'pay' at several hosts"):
        ask_flask(at_subdomain("a", "b", key=key, name="pay"), "a")


@made
def test_keys_are_told_apart_where_one_route_serves_many_hosts(key):
    """No name is for one of them alone, so the key itself must tell."""
    _, retrysafe = shop(at_host("{shop}.test", key=key, name="pay"))
    with pytest.raises(PolicyInvalid, match=r"are those of every \{shop\}.test"):
        retrysafe.refresh()
    with pytest.raises(PolicyInvalid, match=r"are those of every \{shop\}"):
        ask_flask(at_subdomain("<shop>", key=key, name="pay"), "a")
    apart = (
        {"key": FieldsKey("{shop}", "{id}", window=FOREVER)}
        if isinstance(key, FieldsKey)
        else {"key": key, "fingerprint": FingerprintRule(headers=("Host",))}
    )
    shop(at_host("{shop}.test", name="pay", **apart))[1].refresh()
    app = at_subdomain("<shop>", name="pay", **apart)
    assert ask_flask(app, "a", "b", "a") == [False, False, True]


@made
def test_a_rule_by_path_makes_no_keys_for_one_host(key):
    """It holds at every host that has the path, whatever it is named."""
    for name in ("", "pay"):
        app = at_subdomain("a", "b", rules=[Rule(path="/pay/{id}", key=key, name=name)])
        for host in ("a", "b"):
            with pytest.raises(PolicyInvalid, match="write the rule next to the view"):
                ask_flask(app, host)
    app = at_subdomain("a", rules=[Rule(path="/pay/{id}", required=False)])
    assert ask_flask(app, "a") == [False]
