"""Automatic renewal: a long operation keeps its key, and one batch renews all of them."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from datetime import timedelta
from itertools import pairwise

import pytest

from retrysafe import (
    AsyncIdempotency,
    Idempotency,
    Key,
    OperationInFlight,
    Policy,
    StoreUnavailable,
    current_attempt,
)
from retrysafe.core.events import Reporter
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, ExtendAnswer
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.observe import EventKind
from retrysafe.runtime import heartbeat as heartbeat_module
from retrysafe.runtime.heartbeat import TaskHeartbeat, ThreadHeartbeat
from retrysafe.stores import Condition
from tests.runtime.staged import Hold, StagedStore, TaskHold, Worker, drive

LEASE = timedelta(milliseconds=150)
POLICY = Policy(lease=LEASE)
MANY = 20


def _idem(store, **options) -> Idempotency:
    return Idempotency(store, caller="tester", policy=POLICY, **options)


def test_operation_far_longer_than_its_lease_keeps_its_key():
    """Three leases later a rival with its own object still finds the key in flight."""
    store = StagedStore()
    with _idem(store) as idem, _idem(store) as rival:

        def operation() -> str:
            # Nine renewals at a third of a lease each.
            store.wait_until(lambda: len(store.renewals) >= 9)
            with pytest.raises(OperationInFlight):
                rival.run("the key", lambda: "rival", name="", request="r")
            attempt = current_attempt()
            assert not attempt.is_lost
            assert attempt.time_left > timedelta(0)
            return "long"

        answer = idem.answer("the key", operation, name="", request="r")
        assert (answer.value, answer.attempt) == ("long", 1)
        record = idem.read("the key").record
        assert record.lease_ends_at_ms - record.claimed_at_ms >= 3 * 150


def test_async_operation_far_longer_than_its_lease_keeps_its_key():
    """The same for tasks; the renewals go through the loop's timer."""
    store = StagedStore(waits=Waits.NEVER)

    async def main() -> None:
        async with AsyncIdempotency(store, caller="tester", policy=POLICY) as idem:

            async def operation() -> str:
                await asyncio.to_thread(store.wait_until, lambda: len(store.renewals) >= 9)
                assert not current_attempt().is_lost
                return "long"

            answer = await idem.answer("the key", operation, request=None)
            assert (answer.value, answer.attempt) == ("long", 1)

    drive(main())


# Enough time for twenty operations to start before the first of them is due.
TOGETHER = POLICY.with_changes(lease=timedelta(milliseconds=600))


def _wait_for_one_batch(store: StagedStore) -> None:
    """Five rounds are far more than it takes, and far fewer than one commit per operation."""
    sizes: list[int] = []

    def is_reached() -> bool:
        sizes[:] = [len(commit.extensions) for commit in store.renewals]
        return MANY in sizes or len(sizes) >= 5

    store.wait_until(is_reached)
    assert MANY in sizes, sizes


def test_one_thread_renews_many_operations_in_one_batch():
    """Twenty operations that started one after the other are renewed by one commit."""
    store = StagedStore()
    with Idempotency(store, caller="tester", policy=TOGETHER) as idem:
        hold = Hold()
        workers = []
        for number in range(MANY):
            workers.append(Worker(idem.run, f"key {number}", hold, request=None))
            hold.reached()
        _wait_for_one_batch(store)
        beats = [item for item in threading.enumerate() if item.name == "retrysafe-heartbeat"]
        assert len(beats) == 1
        # From there on they stay together: the next three rounds are one commit each.
        start = len(store.renewals)
        store.wait_until(lambda: len(store.renewals) >= start + 3)
        rounds = store.renewals[start : start + 3]
        assert [len(commit.extensions) for commit in rounds] == [MANY] * 3
        hold.open()
        for worker in workers:
            worker.result()


