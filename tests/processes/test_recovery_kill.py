"""SIGKILL at every boundary of an operation whose caller never comes back: a worker finishes it.

Every effect happens exactly once downstream, however far the owner came, and also when the first
worker is killed as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, Idempotency, Policy, child_key, current_attempt
from retrysafe.core.keys.key import Key
from retrysafe.core.model import State
from retrysafe.stores import Condition
from retrysafe.workers import WorkerPolicy
from tests.processes import downstream
from tests.processes.boundaries import Boundaries, MortalPostgresStore, MortalStore
from tests.processes.downstream import SERVICES
from tests.processes.ledger import noted
from tests.processes.recovering import recovered_once

SECRET = b"the secret of this test"
# Owners must not lose their claims on a busy machine, and all of them are waited for at once.
POLICY = Policy(lease=timedelta(seconds=2))
# Here every death is waited for; a claim that is lost on a busy machine is one more attempt.
SHORT = Policy(lease=timedelta(milliseconds=300), attempt_limit=1_000)
# A worker that follows a dead one must not wait for long.
WORKER = WorkerPolicy(interval=timedelta(milliseconds=100), back_off=timedelta(0), concurrency=2)
# An owner has about fifty boundaries; a count far beyond that is an endless loop.
BOUNDARIES_LIMIT = 150


class Crossing:
    """Where the operations of this process tell that they cross a boundary."""

    cross = staticmethod(lambda name: None)


def checkout(ports: dict[str, int], order: str) -> list[str]:
    attempt = current_attempt()
    return [attempt.step(name, call_service, attempt, name, ports) for name in SERVICES]


async def checkout_async(ports: dict[str, int], order: str) -> list[str]:
    attempt = current_attempt()
    return [await attempt.step(name, call_service, attempt, name, ports) for name in SERVICES]


def call_service(attempt, name: str, ports: dict[str, int]) -> str:
    Crossing.cross(f"call-{name}:before")
    answer = downstream.post(ports[name], attempt.child_key(name))
    Crossing.cross(f"call-{name}:after")
    return answer


class DeathAt(Boundaries):
    """Kills this process at the boundary of that name."""

    def cross(self, name: str) -> None:
        if name == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def _store(face: str, url: str, log: str, fatal: int | str):
    boundaries = (Boundaries if isinstance(fatal, int) else DeathAt)(log, fatal)
    Crossing.cross = boundaries.cross
    if url.startswith("sqlite"):
        return MortalStore(url.removeprefix("sqlite:///"), boundaries)
    return MortalPostgresStore(url, boundaries, is_async=face == "async")


def _own(pipe, face: str, url: str, order: str, ports, log: str, fatal: int | str) -> None:
    """The owner: one run of a key of its own, with death at the boundary of that number."""
    store = _store(face, url, log, fatal)
    policy = POLICY if isinstance(fatal, int) else SHORT
    options = {"caller": order, "policy": policy, "secret": SECRET}
    if face == "async":

        async def own() -> None:
            async with AsyncIdempotency(store, **options) as idem:
                idem.resumable("checkout")(checkout_async)
                await idem.run("order", checkout_async, ports, order)

        asyncio.run(own())
        return
    with Idempotency(store, **options) as idem:
        idem.resumable("checkout")(checkout)
        idem.run("order", checkout, ports, order)


def _work(pipe, face: str, url: str, log: str, fatal: int) -> dict[str, int]:
    """A worker that looks once; it too may die at a boundary."""
    store = _store(face, url, log, fatal)
    options = {"caller": "worker", "policy": SHORT, "secret": SECRET}
    operation = checkout_async if face == "async" else checkout
    report = recovered_once(store, options, operation, WORKER)
    return {"resumed": report.resumed, "failed": report.failed}


def _work_until_told(pipe, url: str) -> dict[str, int]:
    """A worker as it runs in production, until a message comes."""
    with Idempotency(url, caller="worker", policy=POLICY, secret=SECRET) as idem:
        idem.resumable("checkout")(checkout)
        with idem.worker(WORKER) as worker:
            pipe.recv()
        report = worker.reports["recovery"]
        return {"resumed": report.resumed, "failed": report.failed}


def _deaths(log: str, run) -> list[str]:
    """Processes that die at the first boundary, the second, … until one survives."""
    for fatal in range(1, BOUNDARIES_LIMIT):
        code = run(fatal).exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    else:
        pytest.fail("the process meets boundaries without end")
    crossed = [line[0] for line in noted(log)]
    assert len(crossed) == fatal - 1
    return crossed


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_a_worker_finishes_what_an_owner_left_at_each_boundary(start, tmp_path, url, ports, face):
    """Nobody retries. What was claimed is finished once, what was not claimed never ran."""
    log = str(tmp_path / "boundaries")
    crossed = _deaths(
        log, lambda fatal: start(_own, face, url, f"order-{fatal}", ports, log, fatal)
    )
    for name in SERVICES:
        for side in ("before", "after"):
            assert f"call-{name}:{side}" in crossed
            assert f"step-{name}:{side}" in crossed
    with Idempotency(url, caller="reader") as reader:
        claimed = [
            order
            for order in _orders(crossed)
            if reader.read(Key("order", caller=order)) is not None
        ]
        # Those that died before their claim was durable left nothing: no key, no arguments.
        assert len(claimed) < len(crossed) + 1
        worker = start(_work_until_told, url)
        _wait_until_settled(reader, claimed)
        worker.send("stop")
        report = worker.result()
        assert report["failed"] == 0
        assert 0 < report["resumed"] < len(claimed)
        for order in claimed:
            stored = reader.read(Key("order", caller=order))
            assert [step.name for step in stored.steps] == list(SERVICES)
            assert [item.state for item in stored.outcomes] == [State.SUCCEEDED]
        for order in set(_orders(crossed)) - set(claimed):
            assert reader.read(Key("order", caller=order)) is None
        while reader.sweep().has_more:
            pass
        assert all(reader.read(Key("order", caller=order)).arguments is None for order in claimed)
    _check_effects(ports, claimed)


def _orders(crossed: list[str]) -> list[str]:
    """One order per death, and that of the survivor."""
    return [f"order-{number}" for number in range(1, len(crossed) + 2)]


def _wait_until_settled(reader: Idempotency, orders: list[str]) -> None:
    for _ in range(6_000):
        left = [
            order
            for order in orders
            if reader.read(Key("order", caller=order)).condition is not Condition.SUCCEEDED
        ]
        if not left:
            return
        time.sleep(0.01)
    pytest.fail(f"nobody finishes {left}")


def _check_effects(ports, orders: list[str]) -> None:
    for name, port in ports.items():
        executions = downstream.seen(port)["executions"]
        keys = [child_key(SECRET, Key("order", caller=order), name) for order in orders]
        assert sorted(executions) == sorted(keys)


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_workers_killed_at_each_boundary(start, tmp_path, url, ports, face):
    """Each worker is killed a little later than the one before it; one of them finishes."""
    log = str(tmp_path / "boundaries")
    owner = start(_own, face, url, "order-1", ports, log, "call-reserve:before")
    assert owner.exit_code() == -signal.SIGKILL
    with Idempotency(url, caller="order-1") as reader:
        for fatal in range(1, BOUNDARIES_LIMIT):
            _wait_until_abandoned(reader)
            code = start(_work, face, url, log, fatal).exit_code()
            assert code in (0, -signal.SIGKILL)
            stored = reader.read("order")
            if stored.condition is Condition.SUCCEEDED:
                break
        assert [step.name for step in stored.steps] == list(SERVICES)
        assert [item.state for item in stored.outcomes] == [State.SUCCEEDED]
    crossed = {line[0] for line in noted(log)}
    assert {"take-over:before", "take-over:after"} <= crossed
    assert any(point.startswith("step-") for point in crossed)
    _check_effects(ports, ["order-1"])


def _wait_until_abandoned(reader: Idempotency) -> None:
    for _ in range(6_000):
        if reader.read("order").condition is Condition.ABANDONED:
            return
        time.sleep(0.01)
    pytest.fail("the lease does not end")
