"""What is FastAPI's own: dependencies, validation, included routers, the OpenAPI document."""

import asyncio
import sqlite3
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import httpx
import psycopg
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Security
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from retrysafe import (
    FOREVER,
    GLOBAL,
    AsyncIdempotency,
    Attempt,
    BodyKey,
    InFlight,
    InvalidInput,
    Policy,
)
from retrysafe.contrib.fastapi import IdempotentRoute, Retrysafe, idempotent
from retrysafe.errors import PolicyInvalid
from retrysafe.http import ACCEPT, FieldsKey, HeaderKey, StatusRule, Streaming, bearer_token
from retrysafe.stores import MemoryStore
from tests.contrib.conftest import is_replay, made, problem
from tests.contrib.shops import Till, parameter_of


class Charge(BaseModel):
    amount: int


def shop(store: Any = None, **options: Any) -> FastAPI:
    app = FastAPI()
    options = {"caller": GLOBAL, **options}
    Retrysafe(AsyncIdempotency(store or MemoryStore()), **options).install(app)
    return app


def ask(app, *requests, raises=False, **headers):
    """The responses to requests that are posted one after the other, all with one key."""

    async def whole():
        transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
        own = {"Idempotency-Key": "k", **headers}
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await client.post(path, json=body, headers=own) for path, body in requests]

    return asyncio.run(whole())


CHARGE = ("/charges", {"amount": 7})


# Validation.


def test_a_request_that_does_not_fit_is_answered_once_and_stays_answered():
    """FastAPI's 422 is an outcome like any below 500. It is no problem document, so nobody takes
    it for a key that was reused, which is what a corrected request under the same key is."""
    app, runs = shop(), []

    @app.post("/charges", dependencies=[idempotent()])
    async def charge(charge: Charge):
        runs.append(charge.amount)

    wrong = ("/charges", {"amount": "seven"})
    first, second, corrected = ask(app, wrong, wrong, CHARGE)
    assert (first.status_code, second.status_code, corrected.status_code) == (422, 422, 422)
    assert first.headers["content-type"] == "application/json"
    assert first.json()["detail"][0]["loc"] == ["body", "amount"]
    assert (first.content, is_replay(second)) == (second.content, True)
    assert problem(corrected) == "key-reused"
    assert runs == []


def test_validation_can_be_asked_again():
    """A rule may free the key instead; the request must still be the same one."""
    app = shop()
    rule = {"stored": StatusRule(freed=[422])}

    @app.post("/charges", dependencies=[idempotent(**rule)])
    async def charge(charge: Charge):
        raise AssertionError

    wrong = ("/charges", {"amount": "seven"})
    replies = ask(app, wrong, wrong, CHARGE)
    assert [is_replay(reply) for reply in replies] == [False, False, False]
    assert problem(replies[2]) == "key-reused"


# Dependencies.


def with_session(ended, *, scope="request", fails=False):
    """A dependency that does its work when the endpoint is done."""

    def session():
        yield "session"
        ended.append(scope)
        if fails:
            raise RuntimeError("the commit failed")

    return Depends(session, scope=scope)


@pytest.mark.parametrize("scope", ["request", "function"])
def test_dependencies_with_yield_end_once(scope):
    """Their ends run with the one run, not with a replay."""
    app, ended = shop(), []

    @app.post("/charges", dependencies=[idempotent()])
    async def charge(session: Annotated[str, with_session(ended, scope=scope)]):
        return session

    first, second = ask(app, CHARGE, CHARGE)
    assert (first.json(), is_replay(second)) == ("session", True)
    assert ended == [scope]


def test_what_fails_before_the_response_frees_the_key():
    """A commit in a dependency of the function's scope comes before the response, and counts."""
    app, ended = shop(), []

    @app.post("/charges", dependencies=[idempotent()])
    async def charge(session: Annotated[str, with_session(ended, scope="function", fails=True)]):
        return session

    assert [reply.status_code for reply in ask(app, CHARGE, CHARGE)] == [500, 500]
    assert len(ended) == 2


