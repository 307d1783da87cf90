"""Flask: views that carry their own rules, driven by Flask's test client."""

from __future__ import annotations

import functools
import io
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from threading import Event

import pytest
from flask import Flask, g
from flask.views import MethodView

from retrysafe import GLOBAL, AsyncIdempotency, Idempotency, InvalidInput, Policy
from retrysafe.contrib.flask import Retrysafe
from retrysafe.errors import PolicyInvalid
from retrysafe.http import Breaker, Rule, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.http.callers import caller_of_credential
from retrysafe.stores import Condition, MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.contrib.flask_shop import Declined, Till, make_app, retrysafe


class Shop:
    """A running shop."""

    def __init__(self, idem, till, **options):
        self.idem, self.till = idem, till
        self.app = make_app(till)
        retrysafe.init_app(self.app, idem, **{"caller": bearer_token, **options})

    def ask(self, method, path, key="k-1", caller="alice", **options):
        headers = options.pop("headers", {})
        if caller is not None:
            headers["Authorization"] = f"Bearer {caller}"
        if key is not None:
            headers["Idempotency-Key"] = key
        # A client of its own for each request: cookies are not what is tested.
        return self.app.test_client().open(path, method=method, headers=headers, **options)

    def post(self, path="/charges", **options):
        if not options.keys() & {"data", "json"}:
            options["json"] = {"amount": 7}
        return self.ask("POST", path, **options)


@pytest.fixture
def make_shop():
    made = []

    def make(store=None, till=None, **options):
        idem = Idempotency(store or MemoryStore())
        made.append(idem)
        return Shop(idem, till or Till(), **options)

    yield make
    for idem in made:
        idem.close()


@pytest.fixture
def shop(make_shop):
    return make_shop()


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE orders (name TEXT)")
    return path


def is_replay(response):
    return response.headers.get("Idempotent-Replayed") == "true"


def problem(response):
    assert response.content_type == "application/problem+json"
    assert response.get_json()["status"] == response.status_code
    return response.get_json()["type"].partition("#")[2]


@pytest.mark.parametrize("path", ["/charges", "/async-charges"])
def test_a_view_runs_once_and_knows_its_attempt(shop, path):
    """A retry gets the first response; `g.idempotency` and `current_attempt()` are the attempt."""
    first, second = shop.post(path), shop.post(path)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.data == second.data
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert len(shop.till.runs) == 1


def test_a_replay_has_the_stored_headers_and_its_own_of_after_request(shop):
    """What the view said is replayed; what the application adds to every response is added."""
    first, second = shop.post(), shop.post()
    assert second.headers["Location"] == "/charges/1"
    assert second.headers["X-Total"] == "7"
    assert first.headers["X-Request-Id"] == "r-1"
    assert "X-Request-Id" not in second.headers
    assert first.headers["X-Served-By"] != second.headers["X-Served-By"]
    assert "seen=1" in second.headers["Set-Cookie"]
    assert second.content_type == "application/json"
    assert shop.till.order == ["before", "after", "teardown"] * 2


def test_keys_are_required_optional_or_off_as_the_view_says(shop):
    missing = shop.post(key=None)
    assert (missing.status_code, problem(missing)) == (400, "key-missing")
    assert missing.get_json()["instance"] == "/charges"
    assert problem(shop.post(key='"open')) == "key-invalid"
    assert problem(shop.post(caller=None)) == "caller-unknown"
    assert shop.till.runs == []
    assert shop.post("/notes", key=None).get_json() == {"run": 1, "is_protected": False}
    assert shop.post("/notes", key=None).get_json() == {"run": 2, "is_protected": False}
    assert [shop.post("/notes").get_json()["run"] for _ in range(2)] == [3, 3]
    assert [shop.post("/open").get_json()["run"] for _ in range(2)] == [4, 5]
    assert [shop.post("/plain").get_json()["run"] for _ in range(2)] == [6, 7]


