"""Signals, forks and failing threads at the worst moment leave nothing locked or lost."""

from __future__ import annotations

import asyncio
import gc
import signal
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from retrysafe import AsyncIdempotency, ClaimLost, Idempotency, Key, Policy
from retrysafe.core.events import Reporter
from retrysafe.core.lease import Lease
from retrysafe.errors import Closed
from retrysafe.runtime import calls
from retrysafe.runtime.calls import ThreadGate
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.heartbeat import ThreadHeartbeat
from retrysafe.stores import MemoryStore, SqliteStore
from tests.forking import answer_of_child
from tests.interrupting import at_every_place, at_every_place_at_once
from tests.runtime.staged import until

LIMIT_SECONDS = 30


class Interrupted(BaseException):
    """What the signal raises in the main thread."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_while_waiting_for_the_write_lock_leaves_the_file_free(tmp_path: Path, alarm):
    """The signal is noticed only when the lock was got: it must be given back at once."""
    path = tmp_path / "app.db"
    with Idempotency(f"sqlite:///{path}", caller="tester") as idem:
        idem.run("first", lambda: 1, request=None)
        rival = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        rival.execute("BEGIN IMMEDIATE")
        release = threading.Timer(0.5, rival.execute, ("COMMIT",))
        release.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            idem.run("second", lambda: 2, request=None)
        release.join(LIMIT_SECONDS)
        assert idem.run("third", lambda: 3, request=None) == 3
        rival.execute("PRAGMA busy_timeout = 0")
        rival.execute("BEGIN IMMEDIATE")  # Raises when somebody still holds the lock.
        rival.execute("ROLLBACK")
        rival.close()


def test_an_outcome_survives_a_signal_while_it_waits_for_the_write_lock(tmp_path: Path, alarm):
    """The operation has run: its outcome is written although its caller is interrupted."""
    path = tmp_path / "app.db"
    runs: list[int] = []
    rival = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    releases: list[threading.Timer] = []

    def operation() -> int:
        runs.append(1)
        rival.execute("BEGIN IMMEDIATE")
        releases.append(threading.Timer(0.5, rival.execute, ("COMMIT",)))
        releases[0].start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 7

    with Idempotency(f"sqlite:///{path}", caller="tester") as idem:
        with pytest.raises(Interrupted):
            idem.run("key", operation, request=1, name="pay")
        releases[0].join(LIMIT_SECONDS)
        rival.close()
    with Idempotency(f"sqlite:///{path}", caller="tester") as other:
        assert other.run("key", operation, request=1, name="pay") == 7
    assert runs == [1]


def test_a_fork_waits_for_the_commit_under_way(tmp_path: Path):
    """Else SQLite's library would believe in the child that the file is locked, for ever."""
    inside, release = threading.Event(), threading.Event()
    is_staged = [False]

    def clock() -> int:
        # Asked for under the write lock, in the middle of a commit.
        if is_staged[0]:
            is_staged[0] = False
            inside.set()
            assert release.wait(LIMIT_SECONDS)
        return 1_700_000_000_000

    store = SqliteStore(tmp_path / "app.db", busy_timeout=timedelta(seconds=2), now_ms=clock)
    with Idempotency(store, caller="tester") as idem:
        idem.run("warm-up", lambda: 1, request=None)
        is_staged[0] = True
        writer = threading.Thread(target=lambda: idem.run("parent", lambda: 2, request=None))
        writer.start()
        assert inside.wait(LIMIT_SECONDS)
        # The fork stands still until the commit is over, so somebody else must let it go on.
        threading.Timer(0.2, release.set).start()
        assert answer_of_child(lambda: str(idem.run("child", lambda: 3, request=None))) == "3"
        writer.join(LIMIT_SECONDS)
        assert idem.run("parent", lambda: 9, request=None) == 2
    run_sync(store.close())


def test_a_relative_path_stays_the_same_file(tmp_path: Path, monkeypatch):
    """A daemon changes its working directory; the records must not be left behind."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("app.db")
    with Idempotency(store, caller="tester", cache=False) as idem:
        assert idem.run("key", lambda: 1, request=0, name="pay") == 1
        run_sync(store.close())
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert idem.run("key", lambda: 2, request=0, name="pay") == 1
    run_sync(store.close())
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_heartbeat_that_could_not_start_is_started_by_the_next_attempt(monkeypatch):
    """One failed start of a thread must not leave every later lease unrenewed."""
    heartbeat = ThreadHeartbeat(MemoryStore(), Reporter(None), time.monotonic)
    key = Key("k", caller="tester")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            heartbeat.add(Lease(key, b"a" * 16, 30_000, 30_000, 0, 0.0))
    heartbeat.add(Lease(key, b"b" * 16, 30_000, 30_000, 0, 0.0))
    names = [thread.name for thread in threading.enumerate()]
    heartbeat.stop(30)
    assert "retrysafe-heartbeat" in names


def test_a_cancelled_claim_that_has_not_left_is_not_sent(tmp_path: Path):
    """Nobody would run it, and its key would be blocked for a lease."""

    async def main() -> int:
        async with AsyncIdempotency(f"sqlite:///{tmp_path}/app.db", caller="tester") as idem:

            async def operation() -> int:
                return 5

            await idem.run("warm-up", operation, request=None)
            # The first one is under way when the second one queues behind it.
            first = asyncio.create_task(idem.run("first", operation, request=None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            second = asyncio.create_task(idem.run("second", operation, request=None))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            return await idem.run("second", operation, request=None)

    assert asyncio.run(main()) == 5


def test_a_gate_forgets_nobody_and_counts_nobody_twice():
    """Leaving is harmless for those who never came in, also after a refusal."""
    gate = ThreadGate()
    gate.enter("a")
    _leave(gate, "never inside")
    assert not gate.close(0.0)
    with pytest.raises(Closed):
        gate.enter("late")
    _leave(gate, "late")
    _leave(gate, "a")
    _leave(gate, "a")
    assert gate.close(0.0)


def _leave(gate: ThreadGate, token: str) -> None:
    gate.inside.pop(token, None)
    gate.notify()


def test_a_forced_release_frees_the_key_in_the_same_process():
    """The operator's own process is as free to run the operation as any other."""
    started, may_end = threading.Event(), threading.Event()
    policy = Policy(lease=timedelta(minutes=5))
    with Idempotency(MemoryStore(), caller="tester", policy=policy) as idem:

        def hang() -> str:
            started.set()
            assert may_end.wait(LIMIT_SECONDS)
            return "late"

        hung = threading.Thread(target=_quietly(idem, hang))
        hung.start()
        assert started.wait(LIMIT_SECONDS)
        idem.release("key", force=True)
        assert idem.run("key", lambda: "next", request=1, name="pay") == "next"
        may_end.set()
        hung.join(LIMIT_SECONDS)
        assert idem.run("key", lambda: "again", request=1, name="pay") == "next"


