"""Django: views that carry their own rules, behind WSGI and behind ASGI."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import pytest
from django.http import HttpRequest
from django.views import View

from retrysafe import FOREVER, GLOBAL, InvalidInput
from retrysafe.contrib.django.decorators import idempotent
from retrysafe.contrib.views import located
from retrysafe.errors import PolicyInvalid
from retrysafe.http import Breaker, FieldsKey, Rule
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.contrib.django_shop import SETTINGS
from tests.contrib.django_visits import MIDDLEWARE, Shop, is_replay, open_shop, problem

WORLDS = ["wsgi", "asgi"]


@pytest.fixture(params=WORLDS)
def world(request):
    return request.param


@pytest.fixture
def shop(world):
    with open_shop(world) as made:
        yield made


CHARGES = pytest.mark.parametrize("path", ["/charges", "/async-charges"])


@CHARGES
def test_a_view_runs_once_and_knows_its_attempt(shop, path):
    """A retry gets the first response, whether the view blocks or not, behind either server;
    `request.idempotency` and `current_attempt()` are the attempt."""
    first, second = shop.post(path), shop.post(path)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert second["Location"] == "/charges/1"
    assert len(shop.till.runs) == 1


def test_a_replay_has_the_stored_headers_and_its_own_of_the_middlewares(shop):
    """What the view said is replayed; what the project adds to every response is added."""
    first, second = shop.post(), shop.post()
    assert second["X-Total"] == "7"
    assert first["X-Request-Id"] == "r-1"
    assert first.cookies["cart"].value == "empty"
    assert "X-Request-Id" not in second.headers
    assert "cart" not in second.cookies
    assert second.cookies["seen"].value == "1"
    assert first["X-Served-By"] != second["X-Served-By"]
    assert second["Content-Type"] == "application/json"
    assert shop.till.order == ["in", "out"] * 2


def test_keys_are_required_optional_or_off_as_the_view_says(shop):
    missing = shop.post(key=None)
    assert (missing.status_code, problem(missing)) == (400, "key-missing")
    assert missing.json()["instance"] == "/charges"
    assert problem(shop.post(key='"open')) == "key-invalid"
    assert problem(shop.post(caller=None)) == "caller-unknown"
    assert shop.till.runs == []
    for path in ("/notes", "/async-notes"):
        shop.till.runs.clear()
        runs = [shop.post(path, key=None).json() for _ in range(2)]
        assert runs == [{"run": 1, "protected": False}, {"run": 2, "protected": False}]
        assert [shop.post(path, key=path).json()["run"] for _ in range(2)] == [3, 3]
    assert [shop.post("/open").json() for _ in range(2)] == [
        {"run": 4, "protected": False},
        {"run": 5, "protected": False},
    ]
    assert [shop.post("/plain").json()["run"] for _ in range(2)] == [6, 7]


@CHARGES
def test_another_request_under_the_key_is_refused(shop, path):
    """422 for another body, another view, another parameter; nothing runs."""
    shop.post(path)
    for other, body in ((path, {"amount": 8}), ("/notes", {"amount": 7})):
        reply = shop.post(other, json=body)
        assert (reply.status_code, problem(reply)) == (422, "key-reused")
    assert shop.post("/v1/refunds/1", key="r-1").status_code == 201
    assert problem(shop.post("/v1/refunds/2", key="r-1")) == "key-reused"
    assert len(shop.till.runs) == 2


@CHARGES
def test_keys_of_two_callers_never_meet(shop, path):
    shop.post(path)
    assert not is_replay(shop.post(path, caller="bob"))
    assert is_replay(shop.post(path, caller="alice"))
    assert shop.idem.read("k-1", caller="user:bob").condition is Condition.SUCCEEDED


def test_a_view_that_blocks_and_one_that_does_not_share_their_keys(shop):
    """Two faces, one store: a key of the one is known to the other."""
    shop.post("/charges")
    assert problem(shop.post("/async-charges")) == "key-reused"


@CHARGES
def test_one_of_two_racing_requests_runs(world, path):
    """The second is told to come back while the first runs; afterwards it gets its response."""
    with open_shop(world) as shop, ThreadPoolExecutor(1) as pool:
        shop.till.started = Event()
        # A server has one event loop; two clients in two threads have two, and so two processes'
        # worth of state. The thread that waits here is a process of its own, on the same store.
        first = pool.submit(shop.post, path)
        assert shop.till.started.wait(30)
        other = Shop("wsgi", shop.options)
        with pytest.MonkeyPatch.context() as patch:
            if path == "/async-charges":
                patch.setattr("retrysafe.contrib.django.decorators.ASGIRequest", type(None))
            duplicate = other.post(path)
            assert (duplicate.status_code, problem(duplicate)) == (409, "in-flight")
            assert int(duplicate["Retry-After"]) >= 1
            accepted = other.post(path, headers={"Prefer": "respond-async"})
            assert accepted.status_code == 202
            assert accepted["Location"] == "/idempotency-status/k-1"
        shop.till.go_on.set()
        assert first.result().status_code == 201
        assert is_replay(shop.post(path))
        assert len(shop.till.runs) == 1


@CHARGES
def test_a_wish_to_wait_is_answered(shop, path):
    """The mark is on the first response and on replays, once."""
    for _ in range(2):
        reply = shop.post(path, headers={"Prefer": "wait=20"})
        assert (reply.status_code, reply["Preference-Applied"]) == (201, "wait=10")


@pytest.mark.parametrize("prefix", ["/raising", "/async-raising"])
@pytest.mark.parametrize(("what", "status"), [("missing", 404), ("denied", 403), ("bad", 400)])
def test_what_django_answers_for_the_view_is_an_outcome(shop, prefix, what, status):
    """Exceptions that mean a response are stored as that response."""
    first, second = (shop.post(f"{prefix}/{what}") for _ in range(2))
    assert [first.status_code, second.status_code] == [status, status]
    assert first.content == second.content
    assert is_replay(second)
    assert shop.till.runs == [what]
    assert shop.idem.read("k-1", caller="user:alice").condition is Condition.FAILED


@pytest.mark.parametrize("prefix", ["/raising", "/async-raising"])
def test_an_exception_that_is_the_servers_failure_frees_the_key(shop, prefix):
    """Django answers with its 500, and the retry runs."""
    for attempt in (1, 2):
        assert shop.post(f"{prefix}/lost").status_code == 500
        assert shop.idem.read("k-1", caller="user:alice").record.attempt == attempt
    assert shop.till.runs == ["lost", "lost"]


def test_the_exception_reaches_the_test_client_as_ever(shop):
    """It is the view's own exception."""
    from django.test import Client

    headers = {"Idempotency-Key": "k", "Authorization": "Bearer alice"}
    with pytest.raises(LookupError, match="lost"):
        Client().post("/raising/lost", headers=headers)


