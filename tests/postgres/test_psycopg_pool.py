"""The pool of blocking connections: a limit that nothing wears down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from retrysafe.stores.postgres.drivers import psycopg as psycopg_connector
from retrysafe.stores.postgres.drivers.port import PoolOptions
from retrysafe.stores.postgres.drivers.psycopg import _Pool, _Slots
from tests.interrupting import at_every_place
from tests.runtime.staged import until

LIMIT_SECONDS = 30


class Connection:
    """As much of a connection as a pool looks at."""

    def __init__(self, limit_seconds: float) -> None:
        self.pgconn = SimpleNamespace(transaction_status=TransactionStatus.IDLE, socket=0)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class QuietPool(_Pool):
    """A pool whose idle connections have no server to look for."""

    def _quiet_one(self) -> Connection | None:
        return self._idle.pop() if self._idle else None


def pool_of(size: int, *, wait: float) -> _Pool:
    options = PoolOptions(size_limit=size, connect_timeout=timedelta(seconds=wait))
    return QuietPool(Connection, options)


def test_a_signal_anywhere_costs_no_slot_and_leaves_no_lock():
    """A slot that is lost is lost for ever, and a lock that stays taken stops everybody."""
    pool = pool_of(1, wait=0.5)

    def use() -> None:
        pool.use(lambda connection: None)

    places = 0
    for places in at_every_place(use, psycopg_connector, contextlib):
        done: list[bool] = []
        user = threading.Thread(target=lambda found=done: (use(), found.append(True)), daemon=True)
        user.start()
        user.join(LIMIT_SECONDS)
        assert done, f"nobody gets a connection after a signal at place {places}"
    assert places > 10


def both_used(pool: _Pool, work: Callable[[Connection, Connection], object]) -> None:
    """Does the work while two connections are in use."""
    pool.use(lambda first: pool.use(lambda second: work(first, second)))


def test_a_thread_that_finds_no_slot_in_time_is_reported():
    pool = pool_of(2, wait=0.01)
    none = pytest.raises(psycopg.OperationalError, match="all 2 connections were busy")

    def all_busy(*_: Connection) -> None:
        with none:
            pool.use(lambda connection: None)

    both_used(pool, all_busy)
    both_used(pool, lambda *_: None)


@pytest.fixture
def slots() -> _Slots:
    slots = _Slots(1)
    assert slots.enter("first", 0)
    return slots


def _waiter(slots: _Slots, token: str, told: list[str]) -> threading.Thread:
    def wait() -> None:
        if slots.enter(token, LIMIT_SECONDS):
            told.append(token)
            slots.leave(token)

    before = len(slots._gates)
    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: len(slots._gates) > before)  # It is in line as soon as it is counted.
    return thread


def test_those_who_wait_are_let_in_in_their_order(slots):
    told: list[str] = []
    threads = [_waiter(slots, token, told) for token in ("second", "third", "fourth")]
    slots.leave("first")
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert told == ["second", "third", "fourth"]


def test_who_gives_up_in_line_lets_nobody_in(slots):
    """A waiter that leaves has had no slot to give."""
    assert not slots.enter("second", 0)
    slots.leave("second")
    assert not slots.enter("third", 0)
    slots.leave("third")
    slots.leave("first")
    assert slots.enter("fourth", 0)


def test_leaving_twice_lets_one_in(slots):
    """A `leave` that was interrupted is made again."""
    told: list[str] = []
    second = _waiter(slots, "second", told)
    slots.leave("first")
    slots.leave("first")
    second.join(LIMIT_SECONDS)
    assert told == ["second"]
    assert slots.enter("third", 0)
    assert not slots.enter("fourth", 0)


def test_an_interrupted_leave_that_is_made_again_lets_in_whoever_it_owes():
    """Another thread may have left in between, and its own `leave` lets only one more in."""
    slots = _Slots(2)
    assert slots.enter("first", 0)
    assert slots.enter("second", 0)
    inside = threading.Semaphore(0)
    may_leave = threading.Event()

    def hold(token: str) -> None:
        if slots.enter(token, LIMIT_SECONDS):
            inside.release()
            may_leave.wait(LIMIT_SECONDS)
        slots.leave(token)

    threads = [threading.Thread(target=hold, args=(token,)) for token in ("third", "fourth")]
    for number, thread in enumerate(threads):
        thread.start()
        until(
            lambda count=3 + number: len(slots._gates) >= count
        )  # In line as soon as it is counted.
    del slots._gates["first"]  # As far as its `leave` came.
    slots.leave("second")
    slots.leave("first")
    arrived = [inside.acquire(timeout=5) for _ in threads]
    may_leave.set()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert arrived == [True, True]
    assert not slots._gates


def test_connections_opened_since_a_demotion_are_kept():
    """All who use connections to a demoted server hear of it, one after the other: the first gives
    those up, also the ones in use, and none of the others gives up what came after."""
    pool = pool_of(3, wait=0.5)
    idle = pool.use(lambda connection: connection)
    known: list[Connection] = []

    def demoted(first: Connection, second: Connection) -> None:
        assert idle in (first, second)
        third = pool.use(lambda connection: connection)
        pool.discard(first)
        assert third.is_closed
        newer = pool.use(lambda connection: connection)
        pool.discard(second)
        assert not newer.is_closed
        known.extend((first, second, newer))

    both_used(pool, demoted)
    assert [item.is_closed for item in known] == [True, True, False]
    assert pool.use(lambda connection: connection) is known[-1]


def test_a_connection_that_is_given_back_twice_is_there_once():
    """Giving back is made again when it was interrupted; two threads must not share one."""
    pool = pool_of(2, wait=0.5)
    held = [Connection(1.0)]
    held[0].generation = pool._generation
    for _ in range(2):
        pool._leave("token", held)
    assert len(pool._idle) == 1
