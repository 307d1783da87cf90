"""Checkouts: three effects, each once, wherever the process dies between them."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from retrysafe.demo.app import add_effect
from retrysafe.demo.ledger import create_tables, open_ledger
from tests.demo.conftest import MOSTLY_SQLITE
from tests.demo.server import (
    CHECKOUT,
    LEASE_SECONDS,
    PATIENCE_SECONDS,
    headers_of,
    new_text,
    problem_of,
)

STEPS = ["reserve", "charge", "receipt"]
EFFECTS = ["reservation", "charge", "receipt"]
CRASH_CODE = 70
# The relay looks every 200 ms; reaching this is a receipt that never comes.
LOOKS = 300


@pytest.fixture
def body():
    return CHECKOUT | {"customer": new_text("customer")}


@pytest.fixture
def key():
    return new_text("key")


def effects_of(demo, customer, checkouts=1):
    """The effects without the checkouts themselves, once all receipts are delivered."""
    for _ in range(LOOKS):
        entries = demo.entries("effects", customer)
        found = [entry for entry in entries if entry["operation"] != "checkout"]
        if sum(entry["operation"] == "receipt" for entry in found) >= checkouts:
            return found
        time.sleep(0.1)
    raise AssertionError(f"the receipt was not delivered: {entries}")


def taken_over(demo, key, body):
    """Retries when it is told to, as a client does, until there is an answer."""
    for _ in range(LEASE_SECONDS + 1):
        reply = demo.post("checkouts", key, body)
        if reply.status_code != 409:
            return reply
        assert problem_of(reply) == "in-flight"
        time.sleep(int(reply.headers["retry-after"]))
    raise AssertionError("the key was held for longer than its lease")


# The contract, as for charges and orders.


def test_a_checkout_is_executed_once_and_replayed(demo, body, key):
    """201 with a Location; a retry gets the same; one checkout and its three effects show."""
    first, second = (demo.post("checkouts", key, body) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert first.content == second.content
    (entry,) = demo.entries("checkouts", body["customer"])
    assert entry.items() >= body.items()
    assert first.json() == entry
    assert demo.client.get(first.headers["location"]).json() == entry
    effects = effects_of(demo, body["customer"])
    assert [effect["operation"] for effect in effects] == EFFECTS
    assert [effect["id"] for effect in effects[:2]] == [entry["reservation"], entry["charge"]]
    assert effects[2]["key"] == entry["receipt_key"]
    assert effects[2]["charge"] == entry["charge"]
    # Each has a key of its own, which tells nothing of the request's.
    assert len({effect["key"] for effect in effects} | {key}) == 4
    assert {effect["checkout_key"] for effect in effects} == {key}
    assert demo.entries("charges", body["customer"]) == [effects[1]]


def test_a_slow_checkout_is_the_same_request(demo, body, key):
    """Its delay is not part of the request: the retry without it is a replay."""
    first = demo.post("checkouts", key, body | {"delay_ms": 50})
    second = demo.post("checkouts", key, body)
    assert (first.status_code, second.headers["idempotent-replayed"]) == (201, "true")


def test_two_callers_with_one_key_have_effects_of_their_own(demo, body, key):
    """Child keys are the caller's: neither's effect is taken for a repetition of the other's."""
    for caller in ("alice", "bob"):
        assert demo.post("checkouts", key, body, caller=caller).status_code == 201
    assert len(effects_of(demo, body["customer"], checkouts=2)) == 6


@pytest.mark.parametrize(
    "fault",
    [
        b'"items":[]',
        b'"items":"widget"',
        b'"items":[[]]',
        b'"items":[{"price":NaN}]',
        b'"items":[{"price":1e999}]',
        b'"items":["a"],"crash_after":"lunch"',
    ],
)
def test_a_checkout_that_makes_no_sense_is_refused(demo, body, key, fault):
    """422, and nothing is executed."""
    customer = body["customer"]
    body = b'{"customer":"%s",%s}' % (customer.encode(), fault)
    headers = headers_of(key, content_type="application/json")
    reply = demo.client.post("/checkouts", headers=headers, content=body)
    assert (reply.status_code, reply.json()["title"]) == (422, "The request is invalid")
    assert " at 0x" not in reply.text
    assert demo.entries("effects", customer) == []


