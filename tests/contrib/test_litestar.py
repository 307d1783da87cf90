"""What is Litestar's own: options in layers, the plugin, mounts, the OpenAPI document."""

import asyncio
from typing import Annotated, Any

import asyncpg
import httpx
import pytest
from litestar import Litestar, MediaType, Request, Response, Router, asgi, get, post
from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException, ServiceUnavailableException
from litestar.handlers import BaseRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.openapi.spec import Operation
from litestar.params import FromPath, HeaderParameter, JSONBody
from litestar.types import ASGIApp, Receive, Scope, Send

from retrysafe import FOREVER, GLOBAL, AsyncIdempotency, BodyKey, Ending, Policy
from retrysafe.contrib.litestar import RetrysafePlugin, idempotent
from retrysafe.errors import InvalidInput, PolicyInvalid, SecretMissing
from retrysafe.http import ACCEPT, FieldsKey, Rule, Streaming
from retrysafe.stores import MemoryStore
from tests.contrib.conftest import is_replay, made, problem
from tests.contrib.shops import Till, parameter_of


def plugin(store: Any = None, **options: Any) -> RetrysafePlugin:
    return RetrysafePlugin(
        AsyncIdempotency(store or MemoryStore()), **{"caller": GLOBAL, **options}
    )


def shop(*handlers: Any, **options: Any) -> Litestar:
    return Litestar(handlers, plugins=[plugin()], **options)


def ask(app, *paths, root_path="", body=None, raises=True, **headers):
    """The responses to requests that are posted one after the other, all with one key."""

    async def whole():
        transport = httpx.ASGITransport(app, root_path=root_path, raise_app_exceptions=raises)
        own = {"Idempotency-Key": "k", **headers}
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [await client.post(path, json=body, headers=own) for path in paths]

    return asyncio.run(whole())


def policy_paths(app):
    async def whole():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            reply = await client.get("/idempotency-policy", headers={"Accept": "application/json"})
            return {route["path"]: route["key"] for route in reply.json()["routes"]}

    return asyncio.run(whole())


def counting(path: Any = "/one", **options: Any):
    """A handler that counts its runs."""
    runs = []

    @post(path, **options)
    async def count() -> int:
        runs.append(1)
        return len(runs)

    return count, runs


def test_options_come_from_the_nearest_layer():
    """Application, router and handler: the innermost rule counts; one may take a handler out."""
    inner, _ = counting("/inner", guards=[idempotent(required=False)])
    of_router, _ = counting("/of-router")
    of_app, _ = counting("/of-app")
    out, _ = counting("/out", guards=[idempotent(protected=False)])
    router = Router("/r", route_handlers=[inner, of_router], guards=[idempotent(strict=True)])
    app = shop(router, of_app, out, guards=[idempotent()])
    shown = policy_paths(app)
    assert {path: shown[path] for path in ("/r/inner", "/r/of-router", "/of-app", "/out")} == {
        "/r/inner": "optional",
        "/r/of-router": "required",
        "/of-app": "required",
        "/out": "off",
    }
    (strict,) = ask(app, "/r/of-router")
    assert problem(strict) == "key-invalid"
    assert [reply.json() for reply in ask(app, "/out", "/out")] == [1, 2]


def test_a_handler_with_two_paths_has_two_places():
    """The same key on the other path is another request."""
    handler, runs = counting(["/a", "/b"], guards=[idempotent()])
    app = shop(handler)
    first, again, other = ask(app, "/a", "/a", "/b")
    assert (first.json(), is_replay(again), problem(other)) == (1, True, "key-reused")
    assert len(runs) == 1
    assert policy_paths(app) == {"/a": "required", "/b": "required"}


def test_the_root_path_is_a_part_of_the_request():
    """Litestar takes it out of the path, and the fingerprint and the links have it all the same.
    A path that looks like the root is not taken for it."""
    handler, _ = counting(["/one", "/shop/one"], guards=[idempotent()])
    app = shop(handler)
    (reply,) = ask(app, "/shop/one", root_path="/shop", **{"Idempotency-Key": '""'})
    assert reply.json()["type"] == "/shop/idempotency-policy#key-invalid"
    assert reply.json()["instance"] == "/shop/one"
    assert ask(app, "/shop/one", root_path="/shop")[0].status_code == 201
    assert problem(ask(app, "/one", root_path="/other")[0]) == "key-reused"
    assert problem(ask(app, "/shop/shop/one", root_path="/shop")[0]) == "key-reused"
    assert is_replay(ask(app, "/shop/one", root_path="/shop")[0])


