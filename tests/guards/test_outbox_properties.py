"""One property per guard of the outbox and the relay, as plain functions without a fixture."""

from __future__ import annotations

import asyncio
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import GLOBAL, Ending, Idempotency, InvalidInput
from retrysafe import current_attempt as attempt
from retrysafe.core.model import Decision, SettleKind
from retrysafe.core.outbox.entries import (
    EntryClaim,
    EntryCommand,
    EntryEnding,
    EntryQuery,
    EntryStart,
    EntryState,
)
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.relay.pools import TaskDeliveryPool, ThreadDeliveryPool
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore, SqliteStore
from retrysafe.testing import ManualClock, Moment
from retrysafe.testing.suite.probe import KEY, request, settlement
from tests.core.building import call
from tests.core.driving import Fault, World, drive
from tests.relay.scripted import Scene, entry, stage

LEASE_MS = 1_000


def _claimed(store, *, dead_blocks=True):
    claim = EntryClaim(bytes([len(_listed(store))]) * 15 + bytes([_turn()]), 10, LEASE_MS)
    claim.dead_blocks = dead_blocks
    return run_sync(store.outbox.claim(claim)).entries


_turns = iter(range(10**9))


def _turn() -> int:
    return next(_turns) % 256


def _listed(store):
    return run_sync(store.outbox.list_entries(EntryQuery()))


def _zombie_is_refused(store, clock) -> None:
    stage(store, entry("a"))
    (zombie,) = _claimed(store)
    clock.advance(timedelta(milliseconds=LEASE_MS))
    (owner,) = _claimed(store)
    assert owner.token != zombie.token
    late = EntryEnding(zombie.id, zombie.token, EntryState.DEAD)
    assert run_sync(store.outbox.write([late])) == [Decision.LOST]
    assert _listed(store)[0].condition.value == "claimed"


def test_a_zombie_relay_is_refused():
    clock = ManualClock()
    _zombie_is_refused(MemoryStore(now_ms=clock), clock)


def test_a_zombie_relay_is_refused_by_sqlite():
    with tempfile.TemporaryDirectory() as folder:
        clock = ManualClock()
        store = SqliteStore(Path(folder) / "x.db", now_ms=clock)
        try:
            _zombie_is_refused(store, clock)
        finally:
            run_sync(store.close())


