"""Charging a card: the operation of the demonstration, as an application would write it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from retrysafe.core.call import Answer
from retrysafe.core.policy import InFlight, Policy
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.current import current_attempt
from retrysafe.story.ledger import CHARGED, STARTED, Entry, Ledger

CALLER: Final = "demo-shop"
OPERATION: Final = "charge card"

Receipt = dict[str, Any]


def no_interruption() -> None:
    """What happens in the middle of an ordinary charge: nothing."""


@dataclass(slots=True)
class Charge:
    """One charge; every execution makes a receipt of its own, so two of them would differ."""

    ledger: Ledger
    key: str
    amount: int
    work_seconds: float = 0.0
    # Where the demonstration kills or freezes the worker: after the claim, before the money moves.
    midway: Callable[[], None] = no_interruption

    def execute(self) -> Receipt:
        """Moves the money."""
        attempt = current_attempt()
        self.ledger.add(Entry(STARTED, self.key, attempt.number, os.getpid(), self.amount))
        time.sleep(self.work_seconds)
        self.midway()
        receipt = f"receipt-{secrets.token_hex(4)}"
        if attempt.is_lost:
            # Somebody else owns the key by now. The money must not move a second time; what is
            # returned goes to the store, which decides by itself whether it counts.
            return {"receipt": receipt, "amount": self.amount}
        self.ledger.add(Entry(CHARGED, self.key, attempt.number, os.getpid(), self.amount, receipt))
        return {"receipt": receipt, "amount": self.amount}

    def run_once(
        self,
        idempotency: Idempotency,
        *,
        lease: timedelta,
        in_flight: InFlight = InFlight.FAIL,
    ) -> Answer[Receipt]:
        """Charges the card, or gives the answer of the first charge back."""
        return idempotency.answer(
            self.key,
            self.execute,
            caller=CALLER,
            name=OPERATION,
            request={"card": "4242", "amount": self.amount},
            policy=Policy(lease=lease, in_flight=in_flight, wait_limit=timedelta(minutes=1)),
        )
