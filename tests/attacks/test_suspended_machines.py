"""Machines that are suspended: the clock that stands still, and the timers that come late.

Attacked: leases that are counted by a clock which does not see the suspension. A laptop lid, a
hibernated instance or a paused container host ends a lease while its owner believes in it, and a
timer for its renewal goes off as if no time had passed.

Must hold: the local clock counts the suspension; nothing starts on a lease that is over by it
unless the store confirms the claim; after waking, leases are renewed within seconds.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, ClaimLost, Idempotency, Policy, current_attempt
from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.model import OperatorCommand
from retrysafe.core.outbox.entries import EntryCommand, OpenTry
from retrysafe.http import IdempotencyMiddleware, bearer_token
from retrysafe.http.asgi_run import AppRun
from retrysafe.runtime import local_time
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.heartbeat import TaskHeartbeat, ThreadHeartbeat
from retrysafe.runtime.task_ports import TaskClock
from retrysafe.runtime.thread_ports import ThreadClock
from retrysafe.stores import MemoryStore
from retrysafe.testing import ManualClock
from tests.core.building import KEY
from tests.http.driving import Shop, ask
from tests.relay.scripted import Scene, ScriptedPool

LEASE = timedelta(seconds=30)
POLICY = Policy(lease=LEASE)


class Machine:
    """A store and a local clock that go on together while the machine is suspended."""

    def __init__(self, monkeypatch) -> None:
        self.store_clock = ManualClock()
        self.store = MemoryStore(now_ms=self.store_clock)
        self.slept = 0.0
        for kind in (ThreadClock, TaskClock):
            monkeypatch.setattr(kind, "monotonic", staticmethod(self.monotonic))

    def monotonic(self) -> float:
        return time.monotonic() + self.slept

    def suspend(self, seconds: float = 40) -> None:
        self.store_clock.advance(timedelta(seconds=seconds))
        self.slept += seconds

    def rival(self) -> None:
        """Another machine takes the key over and finishes it."""
        with Idempotency(self.store, caller="shop", policy=POLICY) as idem:
            assert idem.run("key", lambda: "rival", name="pay", request=1) == "rival"


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


# The clock.


@pytest.mark.skipif(sys.platform != "linux", reason="the clock of Linux")
def test_the_local_clock_counts_a_suspension():
    """It is the one that Linux keeps running, not the one of Python's timers."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= local_time.monotonic() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert ThreadClock().monotonic is TaskClock.monotonic is local_time.monotonic


def test_where_there_is_no_such_clock_the_usual_one_is_taken(monkeypatch):
    """On other systems, and in sandboxes that know its name only."""

    def refuses(number):
        raise OSError(22, "Invalid argument")

    assert local_time.clock_of("win32") is time.monotonic
    monkeypatch.setattr(time, "CLOCK_MONOTONIC_RAW", 4, raising=False)
    assert local_time.clock_of("darwin")() > 0
    monkeypatch.setattr(time, "clock_gettime", refuses)
    assert local_time.clock_of("linux") is time.monotonic


# Timers.


