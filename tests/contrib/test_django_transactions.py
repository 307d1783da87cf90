"""Django: outcomes and transactions, the view's own and those of ATOMIC_REQUESTS."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.db import OperationalError, connections, transaction

from retrysafe.contrib.django import views
from retrysafe.contrib.django.transactions import hook_failure
from retrysafe.http import Rule
from retrysafe.stores import Condition
from tests.contrib import django_shop
from tests.contrib.django_visits import MIDDLEWARE, database, is_replay, open_shop


@pytest.fixture(params=["wsgi", "asgi"])
def world(request):
    return request.param


@contextmanager
def opened(world, path, *, atomic_requests=False, **options):
    """A shop whose keys and whose orders are in one file."""
    with (
        database(path / "shop.db", atomic_requests=atomic_requests) as url,
        open_shop(world, STORE=url, **options) as shop,
    ):
        shop.till.alias = "shop"
        yield shop


@pytest.mark.parametrize("path", ["/orders", "/async-orders"])
def test_row_and_response_are_one_transaction(world, path, tmp_path):
    """The response is stored by the view's own commit, also in a thread of an async view."""
    with opened(world, tmp_path) as shop:
        first, second = (shop.post(path, json={"item": "pen"}) for _ in range(2))
        assert (first.status_code, first.json()) == (201, {"order": "pen"})
        assert (second.content, is_replay(second)) == (first.content, True)
        assert shop.till.orders() == ["pen"]
        assert len(shop.idem.read("k-1", caller="user:alice").outcomes) == 1


@pytest.mark.parametrize("path", ["/orders", "/async-orders"])
def test_what_is_rolled_back_is_not_replayed(world, path, tmp_path):
    with opened(world, tmp_path) as shop:
        for _ in range(2):
            assert shop.post(path, json={"item": "pen", "fails": 1}).status_code == 500
        assert shop.till.orders() == []
        assert shop.till.runs == ["order", "order"]


def test_a_response_that_asks_for_a_retry_cannot_be_committed(world, tmp_path):
    with opened(world, tmp_path) as shop:
        assert shop.post("/orders", json={"item": "pen", "status": 503}).status_code == 500
        assert shop.till.orders() == []


def test_a_decline_is_committed_as_a_failure(world, tmp_path):
    with opened(world, tmp_path) as shop:
        for _ in range(2):
            assert shop.post("/orders", json={"item": "pen", "status": 402}).status_code == 402
        stored = shop.idem.read("k-1", caller="user:alice")
        assert stored.condition is Condition.FAILED
        assert shop.till.orders() == ["pen"]


@pytest.mark.parametrize("atomic_requests", [False, True])
def test_a_rule_with_a_transaction_makes_claim_writes_and_response_one(
    world, tmp_path, atomic_requests
):
    """The view finds its connection in the attempt; what is not kept is rolled back."""
    with opened(world, tmp_path, atomic_requests=atomic_requests) as shop:
        assert shop.idem.read("k-1", caller="user:alice") is None  # The tables are there now.
        assert shop.post("/atomic-orders", json={"status": 503}).json() == {"order": "pen"}
        assert shop.till.orders() == []
        first, second = (shop.post("/atomic-orders", json={"status": 201}, key="b") for _ in "12")
        assert (first.status_code, is_replay(second)) == (201, True)
        assert shop.till.orders() == ["pen"]
        shop.till.error = LookupError()
        assert shop.post("/atomic-orders", json={"status": 201}, key="c").status_code == 500
        assert shop.till.orders() == ["pen"]
        assert shop.idem.read("c", caller="user:alice") is None