def test_a_mounted_asgi_application_is_protected_as_a_whole():
    """The mount's path is a part of the request; other handlers do not share its keys."""
    runs = []

    @asgi("/mounted", is_mount=True, copy_scope=True, guards=[idempotent()])
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        runs.append(scope["path"])
        await Response("done", media_type=MediaType.TEXT, status_code=201).to_asgi_response(
            None, Request(scope)
        )(scope, receive, send)

    @asgi("/plain", copy_scope=True, guards=[idempotent()])
    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    app = shop(mounted, plain)
    first, again, other = ask(app, "/mounted/x", "/mounted/x", "/mounted/y")
    assert (first.status_code, is_replay(again), problem(other)) == (201, True, "key-reused")
    assert other.json()["instance"] == "/mounted/y/"
    assert problem(ask(app, "/plain")[0]) == "key-reused"
    assert runs == ["/x/"]
    assert policy_paths(app) == {"/mounted/*": "required", "/plain": "required"}


def test_middlewares_of_the_application_are_outside_and_those_of_a_handler_inside():
    """Authentication at the application comes before a replay; a handler's middleware runs once."""
    seen = []

    class Noting(ASGIMiddleware):
        def __init__(self, name: str) -> None:
            self.name = name

        async def handle(
            self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp
        ) -> None:
            seen.append(self.name)
            await next_app(scope, receive, send)

    handler, _ = counting(guards=[idempotent()], middleware=[Noting("handler")])
    app = shop(handler, middleware=[Noting("application")])
    assert is_replay(ask(app, "/one", "/one")[1])
    assert seen == ["application", "handler", "application"]


def test_a_guard_that_refuses_is_an_outcome():
    """Guards run inside the operation; what they refuse is replayed to the same caller."""
    asked = []

    def refuse(connection: ASGIConnection, handler: BaseRouteHandler) -> None:
        asked.append(1)
        raise NotAuthorizedException("no")

    handler, runs = counting(guards=[idempotent(), refuse])
    first, second = ask(shop(handler), "/one", "/one")
    assert (first.status_code, second.status_code) == (401, 401)
    assert is_replay(second)
    assert (asked, runs) == ([1], [])


def failing(error: Exception, **options: Any):
    """A handler that raises, and how often it did."""
    runs = []

    @post("/one", guards=[idempotent(**options)])
    async def fail() -> None:
        runs.append(1)
        raise error

    return fail, runs


def test_the_policy_judges_exceptions_that_litestar_answers():
    """One that ends the operation for good is not run again; the first client gets Litestar's 500,
    a retry is told."""
    handler, runs = failing(LookupError("no"), policy=Policy(unlisted=Ending.FAILED))
    first, second = ask(shop(handler), "/one", "/one")
    assert (first.status_code, first.json()["detail"]) == (500, "Internal Server Error")
    assert (second.status_code, problem(second)) == (500, "operation-failed")
    assert len(runs) == 1


def test_an_exception_that_says_its_status_is_a_response():
    """HTTP exceptions are answers, not failures: their status says what is kept."""
    final = Policy(unlisted=Ending.FAILED)
    handler, runs = failing(ServiceUnavailableException("later"), policy=final)
    first, second = ask(shop(handler), "/one", "/one")
    assert (first.status_code, second.status_code) == (503, 503)
    assert len(runs) == 2


def test_an_exception_with_a_handler_of_its_own_is_a_response():
    """What the exception handler answers below 500 is the outcome."""

    def answer(request: Request, error: Exception) -> Response:
        return Response({"handled": True}, status_code=409)

    handler, runs = failing(LookupError("no"), policy=Policy(unlisted=Ending.FAILED))
    first, second = ask(shop(handler, exception_handlers={LookupError: answer}), "/one", "/one")
    assert (first.json(), is_replay(second)) == ({"handled": True}, True)
    assert len(runs) == 1


