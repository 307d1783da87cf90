"""Renewals among much other work: steps, endings, a used-up pool, a busy or blocked event loop.

Attacked is the lease of a healthy operation whose process has more to do than it can do at once.
What must hold: a renewal waits for the store itself, and for nothing else that the process asks of
it. Where an order matters, it is made by holding the other work up for as long as the test likes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Policy, current_attempt
from retrysafe.core.events import Event, Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import Extension, StepWrite
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.heartbeat import TaskHeartbeat, ThreadHeartbeat
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.sqlite.store import SqliteStore
from retrysafe.testing.suite.probe import key_of, request
from tests.runtime.staged import PATIENCE_SECONDS, Hold, StagedStore, Worker, until

SECOND = Policy(lease=timedelta(seconds=1))
# As many as an hour of attacks from outside has shown to be enough.
MANY = 500


class Lost(list[str]):
    """The operations that heard of a lost claim, or of anything else."""

    def run(self, idem: Idempotency, key: str) -> None:
        try:
            idem.run(key, _four_steps, name="op", request="r")
        except Exception as error:
            self.append(f"{key}: {error!r}")

    async def run_async(self, idem: AsyncIdempotency, key: str) -> None:
        try:
            await idem.run(key, _four_async_steps, name="op", request="r")
        except Exception as error:
            self.append(f"{key}: {error!r}")


def _four_steps() -> None:
    for number in range(4):
        current_attempt().step(f"step {number}", time.sleep, 0.05)


async def _four_async_steps() -> None:
    for number in range(4):
        await current_attempt().step(f"step {number}", asyncio.sleep, 0.05)


def test_many_threads_with_steps_lose_no_lease(tmp_path):
    """Five hundred operations at once on one file, each with four steps and a lease of a second."""
    lost = Lost()
    with Idempotency(f"sqlite:///{tmp_path / 'keys.db'}", caller="shop", policy=SECOND) as idem:
        workers = [Worker(lost.run, idem, f"key {number}") for number in range(MANY)]
        for worker in workers:
            worker.result()
    assert lost == []


def test_many_tasks_with_steps_lose_no_lease(tmp_path):
    """The same on an event loop, whose store has two worker threads."""
    lost = Lost()

    async def main() -> None:
        url = f"sqlite:///{tmp_path / 'keys.db'}"
        async with (
            AsyncIdempotency(url, caller="shop", policy=SECOND) as idem,
            asyncio.TaskGroup() as group,
        ):
            for number in range(MANY):
                group.create_task(lost.run_async(idem, f"key {number}"))

    asyncio.run(main())
    assert lost == []


class HeldSteps(MemoryStore):
    """A blocking store whose steps are held up; it counts the renewals."""

    def __init__(self) -> None:
        super().__init__()
        self.hold = Hold()
        self.renewals = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(Waits.BLOCKING)

    async def record_step(self, write: StepWrite) -> Any:
        self.hold()
        return await super().record_step(write)

    async def extend(self, extensions: Sequence[Extension], timeout_seconds: float) -> Any:
        self.renewals += 1
        return await super().extend(extensions, timeout_seconds)


def test_a_loops_renewals_wait_for_no_worker_thread():
    """Both are busy with steps for longer than any lease, and others queue behind them."""
    store, lost = HeldSteps(), Lost()

    async def main() -> None:
        policy = Policy(lease=timedelta(milliseconds=300))
        async with (
            AsyncIdempotency(store, caller="shop", policy=policy) as idem,
            asyncio.TaskGroup() as group,
        ):
            for number in range(8):
                group.create_task(lost.run_async(idem, f"key {number}"))
            await asyncio.to_thread(store.hold.reached, 2)
            await asyncio.to_thread(until, lambda: store.renewals >= 6)
            store.hold.open()

    asyncio.run(main())
    assert lost == []


class SeenLock:
    """A lock that tells how many have come to it, whether they have got it or wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.came = 0

    def __enter__(self) -> None:
        self.came += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_renewal_is_next_at_the_file(tmp_path):
    """Of many threads that want to write to a SQLite file, those that renew come first."""
    store = SqliteStore(tmp_path / "keys.db")
    wish = request(key_of("held"))
    run_sync(store.commit([wish], []))
    connections: Any = store._connections
    connections._turn, connections._lock = turn, lock = SeenLock(), SeenLock()
    hold, order = Hold(), []
    writers = [Worker(connections.write, lambda _: hold())]
    hold.reached()
    others = 20
    writers += [Worker(connections.write, lambda _: order.append("other")) for _ in range(others)]
    until(lambda: turn.came == 1 + others)

    def renew() -> None:
        run_sync(store.extend([Extension(wish.key, wish.token, 30_000)], 5.0))
        order.append("renewal")

    renewal = Worker(renew)
    until(lambda: lock.came == 2)
    hold.open()
    renewal.result()
    for writer in writers:
        writer.result()
    run_sync(store.close())
    # One or two of the others may be faster, as the lock has no order; twenty may not.
    assert order.index("renewal") <= 4, order


LENGTHS_MS = (60_000, 300)


class OneIsHeld(StagedStore):
    """Renewals of long leases are held up for as long as the test likes."""

    async def extend(self, extensions: Sequence[Extension], timeout_seconds: float) -> Any:
        if any(item.lease_ms == LENGTHS_MS[0] for item in extensions):
            await self.hold_long()
        return await super().extend(extensions, timeout_seconds)