def test_what_a_rival_has_claimed_since_the_look_is_left_to_it():
    """Two relays look, then both claim: the second finds that the entry is no longer due."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "x.db")
        try:
            stage(store, entry("a"))
            outbox = store.outbox
            look = outbox._found

            def looked(connection, claim):
                found = look(connection, claim)
                outbox._found = look
                # A rival is quicker; it may not read on this connection while it is in use.
                rival = SqliteStore(Path(folder) / "x.db")
                assert len(_claimed(rival)) == 1
                run_sync(rival.close())
                return found

            outbox._found = looked
            assert _claimed(store) == []
        finally:
            run_sync(store.close())


def test_a_head_holds_its_aggregate_back():
    store = MemoryStore()
    stage(store, entry("a1", "a"), entry("a2", "a"))
    (head,) = _claimed(store)
    assert _claimed(store) == []
    dead = EntryEnding(head.id, head.token, EntryState.DEAD)
    run_sync(store.outbox.write([dead]))
    assert _claimed(store) == []


def test_a_confirmed_ending_stages_nothing_again():
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "x.db")
        try:
            wish = request()
            end = settlement(SettleKind.COMPLETE, KEY, wish.token)
            end.entries = (entry("a"),)
            run_sync(store.commit([wish], []))
            for _ in range(2):
                run_sync(store.commit([], [end]))
            assert len(_listed(store)) == 1
        finally:
            run_sync(store.close())


def test_nothing_is_staged_into_the_void():
    kept = []
    with Idempotency(MemoryStore(), caller=GLOBAL) as idem:
        idem.run("key", lambda: kept.append(attempt().outbox), request=None)
    with pytest.raises(InvalidInput):
        kept[0].stage("t", 1)


def test_a_released_attempt_delivers_nothing():
    """The next attempt stages again; both would be delivered."""
    world = World(join=lambda connection: None)

    async def operation(run):
        run.outbox.stage("t", 1)

    world.first.answer(call(judge=lambda value: Ending.RELEASED), operation)
    assert _listed(world.store) == []


def test_a_relay_does_not_deliver_an_entry_twice_at_once():
    scene = Scene(lease=timedelta(seconds=30))
    scene.stage("a")

    scene.stand_still_before_claim(2)
    scene.run(scene.pool.end)
    assert scene.pool.taken == ["a"]


def test_an_entry_that_kills_relays_is_buried():
    scene = Scene(attempt_limit=2)
    scene.stage("a")
    for _ in range(2):
        assert scene.relay_dies() == ["a"]
    scene.run()
    assert scene.pool.taken == []


def test_what_a_relay_only_claims_is_not_tried():
    store = MemoryStore()
    stage(store, entry("a"))
    assert _claimed(store)[0].attempts == 0


def test_what_a_dead_relay_had_begun_is_delivered_alone():
    scene = Scene(size=2)
    scene.stage("a", "b")
    assert scene.relay_dies() == ["a", "b"]
    assert scene.relay_dies() == ["a"]


def test_no_entry_is_buried_for_its_company():
    scene = Scene(size=2, attempt_limit=1)
    scene.stage("a", "b")
    scene.relay_dies()
    scene.run(scene.pool.end, scene.pool.end)
    assert scene.states() == {"a": "delivered", "b": "delivered"}


class _Target:
    def __init__(self) -> None:
        self.delivered = []

    async def deliver(self, delivery) -> None:
        self.delivered.append(delivery.key)


def test_a_thread_looks_before_it_delivers():
    store, target = MemoryStore(), _Target()
    stage(store, entry("a"))
    pool = ThreadDeliveryPool(target, 1)
    pool.start(_claimed(store)[0], lambda _: False)
    run_sync(pool.wait(10))
    run_sync(pool.close())
    assert target.delivered == []


def test_a_task_looks_before_it_delivers():
    store, target = MemoryStore(), _Target()
    stage(store, entry("a"))

    async def main() -> None:
        pool = TaskDeliveryPool(target, 1, 10)
        pool.start(_claimed(store)[0], lambda _: False)
        await pool.wait(10)
        await pool.close()

    asyncio.run(main())
    assert target.delivered == []


def _zombie_begins_nothing(store, clock) -> None:
    stage(store, entry("a"))
    (zombie,) = _claimed(store)
    clock.advance(timedelta(milliseconds=LEASE_MS))
    assert run_sync(store.outbox.operate(zombie.id, EntryCommand.DISCARD)) is Decision.APPLY
    late = EntryStart(zombie.id, zombie.token, 1, LEASE_MS)
    assert run_sync(store.outbox.write([late])) == [Decision.LOST]


def test_a_zombie_relay_begins_nothing():
    clock = ManualClock()
    _zombie_begins_nothing(MemoryStore(now_ms=clock), clock)


def test_a_zombie_relay_begins_nothing_in_sqlite():
    with tempfile.TemporaryDirectory() as folder:
        clock = ManualClock()
        store = SqliteStore(Path(folder) / "x.db", now_ms=clock)
        try:
            _zombie_begins_nothing(store, clock)
        finally:
            run_sync(store.close())


def test_an_ending_that_was_not_heard_is_told_again():
    scene = Scene()
    scene.stage("a")

    def end():
        scene.store.fail(Moment.BEFORE, method="outbox.write")
        scene.pool.end()

    scene.pool.script = [end, *[lambda: None] * 2]
    run_sync(scene.engine.run(until_idle=True))
    assert scene.states() == {"a": "delivered"}


def test_a_slow_delivery_is_renewed():
    scene = Scene(lease=timedelta(seconds=30))
    scene.stage("a")

    def wait():
        scene.pass_time(10)
        assert _claimed(scene.store) == []

    scene.run(*[wait] * 5, scene.pool.end)


def test_a_store_without_an_outbox_is_asked_first():
    """It would take the settlement and drop the entries."""
    world = World()
    world.first.store.capabilities = Capabilities(Waits.NEVER)
    with pytest.raises(InvalidInput):
        world.first.answer(call(), _staging)


async def _staging(run):
    run.outbox.stage("t", 1)


def test_nothing_is_staged_inside_a_step():
    """A later attempt skips the step, and the entry with it."""
    world = World(join=lambda connection: None)

    async def operation(run):
        await run.step("receipt", lambda: run.outbox.stage("t", 1))

    with pytest.raises(InvalidInput):
        world.first.answer(call(), world.first.operating(operation))


def test_a_cancelled_caller_with_steps_keeps_its_entries():
    """The outcome is settled without the caller, and what belongs to it must go along."""
    world = World(join=lambda connection: None)

    async def operation(run):
        if run.number == 1:
            raise KeyboardInterrupt
        run.outbox.stage("t", "a")

    with pytest.raises(KeyboardInterrupt):
        world.first.answer(call(), world.first.operating(operation))
    world.clock.seconds += 3_600
    second = world.process()
    second.store.read_faults.append(Fault(pauses=True))
    second.start(call(), second.operating(operation)).throw(KeyboardInterrupt())
    drive(world.background.pop())
    assert len(_listed(world.store)) == 1