def test_a_failure_is_answered_and_reported_once():
    """The client gets what the exception handler made, which is not asked a second time."""
    asked = []

    def answer(request: Request, error: Exception) -> Response:
        asked.append(str(error))
        return Response({"asked": len(asked)}, status_code=503)

    handler, _ = failing(LookupError("no"))
    (first,) = ask(shop(handler, exception_handlers={LookupError: answer}), "/one")
    assert (first.status_code, first.json()) == (503, {"asked": 1})
    assert asked == ["no"]


def test_steps_are_compensated_when_a_terminal_one_fails():
    """The failure leaves the handler as an exception, whatever Litestar answers."""
    done = []

    def declined() -> None:
        raise LookupError("no credit")

    @post("/one", guards=[idempotent()])
    async def checkout(request: Request) -> None:
        attempt = request.state.idempotency
        await attempt.step(
            "reserve", done.append, "reserve", compensate=lambda _: done.append("undo")
        )
        await attempt.step("charge", declined, terminal=LookupError)

    first, second = ask(shop(checkout), "/one", "/one")
    assert (first.status_code, problem(second)) == (500, "operation-failed")
    assert done == ["reserve", "undo"]


def test_a_request_that_does_not_fit_is_an_outcome():
    """Litestar's own 400 is told apart from a missing key by its content type."""
    runs = []

    @post("/one", guards=[idempotent()])
    async def typed(data: JSONBody[dict[str, int]]) -> None:
        runs.append(data)

    first, second = ask(shop(typed), "/one", "/one", body={"amount": "seven"})
    assert (first.status_code, is_replay(second)) == (400, True)
    assert first.headers["content-type"] == "application/json"
    assert runs == []


def test_keys_from_path_parameters():
    runs = []

    @post("/orders/{order:int}", guards=[idempotent(key=FieldsKey("{order}", window=FOREVER))])
    async def place(order: FromPath[int]) -> int:
        runs.append(order)
        return order

    replies = ask(shop(place), "/orders/1", "/orders/1", "/orders/2")
    assert [is_replay(reply) for reply in replies] == [False, True, False]