def test_one_timer_renews_many_tasks_in_one_batch():
    """The same for tasks."""
    store = StagedStore(waits=Waits.NEVER)

    async def main() -> None:
        async with (
            AsyncIdempotency(store, caller="tester", policy=TOGETHER) as idem,
            asyncio.TaskGroup() as group,
        ):
            hold = TaskHold()
            for number in range(MANY):
                group.create_task(idem.run(f"key {number}", hold, request=None))
                await asyncio.sleep(0.001)
            await asyncio.to_thread(_wait_for_one_batch, store)
            hold.open()

    drive(main())


def test_renewal_batches_respect_the_limit_of_the_store():
    """A store that takes eight rows a commit gets no more, and all twenty are renewed."""
    store = StagedStore(batch_limit=8)
    with _idem(store) as idem:
        hold = Hold()
        workers = [Worker(idem.run, f"key {number}", hold, request=None) for number in range(MANY)]
        hold.reached(MANY)

        def renewed() -> set[bytes]:
            return {item.token for commit in store.renewals for item in commit.extensions}

        store.wait_until(lambda: len(renewed()) == MANY)
        assert max(len(commit.extensions) for commit in store.renewals) <= 8
        hold.open()
        for worker in workers:
            worker.result()


def test_renewal_stops_when_the_operation_ends():
    """After an operation its lease is nobody's business."""
    store = StagedStore()
    with _idem(store) as idem:
        idem.run("short", lambda: 1, request=None)

        def operation() -> None:
            # While this one is renewed twice, the ended one is not.
            store.wait_until(lambda: len(store.renewals) >= 2)

        idem.run("long", operation, request=None)
    renewed = {item.key.text for commit in store.renewals for item in commit.extensions}
    assert renewed == {"long"}


def test_renewal_stops_at_the_run_limit():
    """An operation over its run limit is renewed no more, and a rival takes over."""
    store = StagedStore()
    policy = POLICY.with_changes(run_limit=timedelta(milliseconds=300))
    with _idem(store) as idem, _idem(store) as rival:
        hold = Hold()
        lost = []

        def operation() -> None:
            hold()
            lost.append(current_attempt().is_lost)

        worker = Worker(idem.run, "the key", operation, name="", policy=policy, request=None)
        hold.reached()
        # Every renewal lies within the run limit of its record.
        store.wait_until(lambda: len(store.renewals) >= 1)
        _wait_until_abandoned(rival)
        assert rival.answer("the key", lambda: "rival", request=None).attempt == 2
        hold.open()
        error = worker.ended()
        assert type(error).__name__ == "ClaimLost"
        assert lost == [True]
        assert rival.run("the key", lambda: None, request=None) == "rival"


def _wait_until_abandoned(idem: Idempotency) -> None:
    ticks = threading.Event()
    for _ in range(3000):
        stored = idem.read("the key")
        assert stored is not None
        if stored.condition is Condition.ABANDONED:
            return
        ticks.wait(max(0.001, (stored.record.lease_ends_at_ms - stored.now_ms) / 1000))
    pytest.fail("the lease does not end")


@pytest.mark.parametrize("error", [StoreUnavailable("down"), OSError("a store's own error")])
def test_heartbeat_survives_a_store_that_fails(error):
    """Renewals that fail are tried again soon; the lease is kept and the failures are told."""
    store = StagedStore()
    failures = 3

    def fail(commit) -> None:
        if commit.is_renewal and len(store.renewals) <= failures:
            raise error

    store.before = fail
    events = []
    policy = POLICY.with_changes(lease=timedelta(seconds=1))
    idem = Idempotency(store, caller="tester", policy=policy, observers=[events.append])
    with idem:

        def operation() -> bool:
            store.wait_until(lambda: len(store.renewals) >= failures + 2)
            return current_attempt().is_lost

        assert idem.run("the key", operation, request=None) is False
    kinds = [event.kind for event in events]
    assert kinds.count(EventKind.RENEWAL_FAILED) == failures


