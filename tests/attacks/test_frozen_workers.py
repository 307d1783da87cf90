"""Workers that stand still past their leases, at each boundary of an operation that they resume.

Attacked: a worker that was frozen between its look and its takeover, between the takeover and the
operation, or between two steps, and wakes up after another has finished the operation.

Must hold: nothing starts on a lease that is over unless the store confirms it. Every step happens
once, and the outcome is that of the one who finished. If nobody came meanwhile, the worker goes on.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest

from retrysafe import Idempotency, Policy, current_attempt
from retrysafe.core.events import EventKind
from retrysafe.stores import open_store
from retrysafe.workers import WorkerPolicy
from tests.attacks.freezing import Freezer, wait_until_frozen
from tests.attacks.relays import wait_until
from tests.processes.ledger import note, noted
from tests.processes.recovering import recovered_once

POLICY = Policy(lease=timedelta(milliseconds=400), attempt_limit=100)
WORKER = WorkerPolicy(interval=timedelta(milliseconds=50), back_off=timedelta(0), concurrency=1)
# Before the operation, so nothing of it has happened by then.
BEFORE = ("look:after", "take-over:before", "take-over:after", "granted")
BOUNDARIES = (*BEFORE, "step:before", "record:before", "settle:before")
STEPS = ("reserve", "charge")


class Here:
    """What the operation of this process writes to, and where it may freeze."""

    ledger = ""
    who = ""
    freezer = Freezer("", "")


def _effect(name: str) -> str:
    note(Here.ledger, Here.who, name)
    return Here.who


def checkout(order: str) -> list[str]:
    if Here.who == "owner":
        os.kill(os.getpid(), signal.SIGKILL)
    _effect("called")
    attempt = current_attempt()
    Here.freezer.cross("step:before")
    return [attempt.step(name, _effect, name) for name in STEPS]


async def checkout_async(order: str) -> list[str]:
    _effect("called")
    attempt = current_attempt()
    Here.freezer.cross("step:before")
    return [await attempt.step(name, _effect, name) for name in STEPS]


def _own(pipe, url: str) -> None:
    Here.who = "owner"
    with Idempotency(url, caller="shop", policy=POLICY) as idem:
        idem.resumable("checkout")(checkout)
        idem.run("order", checkout, "1")


def _store(url: str, face: str, freezer: Freezer):
    """A store with boundaries around what a worker asks it for."""
    store = open_store(url, is_async=face == "async")
    for name, boundary in (
        ("list_resumable", "look"),
        ("take_over", "take-over"),
        ("record_step", "record"),
        ("commit", "settle"),
    ):
        setattr(store, name, freezer.around(getattr(store, name), boundary))
    return store


def _work(pipe, url: str, ledger: str, face: str, boundary: str) -> dict[str, int]:
    Here.ledger, Here.who, Here.freezer = ledger, "zombie", Freezer(ledger, boundary)
    store = _store(url, face, Here.freezer)

    def granted(event) -> None:
        if event.kind is EventKind.TAKEN_OVER:
            Here.freezer.cross("granted")

    options = {"caller": "shop", "policy": POLICY, "observers": [granted]}
    operation = checkout_async if face == "async" else checkout
    report = recovered_once(store, options, operation, WORKER)
    return {"resumed": report.resumed, "lost": report.lost, "failed": report.failed}


def _wait_until_abandoned(url: str) -> None:
    with Idempotency(url, caller="shop", policy=POLICY) as idem:
        wait_until(lambda: idem.read("order").condition.value == "abandoned")


def _freeze(start, face: str, stores: dict[str, tuple[str, str]]):
    """Workers that stand still at their boundaries, past their leases; all at the same time."""
    owners = [start(_own, url) for url, _ in stores.values()]
    for owner in owners:
        assert owner.exit_code() == -signal.SIGKILL
    children = []
    for boundary, (url, ledger) in stores.items():
        _wait_until_abandoned(url)
        children.append(start(_work, url, ledger, face, boundary))
    for child, (url, _) in zip(children, stores.values(), strict=True):
        wait_until_frozen(child)
        _wait_until_abandoned(url)
    return children


@pytest.mark.parametrize("face", ["blocking", "async"])
def test_a_frozen_worker_starts_nothing_that_another_has_finished(start, tmp_path, face):
    """Frozen at each boundary of its resumption; each step happens once."""
    stores = {}
    for boundary in BOUNDARIES:
        name = boundary.replace(":", "-")
        stores[boundary] = f"sqlite:///{tmp_path}/{name}.db", str(tmp_path / name)
    children = _freeze(start, face, stores)
    for child, (boundary, (url, ledger)) in zip(children, stores.items(), strict=True):
        _check(child, url, ledger, boundary)


def _check(child, url, ledger, boundary) -> None:
    Here.ledger, Here.who = ledger, "other"
    with Idempotency(url, caller="shop", policy=POLICY) as idem:
        idem.resumable("checkout")(checkout)
        outcome = idem.run("order", checkout, "1")
        before = noted(ledger)
        child.kill(signal.SIGCONT)
        report = child.result()
        assert noted(ledger) == before, f"frozen at {boundary}, it went on"
        assert report["resumed"] == 0, boundary
        assert idem.run("order", checkout, "1") == outcome
    zombie = [line[1] for line in before if line[0] == "zombie"]
    other = [line[1] for line in before if line[0] == "other"]
    # What it had done and not recorded when it froze is done again: nobody can know.
    assert zombie == {
        "step:before": ["called"],
        "record:before": ["called", "reserve"],
        "settle:before": ["called", *STEPS],
    }.get(boundary, [])
    assert other == ["called", *(() if boundary == "settle:before" else STEPS)]


@pytest.mark.parametrize(
    ("face", "boundary"), [("blocking", "granted"), ("async", "granted"), ("async", "step:before")]
)
def test_a_frozen_worker_goes_on_if_nobody_came(start, tmp_path, face, boundary):
    """The store confirms its claim, with a new lease, and it finishes what it took over."""
    url, ledger = f"sqlite:///{tmp_path}/keys.db", str(tmp_path / "ledger")
    (child,) = _freeze(start, face, {boundary: (url, ledger)})
    child.kill(signal.SIGCONT)
    assert child.result() == {"resumed": 1, "lost": 0, "failed": 0}
    lines = [line[1] for line in noted(ledger) if line[0] == "zombie"]
    assert lines == ["called", *STEPS]


def test_the_same_on_postgresql(start, migrated_url, tmp_path):
    """Frozen with its claim granted, over asyncpg."""
    ledger = str(tmp_path / "ledger")
    (child,) = _freeze(start, "async", {"granted": (migrated_url, ledger)})
    _check(child, migrated_url, ledger, "granted")