def test_what_fails_after_the_response_changes_nothing():
    """FastAPI ends other dependencies after the response: it is sent and stored by then, and the
    server hears of the error."""
    app, ended = shop(), []

    @app.post("/charges", dependencies=[idempotent()])
    async def charge(session: Annotated[str, with_session(ended, fails=True)]):
        return session

    with pytest.raises(RuntimeError, match="commit failed"):
        ask(app, CHARGE, raises=True)
    (again,) = ask(app, CHARGE)
    assert (again.json(), is_replay(again)) == ("session", True)
    assert len(ended) == 1


def test_an_exception_for_the_client_is_an_outcome():
    """A dependency's or an endpoint's HTTPException below 500 is replayed with its headers."""
    app, runs = shop(), []

    def credit():
        runs.append("credit")
        raise HTTPException(402, "no credit", headers={"Link": "</credit>"})

    @app.post("/charges", dependencies=[idempotent(), Depends(credit)])
    async def charge():
        raise AssertionError

    first, second = ask(app, CHARGE, CHARGE)
    assert (first.json(), second.json()) == ({"detail": "no credit"},) * 2
    assert (is_replay(second), second.headers["link"]) == (True, "</credit>")
    assert runs == ["credit"]


def test_security_dependencies_can_say_who_calls():
    """Keys of two tokens never meet, and without a token nothing runs."""
    app = shop(caller=bearer_token)

    @app.post("/charges", dependencies=[idempotent()])
    async def charge(token: Annotated[Any, Security(HTTPBearer())]):
        return token.credentials

    assert ask(app, CHARGE, authorization="Bearer a")[0].json() == "a"
    assert ask(app, CHARGE, authorization="Bearer b")[0].json() == "b"
    assert problem(ask(app, CHARGE)[0]) == "caller-unknown"


def test_the_value_of_the_dependency_is_the_attempt():
    """None for a request that runs without a key where that is allowed."""
    app, seen = shop(), []

    @app.post("/charges")
    async def charge(attempt: Annotated[Attempt | None, idempotent(required=False)]):
        seen.append(attempt)

    ask(app, CHARGE)
    asyncio.run(httpx.AsyncClient(transport=httpx.ASGITransport(app)).post("http://shop/charges"))
    assert (seen[0].number, seen[0].key.text, seen[1]) == (1, "k", None)


# Which rule counts.


def test_the_rule_nearest_to_the_endpoint_counts():
    """Parameter before route, route before router, router before inclusion."""
    app = shop()
    days = iter(range(2, 10))

    def own():
        return idempotent(policy=Policy(active_window=timedelta(days=next(days))))

    inclusion, on_router, on_route, on_parameter = own(), own(), own(), own()
    full = APIRouter(route_class=IdempotentRoute, dependencies=[on_router])
    bare = APIRouter(route_class=IdempotentRoute)

    @full.post("/parameter", dependencies=[on_route])
    async def by_parameter(attempt: Annotated[Attempt, on_parameter]): ...

    @full.post("/route", dependencies=[on_route])
    async def by_route(): ...

    @full.post("/router")
    async def by_router(): ...

    @bare.post("/inclusion")
    async def by_inclusion(): ...

    def depends(attempt: Annotated[Attempt, on_route]):
        return attempt

    @bare.post("/indirect")
    async def by_another_dependency(attempt: Annotated[Attempt, Depends(depends)]): ...

    app.include_router(full, prefix="/full", dependencies=[inclusion])
    app.include_router(bare, prefix="/bare", dependencies=[inclusion])
    assert {path: route["retention_seconds"] / 86_400 for path, route in policy(app).items()} == {
        "/full/parameter": 5,
        "/full/route": 4,
        "/full/router": 3,
        "/bare/inclusion": 2,
        "/bare/indirect": 4,
    }


