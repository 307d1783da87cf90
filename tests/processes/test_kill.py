"""SIGKILL of an owner at every boundary: the key is never lost, and never settled twice."""

from __future__ import annotations

import asyncio
import os
import signal
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Policy
from retrysafe.core.model import State
from retrysafe.errors import AttemptsExhausted
from retrysafe.stores import Condition
from tests.processes.boundaries import Boundaries, MortalStore
from tests.processes.ledger import note, noted

# Long enough for a live owner on a busy machine (it is renewed), short enough to wait for.
POLICY = Policy(
    lease=timedelta(seconds=1), in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30)
)
# The owner has about fifteen boundaries; a count far beyond that is an endless loop.
BOUNDARIES_LIMIT = 60


def operation_with_boundaries(ledger: str, boundaries: Boundaries) -> str:
    boundaries.cross("operation:start")
    note(ledger, "executed", os.getpid())
    boundaries.cross("operation:middle")
    note(ledger, "finished", os.getpid())
    boundaries.cross("operation:end")
    return f"by {os.getpid()}"


def _own(pipe, face: str, database: str, ledger: str, log: str, fatal: int) -> None:
    """The owner: one run of the key, with death at the boundary of that number."""
    boundaries = Boundaries(log, fatal)
    store = MortalStore(database, boundaries)
    if face == "blocking":
        idem = Idempotency(store, caller="owner", policy=POLICY)
        idem.run("the key", lambda: operation_with_boundaries(ledger, boundaries), request="r")
    else:
        asyncio.run(_own_async(store, ledger, boundaries))


async def _own_async(store: MortalStore, ledger: str, boundaries: Boundaries) -> None:
    async def operation() -> str:
        await asyncio.sleep(0)
        return operation_with_boundaries(ledger, boundaries)

    idem = AsyncIdempotency(store, caller="owner", policy=POLICY)
    await idem.run("the key", operation, name="", request="r")


def retry_after_death(url: str, ledger: str, caller: str = "owner") -> Condition:
    """Retries as another process would; checks the outcome against the ledger and the audit."""
    with Idempotency(url, caller=caller, policy=POLICY) as idem:
        before = idem.read("the key")
        executed_before = [line for line in noted(ledger) if line[0] == "executed"]

        def operation() -> str:
            note(ledger, "executed", os.getpid())
            return f"by {os.getpid()}"

        answer = idem.answer("the key", operation, name="", request="r")
        after = idem.read("the key")
        assert after is not None
        executed = [line for line in noted(ledger) if line[0] == "executed"]
        if before is None:
            # The claim had not reached the disk: nothing had run, and nothing blocks the key.
            assert executed_before == []
            assert (answer.attempt, answer.replayed) == (1, False)
        elif before.record.state is State.PENDING:
            # Whoever retries waits for the lease, by the store's clock, and not a moment less.
            assert (answer.attempt, answer.replayed) == (2, False)
            assert after.record.claimed_at_ms >= before.record.lease_ends_at_ms
            assert len(executed) == len(executed_before) + 1
        else:
            assert (answer.attempt, answer.replayed) == (1, True)
            assert executed == executed_before
        # However often the body ran, exactly one ending stands, and it is what everybody gets.
        assert [outcome.state for outcome in after.outcomes] == [State.SUCCEEDED]
        assert answer.value == f"by {executed[-1][1]}"
        again = idem.answer("the key", operation, name="", request="r")
        assert (again.value, again.replayed) == (answer.value, True)
        return Condition.ABSENT if before is None else before.condition


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_owner_killed_at_each_boundary(start, tmp_path, face):
    """Killed at the n-th boundary for n = 1, 2, 3 … until it survives; a retry always ends well."""
    conditions = []
    log = str(tmp_path / "boundaries")
    for fatal in range(1, BOUNDARIES_LIMIT):
        database, ledger = str(tmp_path / f"{fatal}.db"), str(tmp_path / f"ledger-{fatal}")
        owner = start(_own, face, database, ledger, log, fatal)
        code = owner.exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        conditions.append(retry_after_death(f"sqlite:///{database}", ledger))
    else:
        pytest.fail("the owner meets boundaries without end")
    crossed = [line[0] for line in noted(log)]
    assert len(crossed) == len(conditions) == fatal - 1
    # The points lie where they should: around both commits, in both, and in the operation.
    for name in (
        "claim:before",
        "claim:COMMIT",
        "claim:after",
        "operation:start",
        "operation:middle",
        "operation:end",
        "settle-complete:before",
        "settle-complete:COMMIT",
        "settle-complete:after",
    ):
        assert name in crossed
    # Before the claim is durable the key is free, then it is pending, then it is settled.
    absent = conditions.count(Condition.ABSENT)
    pending = crossed.index("settle-complete:after") - absent
    assert crossed[absent] == "claim:after"
    assert set(conditions[absent : absent + pending]) <= {Condition.RUNNING, Condition.ABANDONED}
    assert conditions[absent + pending :] == [Condition.SUCCEEDED]
    assert _survivor_is_replayed(database)


def _survivor_is_replayed(database: str) -> bool:
    with Idempotency(f"sqlite:///{database}", caller="owner", policy=POLICY) as idem:
        return idem.answer("the key", lambda: "again", request="r").replayed


def _die_inside(pipe, database: str, ledger: str) -> str:
    def operation() -> None:
        note(ledger, "executed", os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    policy = POLICY.with_changes(attempt_limit=2)
    idem = Idempotency(f"sqlite:///{database}", caller="owner", policy=policy)
    try:
        idem.run("the key", operation, name="", request="r")
    except AttemptsExhausted as error:
        return str(error)
    return "ran"


def test_operation_that_kills_its_workers_is_given_up(start, database, ledger):
    """With a limit of 2 attempts, two workers die; every later call fails without running."""
    for _ in range(2):
        assert start(_die_inside, database, ledger).exit_code() == -signal.SIGKILL
    for _ in range(2):
        told = start(_die_inside, database, ledger).result()
        assert "attempt_limit=2 is reached" in told
        assert told.endswith("none of them left an error in the store")
    assert len(noted(ledger)) == 2
    with Idempotency(f"sqlite:///{database}", caller="owner") as idem:
        stored = idem.read("the key")
        assert stored is not None
        assert stored.record.state is State.FAILED
