"""Workers: their duties, their rests, how they stop, and that several of them run nothing twice."""

from __future__ import annotations

import asyncio
import inspect
import threading
from datetime import timedelta

import pytest

from retrysafe import (
    AsyncIdempotency,
    ClaimLost,
    Idempotency,
    InvalidInput,
    OperationInFlight,
    current_attempt,
)
from retrysafe.errors import StoreMissing
from retrysafe.relay import AsyncRelay, Relay
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import Condition, MemoryStore, SqliteStore
from retrysafe.testing import ManualClock
from retrysafe.testing.faults import FaultyStore, Moment
from retrysafe.workers import WorkerPolicy
from retrysafe.workers.duties import rounds
from retrysafe.workers.pools import TaskWorkerPool, ThreadWorkerPool

LEASE = timedelta(seconds=30)
# Nothing in these tests waits for a rest to be over.
NEVER = timedelta(days=1)
PATIENCE_SECONDS = 30


class Stop(BaseException):
    """The end of a process."""


def abandon(idem: Idempotency, clock: ManualClock, *keys: str):
    """Keys whose operation was interrupted; what it does from now on is up to the test."""
    acts: list = []

    @idem.resumable("pay")
    def pay(number):
        if not acts:
            raise Stop
        return acts[0](number)

    for number, key in enumerate(keys):
        with pytest.raises(Stop):
            idem.run(key, pay, number)
    clock.advance(LEASE)
    return acts


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def idem(clock):
    with Idempotency(MemoryStore(now_ms=clock), caller="shop", cache=False) as made:
        yield made


# Rests.


class Rests:
    """A signal that notes every rest, and stops after so many."""

    def __init__(self, count: int, meanwhile=lambda seconds: None) -> None:
        self.count = count
        self.seconds: list[float] = []
        self.meanwhile = meanwhile

    def set(self) -> None:
        self.count = 0

    async def wait(self, timeout_seconds: float) -> bool:
        self.seconds.append(timeout_seconds)
        self.meanwhile(timeout_seconds)
        return len(self.seconds) >= self.count


def test_rests_are_spread_around_the_interval():
    """A quarter less to a quarter more, so that workers started together drift apart."""
    draws = iter((0.0, 0.5, 1.0))
    rests = Rests(3)
    seen = []

    async def work():
        seen.append(len(rests.seconds))

    run_sync(rounds("work", work, 4.0, rests, lambda: next(draws)))
    assert rests.seconds == [3.0, 4.0, 5.0]
    assert seen == [0, 1, 2]


