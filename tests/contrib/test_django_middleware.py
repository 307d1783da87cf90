"""Django: the middleware, the pages, the setting, and what a server does to requests."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import httpx
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIHandler
from django.test import override_settings
from django.urls import clear_url_caches, include, path

from retrysafe import GLOBAL, AsyncIdempotency, Policy
from retrysafe.contrib.django.configuration import current
from retrysafe.http import IdempotencyMiddleware, Rule, bearer_token
from retrysafe.stores import MemoryStore
from tests.contrib import django_shop
from tests.contrib.django_visits import CSRF, MIDDLEWARE, database, is_replay, open_shop, problem

URLS = "retrysafe.contrib.django.urls"
LIST = [*django_shop.SETTINGS["MIDDLEWARE"], MIDDLEWARE]


@pytest.fixture(params=["wsgi", "asgi"])
def world(request):
    return request.param


@pytest.mark.parametrize("path", ["/plain", "/async-plain"])
def test_rules_protect_views_by_their_path(world, path):
    """Below the middlewares that stand above it: those run for replays as well."""
    with open_shop(world, middleware=LIST, RULES=[Rule(path=path)]) as shop:
        assert problem(shop.post(path, key=None)) == "key-missing"
        assert problem(shop.post(path, caller=None)) == "caller-unknown"
        first, second = shop.post(path), shop.post(path)
        assert (first.json(), is_replay(first)) == ({"run": 1}, False)
        assert (second.json(), is_replay(second)) == ({"run": 1}, True)
        assert problem(shop.post(path, json={"amount": 8})) == "key-reused"
        assert shop.till.order == ["in", "out"] * 5
        assert second.cookies["seen"].value == "1"


@pytest.mark.parametrize(("what", "status"), [("missing", 404), ("lost", 500)])
def test_what_the_project_answers_is_judged_by_its_status(world, what, status):
    """Exceptions are responses by the time that they pass the middleware."""
    rules = [Rule(path="/raising/{what}")]
    with open_shop(world, middleware=LIST, RULES=rules) as shop:
        replies = [shop.post(f"/raising/{what}") for _ in range(2)]
        assert [reply.status_code for reply in replies] == [status, status]
        assert is_replay(replies[1]) is (status == 404)


def test_the_middleware_twice_protects_once(world):
    """The claim of the outer one covers what the inner one would claim."""
    with open_shop(world, middleware=[*LIST, MIDDLEWARE], RULES=[Rule(path="/*")]) as shop:
        for url in ("/plain", "/async-plain"):
            assert (first := shop.post(url, key=url)).status_code == 200, first.content
            assert is_replay(shop.post(url, key=url))


@pytest.mark.parametrize("url", ["/charges", "/plain"])
def test_a_middleware_around_an_asgi_project_protects_once(url):
    """Neither a decorated view nor a rule of the project claims the key once more."""

    async def visit(options):
        async with AsyncIdempotency(options["STORE"]) as around:
            app = IdempotencyMiddleware(ASGIHandler(), around, caller=bearer_token)
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                headers = {"Authorization": "Bearer alice", "Idempotency-Key": "k-1"}
                return [await client.post(url, headers=headers, json={}) for _ in range(2)]

    options = {"RULES": [Rule(path="/plain")], "CALLER": bearer_token}
    with open_shop("asgi", middleware=LIST, **options) as shop:
        first, second = shop.runner.run(visit(shop.options))
        assert first.is_success
        assert not is_replay(first)
        assert is_replay(second)


def test_a_decorated_view_below_a_rule_is_protected_once(world):
    """The middleware's claim covers it; a second one would find the key in flight."""
    with open_shop(world, middleware=LIST, RULES=[Rule(path="/*")]) as shop:
        for url in ("/charges", "/async-charges"):
            shop.till.runs.clear()
            assert shop.post(url, key=url).status_code == 201
            assert is_replay(shop.post(url, key=url))
            assert len(shop.till.runs) == 1