def _leases(store: StagedStore) -> list[Lease]:
    """A long one that is due at once, and a short one."""
    made = []
    for lease_ms in LENGTHS_MS:
        wish = request(key_of(f"key {lease_ms}"), lease_ms=lease_ms)
        run_sync(store.inner.commit([wish], []))
        asked = time.monotonic() - (lease_ms / 2000 if lease_ms == LENGTHS_MS[0] else 0)
        made.append(Lease(wish.key, wish.token, lease_ms, lease_ms, 0, asked))
    return made


def test_a_slow_renewal_holds_up_none_of_another_length():
    """A sixth of a long lease is all of a short one."""
    store, hold = OneIsHeld(), Hold()

    async def hold_long() -> None:
        hold()

    store.hold_long = hold_long
    heartbeat = ThreadHeartbeat(store, Reporter(None), time.monotonic)
    long, short = _leases(store)
    heartbeat.add(long)
    hold.reached()
    heartbeat.add(short)
    store.wait_until(lambda: len(store.renewals) >= 4)
    assert not short.is_lost(time.monotonic())
    hold.open()
    heartbeat.stop(PATIENCE_SECONDS)


def test_a_slow_renewal_holds_up_none_of_another_length_on_a_loop():
    """The same for a store that is renewed in its user's loop."""

    async def main() -> None:
        store = OneIsHeld(waits=Waits.SUSPENDING)
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def hold_long() -> None:
            reached.set()
            await go_on.wait()

        store.hold_long = hold_long
        heartbeat = TaskHeartbeat(store, Reporter(None), time.monotonic)
        long, short = _leases(store)
        heartbeat.add(long)
        await asyncio.wait_for(reached.wait(), PATIENCE_SECONDS)
        heartbeat.add(short)
        await asyncio.to_thread(store.wait_until, lambda: len(store.renewals) >= 4)
        assert not short.is_lost(time.monotonic())
        go_on.set()
        await heartbeat.stop(PATIENCE_SECONDS)

    asyncio.run(main())


def test_a_blocked_loop_keeps_its_leases(database_url):
    """An operation that blocks its loop for longer than its lease is healthy all the same.

    A rival waits for the key. It is given the outcome, and runs nothing.
    """
    runs: list[str] = []
    has_begun = threading.Event()

    def rival() -> Any:
        policy = SECOND.with_changes(
            in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=PATIENCE_SECONDS)
        )
        assert has_begun.wait(PATIENCE_SECONDS)
        with Idempotency(database_url, caller="shop", policy=policy) as idem:
            return idem.run("key", lambda: runs.append("rival"), name="op", request="r")

    async def operation() -> str:
        runs.append("owner")
        has_begun.set()
        time.sleep(2.0)  # noqa: ASYNC251 — nobody should; this is what is attacked.
        return "done"

    async def main() -> str:
        async with AsyncIdempotency(database_url, caller="shop", policy=SECOND) as idem:
            return await idem.run("key", operation, name="op", request="r")

    waiting = Worker(rival)
    assert asyncio.run(main()) == "done"
    assert waiting.result() == "done"
    assert runs == ["owner"]


class Loop:
    """As much of an event loop as a heartbeat looks at."""

    def __init__(self) -> None:
        self.is_at_work = False
        self.looks = 0

    def is_running(self) -> bool:
        self.looks += 1
        return self.is_at_work

    def is_closed(self) -> bool:
        return False


def test_leases_of_a_loop_that_was_stopped_are_left_to_end():
    """Nobody knows whether it will run again; a crashed operation must not keep its key."""
    store, loop = StagedStore(), Loop()
    key = Key("key", caller="shop")
    lease = Lease(key, b"t" * 16, 120, 120, 0, time.monotonic())
    heartbeat = ThreadHeartbeat(store, Reporter(None), time.monotonic, loop)  # type: ignore[arg-type]
    heartbeat.add(lease)
    until(lambda: loop.looks >= 5)
    assert store.renewals == []
    loop.is_at_work = True
    store.wait_until(lambda: len(store.renewals) >= 1)
    heartbeat.stop(PATIENCE_SECONDS)


def test_a_heartbeat_ends_with_the_loop_that_it_renews_for(tmp_path, monkeypatch):
    """A loop that ended without `close` leaves no thread that renews for nobody."""
    monkeypatch.setattr("retrysafe.runtime.heartbeat.IDLE_SECONDS", 0.05)
    idem = AsyncIdempotency(f"sqlite:///{tmp_path / 'keys.db'}", caller="shop", policy=SECOND)

    left: list[Any] = []
    has_begun = asyncio.Event()

    async def never_ends() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        left.append(asyncio.ensure_future(idem.run("key", never_ends, request=None)))
        await has_begun.wait()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    left[0]._log_destroy_pending = False  # That it is left is what is attacked.

    def beats() -> list[str]:
        return [item.name for item in threading.enumerate() if "heartbeat" in item.name]

    until(lambda: beats() == [])
    idem._calls._bound.loop_ports.leave()


def test_renewals_that_fail_are_told_in_the_loops_own_thread():
    """Those who listen to an object of a loop hear of everything there."""
    store = StagedStore()
    heard: list[int] = []

    def refuse(commit: Any) -> None:
        if commit.is_renewal:
            raise OSError("no")

    store.before = refuse

    failed_thrice = asyncio.Event()

    def note(event: Event) -> None:
        heard.append(threading.get_ident())
        if len(heard) > 3:  # The first is the claim.
            failed_thrice.set()

    async def main() -> None:
        policy = Policy(lease=timedelta(milliseconds=100))
        async with AsyncIdempotency(
            store,
            caller="shop",
            policy=policy,
            observers=[note],
        ) as idem:
            await asyncio.wait_for(
                idem.run("key", failed_thrice.wait, request=None), PATIENCE_SECONDS
            )

    asyncio.run(main())
    assert set(heard) == {threading.get_ident()}