class Extended:
    """A store that only extends, and says when."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.capabilities = self._store.capabilities
        self.asked = threading.Event()

    async def extend(self, extensions, timeout_seconds):
        self.asked.set()
        return await self._store.extend(extensions, timeout_seconds)


@pytest.mark.parametrize("kind", [ThreadHeartbeat, TaskHeartbeat])
def test_a_lease_is_renewed_soon_after_waking(monkeypatch, kind):
    """Its timer was set for ten seconds; the machine slept for an hour of them."""
    monkeypatch.setattr(local_time, "REST_MAXIMUM_SECONDS", 0.01)
    slept = [0.0]

    def monotonic() -> float:
        return time.monotonic() + slept[0]

    store = Extended()
    lease = Lease(KEY, b"t" * 16, 30_000, 30_000, 0, monotonic())

    async def on_a_loop() -> None:
        heartbeat = TaskHeartbeat(store, Reporter(None), monotonic)
        heartbeat.add(lease)
        slept[0] = 3_600.0
        assert await asyncio.to_thread(store.asked.wait, 5)
        await heartbeat.stop(1.0)

    if kind is TaskHeartbeat:
        asyncio.run(on_a_loop())
        return
    heartbeat = ThreadHeartbeat(store, Reporter(None), monotonic)
    heartbeat.add(lease)
    slept[0] = 3_600.0
    assert store.asked.wait(5)
    heartbeat.stop(1.0)


# What starts.


def _run(machine, face, operation, listener):
    options = {"caller": "shop", "policy": POLICY, "observers": [listener]}
    if face == "threads":
        with Idempotency(machine.store, **options) as idem:
            return idem.run("key", operation, name="pay", request=1)

    async def main():
        async with AsyncIdempotency(machine.store, **options) as idem:
            return await idem.run("key", operation, name="pay", request=1)

    return asyncio.run(main())


@pytest.mark.parametrize("face", ["threads", "tasks"])
@pytest.mark.parametrize("comes", [False, True], ids=["nobody came", "taken over"])
def test_no_operation_starts_on_a_lease_that_ended_while_the_machine_slept(machine, face, comes):
    """Suspended between the grant and the operation."""
    ran = []

    def suspend(event) -> None:
        if event.kind is EventKind.CLAIMED and not machine.slept:
            machine.suspend()
            if comes:
                machine.rival()

    def operation() -> str:
        ran.append("first")
        return "first"

    if comes:
        with pytest.raises(ClaimLost):
            _run(machine, face, operation, suspend)
        assert ran == []
    else:
        assert _run(machine, face, operation, suspend) == "first"


def test_no_resumed_operation_starts_after_a_sleep_over_the_reading_of_its_steps(machine):
    """On a loop they are read before the operation, and the answer may come very late."""
    ran = []

    def dies() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(machine, "threads", dies, lambda event: None)
    machine.suspend()
    read = machine.store.read

    async def late(key, **options):
        answer = await read(key, **options)
        machine.store.read = read
        machine.suspend()
        machine.rival()
        return answer

    machine.store.read = late
    with pytest.raises(ClaimLost):
        _run(machine, "tasks", lambda: ran.append("again"), lambda event: None)
    assert ran == []


@pytest.mark.parametrize("comes", [False, True], ids=["nobody came", "taken over"])
def test_no_step_starts_on_a_lease_that_ended_while_the_machine_slept(machine, comes):
    """Suspended between two steps."""
    ran = []

    def operation() -> str:
        attempt = current_attempt()
        attempt.step("reserve", ran.append, "reserve")
        machine.suspend()
        if comes:
            machine.rival()
        attempt.step("charge", ran.append, "charge")
        return "first"

    if comes:
        with pytest.raises(ClaimLost):
            _run(machine, "threads", operation, lambda event: None)
        assert ran == ["reserve"]
    else:
        assert _run(machine, "threads", operation, lambda event: None) == "first"
        assert ran == ["reserve", "charge"]


@pytest.mark.parametrize("comes", [False, True], ids=["nobody came", "taken over"])
def test_no_application_starts_on_a_lease_that_ended_before_its_task_got_its_turn(
    machine, monkeypatch, comes
):
    """Suspended, or busy, between the creation of the request's own task and its first step."""
    invoke = AppRun.invoke

    def late(self, attempt):
        complete = invoke(self, attempt)
        machine.suspend()
        if comes:
            run_sync(machine.store.operate(attempt.key, OperatorCommand.FORCE_RELEASE))
        return complete

    monkeypatch.setattr(AppRun, "invoke", late)
    shop = Shop()

    async def main():
        async with AsyncIdempotency(machine.store, policy=POLICY) as idem:
            return await ask(IdempotencyMiddleware(shop.asgi, idem, caller=bearer_token))

    reply = asyncio.run(main())
    assert (reply.status, len(shop.runs)) == ((409, 0) if comes else (201, 1))


# Relays.


def test_no_delivery_begins_on_a_lease_that_ended_while_the_machine_slept():
    """Suspended with one entry under way and two that wait; an operator has discarded one."""
    scene = Scene(size=1, lease=LEASE, timeout=timedelta(seconds=5))
    scene.stage("a")
    scene.stage("head", aggregate="lane")

    def sleep() -> None:
        scene.pass_time(40)
        number = scene.stored("head").entry.id
        run_sync(scene.store.outbox.operate(number, EntryCommand.DISCARD))
        scene.pool.end()

    report = scene.run(sleep)
    assert scene.pool.taken == ["a"]
    assert (report.delivered, report.lost) == (1, 1)
    assert scene.states() == {"a": "delivered", "head": "discarded"}


def test_what_was_handed_to_a_thread_is_looked_at_again():
    """Suspended with tries that were counted ahead; those that nobody took begin after all."""
    scene = Scene(size=1, lease=LEASE, timeout=timedelta(seconds=5))
    scene.slow_writes(0.01)
    scene.stage(*(f"n{number}" for number in range(60)))
    gone = []

    def act() -> None:
        scene.pass_time(0.005)
        scene.pool.end()

    def sleep() -> None:
        scene.pass_time(40)
        gone.append(scene.pool.queued[0].body.decode())
        run_sync(scene.store.outbox.operate(scene.pool.queued[0].id, EntryCommand.DISCARD))
        act()

    scene.pool.script = [act] * 30 + [sleep] + [act] * 60
    run_sync(scene.engine.run(until_idle=True))
    assert gone[0] not in scene.pool.taken
    assert sorted([*gone, *scene.pool.taken]) == sorted(f"n{number}" for number in range(60))
    assert {scene.stored(name).entry.open_try for name in scene.pool.taken} == {OpenTry.NONE}
    assert {scene.stored(name).entry.attempts for name in scene.pool.taken} == {1}
    other = ScriptedPool()
    run_sync(scene.relay(other).run(until_idle=True))
    assert other.taken == []