# Bodies.


@pytest.mark.parametrize("way", ["body", "read"])
def test_a_view_reads_the_body_as_it_likes(shop, way):
    """The body that was compared is still there."""
    first = shop.post(f"/bodies/{way}", data=b'{"a":1}', kind="application/json")
    assert (first.status_code, first.content) == (201, b'{"a":1}')
    again = shop.post(f"/bodies/{way}", data=b'{"a": 1}', kind="application/json")
    assert (again.content, is_replay(again)) == (first.content, True)


def test_a_view_reads_a_form(shop):
    kind = "application/x-www-form-urlencoded"
    assert shop.post("/bodies/form", data=b"a=1", kind=kind).content == b"{'a': ['1']}"
    assert is_replay(shop.post("/bodies/form", data=b"a=1", kind=kind))
    assert problem(shop.post("/bodies/form", data=b"a=2", kind=kind)) == "key-reused"


def upload(boundary, content=b"hello", title=b"report"):
    body = (
        b'--%b\r\nContent-Disposition: form-data; name="title"\r\n\r\n%b\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\n%b\r\n--%b--\r\n"
    ) % (boundary, title, boundary, content, boundary)
    return {"data": body, "kind": f"multipart/form-data; boundary={boundary.decode()}"}


@pytest.mark.parametrize("path", ["/uploads", "/guarded-uploads"])
def test_an_upload_is_the_same_request_with_another_boundary(world, path):
    """Clients make a new boundary for every try; another file or field is another request. That
    holds when the check against forgery has read the form before the view was reached."""
    token = "a" * 32

    def ask(boundary, **parts):
        made = upload(boundary, **parts)
        field = '--{}\r\nContent-Disposition: form-data; name="csrfmiddlewaretoken"\r\n\r\n{}\r\n'
        made["data"] = field.format(boundary.decode(), token).encode() + made["data"]
        return shop.post(path, cookies={"csrftoken": token}, **made)

    with open_shop(world, check_csrf=True) as shop:
        first = ask(b"one")
        assert first.json() == {"name": "a.txt", "content": "hello", "title": "report"}
        second = ask(b"two")
        assert (second.content, is_replay(second)) == (first.content, True)
        # Put together again, this one is shorter than it was declared; nothing is missing.
        assert is_replay(ask(b"n" * 70))
        assert problem(ask(b"three", content=b"other")) == "key-reused"
        assert problem(ask(b"four", title=b"other")) == "key-reused"
        assert shop.till.runs == ["upload"]


