"""Stripe's own Python library against an API that retrysafe protects.

The most used client with idempotency keys must find what it knows: replays, a refusal for another
amount, one charge from a race, and retries of its own that succeed.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qsl

import pytest
import stripe
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrysafe import AsyncIdempotency
from retrysafe.http import IdempotencyMiddleware, bearer_token
from tests.contrib.serving import served

RACERS = 8


class Charges:
    """A small charging API in Stripe's manner: forms in, JSON objects out."""

    def __init__(self, store_url):
        self.made = []
        # What the endpoint answers before it charges: statuses, used up one by one.
        self.refusals = []
        idem = AsyncIdempotency(store_url)
        routes = [Route("/v1/charges", self._charge, methods=["POST"])]
        self.app = IdempotencyMiddleware(Starlette(routes=routes), idem, caller=bearer_token)

    async def _charge(self, request):
        form = dict(parse_qsl((await request.body()).decode()))
        if self.refusals:
            return Response(status_code=self.refusals.pop(0))
        self.made.append(form)
        number = len(self.made)
        charge = {"id": f"ch_{number}", "object": "charge", "amount": int(form["amount"])}
        return JSONResponse(charge, status_code=200)


@pytest.fixture
def charges(tmp_path):
    return Charges(f"sqlite:///{tmp_path}/charges.db")


@pytest.fixture
def client(charges):
    with served(charges.app) as url:
        yield stripe.StripeClient("sk_test_1", base_addresses={"api": url}, max_network_retries=4)


def charge(client, key, amount=1_000):
    return client.v1.charges.create(
        {"amount": amount, "currency": "eur", "source": "tok_visa"}, {"idempotency_key": key}
    )


def was_replayed(made):
    return made.last_response.headers.get("Idempotent-Replayed") == "true"


def test_a_repeated_call_is_a_replay(charges, client):
    first, second = charge(client, "order-1"), charge(client, "order-1")
    assert (first.id, was_replayed(first)) == ("ch_1", False)
    assert (second.id, was_replayed(second)) == ("ch_1", True)
    assert len(charges.made) == 1


def test_another_amount_under_the_same_key_is_refused(charges, client):
    charge(client, "order-2")
    with pytest.raises(stripe.StripeError) as refused:
        charge(client, "order-2", amount=2_000)
    assert refused.value.http_status == 422
    assert "idempotency" in refused.value.http_body.lower()
    assert [made["amount"] for made in charges.made] == ["1000"]


def test_eight_racing_calls_make_one_charge(charges, client):
    """The losers meet a 409, which the library retries by itself."""
    together = threading.Barrier(RACERS)

    def race(_):
        together.wait()
        return charge(client, "order-3").id

    with ThreadPoolExecutor(RACERS) as pool:
        assert set(pool.map(race, range(RACERS))) == {"ch_1"}
    assert len(charges.made) == 1


def test_the_librarys_own_retries_succeed(charges, client):
    """A 500 and a 503 free the key; the library sends the same key again, and is charged once."""
    charges.refusals = [500, 503]
    made = charge(client, None)
    assert (made.id, was_replayed(made)) == ("ch_1", False)
    assert len(charges.made) == 1
