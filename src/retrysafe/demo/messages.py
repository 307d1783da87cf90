"""Charges that come from a queue: `retrysafe consume retrysafe.demo.messages:charge`.

A message is what `POST /charges` takes as its body. The demo on the same store lists what was
charged under `GET /charges`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import ValidationError

from retrysafe import FOREVER, Policy, current_attempt
from retrysafe.consumers import Handler, Message, PayloadInvalid
from retrysafe.demo.app import LEASE, SIMULATED, Charge, simulate
from retrysafe.demo.ledger import Entry, Ledger, open_ledger
from retrysafe.demo.serving import create_tables

_ledgers: list[Ledger] = []


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[None]:
    """The ledger in the store's database, for as long as messages are consumed."""
    await create_tables(url)
    ledger = open_ledger(url)
    async with ledger.opened():
        _ledgers.append(ledger)
        try:
            yield
        finally:
            _ledgers.remove(ledger)


async def _charge(message: Message) -> Entry:
    """Charges a customer once, however often the message is delivered."""
    try:
        body = Charge.model_validate_json(message.body)
    except ValidationError as error:
        faults = "; ".join(
            f"{'/'.join(map(str, each['loc']))}: {each['msg']}"
            for each in error.errors(include_input=False)
        )
        raise PayloadInvalid(f"this is no charge: {faults}") from None
    attempt = current_attempt()
    await simulate(body.delay_ms, body.outcome)
    ledger = _ledgers[-1]
    # As in `POST /charges`: stands for the payment provider.
    async with ledger.transaction() as connection:
        attempt.raise_if_lost()
        entry = await ledger.add(
            connection,
            "charge",
            customer=body.customer,
            key=attempt.key.text,
            attempt=attempt.number,
            outcome=body.outcome,
            details={"amount": body.amount, "currency": body.currency},
        )
    if body.outcome == "error":
        raise RuntimeError("the charge failed, as it was asked to")
    return entry


charge = Handler(
    _charge,
    policy=Policy(lease=LEASE, active_window=FOREVER),
    fingerprint=SIMULATED,
    lifespan=_opened,
)
