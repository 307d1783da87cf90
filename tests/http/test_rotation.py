"""Requests while secrets are replaced: callers that are credentials, and keys made from bodies."""

from __future__ import annotations

import pytest

from retrysafe import BodyKey
from retrysafe.http import HeaderKey, Rule, api_key, bearer_token, gateway_header
from retrysafe.stores import MemoryStore, SqliteStore
from tests.http.driving import new_store

OLD, NEW = b"the old secret, 16 or more", b"the new secret, 16 or more"
ACCOUNT = {"x_account": "acme", "x_api_key": "live_1"}
SIDE_BY_SIDE = [
    pytest.param(first, second, id=f"{number}")
    for number, pair in enumerate(
        [
            ([OLD], [OLD, NEW]),
            ([OLD], [NEW, OLD]),
            ([OLD, NEW], [NEW, OLD]),
            ([NEW, OLD], [NEW]),
            # The first secret.
            ([None], [NEW, None]),
            ([NEW, None], [NEW]),
        ]
    )
    for first, second in (pair, pair[::-1])
]
BODY_KEY = Rule(key=BodyKey())
EITHER_KEY = Rule(key=HeaderKey(otherwise=BodyKey()))
WAYS = {
    "token": (bearer_token, Rule(), {}),
    "api key": (api_key(), Rule(), {}),
    "body": (gateway_header("X-Account"), BODY_KEY, {"key": None}),
    "body of a token": (bearer_token, BODY_KEY, {"key": None}),
    "header or body": (bearer_token, EITHER_KEY, {"key": None}),
    "name": (gateway_header("X-Account"), Rule(), {}),
}


@pytest.fixture(params=WAYS)
def sides(request, make_subject):
    """Makes two processes with their secrets on one store, and how they are asked."""
    caller, rule, options = WAYS[request.param]

    def made(*lists):
        if None in lists[0] + lists[1] and "body" in request.param:
            lists = [[OLD if item is None else item for item in listed] for listed in lists]
        store = new_store()
        return [
            _Side(
                make_subject(
                    store, caller=caller, rules=[rule], face={"secret": listed, "cache": False}
                ),
                {**ACCOUNT, **options},
            )
            for listed in lists
        ]

    return made


class _Side:
    def __init__(self, subject, options):
        self.shop = subject.shop
        self.app = subject.app
        self._subject = subject
        self._options = options

    def ask(self, **options):
        return self._subject.ask(**{**self._options, **options})


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
def test_a_retry_on_the_other_side_is_replayed(sides, first, second):
    """One run, byte for byte the same answer, whoever is asked and however often."""
    one, other = sides(first, second)
    ran = one.ask()
    assert (ran.status, ran.is_replay) == (201, False)
    for side in (other, one, other):
        again = side.ask()
        assert (again.status, again.is_replay, again.body) == (201, True, ran.body)
    assert len(one.shop.runs) + len(other.shop.runs) == 1
    assert not other.ask(caller="bob", x_account="bob", x_api_key="live_2").is_replay


@pytest.mark.parametrize(("first", "second"), SIDE_BY_SIDE)
@pytest.mark.parametrize(("status", "is_kept"), [(402, True), (500, False)])
def test_an_answer_is_kept_or_frees_the_key_on_both_sides(sides, first, second, status, is_kept):
    one, other = sides(first, second)
    one.shop.status = status
    assert one.ask().status == status
    assert other.ask().is_replay is is_kept
    assert len(one.shop.runs) + len(other.shop.runs) == (1 if is_kept else 2)


@pytest.fixture
def side(make_subject):
    """Makes a process with its secrets and header keys of tokens."""

    def made(store, secret):
        face = {"secret": secret, "cache": False}
        return make_subject(store, caller=bearer_token, face=face)

    return made


@pytest.mark.parametrize("lists", [[[NEW], [NEW, OLD]], [[OLD], [NEW, OLD]], [[OLD], [OLD, NEW]]])
def test_a_refused_request_leaves_nothing_behind(side, lists):
    """Else the honest retry after it would be refused by what the wrong one left."""
    store = new_store()
    one, other = (side(store, listed) for listed in lists)
    one.ask()
    for _ in range(2):
        assert other.ask(body=b'{"amount":2}').status == 422
        assert other.ask().is_replay
        assert one.ask().is_replay
    assert len(one.shop.runs) + len(other.shop.runs) == 1


def test_a_status_is_found_by_every_secret(side):
    """The record of a process with the old one is the caller's as well, and nobody else's."""
    store = new_store()
    one, other = side(store, [OLD]), side(store, [NEW, OLD])
    one.ask()
    url = "/idempotency-status/k-1"
    assert other.ask("GET", url, key=None, body=b"").status == 201
    assert other.ask("GET", url, key=None, body=b"", caller="bob").status == 404
    other.ask(key='"k-2"')
    url = "/idempotency-status/k-2"
    assert one.ask("GET", url, key=None, body=b"").status == 201


@pytest.mark.parametrize("lists", [[[OLD], [NEW, OLD]], [[NEW], [OLD, NEW]]])
def test_a_status_is_not_hidden_by_a_form_that_gave_way(side, lists):
    """A request that was refused lets its own form go; the other one has the answer."""
    store = new_store()
    one, other = (side(store, listed) for listed in lists)
    one.ask()
    assert other.ask(body=b'{"amount":2}').status == 422
    assert other.ask("GET", "/idempotency-status/k-1", key=None, body=b"").status == 201


def test_a_name_costs_nothing_more(make_subject):
    """A key that no secret has made has one form, and one record."""
    store = MemoryStore()
    subject = make_subject(
        store, caller=gateway_header("X-Account"), face={"secret": [NEW, OLD], "cache": False}
    )
    subject.ask(**ACCOUNT)
    assert len(store._records) == 1


def test_a_sqlite_store_takes_both_forms(side, tmp_path):
    store = SqliteStore(tmp_path / "keys.db")
    one, other = side(store, [OLD]), side(store, [NEW, OLD])
    assert not one.ask().is_replay
    assert other.ask().is_replay
    assert not other.ask(key='"k-2"').is_replay
    assert one.ask(key='"k-2"').is_replay
