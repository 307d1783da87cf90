"""SIGKILL of an owner at every boundary on PostgreSQL: around each statement, and in between."""

from __future__ import annotations

import asyncio
import signal

import pytest

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.stores import Condition
from retrysafe.stores.postgres import PostgresStore
from tests.processes.boundaries import Boundaries, MortalPostgresStore
from tests.processes.ledger import noted
from tests.processes.test_kill import (
    BOUNDARIES_LIMIT,
    POLICY,
    operation_with_boundaries,
    retry_after_death,
)


def _own(pipe, face: str, url: str, ledger: str, log: str, fatal: int) -> None:
    boundaries = Boundaries(log, fatal)
    store = MortalPostgresStore(url, boundaries, is_async=face == "async")
    if face == "async":
        asyncio.run(_own_async(store, ledger, boundaries))
        return
    with Idempotency(store, caller=ledger[-40:], policy=POLICY) as idem:
        idem.run("the key", lambda: operation_with_boundaries(ledger, boundaries), request="r")


async def _own_async(store: PostgresStore, ledger: str, boundaries: Boundaries) -> None:
    async def operation() -> str:
        await asyncio.sleep(0)
        return operation_with_boundaries(ledger, boundaries)

    async with AsyncIdempotency(store, caller=ledger[-40:], policy=POLICY) as idem:
        await idem.run("the key", operation, name="", request="r")


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_owner_killed_at_each_boundary(start, tmp_path, migrated_url, face):
    """Killed at the n-th boundary for n = 1, 2, 3 … until it survives; a retry always ends well."""
    conditions = []
    log = str(tmp_path / "boundaries")
    for fatal in range(1, BOUNDARIES_LIMIT):
        # A caller of its own for every death; one schema serves them all.
        ledger = str(tmp_path / f"ledger-{fatal}")
        owner = start(_own, face, migrated_url, ledger, log, fatal)
        code = owner.exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        conditions.append(retry_after_death(migrated_url, ledger, caller=ledger[-40:]))
    else:
        pytest.fail("the owner meets boundaries without end")
    assert [line[0] for line in noted(log)] == [
        "claim:before",
        "claim:claim_one:before",
        "claim:claim_one:after",
        "claim:after",
        "operation:start",
        "operation:middle",
        "operation:end",
        "settle-complete:before",
        "settle-complete:settle_one:before",
        "settle-complete:settle_one:after",
        "settle-complete:after",
    ]
    # Free before the claim is durable, then pending, and settled once the ending is durable.
    pending = {Condition.RUNNING, Condition.ABANDONED}
    assert conditions[:2] == [Condition.ABSENT] * 2
    assert set(conditions[2:9]) <= pending
    assert conditions[9:] == [Condition.SUCCEEDED] * 2
