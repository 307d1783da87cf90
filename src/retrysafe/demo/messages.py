"""Charges that come from a queue: `retrysafe consume retrysafe.demo.messages:charge`.

A message is what `POST /charges` takes as its body. The demo on the same store lists what was
charged under `GET /charges`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import ValidationError

from retrysafe import FOREVER, current_attempt
from retrysafe.consumers import Handler, Message, PayloadInvalid
from retrysafe.demo.app import POLICY, REQUEST, open_ledger, prepare
from retrysafe.demo.ledger import Ledger, new_entry
from retrysafe.demo.staging import staged
from retrysafe.demo.wishes import ChargeWish, Ending

_ledgers: list[Ledger] = []


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[None]:
    """The ledger in the store's database, for as long as messages are consumed."""
    await prepare(url)
    ledger = open_ledger(url)
    await ledger.open()
    _ledgers.append(ledger)
    try:
        yield
    finally:
        _ledgers.remove(ledger)
        await ledger.close()


async def _charge(message: Message) -> dict[str, Any]:
    """Charges a customer once, however often the message is delivered."""
    try:
        wish = ChargeWish.model_validate_json(message.body)
    except ValidationError as error:
        faults = "; ".join(
            f"{'/'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors(include_input=False)
        )
        raise PayloadInvalid(f"this is no charge: {faults}") from None
    attempt = current_attempt()
    await staged(wish)
    entry = new_entry(
        "charge",
        customer=wish.customer,
        key=attempt.key.text,
        attempt=attempt.number,
        outcome=wish.outcome,
        details=wish.details(),
    )
    ledger = _ledgers[-1]
    # As in `POST /charges`: stands for the payment provider.
    async with ledger.transaction() as connection:
        attempt.raise_if_lost()
        await ledger.add(connection, entry)
    if wish.outcome is Ending.ERROR:
        raise RuntimeError("the charge failed, as it was asked to")
    return entry.shape()


charge = Handler(
    _charge,
    policy=POLICY.with_changes(active_window=FOREVER),
    fingerprint=REQUEST,
    lifespan=_opened,
)