@pytest.mark.parametrize("error", [StoreUnavailable("down"), OSError("a store's own error")])
def test_timer_survives_a_store_that_fails(error):
    """The same for tasks."""
    store = StagedStore(waits=Waits.NEVER)
    failures = 3

    def fail(commit) -> None:
        if commit.is_renewal and len(store.renewals) <= failures:
            raise error

    store.before = fail
    policy = POLICY.with_changes(lease=timedelta(seconds=1))

    async def operation() -> bool:
        await asyncio.to_thread(store.wait_until, lambda: len(store.renewals) >= failures + 2)
        return current_attempt().is_lost

    async def main() -> None:
        async with AsyncIdempotency(store, caller="tester", policy=policy) as idem:
            assert await idem.run("the key", operation, request=None) is False

    drive(main())


def test_timer_survives_a_renewal_that_somebody_cancels():
    """Whoever cancels all tasks of a loop leaves operations that run on; they keep their keys."""
    store = StagedStore(waits=Waits.NEVER)

    async def cancel(commit) -> None:
        if commit.is_renewal and len(store.renewals) == 1:
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    store.before = cancel
    policy = POLICY.with_changes(lease=timedelta(seconds=1))

    async def operation() -> bool:
        await asyncio.to_thread(store.wait_until, lambda: len(store.renewals) >= 3)
        return current_attempt().is_lost

    async def main() -> None:
        async with AsyncIdempotency(store, caller="tester", policy=policy) as idem:
            assert await idem.run("the key", operation, request=None) is False

    drive(main())


def test_lease_that_could_not_be_renewed_is_told_to_the_operation():
    """The store is gone for a whole lease: the operation sees that its claim may be lost."""
    store = StagedStore()

    def fail(commit) -> None:
        if commit.is_renewal:
            raise StoreUnavailable("down")

    store.before = fail
    with _idem(store) as idem:

        def operation() -> bool:
            attempt = current_attempt()
            ticks = threading.Event()
            for _ in range(3000):
                if attempt.time_left == timedelta(0):
                    break
                ticks.wait(attempt.time_left.total_seconds())
            return attempt.is_lost

        # Nobody took over, so the late outcome is kept all the same.
        assert idem.run("the key", operation, request=None) is True
        assert idem.read("the key").condition is Condition.SUCCEEDED


class PromptLoop(asyncio.SelectorEventLoop):
    """Does as uvloop: what is due already is no timer any more, and has no instant to ask for."""

    def call_at(self, when, callback, *args, context=None):
        if when <= self.time():
            return self.call_soon(callback, *args, context=context)
        return super().call_at(when, callback, *args, context=context)


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, PromptLoop])
def test_a_lease_is_added_while_another_one_is_due(new_loop):
    """A busy loop gets to a renewal late; what starts meanwhile runs, and one batch renews both."""
    store = StagedStore(waits=Waits.NEVER)
    key = Key("the key", caller="tester")
    asked_at = time.monotonic() - 20
    late = [Lease(key, bytes([number]) * 16, 30_000, 30_000, 0, asked_at) for number in (1, 2)]

    async def main() -> None:
        renewed = asyncio.Event()
        store.before = lambda commit: renewed.set()
        heartbeat = TaskHeartbeat(store, Reporter(None), time.monotonic)
        for lease in late:
            heartbeat.add(lease)
        await asyncio.wait_for(renewed.wait(), 30)
        await heartbeat.stop(30)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    (renewal,) = store.renewals
    assert {item.token for item in renewal.extensions} == {lease.token for lease in late}


class LoopStore:
    """A suspending store that only extends, in any loop, and says when it did."""

    capabilities = Capabilities(Waits.SUSPENDING)

    def __init__(self) -> None:
        self.extended = threading.Semaphore(0)
        self.closing_fails = False

    async def extend(self, extensions, timeout_seconds):
        self.extended.release()
        return [ExtendAnswer(Decision.APPLY, item.lease_ms, 0) for item in extensions]

    async def end_extending(self) -> None:
        if self.closing_fails:
            raise OSError("a store's own error")