async def never_run(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for an application that is mounted."""


def test_rules_are_checked_when_the_application_is_made():
    """A rule that is none, that has a path, or that needs what is missing."""
    with pytest.raises(PolicyInvalid, match="takes no path"):
        idempotent(path="/one")
    with pytest.raises(PolicyInvalid, match=r"guards=\[idempotent"):
        shop(counting(idempotency=Rule())[0])
    with pytest.raises(InvalidInput, match="with the brackets"):
        idempotent(counting()[0])
    with pytest.raises(SecretMissing):
        shop(counting(guards=[idempotent(key=BodyKey())])[0])
    with pytest.raises(PolicyInvalid, match="no such parameter"):
        shop(counting(guards=[idempotent(key=FieldsKey("{id}", window=FOREVER))])[0])
    with pytest.raises(PolicyInvalid, match="covers everything in /v1/"):
        guard = idempotent(key=FieldsKey("/order", window=FOREVER))
        shop(asgi("/v1", is_mount=True, copy_scope=True, guards=[guard])(never_run))


@pytest.mark.parametrize("is_mounted", [False, True])
def test_without_the_plugin_nothing_runs(is_mounted):
    """Else a forgotten plugin runs every retry again, in silence; another application's is none."""
    handler, runs = counting(guards=[idempotent()])
    router, routed = counting("/two")
    app = Litestar([handler, Router("/r", route_handlers=[router], guards=[idempotent()])])
    prefix = ""
    if is_mounted:
        prefix = "/v1"
        app = shop(asgi(prefix, is_mount=True, copy_scope=True)(app))
    for reply in ask(app, prefix + "/one", prefix + "/r/two", raises=False):
        assert reply.status_code == 500
    assert (runs, routed) == ([], [])


# The OpenAPI document.


@pytest.fixture
def document(tmp_path):
    app, _ = made("litestar", Till(tmp_path / "shop.db"), MemoryStore())
    return app.openapi_schema.to_schema()


def test_the_document_shows_the_refusals(document):
    """Beside the handler's own responses, which keep theirs."""
    charge = document["paths"]["/charges"]["post"]["responses"]
    assert set(charge) == {"201", "202", "400", "401", "409", "413", "422", "503"}
    for status in ("400", "401", "409", "413", "422", "503"):
        schema = charge[status]["content"]["application/problem+json"]["schema"]
        assert schema["title"] == "IdempotencyProblem"
        assert schema["properties"]["retryable"]["type"] == "boolean"
    assert "application/json" in charge["400"]["content"]
    assert "; or Idempotency-Key is missing" in charge["400"]["description"]


def test_the_document_shows_what_clients_may_prefer():
    """202 only where it can be the answer; what a handler says of a header itself stays."""

    @post("/orders", guards=[idempotent()])
    async def order(
        mine: Annotated[str | None, HeaderParameter(name="prefer", description="Mine.")] = None,
    ) -> None: ...

    @post("/jobs", guards=[idempotent()], status_code=202)
    async def job() -> None: ...

    @post("/streams", guards=[idempotent(streaming=Streaming.PASS)])
    async def stream() -> None: ...

    paths = shop(order, job, stream).openapi_schema.to_schema()["paths"]
    orders, jobs, streams = (paths[path]["post"] for path in ("/orders", "/jobs", "/streams"))

    def preferences(operation):
        return [item for item in operation["parameters"] if item["name"].lower() == "prefer"]

    assert [item["description"] for item in preferences(orders)] == ["Mine."]
    assert "respond-async" in preferences(jobs)[0]["description"]
    schema = orders["responses"]["202"]["content"]["application/json"]["schema"]
    assert schema["title"] == "IdempotencyAccepted"
    assert "; or The request runs" in jobs["responses"]["202"]["description"]
    assert "202" not in streams["responses"]
    assert "respond-async" not in preferences(streams)[0]["description"]


def test_the_document_tells_of_a_handler_that_accepts_duplicates():
    """202 for what is still running, and 409 for those who waited in vain."""

    @post("/jobs", guards=[idempotent(in_flight=ACCEPT)])
    async def job() -> None: ...

    jobs = shop(job).openapi_schema.to_schema()["paths"]["/jobs"]["post"]
    assert "runs gets 202 with the URL where its outcome can be read" in jobs["description"]
    assert "status URL" in jobs["responses"]["202"]["description"]
    assert "outstanding" in jobs["responses"]["409"]["description"]


def test_an_operation_class_of_the_users_own_is_kept():
    """What it adds stays in the document."""

    class Own(Operation):
        def __post_init__(self) -> None:
            self.tags = ["own"]

    @post("/one", guards=[idempotent()], operation_class=Own)
    async def one() -> None: ...

    @get("/one")
    async def read() -> None: ...

    operation = shop(one, read).openapi_schema.to_schema()["paths"]["/one"]["post"]
    assert operation["tags"] == ["own"]
    assert parameter_of(operation)["required"] is True


# PostgreSQL.


def test_a_handler_completes_on_its_postgresql_connection(migrated_url, postgres_server):
    """Row and response commit together, and what fails after the commit does not run again."""

    @post("/orders", guards=[idempotent()], status_code=202)
    async def place(request: Request) -> dict[str, int]:
        content = {"order": 1}
        connection = await asyncpg.connect(postgres_server.url())
        try:
            async with connection.transaction():
                await connection.execute("CREATE TEMP TABLE t (x int)")
                attempt = request.state.idempotency
                await attempt.complete_in(connection, content)
        finally:
            await connection.close()
        if "fails" in request.headers:
            raise RuntimeError("after the commit")
        return content

    async def whole():
        idem = AsyncIdempotency(migrated_url)
        app = Litestar([place], plugins=[RetrysafePlugin(idem, caller=GLOBAL)])
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            lost = await client.post("/orders", headers={"Idempotency-Key": "k", "fails": "1"})
            again = await client.post("/orders", headers={"Idempotency-Key": "k"})
            other = await client.post("/orders", headers={"Idempotency-Key": "k-2"})
        await idem.close()
        return lost, again, other

    lost, again, other = asyncio.run(whole())
    assert (lost.status_code, again.status_code, is_replay(again)) == (500, 202, True)
    assert again.content == other.content == b'{"order":1}'
    assert again.headers["content-type"] == other.headers["content-type"]