def policy(app):
    async def whole():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            reply = await client.get("/idempotency-policy", headers={"Accept": "application/json"})
            return {route["path"]: route for route in reply.json()["routes"]}

    return asyncio.run(whole())


def test_a_router_that_is_included_twice_is_in_two_places():
    """Each place has its own rule, and the same key there is another request."""
    app, runs = shop(), []
    router = APIRouter(route_class=IdempotentRoute)

    @router.post("/charges/{number}")
    async def charge(number: int):
        runs.append(number)
        return len(runs)

    app.include_router(router, prefix="/v1", dependencies=[idempotent()])
    app.include_router(router, prefix="/v2", dependencies=[idempotent()])
    app.include_router(router, prefix="/free")
    replies = ask(
        app,
        *(("/v1/charges/1", {}),) * 2,
        ("/v2/charges/1", {}),
        *(("/free/charges/1", {}),) * 2,
    )
    assert [is_replay(reply) for reply in replies] == [False, True, False, False, False]
    assert problem(replies[2]) == "key-reused"
    assert [reply.json() for reply in replies[3:]] == [2, 3]
    assert set(policy(app)) == {"/v1/charges/{number}", "/v2/charges/{number}"}


@pytest.mark.parametrize(("root", "prefix"), [("/api", "/api"), ("/api/", "/api/"), ("/api/", "")])
def test_the_places_of_a_router_are_found_behind_a_root_path(root, prefix):
    """A server may be told it with a slash at its end, and its path may have it in front or not:
    whatever Starlette serves is found."""
    app, runs = shop(), []
    router = APIRouter(route_class=IdempotentRoute)

    @router.post("/charges")
    async def charge():
        runs.append(1)
        return len(runs)

    app.include_router(router, prefix="/v1", dependencies=[idempotent()])
    app.include_router(router, prefix="/free")

    async def behind(scope, receive, send):
        await app({**scope, "root_path": root}, receive, send)

    replies = ask(
        behind, *((f"{prefix}/v1/charges", {}),) * 2, *((f"{prefix}/free/charges", {}),) * 2
    )
    assert [reply.status_code for reply in replies] == [200] * 4
    assert [is_replay(reply) for reply in replies] == [False, True, False, False]
    assert len(runs) == 3


def test_a_mounted_application_has_its_own_protection():
    """Its problems lead to its own page; the outer application does not know its endpoints."""
    outer, inner = shop(), shop()

    @inner.post("/charges", dependencies=[idempotent()])
    async def charge():
        return {}

    outer.mount("/api", inner)
    first, second = ask(outer, ("/api/charges", {}), ("/api/charges", {}))
    assert (first.status_code, is_replay(second)) == (200, True)
    (reused,) = ask(outer, ("/api/charges", {"other": 1}))
    assert reused.json()["type"] == "/api/idempotency-policy#key-reused"
    assert policy(outer) == {}


def test_an_endpoint_that_nothing_protects_never_runs():
    """A plain route class, or an application without Retrysafe, is an error of the server."""
    runs = []

    async def charge():
        runs.append("charge")

    for app, router in (
        (shop(), APIRouter()),
        (FastAPI(), APIRouter(route_class=IdempotentRoute)),
    ):
        router.post("/charges", dependencies=[idempotent()])(charge)
        app.include_router(router)
        with pytest.raises(ValueError, match="nothing protects it"):
            ask(app, CHARGE, raises=True)
    assert runs == []


def test_endpoints_come_after_the_installation():
    """Those before it are plain routes; better now than with the first request."""
    app = FastAPI()

    @app.get("/")
    async def read(): ...

    @app.post("/charges", dependencies=[idempotent()])
    async def charge(): ...

    made = Retrysafe(AsyncIdempotency(MemoryStore()), caller=GLOBAL)
    with pytest.raises(InvalidInput, match=r"/charges depends .* before the endpoints"):
        made.install(app)
    # Nothing was done by halves.
    made.install(FastAPI())