def test_refusals_pass_after_request_as_well(shop):
    """A problem is a response like any other: cross-origin headers and the like are on it."""
    assert shop.post(key=None).headers["X-Served-By"] == "shop-2"


def test_another_request_under_the_key_is_refused(shop):
    """422 for another body, another view, another parameter; nothing runs."""
    shop.post()
    for path, body in (("/charges", {"amount": 8}), ("/notes", {"amount": 7})):
        reply = shop.post(path, json=body)
        assert (reply.status_code, problem(reply)) == (422, "key-reused")
    assert shop.post("/v1/refunds/1", key="r-1").status_code == 201
    assert problem(shop.post("/v1/refunds/2", key="r-1")) == "key-reused"
    assert shop.till.runs == ["charge", 1]


def test_keys_of_two_callers_never_meet(shop):
    shop.post()
    assert not is_replay(shop.post(caller="bob"))
    assert len(shop.till.runs) == 2


def test_the_caller_may_be_what_before_request_found_out(make_shop):
    """Views are protected after the application's own authentication."""
    seen = []

    def caller(request):
        seen.append(request.host.endpoint)
        return g.account

    shop = make_shop(caller=caller)
    assert problem(shop.post()) == "caller-unknown"
    assert shop.post(headers={"X-Account": "a"}).status_code == 201
    assert is_replay(shop.post(headers={"X-Account": "a"}))
    assert not is_replay(shop.post(headers={"X-Account": "b"}))
    assert set(seen) == {"charge"}


def test_one_of_two_racing_requests_runs(shop):
    """The second is told to come back while the first runs; afterwards it gets its response."""
    shop.till.started = Event()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.post)
        assert shop.till.started.wait(30)
        duplicate = shop.post()
        assert (duplicate.status_code, problem(duplicate)) == (409, "in-flight")
        assert int(duplicate.headers["Retry-After"]) >= 1
        accepted = shop.post(headers={"Prefer": "respond-async"})
        assert accepted.status_code == 202
        assert accepted.headers["Location"] == "/idempotency-status/k-1"
        waiting = pool.submit(lambda: None)
        shop.till.go_on.set()
        assert first.result().status_code == 201
        waiting.result()
    assert is_replay(shop.post())
    assert shop.till.runs == ["charge"]


def test_a_duplicate_may_ask_to_wait(shop):
    """Both are answered with the one response, and told how long was waited at most."""
    shop.till.started = Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shop.post, headers={"Prefer": "wait=20"})
        assert shop.till.started.wait(30)
        second = pool.submit(shop.post, headers={"Prefer": "wait=20"})
        shop.till.go_on.set()
        replies = [first.result(), second.result()]
    assert [reply.status_code for reply in replies] == [201, 201]
    assert replies[0].data == replies[1].data
    for reply in replies:
        assert reply.headers.getlist("Preference-Applied") == ["wait=10"]
    assert shop.till.runs == ["charge"]


def test_what_an_error_handler_answers_is_an_outcome(shop):
    """A decline that is raised is stored as the response that the application makes of it."""
    shop.till.error = Declined()
    first = shop.post()
    shop.till.error = None
    second = shop.post()
    assert [first.status_code, second.status_code] == [402, 402]
    assert second.get_json() == {"declined": True}
    assert first.headers["X-Reason"] == "credit"
    assert is_replay(second)
    assert shop.idem.read("k-1", caller=bearer(shop)).condition is Condition.FAILED


def bearer(shop):
    """The caller under which alice's keys are stored."""
    from tests.http.building import request

    token = bearer_token(request(headers=((b"authorization", b"Bearer alice"),)))
    return caller_of_credential(token, None)


def test_an_abort_is_an_outcome(shop):
    first, second = (shop.post(json={"outcome": "abort"}) for _ in range(2))
    assert [first.status_code, second.status_code] == [409, 409]
    assert first.data == second.data
    assert b"closed account" in second.data
    assert is_replay(second)
    assert shop.till.runs == ["charge"]