def test_an_outage_is_waited_for_longer_each_time(caplog):
    """And forgotten with the first answer; it is no reason to end."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="list_abandoned", times=6)
    rests = Rests(8)
    look = lambda: store.list_abandoned(1)  # noqa: E731 — the round.
    run_sync(rounds("work", look, 4.0, rests, lambda: 0.5))
    assert rests.seconds == [8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 4.0, 4.0]
    assert caplog.text.count("work: the store does not answer") == 6


def test_a_rest_longer_than_any_outage_stays_as_it_is():
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="list_abandoned", times=None)
    rests = Rests(2)
    run_sync(rounds("work", lambda: store.list_abandoned(1), 300.0, rests, lambda: 0.5))
    assert rests.seconds == [300.0, 300.0]


def test_an_operation_is_finished_within_its_lease_and_an_interval(idem, clock):
    """Whenever the worker looks: at the latest an interval and its jitter after the lease."""
    acts = abandon(idem, clock, "order")
    clock.jump_back(LEASE)
    claimed_at_ms = clock()
    finished: list[int] = []
    acts.append(lambda number: finished.append(clock()))
    interval = timedelta(seconds=7)
    worker = idem.worker(WorkerPolicy(interval=interval))
    flow = worker.duties["recovery"]._flow

    def meanwhile(seconds: float) -> None:
        run_sync(flow._pool.drain())
        clock.advance(timedelta(milliseconds=round(seconds * 1000)))

    run_sync(flow.run(Rests(20, meanwhile)))
    assert len(finished) == 1
    waited_ms = finished[0] - claimed_at_ms
    assert LEASE <= timedelta(milliseconds=waited_ms) <= LEASE + interval * 1.25
    assert idem.read("order").condition is Condition.SUCCEEDED


# One run.


def test_two_workers_and_a_retry_race_for_one_key(tmp_path):
    """All of them see it abandoned before any of them asks for it; exactly one runs it."""
    clock = ManualClock()
    url = tmp_path / "keys.db"
    ran: list[int] = []
    barrier = threading.Barrier(3)
    faces = [
        Idempotency(SqliteStore(url, now_ms=clock), caller="shop", cache=False) for _ in range(3)
    ]
    for idem in faces:
        is_first = idem is faces[0]

        @idem.resumable("pay")
        def pay(number, is_first=is_first):
            if not ran and is_first and clock() == start_ms:
                raise Stop
            ran.append(current_attempt().number)
            return number

        idem.pay = pay
    start_ms = clock()
    with pytest.raises(Stop):
        faces[0].run("order", faces[0].pay, 7)
    clock.advance(LEASE)

    reports = []

    def work(idem):
        worker = idem.worker()
        recovery = worker.duties["recovery"]._flow._recovery
        prepare = recovery._prepared

        def prepared(stored):
            run = prepare(stored)
            barrier.wait(PATIENCE_SECONDS)
            return run

        recovery._prepared = prepared
        worker.duties["recovery"].drain()
        reports.append(worker.reports["recovery"])

    answers = []

    def retry():
        barrier.wait(PATIENCE_SECONDS)
        try:
            answers.append(faces[2].answer("order", faces[2].pay, 7))
        except (OperationInFlight, ClaimLost) as error:
            answers.append(error)

    threads = [threading.Thread(target=work, args=(idem,)) for idem in faces[:2]]
    threads.append(threading.Thread(target=retry))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert ran == [2]
    assert sum(item.resumed + item.lost for item in reports) == 2
    (answer,) = answers
    is_retry = getattr(answer, "replayed", None) is False
    assert sum(item.resumed for item in reports) == (0 if is_retry else 1)
    assert faces[2].run("order", faces[2].pay, 7) == 7
    for idem in faces:
        idem.close()
        run_sync(idem._calls.store.close())


# Stopping.


def test_a_worker_that_is_stopped_finishes_what_is_under_way(idem, clock):
    """And starts nothing more, although more is waiting."""
    acts = abandon(idem, clock, "a", "b", "c")
    inside, go_on = threading.Event(), threading.Event()
    ran = []

    def slow(number):
        inside.set()
        assert go_on.wait(PATIENCE_SECONDS)
        ran.append(number)

    acts.append(slow)
    worker = idem.worker(WorkerPolicy(interval=NEVER, concurrency=1))
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert inside.wait(PATIENCE_SECONDS)
    worker.stop()
    worker.stop()
    assert thread.is_alive()
    go_on.set()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert len(ran) == 1
    assert worker.reports["recovery"].resumed == 1


def test_a_worker_that_was_stopped_before_it_started_does_nothing(idem, clock):
    acts = abandon(idem, clock, "order")
    acts.append(lambda number: number)
    worker = idem.worker()
    worker.stop()
    assert worker.run()["recovery"].resumed == 0
    assert idem.read("order").condition is Condition.ABANDONED


def test_a_worker_beside_the_application(idem, clock):
    """In threads of its own for the length of a block."""
    acts = abandon(idem, clock, "order")
    done = threading.Event()
    acts.append(lambda number: done.set())
    with idem.worker(WorkerPolicy(interval=NEVER)) as worker:
        assert done.wait(PATIENCE_SECONDS)
    assert worker.reports["recovery"].resumed == 1
    assert idem.read("order").condition is Condition.SUCCEEDED


def test_a_duty_that_fails_ends_the_worker(clock):
    """A worker without its recovery would only look alive; what it raised is told."""
    store = FaultyStore(MemoryStore(now_ms=clock))
    store.fail(
        Moment.BEFORE, method="list_resumable", error=lambda call: StoreMissing("the file is gone")
    )
    with Idempotency(store, caller="shop") as idem:
        with pytest.raises(StoreMissing, match="gone"):
            idem.worker(WorkerPolicy(interval=NEVER)).run()
        store.fail(
            Moment.BEFORE, method="list_resumable", error=lambda call: StoreMissing("gone again")
        )
        worker = idem.worker(WorkerPolicy(interval=NEVER))
        with pytest.raises(StoreMissing, match="gone again"), worker:
            worker._thread.join(PATIENCE_SECONDS)


def test_an_interrupted_worker_stops_its_duties(idem, monkeypatch):
    """As by Ctrl-C in a program that handles no signals."""
    worker = idem.worker(WorkerPolicy(interval=NEVER))
    calls = []

    class Interrupted:
        def put(self, item):
            calls.append(item)

        def get(self, timeout):
            raise KeyboardInterrupt

    monkeypatch.setattr("retrysafe.workers.worker.queue.SimpleQueue", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.run()
    assert calls == [None] * len(worker.duties)


def test_a_worker_beside_the_application_says_at_once_that_it_ended(clock, caplog):
    """The block may last as long as the process; what ended the worker is raised there too."""
    store = FaultyStore(MemoryStore(now_ms=clock))
    store.fail(Moment.BEFORE, method="list_resumable", error=lambda call: StoreMissing("gone"))
    with Idempotency(store, caller="shop") as idem:
        worker = idem.worker(WorkerPolicy(interval=NEVER))
        with pytest.raises(StoreMissing), worker:
            worker._thread.join(PATIENCE_SECONDS)
            (line,) = ended_lines(caplog)
            assert isinstance(line.exc_info[1], StoreMissing)


def ended_lines(caplog):
    return [
        line
        for line in caplog.records
        if (line.name, line.levelname) == ("retrysafe", "ERROR") and "was ended" in line.message
    ]


def test_what_ends_recovery_is_told_before_the_wait_for_what_is_under_way(idem, clock, caplog):
    """An operation that hangs would keep it back for ever."""
    acts = abandon(idem, clock, "order")
    inside, go_on = threading.Event(), threading.Event()

    def hang(number):
        inside.set()
        assert go_on.wait(PATIENCE_SECONDS)

    acts.append(hang)
    flow = idem.worker().duties["recovery"]._flow
    resume_all, drain = flow._recovery.resume_all, flow._pool.drain

    async def fail():
        await resume_all()
        assert inside.wait(PATIENCE_SECONDS)
        raise StoreMissing("gone")

    async def told_before():
        assert "recovery: ends by an error, once what is under way has ended" in caplog.text
        assert "StoreMissing" in caplog.text
        go_on.set()
        await drain()

    flow._recovery.resume_all, flow._pool.drain = fail, told_before
    with pytest.raises(StoreMissing):
        run_sync(flow.run(Rests(1)))
    assert flow.report.resumed == 1


def test_a_thread_that_cannot_be_started_ends_the_worker(idem, clock, monkeypatch):
    """The error is raised, nothing waits for the thread, and the key stays as it was."""
    acts = abandon(idem, clock, "order")
    acts.append(lambda number: number)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "retrysafe-recovery":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ends = []

    def work(worker):
        try:
            ends.append(worker.run())
        except RuntimeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=work, args=(idem.worker(),), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert ends == ["can't start new thread"]
    assert idem.read("order").condition is Condition.ABANDONED
    monkeypatch.undo()
    assert idem.worker().run_once()["recovery"].resumed == 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), Stop()])
def test_an_operation_that_ends_its_thread_leaves_a_trace(idem, clock, caplog, error):
    """It counts as failed, is told, and takes neither its place nor the worker with it."""
    acts = abandon(idem, clock, "a", "b", "c")

    def end(number):
        if number < 2:
            raise error
        return number

    acts.append(end)
    report = idem.worker(WorkerPolicy(concurrency=1)).run_once()["recovery"]
    assert (report.failed, report.resumed) == (2, 1)
    lines = [line for line in caplog.records if line.message.endswith("failed")]
    assert [line.exc_info[1] for line in lines] == [error] * 2


def test_a_pool_whose_places_are_taken_for_long_is_reported(idem, clock, caplog):
    """Operations that hang keep their places, and others wait: that must not go unseen."""
    acts = abandon(idem, clock, "a", "b", "c")
    go_on = threading.Event()
    acts.append(lambda number: go_on.wait(PATIENCE_SECONDS))
    worker = idem.worker(WorkerPolicy(interval=timedelta(milliseconds=10), concurrency=2))
    flow = worker.duties["recovery"]._flow
    is_full = flow._recovery._notices.is_full

    def let_go(size):
        is_full(size)
        go_on.set()

    flow._recovery._notices.is_full = let_go
    run_sync(flow.drain())
    assert flow.report.resumed == 3
    assert caplog.text.count("because 2 others are under way") == 1


def test_a_report_that_is_not_complete_says_so(idem, clock, caplog, monkeypatch):
    monkeypatch.setattr("retrysafe.core.recovery.REPORT_LIMIT", 2)
    abandon(idem, clock, "a", "b", "c")
    run_sync(idem.worker().duties["abandoned"]._flow.drain())
    assert "more than 2 abandoned keys" in caplog.text


# More duties.


def test_a_relay_is_a_duty(idem, clock):
    """One line adds it; `run_once` delivers what is due."""
    acts = abandon(idem, clock, "order")
    acts.append(lambda number: current_attempt().outbox.stage("paid", {"order": number}))
    delivered = []
    relay = Relay(idem._calls.store, lambda delivery: delivered.append(delivery.topic))
    worker = idem.worker(also={"relay": relay})
    assert list(worker.duties) == ["recovery", "abandoned", "sweep", "relay"]
    reports = worker.run_once()
    assert (reports["recovery"].resumed, reports["relay"].delivered) == (1, 1)
    assert delivered == ["paid"]


def test_the_sweep_is_a_duty(idem, clock):
    """What is past its windows goes, in as many rounds as it takes."""
    for number in range(2_500):
        idem.run(f"order-{number}", lambda: None, request=None)
    clock.advance(timedelta(days=40))
    assert idem.worker().run_once()["sweep"].keys == 2_500


def test_a_sweep_under_way_waits_for_its_store(clock, caplog):
    store = FaultyStore(MemoryStore(now_ms=clock))
    store.fail(Moment.BEFORE, method="sweep")
    with Idempotency(store, caller="shop") as idem:
        idem.run("order", lambda: None, request=None)
        clock.advance(timedelta(days=40))
        flow = idem.worker().duties["sweep"]._flow
        run_sync(flow.run(Rests(2)))
    assert flow.report.keys == 1
    assert "sweep: the store does not answer" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"interval": timedelta(0)},
        {"report_interval": timedelta(seconds=-1)},
        {"back_off": timedelta(seconds=-1)},
        {"concurrency": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(changes):
    with pytest.raises(InvalidInput, match=next(iter(changes))):
        WorkerPolicy(**changes)


# Pools.


def test_a_pool_of_threads_runs_a_few_at_a_time():
    pool = ThreadWorkerPool(2)
    lock, go_on = threading.Lock(), threading.Event()
    inside: list[int] = []
    most: list[int] = []

    async def flow(number):
        with lock:
            inside.append(number)
            most.append(len(inside))
        assert go_on.wait(PATIENCE_SECONDS)
        with lock:
            inside.remove(number)

    async def start_all():
        for number in range(6):
            if number == 2:
                go_on.set()
            assert await pool.has_room()
            pool.start(flow(number))
        await pool.drain()
        assert await pool.has_room()

    run_sync(start_all())
    assert (len(most), inside) == (6, [])
    assert max(most) <= 2


def test_a_pool_that_cannot_start_a_thread_keeps_its_place(monkeypatch):
    """The flow is closed, and whoever drains the pool does not wait for it."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def nothing():
        raise AssertionError("never started")

    pool = ThreadWorkerPool(1)
    flow = nothing()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run_sync(pool.has_room())
    with pytest.raises(RuntimeError, match="new thread"):
        pool.start(flow)
    assert inspect.getcoroutinestate(flow) == inspect.CORO_CLOSED
    assert run_sync(pool.wait_for_room(0.01))
    run_sync(pool.drain())


