"""Orders: atomic, for operations whose every effect is in the database.

The order and the answer to it are one transaction. If the process dies, neither is there, and the
key is free at once.
"""

from __future__ import annotations

from fastapi import APIRouter, Response

from retrysafe.demo.answers import PROTECTED, answer
from retrysafe.demo.ledger import new_entry
from retrysafe.demo.parts import TheAtomicAttempt, TheLedger
from retrysafe.demo.staging import staged
from retrysafe.demo.wishes import OrderWish

router = APIRouter(tags=["orders"])


@router.post("/orders", status_code=201, responses=PROTECTED)
async def order(wish: OrderWish, attempt: TheAtomicAttempt, ledger: TheLedger) -> Response:
    """Place an order once, in one transaction with the answer to it."""
    entry = new_entry(
        "order",
        customer=wish.customer,
        key=attempt.key.text,
        attempt=attempt.number,
        outcome=wish.outcome,
        details=wish.details(),
    )
    # Written before the work is done: whatever ends it early takes the order back.
    await ledger.add(attempt.connection, entry)
    await staged(wish)
    return answer(entry)