def _quietly(idem: Idempotency, operation):
    def call() -> None:
        with pytest.raises(ClaimLost):
            idem.run("key", operation, request=1, name="pay")

    return call


def test_a_signal_before_the_first_step_leaves_no_flow_that_was_never_begun(monkeypatch):
    """It may raise in the driver's first line; nothing has run then, and nobody complains."""

    def interrupted(flow):
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "run_sync", interrupted)
    with warnings.catch_warnings(record=True) as caught, Idempotency("memory://") as idem:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt):
            idem.run("k", lambda: None, caller="tester", request=None)
        monkeypatch.undo()
        gc.collect()
        assert [str(item.message) for item in caught] == []
        assert idem.run("k", lambda: "ran", caller="tester", request=None) == "ran"


def test_a_signal_anywhere_in_the_closing_leaves_the_gate_usable():
    """Whoever is inside must be able to leave, and somebody else to close it to the end."""
    gate_module = sys.modules[ThreadGate.__module__]
    gates = [ThreadGate()]
    gates[0].enter("call")
    places = 0
    for places in at_every_place(lambda: gates[0].close(0.001), gate_module):
        closed: list[bool] = []
        closer = threading.Thread(
            target=lambda gate=gates[0], found=closed: found.append(gate.close(LIMIT_SECONDS)),
            daemon=True,
        )
        closer.start()
        leaver = threading.Thread(target=_leave, args=(gates[0], "call"), daemon=True)
        leaver.start()
        leaver.join(LIMIT_SECONDS)
        closer.join(LIMIT_SECONDS)
        assert closed == [True], f"nobody can close it after a signal at place {places}"
        gates[0] = ThreadGate()
        gates[0].enter("call")
    assert places > 5


def test_a_signal_anywhere_in_the_gate_of_a_call_leaves_nobody_inside():
    """Closing would wait for a call that is over until its time is up."""
    gate_module = sys.modules[ThreadGate.__module__]
    runs: list[int] = []
    with Idempotency("memory://", caller="tester") as idem:
        idem.run("warm-up", lambda: None, request=None)

        def call() -> None:
            idem.run(f"k{len(runs)}", runs.append, len(runs), name="append")

        places = 0
        for places in at_every_place_at_once(3, call, gate_module):
            assert not idem._calls._gate.inside, (
                f"somebody is inside after signals at place {places}"
            )
        assert places > 2


def test_a_closer_sees_by_itself_that_nobody_is_inside():
    """Signals in a row keep the last one from telling."""
    gate = ThreadGate()
    gate.enter("call")
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(gate.close(LIMIT_SECONDS)))
    closer.start()
    until(lambda: bool(gate._closers))
    gate.inside.pop("call")
    closer.join(LIMIT_SECONDS / 2)
    assert closed == [True]


def test_two_closers_both_hear_of_the_end():
    gate = ThreadGate()
    gate.enter("call")
    closed: list[bool] = []
    closers = [
        threading.Thread(target=lambda: closed.append(gate.close(LIMIT_SECONDS))) for _ in range(2)
    ]
    for closer in closers:
        closer.start()
    until(lambda: len(gate._closers) == len(closers))
    _leave(gate, "call")
    for closer in closers:
        closer.join(LIMIT_SECONDS)
    assert closed == [True, True]


def test_an_outcome_that_a_second_interrupt_cuts_off_is_reported(caplog):
    """The first interrupt leaves its last write to the same thread; the second ends that too."""

    class Interrupted(MemoryStore):
        async def commit(self, claims, settlements):
            if settlements:
                raise KeyboardInterrupt
            return await super().commit(claims, settlements)

    with Idempotency(Interrupted(), caller="tester") as idem, pytest.raises(KeyboardInterrupt):
        idem.run("k", dict, name="charge")
    (told,) = (line.getMessage() for line in caplog.records if line.levelname == "ERROR")
    assert told.startswith("settle failed: key 'k', operation charge, attempt 1: KeyboardInterrupt")