def test_idempotent_is_a_dependency_itself():
    """As a function that FastAPI calls, it would leave the endpoint unprotected."""
    app, runs = shop(), []

    @app.post("/charges", dependencies=[Depends(idempotent)])
    async def charge():
        runs.append("charge")

    @app.post("/refunds", dependencies=[Depends(idempotent())])
    async def refund():
        runs.append("refund")

    for path in ("/charges?options=1", "/refunds?options=1&misplaced=1"):
        with pytest.raises(InvalidInput, match="write it without Depends"):
            ask(app, (path, {}), raises=True)
    assert runs == []


def test_the_brackets_may_be_left_out():
    """At all places where a dependency can stand: the endpoint is under the default rule."""
    app, runs = shop(), []
    router = APIRouter(route_class=IdempotentRoute, dependencies=[idempotent])

    @app.post("/listed", dependencies=[idempotent])
    async def listed():
        runs.append("listed")

    @app.post("/annotated")
    async def annotated(attempt: Annotated[Attempt, idempotent]):
        runs.append(f"annotated {attempt.number}")

    @app.post("/default")
    async def default(attempt: Any = idempotent):
        runs.append(f"default {attempt.number}")

    @router.post("/routed")
    async def routed():
        runs.append("routed")

    app.include_router(router)
    for path in ("/listed", "/annotated", "/default", "/routed"):
        first, second = ask(app, (path, {}), (path, {}), **{"Idempotency-Key": path[1:]})
        assert (first.status_code, is_replay(first), is_replay(second)) == (200, False, True)
    assert runs == ["listed", "annotated 1", "default 1", "routed"]


def test_idempotent_is_no_decorator():
    """Neither with nor without brackets; what to write is told when the endpoint is made."""

    async def charge():
        pass

    for decorator in (idempotent, idempotent()):
        with pytest.raises(InvalidInput, match=r"write dependencies=\[idempotent\(\)\]"):
            decorator(charge)


def test_the_route_class_of_the_application_is_kept():
    """One of the user's own stays; it is theirs to derive it from IdempotentRoute."""

    class Own(APIRoute):
        pass

    app = FastAPI()
    app.router.route_class = Own
    Retrysafe(AsyncIdempotency(MemoryStore()), caller=GLOBAL).install(app)
    assert app.router.route_class is Own
    assert shop().router.route_class is IdempotentRoute


def test_rules_are_checked_where_they_are_written():
    with pytest.raises(PolicyInvalid, match="path"):
        idempotent(path="/charges")
    with pytest.raises(PolicyInvalid, match="safe"):
        idempotent(methods=["GET"])


# The OpenAPI document.


@pytest.fixture
def document(tmp_path):
    app, _ = made("fastapi", Till(tmp_path / "shop.db"), MemoryStore())
    assert app.openapi() is app.openapi()
    return app.openapi()


def test_the_document_shows_the_refusals(document):
    """Every status that retrysafe answers with, beside the endpoint's own; and behind its words."""
    operation = document["paths"]["/charges"]["post"]
    assert operation["description"].startswith("Charges a card.\n\nSend an `Idempotency-Key`")
    charge = operation["responses"]
    assert set(charge) == {"201", "202", "400", "401", "409", "413", "422", "503"}
    for status in ("400", "401", "409", "413", "422", "503"):
        content = charge[status]["content"]["application/problem+json"]
        assert content == {"schema": {"$ref": "#/components/schemas/IdempotencyProblem"}}
    assert "application/json" in charge["422"]["content"]
    assert charge["422"]["description"] == "Validation Error; or Idempotency-Key is already used"
    assert "missing" in charge["400"]["description"]
    note = document["paths"]["/notes"]["post"]["responses"]
    assert "missing" not in note["400"]["description"]
    schema = document["components"]["schemas"]["IdempotencyProblem"]
    assert {"type", "title", "status", "detail", "retryable"} <= set(schema["properties"])