@pytest.mark.parametrize("kind", ["json", "form"])
def test_a_body_that_is_gone_is_told_and_never_taken_for_an_empty_one(world, kind, caplog):
    """Two requests whose bodies nobody can compare must not count as one. With the middleware in
    the list, the body is kept before anybody reads it."""
    sent = {"json": {"amount": 7}} if kind == "json" else upload(b"one")
    other = {"json": {"amount": 8}} if kind == "json" else upload(b"one", title=b"other")
    with open_shop(world) as shop:
        assert shop.post("/greedy", **sent).status_code == 500
        assert "add retrysafe.contrib.django.middleware.RetrysafeMiddleware" in caplog.text
        assert shop.till.runs == []
    with open_shop(world, middleware=[*SETTINGS["MIDDLEWARE"], MIDDLEWARE]) as shop:
        assert shop.post("/greedy", **sent).status_code == 201
        assert is_replay(shop.post("/greedy", **sent))
        assert problem(shop.post("/greedy", **other)) == "key-reused"


def test_a_refusal_of_the_forgery_check_claims_no_key(world):
    """The check comes first, so the retry with the right token runs."""
    with open_shop(world, check_csrf=True) as shop:
        assert shop.post("/guarded-uploads", **upload(b"one")).status_code == 403
        assert shop.idem.read("k-1", caller="user:alice") is None


@pytest.mark.parametrize("size", [1024 * 1024 + 1, 3 * 1024 * 1024])
@CHARGES
def test_a_body_over_the_limit_is_refused(shop, path, size):
    """413 past the rule's limit, and past Django's own; nothing runs."""
    reply = shop.post(path, data=b"x" * size)
    assert (reply.status_code, problem(reply)) == (413, "body-too-large")
    assert shop.till.runs == []


def test_djangos_own_limit_counts_for_bodies_without_a_length(world):
    """A body that is found too large while it is read is refused as one that says so."""
    with open_shop(world, settings={"DATA_UPLOAD_MAX_MEMORY_SIZE": 10}) as shop:
        reply = shop.post(data=b"x" * 11)
        assert (reply.status_code, problem(reply)) == (413, "body-too-large")


# Responses.


@pytest.mark.parametrize("path", ["/stream", "/async-stream"])
def test_a_stream_is_stored_whole(shop, path):
    """A stream of either kind, behind a server of either kind."""
    first, second = shop.post(path), shop.post(path)
    assert first.whole == second.whole == b"0\n1\n2\n"
    assert (first.status_code, second.status_code) == (201, 201)
    assert is_replay(second)


@pytest.mark.parametrize("path", ["/endless", "/async-endless"])
def test_a_stream_without_an_end_passes_at_the_limit_and_ends_with_its_client(shop, path):
    """A stream of either kind, behind a server of either kind: what is past the limit comes piece
    by piece, also where Django itself would collect it to its end; a retry is told that it is done.
    """
    reply = shop.post(path, pieces=20)
    assert (reply.status_code, len(reply.read[0])) == (201, 1_100)
    assert {len(piece) for piece in reply.read[1:]} == {100}
    del reply
    shop.settle()
    assert (shop.till.pieces, shop.till.closed) == (11 + 19, 1)
    assert problem(shop.post(path)) == "outcome-unavailable"
    assert shop.till.runs == ["endless"]


@pytest.mark.parametrize("path", ["/endless-events", "/async-endless-events"])
def test_events_without_an_end_pass_as_they_come(shop, path):
    """Also those of the other kind, which Django itself would collect to their end."""
    reply = shop.post(path, pieces=5)
    assert (reply.status_code, reply.read) == (200, [b"x" * 100] * 5)
    del reply
    shop.settle()
    assert (shop.till.pieces, shop.till.closed) == (5, 1)
    assert problem(shop.post(path)) == "outcome-unavailable"


