"""What the engine itself costs: python -m benchmarks.engine_cost.

First calls over a store that answers at once and keeps nothing, 100 tasks at a time and in one
thread. It prints the least CPU time per call, in microseconds: what comes on top is the store's.
To compare two versions of the code, run it for both in turns, with `PYTHONPATH=…/src`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Decision,
    SettleAnswer,
    Settlement,
    State,
)
from retrysafe.core.ports import Capabilities, Waits

ROUNDS = 40
CALLS = 500
TASKS = 100
SECRET = bytes(32)


class InstantStore:
    """Admits every claim and takes every ending."""

    def __init__(self, waits: Waits) -> None:
        self.capabilities = Capabilities(waits, batch_limit=64, batches_in_flight=2)

    async def commit(
        self, claims: Sequence[ClaimRequest], settlements: Sequence[Settlement]
    ) -> tuple[list[ClaimAnswer], list[SettleAnswer]]:
        if self.capabilities.waits is Waits.SUSPENDING:
            await asyncio.sleep(0)
        granted = [
            ClaimAnswer(Decision.ADMIT, Condition.ABSENT, 1, row.lease_ms, 10**13, State.PENDING)
            for row in claims
        ]
        return granted, [SettleAnswer(Decision.APPLY) for _ in settlements]

    async def close(self) -> None:
        """There is nothing to give back."""


def charge(customer: str, cents: int) -> dict[str, Any]:
    return {"customer": customer, "cents": cents}


async def charge_async(customer: str, cents: int) -> dict[str, Any]:
    return charge(customer, cents)


async def in_tasks() -> float:
    store: Any = InstantStore(Waits.SUSPENDING)
    least = float("inf")
    async with AsyncIdempotency(store, caller="c", cache=False, secret=SECRET) as idem:

        async def work(numbers: Any) -> None:
            for number in numbers:
                await idem.run(f"key-{number}", charge_async, "c1", number)

        for _ in range(ROUNDS):
            numbers = iter(range(CALLS))
            started = time.thread_time()
            await asyncio.gather(*(work(numbers) for _ in range(TASKS)))
            least = min(least, time.thread_time() - started)
    return least


def in_a_thread() -> float:
    store: Any = InstantStore(Waits.BLOCKING)
    least = float("inf")
    with Idempotency(store, caller="c", cache=False, secret=SECRET) as idem:
        for _ in range(ROUNDS):
            started = time.thread_time()
            for number in range(CALLS):
                idem.run(f"key-{number}", charge, "c1", number)
            least = min(least, time.thread_time() - started)
    return least


def main() -> None:
    for title, least in (("100 tasks", asyncio.run(in_tasks())), ("one thread", in_a_thread())):
        print(f"{title:12} {least / CALLS * 1e6:6.1f} µs per call")


if __name__ == "__main__":
    main()