def _lease() -> Lease:
    return Lease(Key("the key", caller="tester"), b"t" * 16, 300, 300, 0, time.monotonic())


def test_heartbeat_outlives_a_lack_of_descriptors(monkeypatch):
    """Its loop needs some; until there are, it says that renewals fail, and tries again."""
    store, events, failures = LoopStore(), [], [OSError(errno.EMFILE, "too many open files")] * 4
    runner = asyncio.Runner

    def refuse() -> asyncio.Runner:
        if failures:
            raise failures.pop()
        return runner()

    monkeypatch.setattr(heartbeat_module.asyncio, "Runner", refuse)
    heartbeat = ThreadHeartbeat(store, Reporter(events.append), time.monotonic)
    heartbeat.add(_lease())
    assert store.extended.acquire(timeout=10)
    heartbeat.stop(5.0)
    assert {event.kind for event in events} == {EventKind.RENEWAL_FAILED}
    assert "too many open files" in events[0].detail


@pytest.mark.parametrize("closing_fails", [False, True])
def test_heartbeat_outlives_whatever_is_raised_in_it(monkeypatch, closing_fails):
    """Also by its own parts, and when the connections cannot be closed afterwards."""
    store, failures = LoopStore(), [RuntimeError("odd")] * 2
    store.closing_fails = closing_fails
    renew = heartbeat_module.renew

    async def fail(*args) -> None:
        if failures:
            raise failures.pop()
        await renew(*args)

    def refuse(event) -> None:
        raise RuntimeError("an observer's own error")

    monkeypatch.setattr(heartbeat_module, "renew", fail)
    heartbeat = ThreadHeartbeat(store, Reporter(refuse), time.monotonic)
    heartbeat.add(_lease())
    for _ in range(2):
        assert store.extended.acquire(timeout=10)
    heartbeat.stop(5.0)


def test_a_heartbeat_that_cannot_begin_ends_when_it_is_stopped(monkeypatch):
    """However long there are no descriptors."""

    def refuse() -> asyncio.Runner:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(heartbeat_module.asyncio, "Runner", refuse)
    heartbeat = ThreadHeartbeat(LoopStore(), Reporter(None), time.monotonic)
    heartbeat.add(_lease())
    (beat,) = heartbeat._beats.values()
    thread = beat._thread
    heartbeat.stop(5.0)
    thread.join(5.0)
    assert not thread.is_alive()


def test_timer_outlives_whatever_is_raised_in_it(monkeypatch):
    """The same for tasks; the next try comes a little later, and not at once."""
    store, failures, tried = LoopStore(), [RuntimeError("odd")] * 2, []
    renew = heartbeat_module.renew

    async def fail(*args) -> None:
        tried.append(time.monotonic())
        if failures:
            raise failures.pop()
        await renew(*args)

    monkeypatch.setattr(heartbeat_module, "renew", fail)

    async def main() -> None:
        heartbeat = TaskHeartbeat(store, Reporter(None), time.monotonic)
        heartbeat.add(_lease())
        assert await asyncio.to_thread(store.extended.acquire, timeout=10)
        await heartbeat.stop(1.0)

    drive(main())
    # A twelfth of the lease after each failure.
    assert all(later - earlier > 0.02 for earlier, later in pairwise(tried[:3]))


def test_a_heartbeat_whose_start_was_interrupted_is_not_relied_on(monkeypatch):
    """Python breaks a thread whose start a signal's handler has interrupted; it seems to live on
    for a moment, in which the next operation asks for its renewals."""
    store, may_end = StagedStore(), threading.Event()
    start, broken = threading.Thread.start, []

    def start_interrupted(thread: threading.Thread) -> None:
        thread._target = may_end.wait
        broken.append(thread)
        start(thread)
        raise KeyboardInterrupt

    with _idem(store) as idem:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", start_interrupted)
            idem.run("first", lambda: 1, request=None)
        idem.run("second", lambda: store.wait_until(lambda: store.renewals), request=None)
    may_end.set()
    broken[0].join(30)
