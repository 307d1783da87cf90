"""Properties of keys that are made from requests, each because of a single line."""

from __future__ import annotations

import asyncio
import contextlib
from decimal import Decimal

from fastapi import FastAPI

from retrysafe import (
    FOREVER,
    GLOBAL,
    AsyncIdempotency,
    BodyKey,
    Idempotency,
    InvalidInput,
    Key,
    natural_key,
)
from retrysafe.contrib.fastapi import Retrysafe, idempotent
from retrysafe.errors import KeyInvalid
from retrysafe.http import FieldsKey, HeaderKey, Rule, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.stores import MemoryStore
from tests.http.driving import ask, ask_wsgi

_BY_ORDER = FieldsKey("{order}", window=FOREVER)
_NATURAL = [
    Rule(path="/orders/{order}", key=_BY_ORDER),
    Rule(path="/bodies", key=FieldsKey("/order", window=FOREVER)),
    Rule(path="/anything"),
]


def _replies(rule, *keys):
    """The replies to one request with these keys; True sends the key that the first one got."""

    def charge(environ, start_response):
        start_response("201 Created", [])
        return [b"done"]

    events = []
    options = {"secret": "a secret of these tests", "observers": [events.append]}
    with Idempotency(MemoryStore(), **options) as idem:
        protected = WSGIIdempotencyMiddleware(charge, idem, caller=bearer_token, rule=rule)
        return [
            ask_wsgi(protected, key=f'"{events[0].key.text}"' if key is True else key)
            for key in keys
        ]


def _runs(requests) -> int:
    """How many of these requests run, sent one after the other."""
    runs = []

    def counted(environ, start_response):
        runs.append(environ["PATH_INFO"])
        start_response("201 Created", [])
        return [b"done"]

    with Idempotency(MemoryStore()) as idem:
        protected = WSGIIdempotencyMiddleware(counted, idem, caller=bearer_token, rules=_NATURAL)
        for path, body, *key in requests:
            ask_wsgi(protected, path=path, key=key[0] if key else None, body=body)
    return len(runs)


def test_no_spelling_of_a_value_runs_twice():
    """Whatever an application makes of 07, it is not run beside 7."""
    assert _runs([(f"/orders/{text}", b"{}") for text in ("7", "07", "7.0", " 7")]) == 1


def test_no_number_runs_twice():
    """An application reads all of these as the float 7.0."""
    numbers = (b"7", b"7.0", b"7.00000000000000000001", b"6.99999999999999999999")
    assert _runs([("/bodies", b'{"order":%b}' % number) for number in numbers]) == 1


def test_a_clients_key_does_not_meet_a_derived_key():
    """Not even when a client learns the key of its body, and sends it as its own; and not on
    another route than the one that makes natural keys."""
    first, again = _replies(Rule(key=HeaderKey(otherwise=BodyKey())), None, True)
    assert (first.status, again.is_replay) == (201, False)
    paid = natural_key("POST /orders/{order}", 7)
    assert _runs([("/anything", b"", f'"{paid}"'), ("/orders/7", b"{}", None)]) == 1


def test_a_copied_key_blocks_no_function():
    """Whoever chooses a key cannot choose the one that an invoice will have."""
    paid = []
    with Idempotency(MemoryStore(), caller="shop") as idem:

        @idem.once(key="invoice", window=FOREVER, name="pay")
        def pay(invoice):
            paid.append(invoice)

        copied = str(natural_key("pay", invoice=42))
        for key in (copied, Key(copied, caller="shop")):
            with contextlib.suppress(KeyInvalid):
                idem.run(key, str, 1)
        pay(42)
    assert paid == [42]


def test_two_keys_are_not_one_intent():
    """Where the key does not count, its client is told so."""
    replies = _replies(Rule(key=BodyKey()), '"a"', '"b"')
    assert not any(reply.is_replay for reply in replies)


def test_no_converted_value_runs_twice():
    """What the endpoint gets is what the key is made of."""
    runs = []
    app = FastAPI()
    Retrysafe(AsyncIdempotency(MemoryStore()), caller=GLOBAL).install(app)

    @app.post("/{order}", dependencies=[idempotent(key=_BY_ORDER)])
    async def pay(order: int) -> None:
        runs.append(order)

    async def run():
        for path in ("/7", "/07", "/+7"):
            await ask(app, path=path, key=None)

    asyncio.run(run())
    assert runs == [7]


def _charged(idem, amount):
    """What a caller gets whose operation holds the amount; None if it is refused."""
    try:
        return idem.run("k", lambda: amount)
    except InvalidInput:
        return None


def test_no_hidden_amount_gets_the_outcome_of_another():
    with Idempotency(MemoryStore(), caller=GLOBAL) as idem:
        assert [_charged(idem, amount) for amount in (500, 900)] != [500, 500]


def test_no_refund_gets_the_outcome_of_a_charge():
    """Lambdas have one name, which is none: under `once` they are refused, or are two."""
    runs = []
    with Idempotency(MemoryStore(), caller="c") as idem, contextlib.suppress(InvalidInput):
        once = idem.once(key="order", window=FOREVER)
        charge = once(lambda order: runs.append("charge"))
        refund = once(lambda order: runs.append("refund"))
        charge(7)
        refund(7)
    assert runs != ["charge"]


def test_no_type_of_a_number_runs_twice():
    """A column gives Decimals, and a request gave an int."""
    runs = []
    with Idempotency(MemoryStore(), caller="c") as idem:

        @idem.once(key="invoice", window=FOREVER)
        def pay(invoice):
            runs.append(invoice)

        for invoice in (42, Decimal(42), Decimal("42.00")):
            pay(invoice)
    assert runs == [42]