def test_streams_are_stored_whole_or_pass(world):
    rules = [Rule(path="/*")]
    streams = ("/stream", "/events") if world == "wsgi" else ("/async-stream", "/async-events")
    with open_shop(world, middleware=LIST, RULES=rules) as shop:
        first, second = shop.post(streams[0]), shop.post(streams[0])
        assert (first.whole, second.whole) == (b"0\n1\n2\n", b"0\n1\n2\n")
        assert is_replay(second)
        assert shop.post(streams[1], key="e").status_code == 200
        assert problem(shop.post(streams[1], key="e")) == "outcome-unavailable"


def test_the_transaction_of_the_request_is_inside(world, tmp_path):
    """Its commit comes before the outcome is stored, so nothing is refused."""
    with (
        database(tmp_path / "shop.db", atomic_requests=True) as url,
        open_shop(world, middleware=LIST, STORE=url, RULES=[Rule(path="/*")]) as shop,
    ):
        shop.till.alias = "shop"
        for blocks in ([1], [1]):
            assert shop.post("/writing").status_code == 201
            assert shop.till.atomic_blocks == blocks
        assert shop.till.orders() == ["pen"]


def test_a_body_is_compared_before_the_forgery_check_reads_it(world):
    """The check is below, and finds the form where it should be."""
    rules = [Rule(path="/plain")]
    with open_shop(world, middleware=[*LIST, CSRF], check_csrf=True, RULES=rules) as shop:
        form = {
            "data": b"csrfmiddlewaretoken=" + b"a" * 32,
            "kind": "application/x-www-form-urlencoded",
            "cookies": {"csrftoken": "a" * 32},
        }
        assert shop.post("/plain", **form).status_code == 200
        assert is_replay(shop.post("/plain", **form))


def test_a_large_body_for_an_unprotected_view_is_left_alone(world):
    """What is over the limit is nobody's to keep."""
    with open_shop(world, middleware=LIST) as shop:
        reply = shop.post("/plain", data=b"x" * (1024 * 1024 + 1))
        request = reply.wsgi_request if world == "wsgi" else reply.asgi_request
        assert (reply.status_code, request._read_started) == (200, False)
        settings = {"DATA_UPLOAD_MAX_MEMORY_SIZE": 10}
    with open_shop(world, middleware=LIST, settings=settings) as shop:
        assert shop.post("/plain", data=b"x" * 11).status_code == 200


# The pages.


def test_the_policy_page_lists_the_views(world):
    """Each view with its rule under its whole path, REST framework's and classes' too; views that
    only read are not there."""
    rules = [Rule(path="/v2/*", methods=("POST",))]
    with open_shop(world, middleware=LIST, RULES=rules) as shop:
        accept = {"Accept": "application/json"}
        page = shop.ask("GET", "/idempotency-policy", headers=accept).json()
        routes = {route["path"]: route for route in page["routes"]}
        assert page["routes"][0]["path"] == "/v2/*"
        assert routes["/charges"]["key"] == "required"
        assert routes["/notes"]["key"] == "optional"
        assert routes["/open"]["key"] == "off"
        assert routes["/carts"]["methods"] == ["POST"]
        assert routes["/boxes/{size}"]["methods"] == ["POST"]
        assert routes["/v1/refunds/{number}"]["retention_seconds"] == 7 * 86_400
        assert routes["/v1/old-refunds/{number}"]["retention_seconds"] == 7 * 86_400
        assert routes["/api/refunds"]["methods"] == ["POST"]
        assert routes["/api/charges"]["methods"] == ["POST"]
        assert "/api/outside" in routes
        assert not {"/plain", "/misplaced"} & routes.keys()
        html = shop.ask("GET", "/idempotency-policy")
        assert b"/charges" in html.content
        head = shop.ask("HEAD", "/idempotency-policy")
        assert (head.status_code, head.content) == (200, b"")


def is_staff(request):
    return "X-Staff" in request.host.headers


@pytest.mark.parametrize("middleware", [LIST, LIST[:-1]])
@pytest.mark.parametrize("readers", [False, is_staff, f"{__name__}.is_staff"])
def test_the_policy_page_can_be_for_some_or_for_nobody(world, middleware, readers, monkeypatch):
    """By the middleware and by the URLs: others find nothing there."""
    with open_shop(world, middleware=middleware, POLICY_PAGE=readers) as shop:
        # The module reads the setting when it is imported.
        sys.modules.pop(URLS, None)
        added = [] if middleware is LIST else [path("", include(URLS))]
        monkeypatch.setattr(django_shop, "urlpatterns", [*django_shop.urlpatterns, *added])
        clear_url_caches()
        try:
            assert shop.ask("GET", "/idempotency-policy").status_code == 404
            staff = shop.ask("GET", "/idempotency-policy", headers={"X-Staff": "yes"})
            assert staff.status_code == (200 if readers else 404)
        finally:
            sys.modules.pop(URLS, None)
            clear_url_caches()