@pytest.mark.parametrize("path", ["/hooked", "/hooked-by-rule", "/hooked-and-told"])
def test_a_hook_that_fails_after_the_commit_does_not_free_the_key(
    world, path, tmp_path, monkeypatch
):
    """The row is there; every further run would write another one. The server's log says why, and
    names the view and the way out."""
    raised = []
    monkeypatch.setattr(
        views, "hook_failure", lambda *given: raised.append(hook_failure(*given)) or raised[-1]
    )
    rules = [Rule(path="/hooked-by-rule")]
    names = [*django_shop.SETTINGS["MIDDLEWARE"], MIDDLEWARE]
    with opened(world, tmp_path, RULES=rules, middleware=names) as shop:
        replies = [shop.post(path) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [500, 500, 500]
        assert shop.till.runs == ["hooked"]
        assert shop.till.orders() == ["pen"]
        assert replies[1].json()["code"] == "idempotency_operation_failed"
        stored = shop.idem.read("k-1", caller="user:alice")
        assert stored.condition is Condition.FAILED
    (failure,) = raised
    assert all(word in str(failure) for word in ("hooked", "robust=True", "complete_in"))


# ATOMIC_REQUESTS.


def test_the_transaction_of_the_request_commits_before_the_outcome_is_stored(world, tmp_path):
    """Else a commit that fails would leave an outcome without its writes. SQLite shows the order:
    while the transaction is open, nobody else could write the outcome."""
    with opened(world, tmp_path, atomic_requests=True) as shop:
        first, second = shop.post("/writing"), shop.post("/writing")
        assert (first.status_code, is_replay(second)) == (201, True)
        assert shop.till.atomic_blocks == [1]
        assert shop.till.orders() == ["pen"]


def test_a_failed_commit_leaves_no_outcome(world, tmp_path, monkeypatch):
    """The writes are gone, so the retry must run."""
    with opened(world, tmp_path, atomic_requests=True) as shop:
        wrapper = type(connections["shop"])
        commit = wrapper._commit

        def failing(self):
            monkeypatch.setattr(wrapper, "_commit", commit)
            raise OperationalError("the disk is full")

        monkeypatch.setattr(wrapper, "_commit", failing)
        assert shop.post("/writing").status_code == 500
        assert shop.till.orders() == []
        second = shop.post("/writing")
        assert (second.status_code, is_replay(second)) == (201, False)
        assert shop.till.orders() == ["pen"]


def test_an_exception_rolls_the_request_back_and_is_stored_all_the_same(world, tmp_path):
    """A 404 that the view raises is an outcome, and undoes what the view wrote, as in Django."""
    from django.http import Http404

    with opened(world, tmp_path, atomic_requests=True) as shop:
        shop.till.error = Http404()
        assert [shop.post("/writing").status_code for _ in range(2)] == [404, 404]
        assert shop.till.orders() == []
        assert shop.till.runs == ["writing"]


def test_unprotected_runs_have_their_transaction_too(world, tmp_path):
    """The view is exempt from Django's own: a GET of a class must not lose it."""
    with opened(world, tmp_path, atomic_requests=True) as shop:
        assert shop.ask("GET", "/carts").status_code == 200
        shop.post("/carts")
        assert shop.till.atomic_blocks == [1, 1]


@pytest.mark.parametrize("path", ["/writing-alone", "/writing-alone-inside"])
def test_a_view_may_do_without_the_transaction(world, path, tmp_path):
    """`non_atomic_requests` counts above and below the decorator."""
    with opened(world, tmp_path, atomic_requests=True) as shop:
        assert shop.post(path).status_code == 201
        assert shop.till.atomic_blocks == [0]


@pytest.mark.parametrize("path", ["/async-charges", "/async-carts", "/async-boxes"])
def test_async_views_are_refused_with_it_as_in_django(world, path, tmp_path):
    """Django has no transactions for them; running them without one would be a silent loss."""
    with opened(world, tmp_path, atomic_requests=True) as shop:
        assert shop.post(path).status_code == 500
        assert shop.till.runs == []


@pytest.mark.parametrize("path", ["/misplaced", "/boxes/3"])
def test_a_transaction_around_a_protected_view_is_refused(world, path, tmp_path, caplog):
    """Its commit would come after the outcome. `transaction.atomic` above the decorator, and the
    decorator on a method while the request is atomic, are told how to be put right."""
    with opened(world, tmp_path, atomic_requests=path == "/boxes/3") as shop:
        assert shop.post(path).status_code == 500
        assert "outcome would be stored before the commit" in caplog.text
        assert shop.till.runs == []
        assert shop.idem.read("k-1", caller="user:alice").condition is Condition.RELEASED


def test_the_transaction_of_a_test_case_is_no_hindrance(tmp_path):
    """Django's TestCase keeps one open around every test; no view sees it commit."""
    with opened("wsgi", tmp_path) as shop:
        around = transaction.atomic(using="shop")
        around._from_testcase = True
        with around:
            assert shop.post("/carts").status_code == 200
        assert shop.till.runs == ["cart"]