def test_a_pool_that_is_stopped_wakes_who_waits_for_room():
    pool = ThreadWorkerPool(1)
    go_on = threading.Event()

    async def flow():
        assert go_on.wait(PATIENCE_SECONDS)

    assert run_sync(pool.wait_for_room(1e300))
    assert run_sync(pool.has_room())
    pool.start(flow())
    assert not run_sync(pool.wait_for_room(0.01))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(run_sync(pool.has_room())))
    thread.start()
    pool.stop()
    thread.join(PATIENCE_SECONDS)
    assert answers == [False]
    pool.stop()
    assert run_sync(pool.wait_for_room(PATIENCE_SECONDS))
    go_on.set()
    run_sync(pool.drain())
    assert not run_sync(pool.has_room())
    assert not run_sync(pool.has_room())


def test_a_pool_of_tasks_does_the_same():
    async def scene():
        pool = TaskWorkerPool(2)
        go_on = asyncio.Event()
        inside: list[int] = []
        most: list[int] = []

        async def flow(number):
            inside.append(number)
            most.append(len(inside))
            await go_on.wait()
            inside.remove(number)

        for number in range(2):
            assert await pool.wait_for_room(PATIENCE_SECONDS)
            assert await pool.has_room()
            pool.start(flow(number))
        assert not await pool.wait_for_room(0.01)
        waiting = asyncio.ensure_future(pool.has_room())
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        assert await waiting
        pool.start(flow(2))
        await pool.drain()
        assert (most, inside) == ([1, 2, most[-1]], [])
        go_on.clear()
        for number in range(2):
            assert await pool.has_room()
            pool.start(flow(number))
        waiting = asyncio.ensure_future(pool.has_room())
        await asyncio.sleep(0)
        pool.stop()
        assert await pool.wait_for_room(PATIENCE_SECONDS)
        assert not await waiting
        assert not await pool.has_room()
        go_on.set()
        await pool.drain()

    asyncio.run(scene())