def test_an_exception_that_nobody_handles_frees_the_key(shop):
    """Flask answers with its 500, and the retry runs."""
    shop.till.error = LookupError("no ledger")
    assert shop.post().status_code == 500
    shop.till.error = None
    second = shop.post()
    assert (second.status_code, is_replay(second)) == (201, False)
    assert shop.idem.read("k-1", caller=bearer(shop)).record.attempt == 2


def test_in_testing_mode_the_exception_reaches_the_test(shop):
    """As without protection: it is the view's own exception, with its own traceback."""
    shop.app.testing = True
    shop.till.error = LookupError("no ledger")
    with pytest.raises(LookupError, match="no ledger") as raised:
        shop.post()
    assert raised.traceback[-1].name == "note"


def test_a_500_of_the_view_frees_the_key(shop):
    shop.app.register_error_handler(LookupError, lambda error: ("busy", 503))
    shop.till.error = LookupError()
    assert shop.post().status_code == 503
    shop.till.error = None
    assert shop.post().status_code == 201


# Bodies.


@pytest.mark.parametrize("way", ["data", "get_data", "stream", "input"])
def test_a_view_reads_the_body_as_it_likes(shop, way):
    """The body that was compared is still there, in each of Flask's ways to it."""
    reply = shop.post(f"/bodies/{way}", data=b'{"a":1}', content_type="application/json")
    assert reply.data == b'{"a":1}|7'
    again = shop.post(f"/bodies/{way}", data=b'{"a": 1}', content_type="application/json")
    assert (again.data, is_replay(again)) == (reply.data, True)


def test_a_view_reads_a_form(shop):
    assert shop.post("/bodies/form", data={"a": "1"}).data == b"{'a': '1'}|3"
    assert is_replay(shop.post("/bodies/form", data={"a": "1"}))
    assert problem(shop.post("/bodies/form", data={"a": "2"})) == "key-reused"


def upload(boundary, content=b"hello"):
    body = (
        b'--%b\r\nContent-Disposition: form-data; name="title"\r\n\r\nreport\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n'
        b"Content-Type: text/plain\r\n\r\n%b\r\n--%b--\r\n"
    ) % (boundary, boundary, content, boundary)
    return {"data": body, "content_type": f"multipart/form-data; boundary={boundary.decode()}"}


def test_an_upload_is_the_same_request_with_another_boundary(shop):
    """Clients make a new boundary for every try; another file is another request."""
    first = shop.post("/uploads", **upload(b"one"))
    assert first.get_json() == {"name": "a.txt", "content": "hello", "title": "report"}
    second = shop.post("/uploads", **upload(b"two"))
    assert (second.data, is_replay(second)) == (first.data, True)
    assert problem(shop.post("/uploads", **upload(b"three", b"other"))) == "key-reused"
    assert shop.till.runs == ["upload"]


def test_a_body_without_a_length_is_read_to_its_end(shop):
    """A server that decodes chunked bodies marks the end of the input."""
    environ = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    for expected in (False, True):
        reply = shop.ask(
            "POST",
            "/bodies/data",
            input_stream=io.BytesIO(b"abc"),
            environ_overrides=environ,
        )
        assert (reply.data[:3], is_replay(reply)) == (b"abc", expected)


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_over_the_limit_is_refused(shop, is_declared):
    """413, whether or not its length is declared; nothing runs."""
    options = {"data": b"x" * (1024 * 1024 + 1)}
    if not is_declared:
        options = {
            "input_stream": io.BytesIO(options["data"]),
            "environ_overrides": {"wsgi.input_terminated": True},
        }
    reply = shop.ask("POST", "/bodies/data", **options)
    assert (reply.status_code, problem(reply)) == (413, "body-too-large")
    assert shop.till.runs == []


@pytest.mark.parametrize("touch", ["form", "get_data", "data"])
def test_what_reads_the_body_first_does_not_take_it_away(shop, touch):
    """A `before_request` function that looks at the form, as protections against forgery do."""
    from flask import request

    shop.app.before_request_funcs[None].insert(0, lambda: (getattr(request, touch), None)[1])
    assert shop.post("/bodies/form", data={"a": "1"}).data == b"{'a': '1'}|3"
    assert problem(shop.post("/bodies/form", data={"a": "2"})) == "key-reused"