def test_the_document_shows_what_clients_may_prefer():
    """202 only where it can be the answer; what an endpoint says of a header itself stays."""
    app = shop()

    @app.post("/orders", dependencies=[idempotent()])
    async def order(prefer: Annotated[str, Header(description="Mine.")] = ""): ...

    @app.post("/jobs", status_code=202, dependencies=[idempotent()])
    async def job(): ...

    @app.post("/streams", dependencies=[idempotent(streaming=Streaming.PASS)])
    async def stream(): ...

    paths = app.openapi()["paths"]
    orders, jobs, streams = (paths[path]["post"] for path in ("/orders", "/jobs", "/streams"))
    assert [item["description"] for item in orders["parameters"] if item["name"] != "prefer"] == [
        parameter_of(orders)["description"]
    ]
    told = [item for item in jobs["parameters"] if item["name"] == "Prefer"]
    assert [(item["in"], item["required"]) for item in told] == [("header", False)]
    assert "respond-async" in told[0]["description"]
    accepted = orders["responses"]["202"]
    schema = accepted["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"state", "key", "status_url"}
    assert jobs["responses"]["202"]["description"].startswith("Successful Response; or The request")
    assert jobs["responses"]["202"]["content"]["application/json"]["schema"] == {}
    assert "202" not in streams["responses"]
    (preference,) = (item for item in streams["parameters"] if item["name"] == "Prefer")
    assert "respond-async" not in preference["description"]


def test_the_document_tells_what_a_duplicate_gets():
    """202 where the route accepts, and 409 for those who waited in vain; its wait otherwise."""
    app = shop()

    @app.post("/jobs", dependencies=[idempotent(in_flight=ACCEPT)])
    async def job(): ...

    @app.post("/orders", dependencies=[idempotent(in_flight=InFlight.WAIT)])
    async def order(): ...

    paths = app.openapi()["paths"]
    jobs, orders = (paths[path]["post"] for path in ("/jobs", "/orders"))
    assert "runs gets 202 with the URL where its outcome can be read" in jobs["description"]
    assert "status URL" in jobs["responses"]["202"]["description"]
    assert "outstanding" in jobs["responses"]["409"]["description"]
    assert "runs waits for its response up to 10 seconds, then gets 409" in orders["description"]
    assert "outstanding" in orders["responses"]["409"]["description"]


def test_the_document_follows_the_configuration():
    """Without callers there is no 401, without a header no parameter; routes added later are
    described, those that were described before only once."""
    app = shop()

    @app.post("/orders", dependencies=[idempotent(key=FieldsKey("/order", window=FOREVER))])
    async def order(): ...

    operation = app.openapi()["paths"]["/orders"]["post"]
    assert "401" not in operation["responses"]
    assert [item["name"] for item in operation["parameters"]] == ["Prefer"]
    assert "recognised by" in operation["description"]

    @app.post("/late", dependencies=[idempotent()])
    async def late(): ...

    paths = app.openapi()["paths"]
    assert parameter_of(paths["/late"]["post"])["required"] is True
    assert paths["/orders"]["post"]["description"] == operation["description"]


def test_a_key_that_may_be_left_out_is_described_so():
    """Where the body makes the key of clients that send none, and where it makes all of them."""
    app = FastAPI()
    secret = "a secret of these tests"
    Retrysafe(AsyncIdempotency(MemoryStore(), secret=secret), caller=GLOBAL).install(app)
    both = idempotent(key=HeaderKey(otherwise=BodyKey()))

    @app.post("/both", dependencies=[both])
    async def shared(): ...

    @app.post("/hashed", dependencies=[idempotent(key=BodyKey())])
    async def hashed(): ...

    paths = app.openapi()["paths"]
    operation = paths["/both"]["post"]
    assert parameter_of(operation)["required"] is False
    assert "Without one, repeated requests are recognised by all that" in operation["description"]
    assert "Idempotency-Key is not taken here" in str(paths["/hashed"]["post"]["responses"]["400"])


def test_a_document_without_protected_endpoints_is_left_alone():
    assert "components" not in shop().openapi()


# PostgreSQL.


@contextmanager
def orders_table(url):
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE fastapi_orders (name text)")
        try:
            yield lambda: connection.execute("SELECT count(*) FROM fastapi_orders").fetchone()[0]
        finally:
            connection.execute("DROP TABLE fastapi_orders")


class Receipt(BaseModel):
    number: int
    paid_at: datetime = datetime(2026, 1, 2, tzinfo=UTC)
    note: str | None = None
    secret: str = "not for clients"


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (Receipt(number=7), {}),
        (Receipt(number=7), {"status_code": 201, "response_model_exclude": {"secret"}}),
        ({"number": 7}, {"response_model": Receipt, "response_model_exclude_unset": True}),
        ([{"at": datetime(2026, 1, 2, tzinfo=UTC)}], {"status_code": 202}),
        ("hat", {"response_class": PlainTextResponse}),
        (None, {"status_code": 204, "response_model": None}),
        (JSONResponse({"own": 1}, 203, {"Location": "/1"}), {"status_code": 201}),
    ],
    ids=["model", "status and fields", "dict as model", "list", "class", "no body", "response"],
)
def test_an_endpoint_completes_with_what_it_returns(tmp_path, value, options):
    """The stored response is the one that FastAPI makes of the value, byte for byte."""
    path = tmp_path / "shop.db"

    async def whole():
        idem = AsyncIdempotency(f"sqlite:///{path}")
        app = FastAPI()
        Retrysafe(idem, caller=GLOBAL).install(app)
        router = APIRouter(route_class=IdempotentRoute)

        @router.post("/completed", **options)
        def completed(attempt: Annotated[Attempt, idempotent()]) -> Any:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                attempt.complete_in(connection, value)
                connection.execute("COMMIT")
            return value

        @router.post("/plain", **options)
        async def plain() -> Any:
            return value

        app.include_router(router, prefix="/v1")
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": "k"}
            first, again = [await client.post("/v1/completed", headers=headers) for _ in range(2)]
            wanted = await client.post("/v1/plain")
        await idem.close()
        return first, again, wanted

    first, again, wanted = asyncio.run(whole())
    for reply in (first, again):
        assert (reply.status_code, reply.content) == (wanted.status_code, wanted.content)
        assert wanted.headers.items() <= reply.headers.items()
    assert is_replay(again)