# The face for event loops.


def async_scene(flow, *, store=None):
    """Runs a flow with a face on which one key is abandoned."""
    clock = ManualClock()
    acts: list = []

    async def main():
        made = store(clock) if store else MemoryStore(now_ms=clock)
        async with AsyncIdempotency(made, caller="shop", cache=False) as idem:

            @idem.resumable("pay")
            async def pay(number):
                if not acts:
                    raise Stop
                return await acts[0](number)

            with pytest.raises(Stop):
                await idem.run("order", pay, 7)
            clock.advance(LEASE)
            await flow(idem, acts)

    asyncio.run(main())


def test_an_async_worker_beside_the_application():
    async def flow(idem, acts):
        done = asyncio.Event()

        async def act(number):
            done.set()

        acts.append(act)
        async with idem.worker(WorkerPolicy(interval=NEVER)) as worker:
            await asyncio.wait_for(done.wait(), PATIENCE_SECONDS)
        assert worker.reports["recovery"].resumed == 1
        assert (await idem.read("order")).condition is Condition.SUCCEEDED

    async_scene(flow)


def test_an_async_worker_that_is_stopped_finishes_what_is_under_way():
    async def flow(idem, acts):
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def act(number):
            inside.set()
            await go_on.wait()
            return number

        acts.append(act)
        worker = idem.worker(WorkerPolicy(interval=NEVER))
        work = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(inside.wait(), PATIENCE_SECONDS)
        worker.stop()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not work.done()
        go_on.set()
        reports = await asyncio.wait_for(work, PATIENCE_SECONDS)
        assert reports["recovery"].resumed == 1
        assert (await idem.read("order")).condition is Condition.SUCCEEDED

    async_scene(flow)