def hidden(view):
    """A decorator without `functools.wraps`: nobody sees what it wraps."""

    def unnamed():
        return view()

    return unnamed


def test_a_body_that_is_gone_is_told_and_never_taken_for_an_empty_one(make_shop):
    """Two requests whose bodies nobody can compare must not count as one."""
    from flask import request

    shop = make_shop()

    @retrysafe.idempotent()
    def view():
        return "ran"

    shop.app.add_url_rule("/hidden", "hidden", hidden(view), methods=["POST"])
    before = shop.app.before_request_funcs[None]
    assert shop.post("/hidden", data={"a": "1"}).data == b"ran"
    before.append(lambda: (request.get_data(), None)[1])
    assert is_replay(shop.post("/hidden", data={"a": "1"}))
    assert problem(shop.post("/hidden", data={"a": "2"})) == "key-reused"
    before[-1] = lambda: (request.form, None)[1]
    shop.app.testing = True
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"functools\.wraps"):
            shop.post("/hidden", data={"a": "2"})
        before[-1] = lambda: (request.data, None)[1]


# Responses.


def test_a_stream_is_stored_whole(shop):
    """Also one that needs the request while it runs."""
    first, second = shop.post("/stream"), shop.post("/stream")
    assert first.text == second.text == "0 /stream\n1 /stream\n2 /stream\n"
    assert is_replay(second)


def test_a_file_is_stored_whole(shop):
    first, second = shop.post("/files"), shop.post("/files")
    assert first.data == second.data == b"report"
    assert second.headers["Content-Disposition"] == first.headers["Content-Disposition"]
    assert is_replay(second)


@pytest.mark.parametrize(("path", "text"), [("/events", "data: 1\n\n"), ("/passing", "ab")])
def test_what_passes_is_not_sent_again(shop, path, text):
    """Events, and streams that are to pass; a retry is told that they are done."""
    first, second = shop.post(path), shop.post(path)
    assert (first.status_code, first.text) == (200, text)
    assert (second.status_code, problem(second)) == (409, "outcome-unavailable")
    assert len(shop.till.runs) == 1


def test_an_empty_response_is_replayed_without_a_type(shop):
    """A natural key, from the path's parameter; no header is needed."""
    first, second = (shop.ask("DELETE", "/things/pen", key=None) for _ in range(2))
    assert [first.status_code, second.status_code] == [204, 204]
    assert second.data == b""
    assert is_replay(second)
    assert shop.ask("DELETE", "/things/ink", key=None).status_code == 204
    assert shop.till.runs == ["pen", "ink"]


# Transactions.


def test_row_and_response_are_one_transaction(make_shop, database):
    """The response is stored by the view's own commit: any value that a view may return."""
    shop = make_shop(f"sqlite:///{database}", Till(database))
    first, second = (shop.post("/orders", json={"item": "pen"}) for _ in range(2))
    assert (first.status_code, first.get_json()) == (201, {"order": "pen"})
    assert (second.status_code, second.data) == (201, first.data)
    assert second.headers["Location"] == "/orders/1"
    assert is_replay(second)
    assert shop.till.orders() == ["pen"]
    assert len(shop.idem.read("k-1", caller=bearer(shop)).outcomes) == 1


def test_what_is_rolled_back_is_not_replayed(make_shop, database):
    shop = make_shop(f"sqlite:///{database}", Till(database))
    assert shop.post("/orders", json={"item": "pen", "fails": 1}).status_code == 500
    assert shop.till.orders() == []
    assert shop.post("/orders", json={"item": "pen", "fails": 1}).status_code == 500
    assert shop.till.runs == ["order", "order"]


