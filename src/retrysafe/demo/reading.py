"""What was really executed, for everybody to read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from retrysafe.demo.answers import READ, problem
from retrysafe.demo.ledger import Ledger
from retrysafe.demo.parts import TheLedger
from retrysafe.demo.wishes import Text

router = APIRouter(tags=["ledger"], responses=READ)
Customer = Annotated[Text | None, Query(description="Only those of this customer.")]


async def _shown(ledger: Ledger, operation: str, customer: str | None) -> list[dict[str, Any]]:
    return [entry.shape() for entry in await ledger.entries(operation, customer or "")]


@router.get("/charges")
async def charges(ledger: TheLedger, customer: Customer = None) -> list[dict[str, Any]]:
    """Every charge that was executed, with its outcome."""
    return await _shown(ledger, "charge", customer)


@router.get("/orders")
async def orders(ledger: TheLedger, customer: Customer = None) -> list[dict[str, Any]]:
    """Every order that was committed, with its outcome."""
    return await _shown(ledger, "order", customer)


@router.get("/checkouts")
async def checkouts(ledger: TheLedger, customer: Customer = None) -> list[dict[str, Any]]:
    """Every checkout that was finished; its effects are in `/effects`."""
    return await _shown(ledger, "checkout", customer)


@router.get("/effects")
async def effects(ledger: TheLedger, customer: Customer = None) -> list[dict[str, Any]]:
    """Everything that was executed, of every kind, in the order in which it happened."""
    return await _shown(ledger, "", customer)


async def _one(ledger: Ledger, entry_id: str, operation: str) -> Response:
    entry = await ledger.entry(entry_id, operation)
    if entry is None:
        return problem(404, f"There is no such {operation}", retryable=False)
    return JSONResponse(entry.shape())


@router.get("/charges/{entry_id}")
async def one_charge(entry_id: Text, ledger: TheLedger) -> Response:
    """One charge: what `Location` leads to."""
    return await _one(ledger, entry_id, "charge")


@router.get("/orders/{entry_id}")
async def one_order(entry_id: Text, ledger: TheLedger) -> Response:
    """One order: what `Location` leads to."""
    return await _one(ledger, entry_id, "order")


@router.get("/checkouts/{entry_id}")
async def one_checkout(entry_id: Text, ledger: TheLedger) -> Response:
    """One checkout: what `Location` leads to."""
    return await _one(ledger, entry_id, "checkout")