@pytest.mark.parametrize("path", ["/endless", "/async-endless"])
def test_a_stream_that_fails_within_its_limit_frees_the_key(shop, path):
    """Nothing of it was sent, and nothing of it is stored; it is closed."""
    shop.till.last_piece = 5
    assert shop.post(path).status_code == 500
    assert (shop.till.pieces, shop.till.closed) == (5, 1)
    shop.till.last_piece = None
    assert shop.post(path, pieces=1).status_code == 201
    assert shop.till.runs == ["endless", "endless"]


def test_a_file_is_stored_whole(shop):
    """The first response is still the view's own: with its cookies, and what it closes."""
    first = shop.post("/files")
    assert first.cookies["file"].value == "1"
    first.close()
    assert shop.till.opened.closed
    second = shop.post("/files")
    assert first.whole == second.whole == b"report"
    assert second["Content-Disposition"] == 'attachment; filename="r.txt"'
    assert is_replay(second)


@pytest.mark.parametrize(
    ("path", "text"),
    [("/events", b"data: 1\n\n"), ("/async-events", b"0\n1\n2\n"), ("/passing", b"ab")],
)
def test_what_passes_is_not_sent_again(world, path, text):
    """Events, and what is to pass; a retry is told that they are done."""
    if (world, path) == ("asgi", "/events"):
        path, text = "/async-events", b"0\n1\n2\n"  # Django itself warns of the other kind.
    if (world, path) == ("wsgi", "/async-events"):
        path, text = "/events", b"data: 1\n\n"
    with open_shop(world) as shop:
        first, second = shop.post(path), shop.post(path)
        assert (first.status_code, first.whole) == (200, text)
        assert (second.status_code, problem(second)) == (409, "outcome-unavailable")
        assert len(shop.till.runs) == 1


@pytest.mark.parametrize("path", ["/template", "/async-template"])
def test_a_response_that_is_rendered_later_is_rendered_for_the_store(shop, path):
    first, second = shop.post(path), shop.post(path)
    assert first.content == second.content == b"Hello pen"
    assert is_replay(second)


def test_an_empty_response_is_replayed_without_a_type(shop):
    """A natural key, from the path's parameter; no header is needed."""
    first, second = (shop.ask("DELETE", "/things/pen", key=None) for _ in range(2))
    assert [first.status_code, second.status_code] == [204, 204]
    assert (second.content, "Content-Type" in second.headers) == (b"", False)
    assert is_replay(second)
    shop.ask("DELETE", "/things/ink", key=None)
    assert shop.till.runs == ["pen", "ink"]


# Classes, and where views stand.


@pytest.mark.parametrize("prefix", ["", "async-"])
def test_the_decorator_works_on_classes_and_on_their_methods(shop, prefix):
    """By `method_decorator`, on `dispatch` and on a method; reading is never protected."""
    boxes = f"/{prefix}boxes" + ("" if prefix else "/3")
    for path in (f"/{prefix}carts", boxes):
        shop.till.runs.clear()
        assert [shop.post(path, key=path).json()["run"] for _ in range(2)] == [1, 1]
    assert shop.ask("GET", f"/{prefix}carts").json() == {"protected": False}
    if not prefix:
        for _ in range(2):
            shop.ask("PUT", boxes)
        assert shop.till.runs == [3, 3, 3]
        assert shop.idem.read(boxes, caller="user:alice").record.operation == "make a box"


def test_operations_are_named_by_their_routes(shop):
    """An operator finds a key's view by its route, also by one that is a regular expression."""
    for path, shown in (
        ("/v1/refunds/1", "POST /v1/refunds/{number}"),
        ("/v1/old-refunds/12", "POST /v1/old-refunds/{number}"),
    ):
        shop.post(path, key=path)
        assert shop.idem.read(path, caller="user:alice").record.operation == shown


def test_a_view_can_be_called_without_a_route():
    """As tests do that make a request and call the view."""
    from django.test import RequestFactory

    from tests.contrib.django_shop import charge

    with open_shop(CALLER=GLOBAL) as shop:
        replies = [
            charge(RequestFactory().post("/charges", headers={"Idempotency-Key": "k"}))
            for _ in range(2)
        ]
        assert [is_replay(reply) for reply in replies] == [False, True]
        assert shop.idem.read("k", caller=GLOBAL).record.operation == "charge"


def test_a_project_under_a_prefix(shop):
    """Links lead to the project, wherever it is mounted; the mount is part of the path."""
    if shop.world == "asgi":
        mounted = {"scope": {"root_path": "/shop"}}
        path = "/shop/charges"
    else:
        mounted = {"environ": {"SCRIPT_NAME": "/shop"}}
        path = "/charges"
    reply = shop.post(path, key=None, **mounted)
    assert reply.json()["type"] == "/shop/idempotency-policy#key-missing"
    assert reply.json()["instance"] == "/shop/charges"
    shop.post(path, **mounted)
    assert is_replay(shop.post(path, **mounted))
    assert problem(shop.post()) == "key-reused"