@pytest.mark.parametrize("middleware", [LIST, LIST[:-1]])
def test_the_status_page_shows_the_callers_own_key(world, middleware):
    """By the middleware, or by the URLs of a project that does without it."""
    with open_shop(world, middleware=middleware) as shop:
        if middleware is not LIST:
            urls = include("retrysafe.contrib.django.urls")
            django_shop.urlpatterns.append(path("", urls))
        try:
            shop.post(key='"a/b c/"')
            url = "/idempotency-status/a%2Fb%20c%2F"
            mine = shop.ask("GET", url)
            assert (mine.status_code, mine.json()) == (201, {"run": 1})
            other = shop.ask("GET", url, caller="bob")
            assert (other.status_code, problem(other)) == (404, "key-unknown")
            assert shop.ask("GET", "/idempotency-policy").status_code == 200
            assert shop.ask("POST", "/idempotency-policy").status_code in (404, 405)
        finally:
            if middleware is not LIST:
                django_shop.urlpatterns.pop()


@pytest.mark.parametrize("place", ["/jobs", "/async-jobs"])
@pytest.mark.parametrize("pages", ["middleware", "urls", "elsewhere", None])
def test_a_view_that_accepts_duplicates_needs_the_status_page(world, pages, place, caplog):
    """Else its 202 would lead nowhere: told by the first request, which runs nothing."""
    added = {
        "urls": path("", include("retrysafe.contrib.django.urls")),
        "elsewhere": path("<path:rest>", django_shop.plain),
    }.get(pages)
    with open_shop(world, middleware=LIST if pages == "middleware" else LIST[:-1]) as shop:
        if added is not None:
            django_shop.urlpatterns.append(added)
        try:
            reply = shop.post(place)
        finally:
            if added is not None:
                django_shop.urlpatterns.pop()
        if pages in ("middleware", "urls"):
            assert (reply.status_code, shop.till.runs) == (201, ["job"])
        else:
            assert (reply.status_code, shop.till.runs) == (500, [])
            assert "tells its clients a status URL, and nothing serves it" in caplog.text


# A server whose client goes away.


def test_a_client_that_goes_away_does_not_end_its_request():
    """Django cancels the view's task; the view runs to its end, and the retry gets its response."""
    with open_shop("asgi") as shop:

        async def scenario():
            app = ASGIHandler()
            body = b'{"amount": 7}'
            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": "POST",
                "path": "/held",
                "query_string": b"",
                "headers": [
                    (b"host", b"shop"),
                    (b"idempotency-key", b"k-1"),
                    (b"authorization", b"Bearer alice"),
                    (b"content-length", b"%d" % len(body)),
                ],
            }
            started, go_on, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def held(request):
                started.set()
                await go_on.wait()
                shop.till.note("held")
                return django_shop.JsonResponse({"done": True}, status=201)

            view = django_shop.idempotent()(held)
            django_shop.urlpatterns.append(path("held", view))
            try:
                sent = []

                async def send(message):
                    sent.append(message)

                async def exchange(hang_up):
                    messages = [{"type": "http.request", "body": body, "more_body": False}]

                    async def receive():
                        if messages:
                            return messages.pop()
                        await hang_up.wait()
                        return {"type": "http.disconnect"}

                    await app(dict(scope), receive, send)

                first = asyncio.create_task(exchange(leave))
                await started.wait()
                leave.set()
                await first
                assert sent == []
                assert shop.till.runs == []
                go_on.set()
                await exchange(asyncio.Event())
                # The retry may have come before the first run was stored, and is then in flight.
                while sent[0]["status"] == 409:
                    sent.clear()
                    await exchange(asyncio.Event())
                headers = dict(sent[0]["headers"])
                assert (sent[0]["status"], sent[1]["body"]) == (201, b'{"done": true}')
                assert headers[b"idempotent-replayed"] == b"true"
                assert shop.till.runs == ["held"]
                await current().on_loop.idempotency.close()
                current()._on_loop = None
            finally:
                django_shop.urlpatterns.pop()

        shop.runner.run(scenario())


