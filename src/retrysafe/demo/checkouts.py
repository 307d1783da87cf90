"""Checkouts: durable steps, for operations that ask several other systems for something.

Each step is recorded when it is done, so the attempt that takes over after a crash goes on behind
the last one. A crash between a call and its record repeats the call, with the same child key, by
which the other side knows it. The receipt is an outbox entry: it is committed together with the
checkout and the response, and the relay delivers it afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, Final

from fastapi import APIRouter, Response

from retrysafe import Attempt
from retrysafe.demo.answers import LEASED, answer
from retrysafe.demo.ledger import Entry, Ledger, effect_entry, new_entry
from retrysafe.demo.parts import LeasedAttempt, TheLedger
from retrysafe.demo.staging import crash_point, delayed
from retrysafe.demo.wishes import CheckoutWish, Ending, Step
from retrysafe.relay import Delivery

router = APIRouter(tags=["checkouts"])

RECEIPTS: Final = "receipts"
# Nobody told the demo its prices.
_PRICE: Final = 1000
# Nothing declines a checkout.
_ANSWERS: Final = {status: LEASED[status] for status in LEASED if status != 402}


@router.post("/checkouts", status_code=201, responses=_ANSWERS)
async def checkout(wish: CheckoutWish, attempt: LeasedAttempt, ledger: TheLedger) -> Response:
    """Reserve, charge and send a receipt, each once, wherever the process dies."""
    await delayed(wish)
    price = {"amount": _PRICE * len(wish.items), "currency": "eur"}

    reservation = await attempt.step(Step.RESERVE, _reserve, ledger, attempt, wish)
    crash_point(Step.RESERVE, wish, attempt)

    charge = await attempt.step(Step.CHARGE, _charge, ledger, attempt, wish, price)
    crash_point(Step.CHARGE, wish, attempt)

    receipt = await attempt.step(Step.RECEIPT, _receipt, attempt, wish, charge, price)
    # Not in the step, which a later attempt skips: the attempt that completes has to stage it.
    receipt_key = attempt.outbox.stage(RECEIPTS, receipt, aggregate=wish.customer)
    crash_point(Step.RECEIPT, wish, attempt)

    effects = {"reservation": reservation, "charge": charge, "receipt_key": receipt_key}
    entry = new_entry(
        "checkout",
        customer=wish.customer,
        key=attempt.key.text,
        attempt=attempt.number,
        outcome=Ending.OK,
        details={"items": wish.items} | price | effects,
    )
    return await _completed(attempt, ledger, entry)


async def _reserve(ledger: Ledger, attempt: Attempt, wish: CheckoutWish) -> str:
    """Stands for the warehouse."""
    return await _sent(ledger, attempt, "reservation", wish.customer, {"items": wish.items})


async def _charge(
    ledger: Ledger, attempt: Attempt, wish: CheckoutWish, price: dict[str, Any]
) -> str:
    """Stands for the payment provider."""
    return await _sent(ledger, attempt, "charge", wish.customer, price)


async def _sent(
    ledger: Ledger, attempt: Attempt, effect: str, customer: str, details: dict[str, Any]
) -> str:
    """One call to another system, which knows repetitions by the child key; what it has made."""
    entry = effect_entry(
        effect,
        customer=customer,
        key=attempt.child_key("checkout", effect),
        attempt=attempt.number,
        details=details | {"checkout_key": attempt.key.text},
    )
    async with ledger.transaction() as connection:
        await ledger.add_once(connection, entry)
    return entry.id


async def _receipt(
    attempt: Attempt, wish: CheckoutWish, charge: str, price: dict[str, Any]
) -> dict[str, Any]:
    """What the customer is sent."""
    told = {"customer": wish.customer, "checkout_key": attempt.key.text, "charge": charge}
    return told | price


async def _completed(attempt: Attempt, ledger: Ledger, entry: Entry) -> Response:
    """The answer, in one transaction with the checkout's entry and with the staged receipt."""
    response = answer(entry)
    async with ledger.transaction() as connection:
        await ledger.add(connection, entry)
        written = attempt.complete_in(connection, response)
        if isawaitable(written):  # As the connection's own methods are: not those of SQLite.
            await written
    return response


def receipts_into(ledger: Ledger) -> Callable[[Delivery], Awaitable[None]]:
    """The relay's target: stands for the mail server, which drops repetitions by their key."""

    async def deliver(delivery: Delivery) -> None:
        receipt = delivery.json()
        entry = effect_entry(
            "receipt",
            customer=receipt.pop("customer"),
            key=delivery.key,
            attempt=delivery.attempt,
            details=receipt,
        )
        async with ledger.transaction() as connection:
            await ledger.add_once(connection, entry)

    return deliver