def test_what_is_committed_is_replayed_whatever_follows(make_shop, database):
    """The view fails after its commit: its client hears of that, and its retry of the outcome."""
    shop = make_shop(f"sqlite:///{database}", Till(database))
    assert shop.post("/orders", json={"item": "pen", "breaks": 1}).status_code == 500
    second = shop.post("/orders", json={"item": "pen", "breaks": 1})
    assert (second.status_code, is_replay(second)) == (201, True)
    assert shop.till.orders() == ["pen"]


def test_a_response_that_asks_for_a_retry_cannot_be_committed(make_shop, database):
    shop = make_shop(f"sqlite:///{database}", Till(database))
    assert shop.post("/orders", json={"item": "pen", "status": 503}).status_code == 500
    assert shop.till.orders() == []


def test_a_rule_with_a_transaction_makes_claim_writes_and_response_one(make_shop, database):
    """The view finds its connection in the attempt; what is not kept is rolled back."""
    shop = make_shop(f"sqlite:///{database}", Till(database))
    assert shop.idem.read("k-1", caller=bearer(shop)) is None  # The tables are there now.
    assert shop.post("/atomic-orders", json={"status": 503}).get_json() == {"order": "pen"}
    assert shop.till.orders() == []
    first, second = (shop.post("/atomic-orders", json={"status": 201}, key="b") for _ in "12")
    assert (first.status_code, is_replay(second)) == (201, True)
    assert shop.till.orders() == ["pen"]
    shop.till.error = LookupError()
    assert shop.post("/atomic-orders", json={"status": 201}, key="c").status_code == 500
    assert shop.till.orders() == ["pen"]


# Views of classes, and where views stand.


def test_the_decorator_works_on_classes_and_on_their_methods(shop):
    for path in ("/carts", "/boxes/3"):
        assert [shop.post(path, key=path).get_json()["run"] for _ in range(2)] == [
            len(shop.till.runs)
        ] * 2
    assert shop.ask("GET", "/carts").get_json() == "cart"
    before = len(shop.till.runs)
    for _ in range(2):
        shop.ask("PUT", "/boxes/3")
    assert len(shop.till.runs) == before + 2
    assert shop.idem.read("/boxes/3", caller=bearer(shop)).record.operation == "make a box"


def test_reading_is_never_protected(shop):
    assert shop.ask("GET", "/v1/refunds/4", key=None).get_json() == {"refund": 4}


def test_an_application_under_a_prefix(shop):
    """Links lead to the application, wherever it is mounted; the mount is part of the path."""
    mounted = {"environ_overrides": {"SCRIPT_NAME": "/shop"}}
    reply = shop.post(key=None, **mounted)
    assert reply.get_json()["type"] == "/shop/idempotency-policy#key-missing"
    shop.post(**mounted)
    assert is_replay(shop.post(**mounted))
    assert problem(shop.post()) == "key-reused"


def test_a_middleware_around_the_application_protects_once(make_shop):
    """Its claim covers the view; a second one would find the key in flight."""
    shop = make_shop()
    shop.app.wsgi_app = WSGIIdempotencyMiddleware(shop.app.wsgi_app, shop.idem, caller=bearer_token)
    assert shop.post().status_code == 201
    assert is_replay(shop.post())
    assert shop.till.runs == ["charge"]


# The pages.


def test_the_policy_page_lists_the_views(shop):
    """Each view with its rule under its whole path; those that only read are not there."""
    page = shop.ask("GET", "/idempotency-policy", headers={"Accept": "application/json"})
    routes = {route["path"]: route for route in page.get_json()["routes"]}
    assert routes.keys() == {
        *("/charges", "/async-charges", "/notes", "/open", "/orders", "/uploads", "/stream"),
        *("/bodies/{way}", "/events", "/passing", "/files", "/things/{name}", "/carts"),
        *("/boxes/{size}", "/v1/refunds/{number}", "/atomic-orders"),
    }
    assert routes["/notes"]["key"] == "optional"
    assert routes["/open"]["key"] == "off"
    assert routes["/v1/refunds/{number}"]["retention_seconds"] == 7 * 86_400
    assert routes["/boxes/{size}"]["methods"] == ["POST"]
    assert "x-total" in routes["/charges"]["stored_headers"]
    html = shop.ask("GET", "/idempotency-policy")
    assert b"POST /charges" in html.data
    head = shop.ask("HEAD", "/idempotency-policy")
    assert (head.status_code, head.data) == (200, b"")
    assert shop.post("/idempotency-policy").status_code == 405


