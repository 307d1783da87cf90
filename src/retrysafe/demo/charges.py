"""Charges: leased, for effects outside of the database.

The claim is durable before the work begins and is renewed while it lasts. If the process dies, the
key is free when the lease ends, and the next retry starts over.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from retrysafe.demo.answers import LEASED, answer
from retrysafe.demo.ledger import new_entry
from retrysafe.demo.parts import LeasedAttempt, TheLedger
from retrysafe.demo.staging import staged
from retrysafe.demo.wishes import ChargeWish

router = APIRouter(tags=["charges"])


@router.post("/charges", status_code=201, responses=LEASED)
async def charge(wish: ChargeWish, attempt: LeasedAttempt, ledger: TheLedger) -> Response:
    """Charge a customer once, however often the request is sent."""
    await staged(wish)
    entry = new_entry(
        "charge",
        customer=wish.customer,
        key=attempt.key.text,
        attempt=attempt.number,
        outcome=wish.outcome,
        details=wish.details(),
    )
    # Stands for the payment provider: a charge that was made stays made, whatever comes next.
    async with ledger.transaction() as connection:
        # Last thing before the effect: whoever has lost the claim leaves it to the next owner.
        attempt.raise_if_lost()
        await ledger.add(connection, entry)
    return answer(entry)