def test_an_async_worker_that_was_stopped_early_does_nothing():
    """Before it runs, or before its duties have had their first turn."""

    async def flow(idem, acts):
        async def act(number):
            return number

        acts.append(act)
        worker = idem.worker()
        worker.stop()
        assert (await worker.run())["recovery"].resumed == 0
        async with idem.worker():
            pass
        worker = idem.worker()
        work = asyncio.ensure_future(worker.run())
        await asyncio.sleep(0)
        worker.stop()
        await asyncio.wait_for(work, PATIENCE_SECONDS)
        assert (await idem.read("order")).condition is Condition.ABANDONED

    async_scene(flow)


def test_an_async_operation_that_is_cancelled_leaves_a_trace(caplog):
    """By itself, and not because the worker is: that would be no failure of the operation."""

    async def flow(idem, acts):
        async def act(number):
            raise asyncio.CancelledError

        acts.append(act)
        report = (await idem.worker().run_once())["recovery"]
        assert (report.failed, report.resumed) == (1, 0)
        (line,) = [line for line in caplog.records if line.message.endswith("failed")]
        assert isinstance(line.exc_info[1], asyncio.CancelledError)

    async_scene(flow)


def test_an_async_duty_that_fails_ends_the_worker(caplog):
    """What it raised is told, at once and at the end of the block."""

    def store(clock):
        made = FaultyStore(MemoryStore(now_ms=clock))
        made.fail(
            Moment.BEFORE,
            method="list_resumable",
            times=None,
            error=lambda call: StoreMissing("the file is gone"),
        )
        return made

    async def flow(idem, acts):
        with pytest.raises(StoreMissing):
            await asyncio.wait_for(idem.worker().run(), PATIENCE_SECONDS)
        worker = idem.worker()
        with pytest.raises(StoreMissing):
            async with worker:
                await asyncio.wait({worker._task}, timeout=PATIENCE_SECONDS)
                await asyncio.sleep(0)
                (line,) = ended_lines(caplog)
                assert isinstance(line.exc_info[1], StoreMissing)
        with pytest.raises(KeyError):
            async with idem.worker():
                raise KeyError

    async_scene(flow, store=store)


