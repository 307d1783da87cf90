"""Django REST framework: the decorator around its views, inside them, and on methods of classes."""

from __future__ import annotations

import pytest

from retrysafe import GLOBAL
from retrysafe.contrib.django.callers import authenticated_user
from tests.contrib.django_visits import MIDDLEWARE, database, is_replay, open_shop, problem

VIEWS = pytest.mark.parametrize(
    "path", ["/api/outside", "/api/inside", "/api/charges", "/api/whole-charges"]
)


@pytest.fixture(params=["wsgi", "asgi"])
def world(request):
    return request.param


@pytest.fixture
def shop(world):
    with open_shop(world, CALLER=GLOBAL) as made:
        yield made


@VIEWS
def test_a_view_runs_once_and_its_rendered_response_is_replayed(shop, path):
    """Wherever the decorator stands, the body is what the renderer made of the data."""
    first, second = shop.post(path), shop.post(path)
    assert (first.status_code, first.content) == (201, b'{"run":1,"amount":7}')
    assert (second.status_code, second.content) == (201, first.content)
    assert second["Content-Type"] == first["Content-Type"] == "application/json"
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert shop.till.runs == ["charge"]


@VIEWS
def test_what_the_framework_answers_to_an_exception_is_an_outcome(shop, path):
    """A decline and a refused field are stored; the view does not run for the retry."""
    for number, (body, status) in enumerate((({"decline": 1}, 402), ({"invalid": 1}, 400))):
        first, second = (shop.post(path, json=body, key=f"k-{number}") for _ in range(2))
        assert (first.status_code, second.status_code) == (status, status)
        assert first.content == second.content
        assert is_replay(second)
    assert shop.till.runs == ["charge"]


@VIEWS
def test_an_exception_that_is_the_servers_failure_frees_the_key(shop, path):
    shop.till.error = LookupError()
    assert shop.post(path).status_code == 500
    shop.till.error = None
    assert not is_replay(shop.post(path))


@VIEWS
def test_another_request_under_the_key_is_refused(shop, path):
    shop.post(path)
    reply = shop.post(path, json={"amount": 8})
    assert (reply.status_code, problem(reply)) == (422, "key-reused")


@pytest.mark.parametrize("path", ["/api/inside", "/api/charges"])
def test_the_caller_may_be_whom_the_framework_has_authenticated(world, path):
    """Inside its views, the framework's own authentication has run by then."""
    with open_shop(world, CALLER=authenticated_user, middleware=[]) as shop:
        assert problem(shop.post(path)) == "caller-unknown"
        shop.post(path, headers={"X-Token": "a"})
        assert is_replay(shop.post(path, headers={"X-Token": "a"}))
        assert not is_replay(shop.post(path, headers={"X-Token": "b"}))
        assert shop.idem.read("k-1", caller="user:a") is not None


@pytest.mark.parametrize("middleware", [[], [MIDDLEWARE]])
def test_a_body_that_the_framework_has_parsed_is_compared(world, middleware):
    """A permission looks at the data before the method is reached."""
    with open_shop(world, CALLER=GLOBAL, middleware=middleware) as shop:
        first, second = shop.post("/api/looked-at"), shop.post("/api/looked-at")
        assert first.json() == {"run": 1, "amount": 7}
        assert is_replay(second)
        assert problem(shop.post("/api/looked-at", json={"amount": 8})) == "key-reused"


def test_row_and_response_are_one_transaction(world, tmp_path):
    """A response that is not rendered yet is rendered as its view would."""
    with database(tmp_path / "shop.db") as url, open_shop(world, STORE=url, CALLER=GLOBAL) as shop:
        shop.till.alias = "shop"
        first, second = (shop.post("/api/orders", json={"item": "pen"}) for _ in range(2))
        assert (first.status_code, first.content) == (201, b'{"order":"pen"}')
        assert (second.content, is_replay(second)) == (first.content, True)
        assert shop.till.orders() == ["pen"]


def test_a_response_that_nobody_can_render_yet_is_refused(world, tmp_path, caplog):
    """Around the class, nobody knows the renderer while the method runs; its writes are undone."""
    with database(tmp_path / "shop.db") as url, open_shop(world, STORE=url, CALLER=GLOBAL) as shop:
        shop.till.alias = "shop"
        assert shop.post("/api/whole-orders", json={"item": "pen"}).status_code == 500
        assert "put idempotent on the method" in caplog.text
        assert shop.till.orders() == []


def test_a_view_set_names_its_own_methods(shop):
    first, second = shop.post("/api/refunds"), shop.post("/api/refunds")
    assert (first.json(), is_replay(second)) == ({"run": 1}, True)
    assert shop.ask("DELETE", "/api/refunds").status_code == 204
    assert not is_replay(shop.ask("DELETE", "/api/refunds"))
