"""What is Starlette's own: decorators, middlewares at every level, mounts."""

from __future__ import annotations

import asyncio
import functools

import asyncpg
import httpx
import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Host, Mount, Route, Router, WebSocketRoute

from retrysafe import FOREVER, GLOBAL, AsyncIdempotency, BodyKey, Idempotency, InvalidInput
from retrysafe.contrib.starlette import Idempotent, Retrysafe, idempotent
from retrysafe.errors import PolicyInvalid, SecretMissing
from retrysafe.http import FieldsKey, HeaderKey, IdempotencyMiddleware, Rule
from retrysafe.stores import MemoryStore
from tests.contrib.conftest import is_replay, problem
from tests.contrib.serving import served
from tests.contrib.shops import Till


class Counted:
    """An endpoint that counts its runs."""

    def __init__(self):
        self.runs = 0

    async def __call__(self, request):
        self.runs += 1
        return JSONResponse({"run": self.runs}, 201)

    @property
    def endpoint(self):
        return functools.partial(Counted.__call__, self)


def protection(**options):
    options = {"caller": GLOBAL, **options}
    return Retrysafe(AsyncIdempotency(MemoryStore(), secret="0123456789abcdef"), **options)


def shop(routes, retrysafe=None, **options):
    app = Starlette(routes=routes, **options)
    (retrysafe or protection()).install(app)
    return app


def ask(app, *requests, root_path=""):
    """The responses to requests that are posted one after the other, with one key if any."""

    async def whole():
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return [
                await client.post(
                    path,
                    content=body,
                    headers={
                        name: value
                        for name, value in ({"Idempotency-Key": "k"} | headers).items()
                        if value is not None
                    },
                )
                for path, body, headers in (
                    (*request, *(b"", {})[len(request) - 1 :]) for request in requests
                )
            ]

    return asyncio.run(whole())


async def websocket(app, path):
    """What an application sends to a websocket that says nothing."""
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": path, "headers": [], "subprotocols": []}
    await app(scope, receive, send)
    return sent


async def started(retrysafe, app):
    """Starts an application and ends it."""
    async with retrysafe.lifespan(app):
        pass


def policy_paths(app, path="/idempotency-policy"):
    async def whole():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://shop"
        ) as client:
            reply = await client.get(path, headers={"Accept": "application/json"})
            return [route["path"] for route in reply.json()["routes"]]

    return asyncio.run(whole())


def test_decorated_endpoints_keep_their_names():
    """Routes of decorated functions and classes can still be found by name."""

    @idempotent()
    async def charge(request):
        """Charges a card."""
        return JSONResponse({})

    @idempotent()
    class Refund(HTTPEndpoint):
        async def post(self, request):
            return JSONResponse({"refunded": True}, 201)

    app = shop([Route("/charges", charge, methods=["POST"]), Route("/refunds", Refund)])
    assert app.url_path_for("charge") == "/charges"
    assert app.url_path_for("Refund") == "/refunds"
    assert charge.__doc__ == "Charges a card."
    first, second = ask(app, ("/refunds",), ("/refunds",))
    assert (first.json(), is_replay(second)) == ({"refunded": True}, True)


def test_a_mount_protects_everything_below_it():
    """Each path below is its own request, and the mount is a part of it."""
    one, two = Counted(), Counted()
    inner = [
        Route("/one", one.endpoint, methods=["POST"]),
        Mount("/deep", routes=[Route("/two", two.endpoint, methods=["POST"])]),
    ]
    guard = [Middleware(Idempotent)]
    app = shop(
        [Mount("/v1", routes=inner, middleware=guard), Mount("/v2", routes=inner, middleware=guard)]
    )
    first, again, deep, other = ask(
        app, ("/v1/one",), ("/v1/one",), ("/v1/deep/two",), ("/v2/one",)
    )
    assert (first.status_code, is_replay(again)) == (201, True)
    assert problem(deep) == problem(other) == "key-reused"
    assert deep.json()["type"] == "/idempotency-policy#key-reused"
    assert deep.json()["instance"] == "/v1/deep/two"
    assert (one.runs, two.runs) == (1, 0)
    assert policy_paths(app) == ["/v1/*", "/v2/*"]


def test_a_router_and_a_host_show_what_is_below_them():
    """Rules are found behind routers with middlewares of their own, and behind host names."""
    route = Route("/one", idempotent()(Counted().endpoint), methods=["POST"])
    app = shop(
        [
            Mount("/a", app=Router([route])),
            Mount("/b", app=Router([], middleware=[Middleware(Idempotent)])),
            Host("shop", app=Router([Route("/c", idempotent()(Counted().endpoint))])),
        ]
    )
    assert policy_paths(app) == ["/a/one", "/b/*", "/c"]
    (reply,) = ask(app, ("/c",))
    assert reply.status_code == 201


