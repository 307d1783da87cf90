"""Flask: rules for whole paths, and an application that a server forks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
from flask import Flask, request

from retrysafe import FOREVER, GLOBAL, Idempotency
from retrysafe.contrib.flask import Retrysafe
from retrysafe.errors import PolicyInvalid
from retrysafe.http import FieldsKey, Rule
from retrysafe.stores import MemoryStore
from tests.contrib.flask_shop import Declined
from tests.contrib.test_flask_views import Shop, Till, is_replay, problem
from tests.docs.documents import ROOT


@pytest.fixture
def make_shop():
    made = []

    def make(*rules):
        idem = Idempotency(MemoryStore())
        made.append(idem)
        return Shop(idem, Till(), rules=rules)

    yield make
    for idem in made:
        idem.close()


def test_rules_protect_views_without_a_decorator(make_shop):
    """After `before_request`, with error handlers: as if the view had a decorator."""
    shop = make_shop(Rule(path="/plain"))
    assert problem(shop.post("/plain", key=None)) == "key-missing"
    shop.till.error = Declined()
    first = shop.post("/plain")
    shop.till.error = None
    second = shop.post("/plain")
    assert (first.status_code, second.status_code) == (402, 402)
    assert is_replay(second)
    assert shop.till.order == ["before", "after", "teardown"] * 3


def test_a_rule_that_is_not_in_a_list_is_refused():
    """The refusal names the way that Flask's extension has: it takes no single rule."""
    with closing(Idempotency(MemoryStore())) as idem, pytest.raises(PolicyInvalid) as refused:
        Retrysafe(Flask("shop"), idem, caller=GLOBAL, rules=Rule(path="/plain"))
    assert str(refused.value) == "rules takes a list: rules=[Rule(…)]"


def test_a_decorator_counts_more_than_a_rule(make_shop):
    """The view's own rule says that a key is optional, or that there is none."""
    shop = make_shop(Rule(path="/*"))
    assert shop.post("/notes", key=None).status_code == 200
    assert [shop.post("/open").get_json()["run"] for _ in range(2)] == [2, 3]
    assert problem(shop.post("/plain", key=None)) == "key-missing"


def test_a_method_of_a_class_may_have_its_own_rule(make_shop):
    """POST carries a rule; PUT, beside it, is found by its path."""
    shop = make_shop(Rule(path="/boxes/{size}", name="by path"))
    assert [shop.ask(method, "/boxes/3", key=method).status_code for method in ("POST", "PUT")] == [
        200,
        200,
    ]
    assert is_replay(shop.ask("PUT", "/boxes/3", key="PUT"))
    assert is_replay(shop.ask("POST", "/boxes/3", key="POST"))


@pytest.mark.parametrize(("name", "statuses"), [("size", [200, 422]), ("of_the_rule", [200, 400])])
def test_a_natural_key_takes_names_of_the_rule_and_of_the_view(make_shop, name, statuses):
    """Of the view's name Flask has made a value; the rule's own is text, in one spelling."""
    source = FieldsKey(f"{{{name}}}", window=FOREVER)
    shop = make_shop(Rule(path=f"/boxes/{{{name}}}", methods=("PUT",), key=source))
    replies = [shop.ask("PUT", path, key=None) for path in ("/boxes/7", "/boxes/07")]
    assert [reply.status_code for reply in replies] == statuses
    assert is_replay(shop.ask("PUT", "/boxes/7", key=None))
    assert shop.till.runs == [7]


def test_a_natural_key_of_a_parameter_that_a_view_has_not_is_refused():
    """With the first request, whatever it asks for; unless functions of the application add it."""

    def answers(*, adds):
        app, retrysafe = Flask("shop"), Retrysafe()
        app.testing = True

        @app.post("/orders/<int:order>")
        @retrysafe.idempotent(key=FieldsKey("{number}", window=FOREVER))
        def cancel(order, number=None):
            return "cancelled"

        if adds:
            app.url_value_preprocessor(lambda endpoint, values: values and values.update(number=1))
        with closing(Idempotency(MemoryStore())) as idem:
            retrysafe.init_app(app, idem, caller=GLOBAL)
            return app.test_client().post("/orders/7" if adds else "/nowhere").status_code

    assert answers(adds=True) == 200
    with pytest.raises(PolicyInvalid, match=r"has no such parameter \(it has \{order\}\)"):
        answers(adds=False)


def test_a_parameter_is_that_of_the_rules_path():
    """The view may call the shop what the rule calls the order: all its orders had one key."""
    app = Flask("shop")

    @app.post("/shops/<id>/orders/<order>")
    def cancel(**names):
        return "cancelled"

    rule = Rule(path="/shops/{shop}/orders/{id}", key=FieldsKey("{shop}", "{id}", window=FOREVER))
    with closing(Idempotency(MemoryStore())) as idem:
        Retrysafe(app, idem, caller=GLOBAL, rules=[rule])
        client = app.test_client()
        asked = ["/shops/1/orders/7", "/shops/1/orders/8", "/shops/7/orders/1", "/shops/1/orders/7"]
        replies = [client.post(path) for path in asked]
    assert [reply.status_code for reply in replies] == [200] * 4
    assert [is_replay(reply) for reply in replies] == [False, False, False, True]


