"""Keys for ever: nothing runs again on day two, nor after the outcome is gone."""

from __future__ import annotations

from datetime import timedelta

import pytest

from retrysafe import FOREVER, Idempotency, OutcomeUnavailable
from retrysafe.core.policy import Policy
from retrysafe.errors import PolicyInvalid
from retrysafe.http import FieldsKey, Rule
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.testing import ManualClock

DAY = timedelta(days=1)


@pytest.fixture
def clock():
    return ManualClock()


def test_an_invoice_is_paid_once(clock, tmp_path):
    """A replay while the outcome is kept, and a clear refusal for all the time after that."""
    paid = []
    store = SqliteStore(tmp_path / "keys.db", now_ms=clock)
    with Idempotency(store, caller="tester", cache=False) as idem:
        pay = idem.once(key="invoice", window=FOREVER, name="pay")(
            lambda invoice: paid.append(invoice) or "receipt"
        )
        assert pay(42) == "receipt"
        clock.advance(2 * DAY)
        assert pay(42) == "receipt"
        clock.advance(Policy().audit_window)
        while idem.sweep().has_more:
            pass
        for _ in range(2):
            with pytest.raises(OutcomeUnavailable, match="done"):
                pay(42)
            clock.advance(10_000 * DAY)
        assert paid == [42]


def test_a_request_is_carried_out_once(make_subject, clock, tmp_path):
    store = SqliteStore(tmp_path / "keys.db", now_ms=clock)
    rule = Rule(path="/charges", key=FieldsKey("/invoice", window=FOREVER))
    subject = make_subject(store, rules=[rule], face={"cache": False})
    body = b'{"invoice": 42}'
    assert subject.ask(key=None, body=body).status == 201
    clock.advance(2 * DAY)
    assert subject.ask(key=None, body=body).is_replay
    clock.advance(40 * DAY)
    with Idempotency(store, caller="operator") as operator:
        while operator.sweep().has_more:
            pass
    clock.advance(4 * DAY)
    reply = subject.ask(key=None, body=body)
    assert (reply.status, reply.json["code"]) == (409, "idempotency_outcome_unavailable")
    assert reply.json["retryable"] is False
    assert len(subject.shop.runs) == 1


def test_a_declined_payment_is_never_told_as_done(make_subject, clock, tmp_path):
    """Its client would take the invoice for paid."""
    store = SqliteStore(tmp_path / "keys.db", now_ms=clock)
    rule = Rule(path="/charges", key=FieldsKey("/invoice", window=FOREVER), nothing_happened=(402,))
    subject = make_subject(store, rules=[rule], face={"cache": False})
    declined, corrected = (b'{"invoice": 42, "card": %d}' % number for number in (1, 2))
    subject.shop.status = 402
    assert subject.ask(key=None, body=declined).status == 402
    clock.advance(40 * DAY)
    with Idempotency(store, caller="operator") as operator:
        while operator.sweep().has_more:
            pass
    clock.advance(4 * DAY)
    reply = subject.ask(key=None, body=declined)
    assert (reply.status, reply.json["code"]) == (500, "idempotency_operation_failed")
    assert reply.json["retryable"] is False
    subject.shop.status = 201
    assert subject.ask(key=None, body=corrected).status == 201
    assert len(subject.shop.runs) == 2


def test_a_window_that_was_stated_ends(clock, tmp_path):
    store = SqliteStore(tmp_path / "keys.db", now_ms=clock)
    with Idempotency(store, caller="tester", cache=False) as idem:
        remind = idem.once(key="invoice", window=timedelta(days=7), name="remind")(
            lambda invoice: clock()
        )
        first = remind(42)
        clock.advance(6 * DAY)
        assert remind(42) == first
        clock.advance(DAY)
        assert remind(42) != first


def test_a_decoration_without_a_window_is_refused():
    """A day by default would pay an invoice again on day two; both choices are in the message."""
    with Idempotency("memory://", caller="tester") as idem:
        for decorate in (idem.once(key="invoice"), idem.atomic_once(key="a", connection="b")):
            with pytest.raises(PolicyInvalid, match=r"FOREVER.*window=timedelta\(days=30\)"):
                decorate(lambda invoice, a, b: None)