@pytest.mark.parametrize("readers", [False, lambda request: "X-Staff" in request.host.headers])
def test_the_policy_page_can_be_for_some_or_for_nobody(make_shop, readers):
    """Others find nothing there."""
    shop = make_shop(policy_page=readers)
    assert shop.ask("GET", "/idempotency-policy").status_code == 404
    staff = shop.ask("GET", "/idempotency-policy", headers={"X-Staff": "yes"})
    assert staff.status_code == (200 if readers else 404)


def test_the_status_page_shows_the_callers_own_key(shop):
    """Also a key with slashes; another caller is told that there is no such key."""
    shop.post(key='"a//b c/"')
    mine = shop.ask("GET", "/idempotency-status/a%2F%2Fb%20c%2F", key=None)
    assert (mine.status_code, mine.get_json()["amount"]) == (201, 7)
    other = shop.ask("GET", "/idempotency-status/a%2F%2Fb%20c%2F", caller="bob")
    assert (other.status_code, problem(other)) == (404, "key-unknown")


# The store.


def test_a_store_that_is_down_refuses_and_fails_open_only_if_asked(make_shop):
    """503 with Retry-After; with `fail_open` the view runs, and its response says so."""
    store = FaultyStore(MemoryStore())
    breaker = Breaker(failures_limit=1, open_seconds=1000)
    shop = make_shop(store, fail_open=True, breaker=breaker)
    store.fail(Moment.AFTER, method="commit", times=None)
    for run in (1, 2):
        reply = shop.post("/notes", key=f"k-{run}")
        assert reply.get_json() == {"run": run, "is_protected": False}
        assert reply.headers["Idempotency-Protected"] == "false"
    again = shop.post("/notes", key="k-1")
    assert (again.get_json(), is_replay(again)) == ({"run": 1, "is_protected": False}, True)
    assert again.headers["Idempotency-Protected"] == "false"
    assert problem(shop.post("/notes", key="k-1", json={"other": 1})) == "key-reused"
    closed = make_shop(store)
    refused = closed.post()
    assert (refused.status_code, problem(refused)) == (503, "store-unavailable")
    assert "Retry-After" in refused.headers


def test_an_outcome_that_could_not_be_stored_is_reported(make_shop):
    store = FaultyStore(MemoryStore())
    policy = Policy(settle_patience=timedelta(0))
    shop = make_shop(store, rules=[Rule(path="/plain", policy=policy)])
    store.fail(
        Moment.BEFORE, method="commit", times=None, when=lambda call: bool(call.arguments[1])
    )
    reply = shop.post("/plain")
    assert (reply.status_code, problem(reply)) == (500, "outcome-not-stored")
    assert shop.till.runs == ["plain"]


# Setting up.


def test_mistakes_are_told_when_the_application_is_made():
    app = Flask(__name__)
    with pytest.raises(InvalidInput, match="Idempotency object, got"):
        Retrysafe(app, AsyncIdempotency(MemoryStore()), caller=GLOBAL)
    with pytest.raises(InvalidInput, match="along with"):
        Retrysafe(app)
    with pytest.raises(InvalidInput, match="init_app"):
        Retrysafe(caller=GLOBAL)
    with pytest.raises(PolicyInvalid, match="no path"):
        retrysafe.idempotent(path="/charges")
    with pytest.raises(TypeError, match="unexpected"):
        retrysafe.idempotent(keys=1)
    with Idempotency(MemoryStore()) as idem:
        with pytest.raises(InvalidInput, match="GLOBAL"):
            Retrysafe(app, idem, caller="alice")
        Retrysafe(app, idem, caller=GLOBAL)
        with pytest.raises(InvalidInput, match="call init_app once"):
            Retrysafe(app, idem, caller=GLOBAL)