# The setting.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (None, "needs? the setting RETRYSAFE"),
        ({"CALLER": GLOBAL}, "needs STORE"),
        ({"STORE": "memory://"}, "needs CALLER"),
        ({"STORE": "memory://", "CALLER": GLOBAL, "RULE": []}, "has no RULE: it takes BREAKER"),
        ({"STORE": "mysql://db", "CALLER": GLOBAL}, "names no store"),
        ({"STORE": "memory://", "CALLER": 7}, "GLOBAL"),
        ({"STORE": "memory://", "CALLER": "GLOBAL"}, "no usable CALLER.*dotted name: GLOBAL"),
        ({"STORE": "memory://", "CALLER": GLOBAL, "RULES": "shop.no"}, "no usable RULES"),
        ({"STORE": "memory://", "CALLER": GLOBAL, "POLICY_PATH": "x"}, "starts with a slash"),
    ],
)
def test_mistakes_are_told_when_the_server_starts(options, told):
    from retrysafe.contrib.django.middleware import RetrysafeMiddleware

    with override_settings(RETRYSAFE=options), pytest.raises(ImproperlyConfigured, match=told):
        RetrysafeMiddleware(lambda request: None)


def test_the_setting_names_things_by_dotted_names_and_by_themselves():
    options = {
        "STORE": "memory://",
        "CALLER": "retrysafe.http.bearer_token",
        "POLICY": Policy(active_window=timedelta(hours=2)),
        "SECRET": "at least sixteen bytes",
        "RULES": "tests.contrib.test_django_middleware.SOME_RULES",
    }
    with override_settings(RETRYSAFE=options):
        made = current()
        assert made.protection._caller_of is bearer_token
        assert made.idempotency.policy.active_window == timedelta(hours=2)
        assert [route.rule for route in made.protection.table.routes] == SOME_RULES
        assert current() is made


SOME_RULES = [Rule(path="/somewhere")]


def test_a_changed_setting_is_made_anew():
    """As tests change it; what was made of the old one is closed."""
    options = {"STORE": MemoryStore(), "CALLER": GLOBAL}
    with override_settings(RETRYSAFE=options):
        first = current()
        with override_settings(RETRYSAFE=dict(options)):
            assert current() is not first
        assert first.idempotency._calls._gate.is_closed


def test_no_spelling_passes_a_rule_by(world):
    """`post`, and a slash more or less: the view runs once, and a 404 takes no key."""
    with open_shop(world, middleware=LIST, RULES=[Rule(path="/plain")]) as shop:
        assert shop.post("/plain/", key="a").status_code == 404
        assert (first := shop.post("/plain", key="a")).json() == {"run": 1}
        assert not is_replay(first)
        lower = shop.ask("post", "/plain", key="a", json={"amount": 7})
        assert (lower.json(), is_replay(lower)) == ({"run": 1}, True)


@pytest.mark.parametrize("path", ["/raising/missing", "/async-raising/missing"])
def test_a_404_of_a_view_is_kept_at_any_spelling(world, path):
    """The rule is spelled with a slash and the route without: the view has run."""
    with open_shop(world, middleware=LIST, RULES=[Rule(path=f"{path}/")]) as shop:
        replies = [shop.post(path) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [404, 404]
        assert ([is_replay(reply) for reply in replies], len(shop.till.runs)) == ([False, True], 1)


@pytest.mark.parametrize("path", ["/plain", "/async-plain"])
def test_a_key_that_no_rule_looks_at_is_reported(world, path, caplog):
    """Once for each route; not for a view that carries its own rule."""
    with (
        caplog.at_level("WARNING", "retrysafe"),
        open_shop(world, middleware=LIST, RULES=[Rule(path="/other")]) as shop,
    ):
        for _ in range(2):
            assert shop.post(path).status_code == 200
        assert shop.post("/charges").status_code == 201
    lines = [record.message for record in caplog.records if "no rule" in record.message]
    assert len(lines) == 1
    assert f"POST '{path}'" in lines[0]