def test_hosts_do_not_share_keys_that_are_made_here():
    """A payment to one shop would get the response of another one."""

    def first_request(**options):
        app, retrysafe = Flask("shop"), Retrysafe()
        app.testing = True

        @app.post("/pay", subdomain="a")
        @retrysafe.idempotent(key=FieldsKey("/order", window=FOREVER), **options)
        def pay():
            raise AssertionError

        with closing(Idempotency(MemoryStore())) as idem:
            retrysafe.init_app(app, idem, caller=GLOBAL)
            return app.test_client().get("/nowhere").status_code

    assert first_request(name="a: pay") == 404
    with pytest.raises(PolicyInvalid, match="do not tell hosts apart"):
        first_request()


def test_what_no_view_answers_is_not_protected(make_shop):
    """A path that does not exist and a method that is not allowed store nothing."""
    shop = make_shop(Rule(path="/*"))
    assert shop.post("/nowhere", key=None).status_code == 404
    assert shop.ask("DELETE", "/plain", key=None).status_code == 405


def test_a_rule_can_take_paths_out(make_shop):
    shop = make_shop(Rule(path="/plain", protected=False), Rule(path="/*"))
    assert [shop.post("/plain", key=None).get_json()["run"] for _ in range(2)] == [1, 2]


def test_the_body_is_kept_for_rules_as_well(make_shop):
    """The form was read by the application first, and is compared all the same."""
    shop = make_shop(Rule(path="/plain"))
    shop.app.before_request_funcs[None].append(lambda: (request.form, None)[1])
    shop.post("/plain", data={"a": "1"})
    assert problem(shop.post("/plain", data={"a": "2"})) == "key-reused"


def test_rules_stand_on_the_policy_page(make_shop):
    shop = make_shop(Rule(path="/v2/*", methods=("POST",)))
    page = shop.ask("GET", "/idempotency-policy", headers={"Accept": "application/json"})
    paths = [route["path"] for route in page.get_json()["routes"]]
    assert paths[0] == "/v2/*"
    assert "/charges" in paths


# A server that loads the application and then forks.

SERVED = """
import os
from flask import Flask, g
from retrysafe import GLOBAL, Idempotency
from retrysafe.contrib.flask import Retrysafe

idem = Idempotency("sqlite:///" + os.environ["SHOP_FILE"])
app = Flask(__name__)
retrysafe = Retrysafe(app, idem, caller=GLOBAL)

@app.post("/charges")
@retrysafe.idempotent()
def charge():
    return {"process": os.getpid(), "attempt": g.idempotency.number}, 201

# Used before the server forks: its connection and its heartbeat belong to the parent.
assert app.test_client().post("/charges", headers={"Idempotency-Key": "first"}).status_code == 201
"""


@pytest.fixture
def served(tmp_path):
    """The address of the application under gunicorn, preloaded, with two processes of threads."""
    (tmp_path / "served.py").write_text(SERVED)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--threads", "4"),
            *("--bind", f"127.0.0.1:{port}", "--log-level", "warning", "served:app"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)]),
            "SHOP_FILE": str(tmp_path / "shop.db"),
        },
    )
    try:
        for _ in range(300):
            assert server.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        assert server.wait(30) == 0


def test_a_preloaded_application_keeps_its_promise_in_every_process(served):
    """What ran before the fork is replayed by the children, and they run each key once between
    them."""

    def post(key):
        # Every request has a connection of its own, so that both processes get some.
        return httpx.post(f"{served}/charges", headers={"Idempotency-Key": key}, timeout=60)

    assert is_replay(post("first"))
    keys = [f"k-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(post, keys * 3))
    done = [reply for reply in replies if reply.status_code == 201]
    assert {reply.status_code for reply in replies} <= {201, 409}
    assert sum(not is_replay(reply) for reply in done) == len(keys)
    again = list(map(post, keys))
    assert all(map(is_replay, again))
    assert all(reply.json()["attempt"] == 1 for reply in again)
    assert len({reply.json()["process"] for reply in again}) == 2


def test_a_key_that_comes_to_a_view_without_a_rule_is_reported(make_shop, caplog):
    """Once for each route; not for views that carry a rule, or are taken out by one."""
    shop = make_shop(Rule(path="/plain/{more}"))
    with caplog.at_level("WARNING", "retrysafe"):
        for path in ("/plain", "/plain", "/charges"):
            assert shop.post(path).status_code < 300
    lines = [record.message for record in caplog.records if "no rule" in record.message]
    assert len(lines) == 1
    assert "POST '/plain'" in lines[0]


def test_a_method_in_lower_case_is_no_other_method(make_shop):
    """Flask takes `post` for POST, and the view's rule does too."""
    shop = make_shop()
    first, again = shop.post(), shop.post(environ_overrides={"REQUEST_METHOD": "post"})
    assert (first.status_code, again.status_code) == (201, 201)
    assert is_replay(again)
    assert len(shop.till.runs) == 1