def test_mistakes_are_told_when_a_view_is_decorated():
    """What would else be an error of Python without a hint at what to write."""
    with pytest.raises(InvalidInput, match=r"write @retrysafe\.idempotent\(\) above the view"):
        retrysafe.idempotent(lambda: "x")
    with pytest.raises(InvalidInput, match=r"decorators = \[retrysafe\.idempotent\(\)\]"):
        retrysafe.idempotent()(MethodView)


def plain(view):
    """A decorator as people write them."""

    @functools.wraps(view)
    def called():
        return view()

    return called


@pytest.mark.parametrize("inner", [lambda view: view, plain])
@pytest.mark.parametrize("outer", [lambda view: view, plain])
def test_a_route_below_the_decorator_is_an_error_of_the_server(inner, outer):
    """Flask has registered the view without its protection, and would run it for every retry."""
    app, runs = Flask(__name__), []
    app.testing = True

    def charge():
        runs.append("charge")
        return "charged"

    with Idempotency(MemoryStore()) as idem:
        Retrysafe(app, idem, caller=GLOBAL)
        registered = app.post("/charges")(inner(charge))
        retrysafe.idempotent()(outer(registered))
        for _ in range(2):
            with pytest.raises(InvalidInput, match="'charge' is not protected: write its route"):
                app.test_client().post("/charges", headers={"Idempotency-Key": "k"})
    assert runs == []


def test_a_decorator_that_hides_the_rule_is_no_mistake():
    """It tells what it wraps and nothing more; the view below it is protected."""
    app, runs = Flask(__name__), []
    app.testing = True

    def charge():
        runs.append("charge")
        return "charged"

    with Idempotency(MemoryStore()) as idem:
        Retrysafe(app, idem, caller=GLOBAL)
        hidden = plain(retrysafe.idempotent()(charge))
        vars(hidden).pop("retrysafe_rule")
        app.post("/charges")(hidden)
        for _ in range(2):
            headers = {"Idempotency-Key": "k"}
            assert app.test_client().post("/charges", headers=headers).status_code == 200
    assert runs == ["charge"]


def test_a_function_may_be_a_protected_view_and_a_plain_one():
    """Registered both ways, somebody has meant it."""
    app, runs = Flask(__name__), []
    app.testing = True

    def charge():
        runs.append("charge")
        return "charged"

    with Idempotency(MemoryStore()) as idem:
        Retrysafe(app, idem, caller=GLOBAL)
        app.add_url_rule(
            "/protected", "protected", retrysafe.idempotent()(charge), methods=["POST"]
        )
        app.add_url_rule("/plain", "plain", plain(charge), methods=["POST"])
        client = app.test_client()
        for path in ("/protected", "/protected", "/plain", "/plain"):
            assert client.post(path, headers={"Idempotency-Key": "k"}).status_code == 200
    assert len(runs) == 3


def test_methods_of_an_object_are_views_too():
    """They have no place for a note, and need none."""
    app = Flask(__name__)
    app.testing = True

    class Till:
        runs = 0

        def charge(self):
            self.runs += 1
            return "charged"

    till = Till()
    with Idempotency(MemoryStore()) as idem:
        Retrysafe(app, idem, caller=GLOBAL)
        app.post("/charges")(retrysafe.idempotent()(till.charge))
        for _ in range(2):
            assert app.test_client().post("/charges", headers={"Idempotency-Key": "k"}).text
    assert till.runs == 1


def test_an_application_without_protection_says_so():
    """A forgotten `init_app` must not let requests run unprotected."""
    app = make_app(Till())
    app.testing = True
    with pytest.raises(InvalidInput, match="init_app"):
        app.test_client().post("/charges", json={"amount": 1})
