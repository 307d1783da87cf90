"""SIGSTOP of an owner past its lease: a zombie that wakes up changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, ClaimLost, Idempotency, InFlight, Policy, current_attempt
from retrysafe.core.model import State
from retrysafe.stores import Condition
from tests.processes.ledger import note, noted

POLICY = Policy(
    lease=timedelta(milliseconds=400), in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=30)
)


def _work_until_told(pipe, ledger: str) -> str:
    """The operation: has its first effect, waits for word from the test, looks at its claim."""
    note(ledger, "executed", os.getpid())
    pipe.send("running")
    pipe.recv()
    attempt = current_attempt()
    note(ledger, "lost" if attempt.is_lost else "held", attempt.number)
    try:
        attempt.raise_if_lost()
    except ClaimLost:
        note(ledger, "would-stop")
    return "from the first owner"


def _own(pipe, face: str, url: str, ledger: str) -> str:
    try:
        if face == "blocking":
            with Idempotency(url, caller="owner", policy=POLICY) as idem:
                return idem.run("the key", lambda: _work_until_told(pipe, ledger), request="r")
        return asyncio.run(_own_async(pipe, url, ledger))
    except ClaimLost as error:
        return f"ClaimLost for {error.key}"


async def _own_async(pipe, url: str, ledger: str) -> str:
    async def operation() -> str:
        # In a thread with this context, so that the loop stays free to renew the lease.
        return await asyncio.to_thread(_work_until_told, pipe, ledger)

    async with AsyncIdempotency(url, caller="owner", policy=POLICY) as idem:
        return await idem.run("the key", operation, name="", request="r")


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_zombie_gets_claim_lost_and_the_outcome_stays(start, url, ledger, face):
    """Stopped, overtaken, woken: the first owner learns of its loss and writes nothing."""
    owner = start(_own, face, url, ledger)
    assert owner.receive() == "running"
    owner.kill(signal.SIGSTOP)
    with Idempotency(url, caller="owner", policy=POLICY) as idem:

        def operation() -> str:
            note(ledger, "executed", os.getpid())
            return "from the second owner"

        taken = idem.answer("the key", operation, name="", request="r")
        assert (taken.value, taken.attempt, taken.replayed) == ("from the second owner", 2, False)
        settled = idem.read("the key")
        owner.kill(signal.SIGCONT)
        owner.send("go on")
        assert owner.result() == "ClaimLost for the key"
        after = idem.read("the key")
        assert settled is not None
        assert after is not None
        assert after.record == settled.record
        assert after.outcomes == settled.outcomes
        assert len(after.outcomes) == 1
        assert idem.answer("the key", operation, name="", request="r").value == taken.value
    assert noted(ledger) == [
        ["executed", str(owner.pid)],
        ["executed", str(os.getpid())],
        ["lost", "1"],
        ["would-stop"],
    ]


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_owner_stopped_past_its_lease_but_not_overtaken_keeps_its_outcome(start, url, ledger, face):
    """Nobody wanted the key meanwhile, so the late outcome is the one and only one."""
    owner = start(_own, face, url, ledger)
    assert owner.receive() == "running"
    owner.kill(signal.SIGSTOP)
    with Idempotency(url, caller="owner", policy=POLICY) as idem:
        _wait_until_abandoned(idem)
        owner.kill(signal.SIGCONT)
        owner.send("go on")
        assert owner.result() == "from the first owner"
        answer = idem.answer("the key", lambda: "again", request="r")
        assert (answer.value, answer.attempt, answer.replayed) == ("from the first owner", 1, True)
        stored = idem.read("the key")
        assert stored is not None
        assert [outcome.state for outcome in stored.outcomes] == [State.SUCCEEDED]
    assert [line for line in noted(ledger) if line[0] == "executed"] == [
        ["executed", str(owner.pid)]
    ]


def _wait_until_abandoned(idem: Idempotency) -> None:
    """Waits until the store's clock has passed the end of the lease."""
    for _ in range(500):
        stored = idem.read("the key")
        assert stored is not None
        if stored.condition is Condition.ABANDONED:
            return
        time.sleep(max(0, stored.record.lease_ends_at_ms - stored.now_ms) / 1000)
    pytest.fail("the lease of a stopped process does not end")