# The store.


@CHARGES
def test_a_store_that_is_down_refuses_and_fails_open_only_if_asked(world, path):
    """503 with Retry-After; with `FAIL_OPEN` the view runs, and its response says so."""
    store = FaultyStore(MemoryStore())
    notes = "/notes" if path == "/charges" else "/async-notes"
    breaker = Breaker(failures_limit=1, open_seconds=1000)
    store.fail(Moment.AFTER, method="commit", times=None)
    with open_shop(world, STORE=store, FAIL_OPEN=True, BREAKER=breaker) as shop:
        for run in (1, 2):
            reply = shop.post(notes, key=f"k-{run}")
            assert reply.json() == {"run": run, "protected": False}
            assert reply["Idempotency-Protected"] == "false"
        again = shop.post(notes, key="k-1")
        assert (again.json(), is_replay(again)) == ({"run": 1, "protected": False}, True)
        assert again["Idempotency-Protected"] == "false"
        assert problem(shop.post(notes, key="k-1", json={"other": 1})) == "key-reused"
    with open_shop(world, STORE=store) as shop:
        refused = shop.post(path)
        assert (refused.status_code, problem(refused)) == (503, "store-unavailable")
        assert "Retry-After" in refused.headers
    store.heal()


@CHARGES
def test_an_outcome_that_could_not_be_stored_is_reported(world, path):
    from retrysafe import Policy

    store = FaultyStore(MemoryStore())
    policy = Policy(settle_patience=timedelta(0))
    with open_shop(world, STORE=store, POLICY=policy) as shop:
        store.fail(
            Moment.BEFORE, method="commit", times=None, when=lambda call: bool(call.arguments[1])
        )
        reply = shop.post(path)
        assert (reply.status_code, problem(reply)) == (500, "outcome-not-stored")
        assert len(shop.till.runs) == 1
        store.heal()


def test_mistakes_are_told_when_the_view_is_made():
    with pytest.raises(PolicyInvalid, match="no path"):
        idempotent(path="/charges")
    with pytest.raises(PolicyInvalid, match="safe to repeat"):
        idempotent(methods=("GET",))
    with pytest.raises(TypeError, match="unexpected"):
        idempotent(keys=1)


def test_mistakes_are_told_when_a_view_is_decorated():
    """What would else be an error of Python without a hint at what to write."""
    with pytest.raises(InvalidInput, match=r"write @idempotent\(\) above the view"):
        idempotent(lambda request: None)
    with pytest.raises(InvalidInput, match=r"write @method_decorator\(idempotent\(\), name="):
        idempotent()(View)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_method_that_is_decorated_like_a_function_says_so(is_async):
    """It is called with its object first."""

    class Charges(View):
        @idempotent()
        def post(self, request):
            return None

        @idempotent()
        async def put(self, request):
            return None

    with pytest.raises(
        InvalidInput, match=r"Charges in the place of its request.*method_decorator"
    ):
        if is_async:
            asyncio.run(Charges().put(HttpRequest()))
        else:
            Charges().post(HttpRequest())


def test_a_natural_key_that_a_route_cannot_make_is_refused(shop, caplog):
    """As a mistake of the server, which no client could mend; extra arguments of a route count."""
    assert shop.post("/misnamed/pen", key=None).status_code == 500
    assert "{number} from the path, and /misnamed/{name} has no such parameter" in caplog.text
    assert shop.post("/named-so/pen", key=None).status_code == 204
    assert is_replay(shop.post("/named-so/pen", key=None))
    assert shop.till.runs == ["pen"]


def test_methods_of_a_view_without_a_plain_path_do_not_share_natural_keys():
    """To change order 7 and to delete it would have one key, unless a name says that they do."""
    expression, source = "/orders/[0-9]+", FieldsKey("/order", window=FOREVER)
    with pytest.raises(PolicyInvalid, match="POST, PUT, PATCH, DELETE would share them"):
        located(Rule(key=source), expression, name="orders")
    assert located(Rule(key=source, name="pay"), expression, name="orders").name == "pay"
    assert located(Rule(key=source, methods="POST"), expression, name="orders").name == "orders"
    assert located(Rule(), expression, name="orders").name == "orders"