@pytest.mark.parametrize("is_stopping", [False, True])
def test_an_async_worker_that_is_cancelled_cancels_what_is_under_way(is_stopping):
    """While it works, or while it waits for the end: the key is left to its lease."""

    async def flow(idem, acts):
        inside, ended = asyncio.Event(), asyncio.Event()

        async def act(number):
            inside.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        acts.append(act)
        worker = idem.worker(WorkerPolicy(interval=NEVER))
        work = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(inside.wait(), PATIENCE_SECONDS)
        if is_stopping:
            worker.stop()
            for _ in range(5):
                await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(work, PATIENCE_SECONDS)
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
        assert (await idem.read("order")).condition is Condition.RUNNING
        assert worker.reports["recovery"].failed == 0

    async_scene(flow)


def test_an_async_relay_is_a_duty():
    async def flow(idem, acts):
        async def act(number):
            current_attempt().outbox.stage("paid", {"order": number})

        acts.append(act)
        delivered = []

        async def deliver(delivery):
            delivered.append(delivery.topic)

        worker = idem.worker(also={"relay": AsyncRelay(idem._calls.store, deliver)})
        reports = await worker.run_once()
        assert (reports["recovery"].resumed, reports["relay"].delivered) == (1, 1)
        assert delivered == ["paid"]

    async_scene(flow)