def test_a_mounted_application_has_its_own_protection_and_page():
    """Links lead to the page of the application that answers, wherever it is mounted."""
    counted = Counted()
    route = Route("/one", idempotent()(counted.endpoint), methods=["POST"])
    inner = shop([Mount("/deep/{tenant}", routes=[route])])
    outer = shop([Mount("/api", app=inner)])
    (reply,) = ask(outer, ("/api/deep/t1/one", b"", {"Idempotency-Key": '""'}), root_path="")
    assert reply.json()["type"] == "/api/idempotency-policy#key-invalid"
    assert policy_paths(outer, "/api/idempotency-policy") == ["/deep/{tenant}/one"]
    assert policy_paths(outer) == []


def test_the_servers_root_path_is_in_links_and_in_the_request():
    """Behind a proxy the same path under another root is another request."""
    app = shop([Route("/one", idempotent()(Counted().endpoint), methods=["POST"])])
    (reply,) = ask(app, ("/one", b"", {"Idempotency-Key": '""'}), root_path="/shop")
    assert reply.json()["type"] == "/shop/idempotency-policy#key-invalid"
    assert reply.json()["instance"] == "/shop/one"
    assert ask(app, ("/one",), root_path="/shop")[0].status_code == 201
    assert problem(ask(app, ("/one",), root_path="/other")[0]) == "key-reused"


def test_a_rule_around_the_whole_application():
    """Found at its first request at the latest; websockets pass."""
    counted = Counted()

    async def greet(socket):
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()

    app = shop(
        [Route("/one", counted.endpoint, methods=["POST"]), WebSocketRoute("/ws", greet)],
        middleware=[Middleware(Idempotent)],
    )
    assert is_replay(ask(app, ("/one",), ("/one",))[1])
    assert policy_paths(app) == ["/*"]
    sent = asyncio.run(websocket(app, "/ws"))
    assert [message.get("text") for message in sent] == [None, "hello", None]


