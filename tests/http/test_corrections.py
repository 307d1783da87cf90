"""Corrected requests over HTTP: another card after a 402, and nothing after what is uncertain."""

from __future__ import annotations

import json

import pytest

from retrysafe import FOREVER, BodyKey, Policy
from retrysafe.errors import PolicyInvalid
from retrysafe.http import FieldsKey, HeaderKey, Rule, StatusRule

INVOICE = FieldsKey("/invoice", window=FOREVER)
KEPT = Rule(path="/charges", key=INVOICE, nothing_happened=(402,))
FREED = Rule(path="/charges", key=INVOICE, nothing_happened=[402], stored=StatusRule(freed=[402]))
SECRET = {"secret": "x" * 32}


def paying(subject, card, **options):
    body = json.dumps({"invoice": 42, "card": card}).encode()
    return subject.ask(body=body, **{"key": None, **options})


@pytest.mark.parametrize("rule", [KEPT, FREED], ids=["kept", "freed"])
def test_another_card_is_taken_after_a_declined_one(database_url, make_subject, rule):
    """The corrected request runs once; then the first one is another request, and sees nothing."""
    subject = make_subject(database_url, rules=[rule], face=SECRET)
    subject.shop.status = 402
    assert paying(subject, "bad").status == 402
    assert paying(subject, "bad").is_replay is (rule is KEPT)
    subject.shop.status = 201
    paid = paying(subject, "good")
    assert (paid.status, paid.is_replay) == (201, False)
    again = paying(subject, "good")
    assert (again.body, again.is_replay) == (paid.body, True)
    refused = paying(subject, "bad")
    assert (refused.status, refused.problem) == (422, "key-reused")
    assert b'"run"' not in refused.body
    assert refused.json["detail"].endswith(" after a response with status 402 alone.")
    assert len(subject.shop.runs) == (2 if rule is KEPT else 3)


@pytest.mark.parametrize("status", [400, 404, 409, 429, 500, 503])
def test_what_is_not_listed_stays_refused(make_subject, tmp_path, status):
    """Kept or freed, below 500 or not: nobody said that nothing happened."""
    subject = make_subject(f"sqlite:///{tmp_path / 'keys.db'}", rules=[KEPT], face=SECRET)
    subject.shop.status = status
    assert paying(subject, "bad").status == status
    subject.shop.status = 201
    assert paying(subject, "good").problem == "key-reused"
    assert len(subject.shop.runs) == 1


def test_an_uncertain_response_before_the_listed_one_stays_refused(database_url, make_subject):
    """A 500 may have paid; that the same card is declined after it proves nothing."""
    subject = make_subject(database_url, rules=[KEPT], face=SECRET)
    for status in (500, 402):
        subject.shop.status = status
        assert paying(subject, "bad").status == status
    assert paying(subject, "good").problem == "key-reused"
    assert len(subject.shop.runs) == 2


def test_an_exception_is_a_500_whatever_the_policy_lists(make_subject, tmp_path):
    """What a client has seen is no refusal after which nothing happened."""
    policy = Policy(nothing_happened=(LookupError,))
    rule = Rule(path="/charges", key=INVOICE, nothing_happened=(402,), policy=policy)
    subject = make_subject(f"sqlite:///{tmp_path / 'keys.db'}", rules=[rule], face=SECRET)
    subject.shop.error = LookupError("no ledger")
    with pytest.raises(LookupError):
        paying(subject, "bad")
    subject.shop.error = None
    assert paying(subject, "good").problem == "key-reused"


def test_a_key_of_a_client_belongs_to_one_request(database_url, make_subject):
    """A header is as strict as ever, on a route that lists nothing and on one that has no say."""
    subject = make_subject(database_url, rules=[Rule()], face=SECRET)
    subject.shop.status = 402
    assert paying(subject, "bad", key='"k-1"').status == 402
    assert paying(subject, "good", key='"k-1"').problem == "key-reused"
    assert len(subject.shop.runs) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": HeaderKey(), "nothing_happened": (402,)}, "belongs to one request"),
        ({"key": BodyKey(), "nothing_happened": (402,)}, "another key anyway"),
        (
            {"key": HeaderKey(otherwise=BodyKey()), "nothing_happened": (402,)},
            "is for FieldsKey",
        ),
        ({"key": INVOICE, "nothing_happened": None}, "None"),
        ({"key": INVOICE, "nothing_happened": 4.02}, "4.02"),
        ({"key": INVOICE, "nothing_happened": (500,)}, "400 to 499"),
        ({"key": INVOICE, "nothing_happened": (408,)}, "except 408"),
        ({"key": INVOICE, "nothing_happened": (200,)}, "400 to 499"),
        ({"key": INVOICE, "nothing_happened": ("402",)}, "'402'"),
        ({"key": INVOICE, "nothing_happened": (True,)}, "True"),
    ],
)
def test_a_list_that_cannot_be_true_is_refused(options, words):
    """A time-out and what a server has broken leave everything open.

    And under keys of other sources no corrected request ever meets the first one.
    """
    with pytest.raises(PolicyInvalid, match=words):
        Rule(**options)


def test_one_status_may_stand_without_its_list():
    assert Rule(key=INVOICE, nothing_happened=402).nothing_happened == (402,)


def test_the_policy_page_says_when_a_corrected_request_is_taken(make_subject):
    """Clients learn it there, and nothing of it where no status is listed."""
    subject = make_subject(rules=[KEPT], face=SECRET)
    page = subject.ask("GET", "/idempotency-policy", key=None, accept="application/json").json
    assert page["routes"][0]["nothing_happened_statuses"] == [402]
    shown = subject.ask("GET", "/idempotency-policy", key=None, accept="text/html").body
    assert b"Corrected requests</dt><dd>accepted after 402" in shown
    assert b"or a part of the work is done" in shown
    plain = make_subject(rules=[Rule()])
    shown = plain.ask("GET", "/idempotency-policy", key=None, accept="text/html").body
    assert b"Corrected requests" not in shown
