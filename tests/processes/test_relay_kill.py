"""Relays in processes of their own: SIGKILL at every boundary, of either of two, and SIGSTOP."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from datetime import timedelta

import pytest

from retrysafe import GLOBAL, Idempotency, current_attempt
from retrysafe.core.outbox.entries import EntryQuery, EntryStart
from retrysafe.relay import Relay, RelayPolicy
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.processes.boundaries import Boundaries
from tests.processes.children import PATIENCE_SECONDS
from tests.processes.ledger import note, noted

# Long enough for a relay that lives to renew on a busy machine, short enough to wait for.
LEASE = timedelta(milliseconds=500)
POLICY = RelayPolicy(
    lease=LEASE, timeout=LEASE, poll=timedelta(milliseconds=20), attempt_limit=1_000
)
BOUNDARIES_LIMIT = 60
LANES = 12
EACH = 15
FREE = 40


def _stage_all(url: str, *, lanes: int, each: int, free: int) -> int:
    def operation(number: int) -> None:
        outbox = current_attempt().outbox
        for lane in range(lanes):
            outbox.stage("t", f"{lane}-{number:03}", aggregate=f"lane {lane}")

    def loose() -> None:
        for number in range(free):
            current_attempt().outbox.stage("t", f"free-{number:03}")

    with Idempotency(url, caller=GLOBAL) as idem:
        for number in range(each):
            idem.run(f"step-{number}", operation, number)
        idem.run("loose", loose, request=None)
    return lanes * each + free


def _states(url: str) -> list[str]:
    store = open_store(url)
    try:
        found = run_sync(store.outbox.list_entries(EntryQuery(limit=100_000)))
        return [item.condition.value for item in found]
    finally:
        run_sync(store.close())


def _finish(url: str, ledger: str) -> None:
    """A relay that lives delivers what is left, once the leases of the dead are over."""
    store = open_store(url)
    try:
        with Relay(store, _noting(ledger, "last"), policy=POLICY):
            for _ in range(PATIENCE_SECONDS * 50):
                found = run_sync(store.outbox.list_entries(EntryQuery(limit=100_000)))
                if all(item.condition.value == "delivered" for item in found):
                    return
                threading.Event().wait(0.02)
        raise AssertionError(Counter(item.condition.value for item in found))
    finally:
        run_sync(store.close())


def _noting(ledger: str, who: str):
    def deliver(delivery) -> None:
        note(ledger, who, delivery.key, delivery.body.decode())

    return deliver


def _check(ledger: str, count: int) -> Counter:
    """Nothing lost; whatever came twice came under its key; every lane in its order.

    The order is that of a receiver that drops repetitions: a late one may come after its successor.
    """
    deliveries = [(key, name) for _, key, name in noted(ledger)]
    assert len({name for _, name in deliveries}) == count
    # One key for each entry, and one entry for each key.
    assert len(set(deliveries)) == count
    assert len({key for key, _ in deliveries}) == count
    lanes: dict[str, list[str]] = {}
    for _, name in dict.fromkeys(deliveries):
        lane, _, number = name.partition("-")
        if lane != "free":
            lanes.setdefault(lane, []).append(number)
    for numbers in lanes.values():
        assert numbers == sorted(numbers)
    return Counter(name for _, name in deliveries)


# Every boundary.


class _MortalOutbox:
    """An outbox with a boundary before and after each write of its relay."""

    def __init__(self, outbox, boundaries: Boundaries) -> None:
        self._outbox = outbox
        self._boundaries = boundaries
        self.hints = outbox.hints

    async def claim(self, claim):
        self._boundaries.cross("claim:before")
        found = await self._outbox.claim(claim)
        self._boundaries.cross("claim:after")
        return found

    async def write(self, writes):
        # Both at once, if a delivery has ended by the time that the next one begins.
        kinds = sorted({"start" if isinstance(it, EntryStart) else "settle" for it in writes})
        for kind in kinds:
            self._boundaries.cross(f"{kind}:before")
        decisions = await self._outbox.write(writes)
        for kind in kinds:
            self._boundaries.cross(f"{kind}:after")
        return decisions

    async def extend(self, token, ids, lease_ms):
        return await self._outbox.extend(token, ids, lease_ms)


def _mortal_relay(pipe, url: str, ledger: str, log: str, fatal: int) -> None:
    boundaries = Boundaries(log, fatal)
    store = open_store(url)

    def deliver(delivery) -> None:
        boundaries.cross("deliver:before")
        note(ledger, "mortal", delivery.key, delivery.body.decode())
        boundaries.cross("deliver:after")

    relay = Relay(store, deliver, policy=POLICY, concurrency=1)
    relay._engine._outbox = _MortalOutbox(store.outbox, boundaries)
    relay.drain()
    run_sync(store.close())


def test_a_relay_killed_at_each_boundary_loses_nothing(start, url, tmp_path):
    """Killed at the n-th boundary for n = 1, 2, 3 … until it survives; the rest is delivered."""
    seen = set()
    delivered_twice = 0
    for fatal in range(1, BOUNDARIES_LIMIT):
        log, ledger = str(tmp_path / f"log-{fatal}"), str(tmp_path / f"ledger-{fatal}")
        own = f"{url}.{fatal}" if url.startswith("sqlite") else url
        before = len(_states(own))
        with Idempotency(own, caller=f"death {fatal}") as idem:

            def operation() -> None:
                for number in range(2):
                    current_attempt().outbox.stage("t", f"0-{number:03}", aggregate="lane")
                current_attempt().outbox.stage("t", "free-000")

            idem.run("the key", operation, name="stages", request=None)
        assert len(_states(own)) == before + 3
        child = start(_mortal_relay, own, ledger, log, fatal)
        code = child.exit_code()
        _finish(own, ledger)
        counts = _check(ledger, 3)
        delivered_twice += sum(count > 1 for count in counts.values())
        seen |= {name for (name,) in noted(log)}
        if code == 0:
            break
        assert code == -signal.SIGKILL
    else:
        raise AssertionError("the relay never survives")
    assert seen == {
        f"{what}:{when}"
        for what in ("claim", "start", "deliver", "settle")
        for when in ("before", "after")
    }
    # At least once is not exactly once: some deaths come between the delivery and the word of it.
    assert delivered_twice >= 3


# Either of two.


def _wait_for(is_so) -> None:
    for _ in range(PATIENCE_SECONDS * 100):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never comes to that")


def _relay_until_killed(pipe, url: str, ledger: str, who: str) -> None:
    store = open_store(url)
    pipe.send("ready")
    pipe.recv()
    Relay(store, _noting(ledger, who), policy=POLICY, concurrency=4).run()


@pytest.mark.parametrize("victim", [0, 1])
def test_two_relays_and_a_kill_of_either(start, url, ledger, victim):
    """No entry is lost, duplicates come under their key, and every aggregate keeps its order."""
    count = _stage_all(url, lanes=LANES, each=EACH, free=FREE)
    children = [start(_relay_until_killed, url, ledger, f"relay-{number}") for number in range(2)]
    for child in children:
        assert child.receive() == "ready"
    # The victim first: it has entries in its hands when it dies.
    children[victim].send("go")
    _wait_for(lambda: len(noted(ledger)) >= 5)
    children[1 - victim].send("go")
    _wait_for(lambda: len(noted(ledger)) >= count // 4)
    children[victim].kill(signal.SIGKILL)
    assert children[victim].exit_code() == -signal.SIGKILL
    _wait_for(lambda: set(_states(url)) == {"delivered"})
    children[1 - victim].kill(signal.SIGKILL)
    _check(ledger, count)
    assert f"relay-{victim}" in {who for who, _, _ in noted(ledger)}


# A zombie.


def _stopped_relay(pipe, url: str, ledger: str) -> tuple[int, int]:
    store = open_store(url)

    def deliver(delivery) -> None:
        note(ledger, "zombie", delivery.key, delivery.body.decode())
        pipe.send("delivering")
        # The test stops the whole process here, and lets it go on after its lease.
        pipe.recv()

    report = Relay(store, deliver, policy=POLICY, concurrency=1).drain()
    run_sync(store.close())
    return report.delivered, report.lost


def test_a_stopped_relays_late_word_is_refused(start, url, ledger):
    """It was taken over while it stood still, and what it says afterwards changes nothing."""
    count = _stage_all(url, lanes=1, each=2, free=0)
    child = start(_stopped_relay, url, ledger)
    assert child.receive() == "delivering"
    child.kill(signal.SIGSTOP)
    _finish(url, ledger)
    child.kill(signal.SIGCONT)
    child.send("go on")
    assert child.result() == (0, 1)
    assert _states(url) == ["delivered"] * 2
    counts = _check(ledger, count)
    assert counts == {"0-000": 2, "0-001": 1}
