"""What clients may ask for: the bodies of requests, and how a run is made to end."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# Control characters have no place in a name, and PostgreSQL cannot even store the first of them.
_PRINTABLE = r"^[^\x00-\x1f\x7f]+$"
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=_PRINTABLE)]
_Number = Annotated[int | float, Field(ge=-1e15, le=1e15)]
# What an item is, only the shop knows: a name, or a few fields.
Item = Text | Annotated[dict[Text, Text | bool | _Number | None], Field(max_length=20)]


class Ending(StrEnum):
    """How the run of a request ends."""

    OK = "ok"
    # 402: an answer like any other, kept and replayed.
    DECLINE = "decline"
    # 500: the key is free again.
    ERROR = "error"
    # The process dies on the spot.
    CRASH = "crash"


class Wish(BaseModel):
    """What every request may carry: stage directions, no part of what is asked for."""

    delay_ms: Annotated[int, Field(ge=0, le=60_000, description="How long the work takes.")] = 0


class Staging(Wish):
    """How a run ends."""

    outcome: Annotated[Ending, Field(description="How it ends.")] = Ending.OK


class ChargeWish(Staging):
    """A charge to be made."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"amount": 1000, "currency": "eur", "customer": "c1"}}
    )
    amount: Annotated[int, Field(gt=0, le=1_000_000_000, description="In the smallest unit.")]
    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{3}$")]
    customer: Text

    def details(self) -> dict[str, Any]:
        """What the ledger keeps of it."""
        return {"amount": self.amount, "currency": self.currency}


class OrderWish(Staging):
    """An order to be placed."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"item": "widget", "quantity": 1, "customer": "c1"}}
    )
    item: Text
    quantity: Annotated[int, Field(gt=0, le=1_000_000)]
    customer: Text

    def details(self) -> dict[str, Any]:
        """What the ledger keeps of it."""
        return {"item": self.item, "quantity": self.quantity}


class Step(StrEnum):
    """The steps of a checkout, in their order."""

    RESERVE = "reserve"
    CHARGE = "charge"
    RECEIPT = "receipt"


class CheckoutWish(Wish):
    """Items to be reserved, charged and confirmed by a receipt."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"items": ["widget", "gadget"], "customer": "c1"}}
    )
    items: Annotated[list[Item], Field(min_length=1, max_length=100)]
    customer: Text
    crash_after: Annotated[
        Step | None,
        Field(description="The process dies when this step is recorded, on the first attempt."),
    ] = None