@pytest.mark.parametrize("is_outside", [True, False])
def test_middlewares_of_the_application_work_on_either_side(is_outside):
    """What is outside also sees replays; what is inside runs once, and its chunks are stored."""
    counted, seen = Counted(), []

    class Noting(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            response = await call_next(request)
            response.headers["Content-Language"] = f"x-{len(seen)}"
            seen.append(response.status_code)
            return response

    own, guard = (
        [Middleware(Noting), Middleware(GZipMiddleware, minimum_size=1)],
        Middleware(Idempotent),
    )
    middleware = [*own, guard] if is_outside else [guard, *own]
    app = shop([Route("/one", counted.endpoint, methods=["POST"], middleware=middleware)])
    first, second = ask(app, ("/one",), ("/one",))
    assert first.json() == second.json() == {"run": 1}
    assert first.headers["content-encoding"] == second.headers["content-encoding"] == "gzip"
    assert is_replay(second)
    assert seen == ([201, 201] if is_outside else [201])
    assert second.headers["content-language"] == ("x-1" if is_outside else "x-0")
    assert counted.runs == 1


def test_an_endpoint_inside_a_protected_application_is_claimed_once():
    """The rule further out counts: a second claim of the same key would find itself in flight."""
    counted, retrysafe = Counted(), protection()
    app = shop([Route("/one", idempotent()(counted.endpoint), methods=["POST"])], retrysafe)
    around = IdempotencyMiddleware(app, retrysafe.idempotency, caller=GLOBAL)
    first, second = ask(around, ("/one",), ("/one",))
    assert (first.status_code, is_replay(second)) == (201, True)
    assert counted.runs == 1


def test_an_atomic_rule_further_out_counts_too(tmp_path):
    """Its attempt is of another kind, and the endpoint's own rule gives way all the same."""
    till = Till(tmp_path / "shop.db")
    till.open_for_business()
    retrysafe = Retrysafe(AsyncIdempotency(f"sqlite:///{till.path}"), caller=GLOBAL)

    @idempotent()
    async def place(request):
        return JSONResponse(till.place(request.state.idempotency), 201)

    app = shop([Route("/one", place, methods=["POST"])], retrysafe)
    rule = Rule(transaction=till.transaction)
    around = IdempotencyMiddleware(app, retrysafe.idempotency, caller=GLOBAL, rule=rule)
    first, second = ask(around, ("/one",), ("/one",))
    assert (first.status_code, is_replay(second)) == (201, True)
    assert till.orders() == ["hat"]


def test_state_of_the_lifespan_with_the_same_name_protects_nobody():
    """Only an attempt in the state means that a request is protected already."""
    counted = Counted()
    app = shop([Route("/one", idempotent()(counted.endpoint), methods=["POST"])])

    async def with_state(scope, receive, send):
        await app({**scope, "state": {"idempotency": object()}}, receive, send)

    assert is_replay(ask(with_state, ("/one",), ("/one",))[1])


def test_keys_from_path_parameters_and_bodies():
    """The route's parameters make natural keys; equal bodies are recognised without any key."""
    orders, mails = Counted(), Counted()
    source = FieldsKey("{order}", "/amount", window=FOREVER)
    app = shop(
        [
            Route(
                "/orders/{order:int}",
                idempotent(key=source)(orders.endpoint),
                methods=["POST"],
            ),
            Route("/mails", idempotent(key=BodyKey())(mails.endpoint), methods=["POST"]),
        ]
    )
    json = {"Content-Type": "application/json", "Idempotency-Key": "unused"}
    first, again, other = ask(
        app,
        ("/orders/1", b'{"amount": 1}', json),
        ("/orders/1", b'{"amount":1}', json),
        ("/orders/2", b'{"amount": 1}', json),
    )
    assert (first.json(), is_replay(again), other.json()) == ({"run": 1}, True, {"run": 2})
    without = {"Idempotency-Key": None}
    asked = [("/mails", body, without) for body in (b"hello", b"hello", b"bye")]
    *same, refused = ask(app, *asked, ("/mails", b"hello"))
    assert [is_replay(reply) for reply in same] == [False, True, False]
    assert refused.json()["code"] == "idempotency_key_unexpected"


@pytest.mark.parametrize(
    ("field", "told"), [("/order", "covers everything in /v1/"), ("{id}", "covers everything")]
)
def test_a_natural_key_on_a_mount_is_refused(field, told):
    """One rule would give the payment of order 7 and its refund one key."""
    routes = [Route(f"/{name}", Counted().endpoint, methods=["POST"]) for name in ("pay", "refund")]
    once = Middleware(Idempotent, key=FieldsKey(field, window=FOREVER))
    retrysafe = protection()
    shop([Mount("/v1", routes=routes, middleware=[once])], retrysafe)
    with pytest.raises(PolicyInvalid, match=told):
        retrysafe.refresh()


def test_a_natural_key_of_a_parameter_that_no_route_has_is_refused():
    """Those of mounts and hosts are there; any other would refuse every request with 400."""
    source = FieldsKey("{shop}", "{tenant}", "{id}", window=FOREVER)
    named = idempotent(key=source, name="cancel")
    routes = [Route("/{id:int}", named(Counted().endpoint), methods=["POST"])]
    at_host = Host("{shop}.example.org", app=Router(routes=routes))
    protected = protection()
    shop([Mount("/{tenant:int}", routes=[at_host])], protected)
    protected.refresh()
    protected = protection()
    shop([at_host], protected)
    with pytest.raises(PolicyInvalid, match=r"\{tenant\} from the path, and /\{id\} has no such"):
        protected.refresh()


@pytest.mark.parametrize(
    "source",
    [FieldsKey("/order", window=FOREVER), BodyKey(), HeaderKey(otherwise=BodyKey())],
    ids=lambda source: type(source).__name__,
)
def test_hosts_do_not_share_keys_that_are_made_here(source):
    """A payment to one shop would get the response of another one."""

    def of(shop, **options):
        pay = Route("/pay", idempotent(**options)(Counted().endpoint), methods=["POST"])
        return Host(f"{shop}.example.org", app=Router(routes=[pay]))

    retrysafe = protection()
    shop([of("a"), of("b", key=source, name="b: pay")], retrysafe)
    retrysafe.refresh()
    retrysafe = protection()
    shop([of("a"), of("b", key=source)], retrysafe)
    with pytest.raises(PolicyInvalid, match="do not tell hosts apart, and the routes of /pay are"):
        retrysafe.refresh()


def test_an_endpoint_without_a_protection_never_runs():
    """A forgotten install is an error of the server, not an unprotected run."""
    counted = Counted()
    routes = [Route("/one", idempotent()(counted.endpoint), methods=["POST"])]
    with pytest.raises(ValueError, match="no Retrysafe"):
        ask(Starlette(routes=routes), ("/one",))
    with pytest.raises(ValueError, match="no Retrysafe"):
        ask(Router(routes), ("/one",))
    assert counted.runs == 0


def test_one_application_has_one_protection():
    retrysafe = protection()
    app = shop([], retrysafe)
    for other_app, other in ((app, protection()), (Starlette(), retrysafe)):
        with pytest.raises(ValueError, match="one Retrysafe"):
            other.install(other_app)


def test_rules_are_checked_at_the_start():
    """Where the rule is written, or when the application starts."""
    with pytest.raises(PolicyInvalid, match="path"):
        idempotent(path="/charges")
    with pytest.raises(PolicyInvalid, match="safe to repeat"):
        idempotent(methods=("GET",))
    with pytest.raises(TypeError):
        Idempotent(Starlette(), no_such_option=1)

    retrysafe = Retrysafe(AsyncIdempotency(MemoryStore()), caller=GLOBAL)
    mails = idempotent(key=BodyKey())(Counted().endpoint)
    with pytest.raises(SecretMissing):
        asyncio.run(started(retrysafe, Starlette(routes=[Route("/m", mails, methods=["POST"])])))
    with pytest.raises(ValueError, match="caller"):
        Retrysafe(AsyncIdempotency(MemoryStore()), caller="everybody")
    assert Rule().path is None


def test_the_lifespan_is_enough():
    """It installs what was not installed, keeps the pages, and closes at the end."""
    counted, retrysafe = Counted(), protection()
    app = Starlette(
        routes=[
            Route("/one", idempotent()(counted.endpoint), methods=["POST"]),
            Mount("/", app=Starlette()),
        ],
        lifespan=retrysafe.lifespan,
    )
    with served(app) as url:
        headers = {"Idempotency-Key": "k"}
        replies = [httpx.post(f"{url}/one", headers=headers) for _ in range(2)]
        assert [reply.json() for reply in replies] == [{"run": 1}] * 2
        assert httpx.get(f"{url}/idempotency-policy").status_code == 200
    with served(app) as url:
        again = httpx.post(f"{url}/one", headers={"Idempotency-Key": "another"})
        assert again.json() == {"run": 2}


def test_routes_may_be_added_later():
    """An endpoint that is added to a running application is found with its first request."""
    app = shop([])
    assert policy_paths(app) == []
    app.router.routes.append(Route("/late", idempotent()(Counted().endpoint), methods=["POST"]))
    assert is_replay(ask(app, ("/late",), ("/late",))[1])
    assert policy_paths(app) == ["/late"]


def test_an_async_endpoint_completes_on_its_postgresql_connection(migrated_url, postgres_server):
    """The order's row and the response are one transaction of asyncpg's."""
    url = migrated_url
    runs = []

    @idempotent()
    async def order(request):
        runs.append("order")
        connection = await asyncpg.connect(postgres_server.url())
        try:
            response = JSONResponse({"order": 1}, 201, headers={"Location": "/orders/1"})
            async with connection.transaction():
                await connection.execute("CREATE TEMP TABLE t (x int)")
                await request.state.idempotency.complete_in(connection, response)
        finally:
            await connection.close()
        if request.headers.get("fails"):
            raise RuntimeError("after the commit")
        return response

    async def whole():
        idem = AsyncIdempotency(url)
        app = shop(
            [Route("/orders", order, methods=["POST"])],
            Retrysafe(idem, caller=GLOBAL),
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            lost = await client.post("/orders", headers={"Idempotency-Key": "k", "fails": "1"})
            again = await client.post("/orders", headers={"Idempotency-Key": "k"})
        stored = await idem.read("k", caller=GLOBAL)
        await idem.close()
        return lost, again, stored

    lost, again, stored = asyncio.run(whole())
    assert lost.status_code == 500
    assert (again.status_code, again.json()) == (201, {"order": 1})
    assert (is_replay(again), again.headers["location"]) == (True, "/orders/1")
    assert len(stored.outcomes) == 1
    assert runs == ["order"]


def test_mistakes_are_told_when_the_application_is_made():
    """A blocking object, a URL in its place, and a decorator without its brackets."""
    with Idempotency(MemoryStore()) as blocking:
        for given in (blocking, "sqlite:///shop.db"):
            with pytest.raises(InvalidInput, match="needs an AsyncIdempotency object, got"):
                Retrysafe(given, caller=GLOBAL)
    with pytest.raises(InvalidInput, match=r"write @idempotent\(\) above the view"):
        idempotent(Counted().endpoint)
