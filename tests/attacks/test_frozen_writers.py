"""Attack: a process that holds SQLite's write lock stands still, for longer than leases last.

While it does, nobody renews a lease of that file, and all of them run out. What must hold: the
moment that the lock is free again, because that process wakes up or dies, a healthy owner keeps its
key, also when a rival's claim comes before the owner's renewal. A crashed owner's key is taken over
all the same. The processes and their signals are real; who comes first is ordered by stopping the
other one for that moment.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from retrysafe import ClaimLost, Idempotency, InFlight, Key, Policy
from retrysafe.core import transitions
from retrysafe.core.model import ClaimAnswer, ClaimRequest, Condition, Decision, Record, StoredKey
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from retrysafe.stores.sqlite.grace import BLOCKED_SECONDS, HELD_SECONDS, Grace
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import LEASE_MS, key_of, request
from tests.core.building import MARK
from tests.processes.children import Child
from tests.processes.ledger import note, noted

LIMIT_SECONDS = 30
LEASE = timedelta(milliseconds=600)
POLICY = Policy(lease=LEASE, in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=20))
KEY = Key("the key", caller="owner")


def _freeze_in_a_commit(pipe: Connection, database: str) -> str:
    """Stands still in the middle of a commit, until it is woken or killed."""
    store = SqliteStore(database)

    def stand_still(_connection: object) -> None:
        pipe.send("holds the lock")
        os.kill(os.getpid(), signal.SIGSTOP)

    store._write(stand_still)
    run_sync(store.close())
    return "awake"


def _own(pipe: Connection, database: str, ledger: str) -> str:
    """A healthy owner, at work for as long as it is not told to end."""

    def operation() -> str:
        note(ledger, "executed", os.getpid())
        pipe.send("running")
        pipe.recv()
        return "from the owner"

    try:
        with Idempotency(f"sqlite:///{database}", caller="owner", policy=POLICY) as idem:
            return idem.run("the key", operation, name="pay", request="r")
    except ClaimLost:
        return "lost"


class Rival:
    """Asks for the key of the owner, in a thread: it waits for the write lock."""

    def __init__(self, store: SqliteStore, ask: Callable[[SqliteStore], Any]) -> None:
        self._answers: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(ask(store)), daemon=True
        )
        self._thread.start()
        _until(store._connections._lock.locked)
        # What it is about: a wait that is longer than commits take.
        time.sleep(2 * BLOCKED_SECONDS)

    def answer(self) -> Any:
        self._thread.join(LIMIT_SECONDS)
        (answer,) = self._answers
        return answer


def _until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.005)


def _read(store: SqliteStore) -> StoredKey:
    found = run_sync(store.read(KEY))
    assert found is not None
    return found


def _request(store: SqliteStore) -> ClaimRequest:
    record = _read(store).record
    mark = type(MARK)(record.rule, record.fingerprint)
    lease_ms = round(LEASE.total_seconds() * 1000)
    return ClaimRequest(KEY, (mark,), b"R" * 16, lease_ms, record.operation, "rival")


def _claim(store: SqliteStore) -> ClaimAnswer:
    ((answer,), _) = run_sync(store.commit([_request(store)], []))
    assert isinstance(answer, ClaimAnswer)
    return answer


def _recover(store: SqliteStore) -> ClaimAnswer:
    """As a worker does that has found the key among the abandoned ones."""
    (found,) = run_sync(store.list_abandoned(5))
    return run_sync(store.take_over(_request(store), found.record.token))


@pytest.fixture
def store(database: str):
    made = SqliteStore(database)
    yield made
    run_sync(made.close())


@pytest.fixture
def scene(start: Callable[..., Child], database: str, ledger: str, store: SqliteStore):
    """A healthy owner whose lease has run out, because another process holds the write lock."""
    owner = start(_own, database, ledger)
    assert owner.receive() == "running"
    frozen = start(_freeze_in_a_commit, database)
    assert frozen.receive() == "holds the lock"
    # Reading takes no lock.
    _until(lambda: _read(store).condition is Condition.ABANDONED)
    return owner, frozen


@pytest.mark.parametrize("ask", [_claim, _recover], ids=["claim", "worker"])
@pytest.mark.parametrize("ending", [signal.SIGCONT, signal.SIGKILL])
def test_a_healthy_owner_keeps_its_key(scene, store, ledger, ask, ending):
    """Although the rival comes first when the lock is free: it waited for it as well."""
    owner, frozen = scene
    rival = Rival(store, ask)
    owner.kill(signal.SIGSTOP)  # For a moment: its renewal comes second.
    frozen.kill(ending)
    answer = rival.answer()
    owner.kill(signal.SIGCONT)
    assert answer.decision in (Decision.IN_FLIGHT, Decision.LOST)
    # The owner renews it for as long as it works, which is longer than the grace.
    ends_at_ms = _read(store).record.lease_ends_at_ms
    _until(lambda: _read(store).record.lease_ends_at_ms > ends_at_ms)
    owner.send("end")
    assert owner.result() == "from the owner"
    assert noted(ledger) == [["executed", str(owner.pid)]]


def test_a_waiting_caller_gets_the_outcome_of_the_healthy_owner(scene, database, ledger):
    """By way of the whole stack, with the defaults of a caller that waits."""
    owner, frozen = scene
    with Idempotency(f"sqlite:///{database}", caller="owner", policy=POLICY) as idem:

        def operation() -> str:
            note(ledger, "executed", "by the rival")
            return "a second run"

        rival = Rival(
            idem._calls.store, lambda _: idem.run("the key", operation, name="pay", request="r")
        )
        owner.kill(signal.SIGSTOP)
        frozen.kill(signal.SIGKILL)
        spared_ms = round(LEASE.total_seconds() * 1000) // 6
        lapsed_ms = _read(idem._calls.store).record.lease_ends_at_ms
        _until(lambda: _read(idem._calls.store).record.lease_ends_at_ms >= lapsed_ms + spared_ms)
        owner.kill(signal.SIGCONT)
        owner.send("end")
        assert rival.answer() == "from the owner"
        assert owner.result() == "from the owner"
    assert noted(ledger) == [["executed", str(owner.pid)]]


def test_a_crashed_owners_key_is_taken_over_all_the_same(scene, store):
    """Once: the grace is given to each attempt a single time, however long others wait."""
    owner, frozen = scene
    owner.kill(signal.SIGKILL)
    rival = Rival(store, _claim)
    frozen.kill(signal.SIGKILL)
    answer = rival.answer()
    assert answer.decision is Decision.IN_FLIGHT
    assert 0 < answer.remaining_ms < LEASE.total_seconds() * 1000
    _until(lambda: _claim(store).decision is Decision.TAKE_OVER)


def test_without_a_wait_a_lapsed_lease_is_taken_over_at_once(store):
    """As ever: nobody stood in the way of its owner."""
    lapsed = ClaimRequest(KEY, (MARK,), b"O" * 16, 1, "pay", "owner")
    run_sync(store.commit([lapsed], []))
    _until(lambda: _read(store).condition is Condition.ABANDONED)
    assert _claim(store).decision is Decision.TAKE_OVER


def test_an_owner_whose_own_claim_waited_takes_it_over_itself(store, start, database):
    """Its answer was lost, its lease ran out; nobody else is spared by asking again."""
    own = ClaimRequest(KEY, (MARK,), b"R" * 16, 1, "pay", "owner")
    run_sync(store.commit([own], []))
    frozen = start(_freeze_in_a_commit, database)
    assert frozen.receive() == "holds the lock"
    rival = Rival(store, lambda made: run_sync(made.commit([own], [])))
    frozen.kill(signal.SIGCONT)
    ((answer,), _) = rival.answer()
    assert answer.decision is Decision.TAKE_OVER
    assert frozen.result() == "awake"


def _abandoned(number: int) -> Record:
    """What a crashed owner has left behind."""
    key = Key(f"key-{number}", caller="owner")
    lapsed = ClaimRequest(key, (MARK,), number.to_bytes(16, "big"), 1, "pay", "owner")
    record, _ = transitions.claim(None, lapsed, 0)
    return record


def _spares(grace: Grace, record: Record) -> bool:
    """Whether a process that has just waited for the lock spares the owner."""
    grace.note_wait(grace.monotonic() - 1)
    key = Key(record.text, caller="owner")
    claim = ClaimRequest(key, (MARK,), b"R" * 16, 60_000, "pay", "rival")
    return grace.spared(record, claim, 1_000) is not None


def test_a_contended_file_keeps_no_crowd_of_crashed_owners_keys(monkeypatch):
    """Each is spared once at most, however many there are: with more than are remembered, some are
    not spared, and none is forgotten while its second claim may be still to come."""
    monkeypatch.setattr("retrysafe.stores.sqlite.grace._SPARED_LIMIT", 3)
    now = [0.0]
    grace = Grace(lambda: now[0])
    crowd = [_abandoned(number) for number in range(5)]
    assert [_spares(grace, record) for record in crowd] == [True] * 3 + [False] * 2
    for _ in range(100):
        now[0] += 20
        assert [_spares(grace, record) for record in crowd] == [False] * 5


def test_a_process_that_runs_for_long_still_spares(monkeypatch):
    """Those of before a calm are forgotten for new ones: its memory is not full for ever."""
    monkeypatch.setattr("retrysafe.stores.sqlite.grace._SPARED_LIMIT", 3)
    now = [0.0]
    grace = Grace(lambda: now[0])
    assert all(_spares(grace, _abandoned(number)) for number in range(3))
    now[0] += 601
    assert all(_spares(grace, _abandoned(number)) for number in range(3, 6))
    assert len(grace._spared) == 3
    # A later attempt of a key that is remembered has a time of its own.
    again = replace(_abandoned(5), token=b"N" * 16)
    assert [_spares(grace, again), _spares(grace, again)] == [True, False]


def test_a_claim_that_is_refused_gives_no_grace(tmp_path):
    """Another request under the same key takes nothing over, so it must not keep others from it."""
    clock = ManualClock()
    store = SqliteStore(tmp_path / "shop.db", now_ms=clock)
    try:
        lapsed = ClaimRequest(KEY, (MARK,), b"O" * 16, 1_000, "pay", "owner")
        run_sync(store.commit([lapsed], []))
        clock.advance(timedelta(seconds=2))
        grace = store._connections.grace
        grace.note_wait(grace.monotonic() - 1)
        other = replace(lapsed, fingerprints=(replace(MARK, digest=b"other" * 4),), token=b"R" * 16)
        ((answer,), _) = run_sync(store.commit([other], []))
        assert answer.decision is Decision.MISMATCH
        assert _read(store).condition is Condition.ABANDONED
    finally:
        run_sync(store.close())


def test_who_held_the_lock_for_long_takes_nothing_over_at_once(tmp_path):
    """A process that stood still inside its own transaction kept all others from renewing."""
    clock, stands_still = ManualClock(), []

    def now_ms():
        if stands_still:
            stands_still.pop()
            time.sleep(HELD_SECONDS)  # Under the write lock: this is when a batch looks at it.
        return clock()

    store = SqliteStore(tmp_path / "keys.db", now_ms=now_ms)
    key, other = key_of("k"), key_of("other")
    run_sync(store.commit([request(key)], []))
    clock.advance(timedelta(milliseconds=LEASE_MS + 1))
    stands_still.append(True)
    run_sync(store.commit([request(other)], []))
    (answer,), _ = run_sync(store.commit([request(key)], []))
    assert answer.decision is Decision.IN_FLIGHT
    # Its owner had the time; it is dead.
    clock.advance(timedelta(milliseconds=LEASE_MS))
    (answer,), _ = run_sync(store.commit([request(key)], []))
    assert answer.decision is Decision.TAKE_OVER
    run_sync(store.close())