def test_endpoints_complete_in_their_sessions(migrated_url, postgres_server):
    """An async SQLAlchemy session in an async endpoint, a psycopg connection in a plain one: row
    and response commit together, and what fails after the commit does not run again."""
    url = postgres_server.url()
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))

    async def whole():
        idem = AsyncIdempotency(migrated_url)
        app = FastAPI()
        Retrysafe(idem, caller=GLOBAL).install(app)

        @app.post("/async")
        async def place(attempt: Annotated[Attempt, idempotent()]):
            response = JSONResponse({"by": "session"}, 201)
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(text("INSERT INTO fastapi_orders VALUES ('a')"))
                await attempt.complete_in(session, response)
            raise RuntimeError("after the commit")

        @app.post("/sync")
        def place_in_thread(attempt: Annotated[Attempt, idempotent()]):
            response = JSONResponse({"by": "connection"}, 201)
            with psycopg.connect(url) as connection:
                connection.execute("INSERT INTO fastapi_orders VALUES ('b')")
                attempt.complete_in(connection, response)
            raise RuntimeError("after the commit")

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            replies = [
                await client.post(path, headers={"Idempotency-Key": path[1:]})
                for path in ("/async", "/async", "/sync", "/sync")
            ]
        await idem.close()
        await engine.dispose()
        return replies

    with orders_table(url) as count:
        replies = asyncio.run(whole())
        assert [reply.status_code for reply in replies] == [500, 201, 500, 201]
        assert replies[1].json() == {"by": "session"}
        assert replies[3].json() == {"by": "connection"}
        assert is_replay(replies[1])
        assert is_replay(replies[3])
        assert count() == 2