def test_of_many_identical_checkouts_one_is_executed(demo, body, key):
    """Those that wait get the identical bytes, and every effect shows once."""

    async def scenario():
        headers = headers_of(key, Prefer="wait=60")
        async with httpx.AsyncClient(base_url=demo.url, timeout=PATIENCE_SECONDS) as client:
            return await asyncio.gather(
                *(client.post("/checkouts", headers=headers, json=body) for _ in range(20))
            )

    replies = asyncio.run(scenario())
    assert {reply.status_code for reply in replies} == {201}
    assert len({reply.content for reply in replies}) == 1
    assert len(demo.entries("checkouts", body["customer"])) == 1
    assert len(effects_of(demo, body["customer"])) == 3


# Crashes.


@MOSTLY_SQLITE
def test_a_crash_after_any_step_repeats_no_effect(start_demo, store_url):
    """What was recorded is there at once; the retry does the rest, and does not crash again."""
    bodies = {step: CHECKOUT | {"customer": step, "crash_after": step} for step in STEPS}
    for step, body in bodies.items():
        demo = start_demo(store_url)
        with pytest.raises(httpx.TransportError):
            demo.post("checkouts", step, body)
        assert demo.process.wait(PATIENCE_SECONDS) == CRASH_CODE
    demo = start_demo(store_url)
    done = {step: demo.entries("effects", step) for step in STEPS}
    # A receipt that was recorded and staged is not sent before the checkout is finished.
    assert [len(done[step]) for step in STEPS] == [1, 2, 2]
    for step, body in bodies.items():
        # Once with and once without the field: it is the same request.
        again = body if step != "charge" else CHECKOUT | {"customer": step}
        reply = taken_over(demo, step, again)
        assert (reply.status_code, reply.json()["attempt"]) == (201, 2)
        assert "idempotent-replayed" not in reply.headers
        assert demo.post("checkouts", step, body).headers["idempotent-replayed"] == "true"
        assert demo.entries("checkouts", step) == [reply.json()]
        effects = effects_of(demo, step)
        assert [effect["operation"] for effect in effects] == EFFECTS
        # Not asked for again either: what was recorded is skipped.
        assert effects[: len(done[step])] == done[step]
        assert {effect["asked"] for effect in effects} == {1}
        assert effects[2]["key"] == reply.json()["receipt_key"]
    assert demo.process.poll() is None
    assert demo.stop()[0] == 0


def test_a_receipt_outlives_the_process_that_promised_it(start_demo, store_url, body, key):
    """Killed as soon as it has answered; the next process delivers the receipt, once."""
    first = start_demo(store_url)
    made = first.post("checkouts", key, body)
    first.kill()
    second = start_demo(store_url)
    # Whether the first one got to deliver it or not: a relay that died leaves it to its lease.
    assert [effect["operation"] for effect in effects_of(second, body["customer"])] == EFFECTS
    assert second.post("checkouts", key, body).content == made.content
    assert len(effects_of(second, body["customer"])) == 3


def test_an_effect_that_is_asked_for_again_under_its_key_is_one_effect(store_url):
    """As after a crash between a call and its record, or a receipt that is delivered twice.

    The entry is the first one's and says how often it was asked for.
    """

    async def scenario():
        await create_tables(store_url)
        ledger = open_ledger(store_url)
        async with ledger.opened():
            for number, key in ((1, "child:a"), (2, "child:a"), (1, "child:b")):
                await add_effect(ledger, "charge", {"customer": "c"}, key, number)
            return await ledger.entries()

    found = asyncio.run(scenario())
    assert [(entry["key"], entry["attempt"], entry["asked"]) for entry in found] == [
        ("child:a", 1, 2),
        ("child:b", 1, 1),
    ]
