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
from retrysafe.demo.app import LEASE, SIMULATED, Charge, execute_charge
from retrysafe.demo.ledger import Entry, Ledger, create_tables, open_ledger

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
    entry = await execute_charge(_ledgers[-1], body, current_attempt())
    if body.outcome == "error":
        raise RuntimeError("the charge failed, as it was asked to")
    return entry


charge = Handler(
    _charge,
    policy=Policy(lease=LEASE, active_window=FOREVER),
    fingerprint=SIMULATED,
    lifespan=_opened,
)
