"""The pool of blocking connections: a limit that nothing wears down."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from retrysafe.stores.postgres.drivers import psycopg_connections
from retrysafe.stores.postgres.drivers.port import PoolOptions
from retrysafe.stores.postgres.drivers.psycopg_connections import PsycopgPool, _Place
from tests.interrupting import at_every_place_at_once
from tests.runtime.staged import until

LIMIT_SECONDS = 30


class Connection:
    """As much of a connection as a pool looks at."""

    def __init__(self, limit_seconds: float) -> None:
        self.pgconn = SimpleNamespace(transaction_status=TransactionStatus.IDLE, socket=0)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class QuietPool(PsycopgPool):
    """A pool whose idle connections have no server to look for."""

    def _quiet_one(self) -> Connection | None:
        return self._idle.pop() if self._idle else None


def pool_of(size: int, *, wait: float) -> PsycopgPool:
    options = PoolOptions(size_limit=size, connect_timeout=timedelta(seconds=wait))
    return QuietPool(Connection, options)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_signals_anywhere_cost_no_place_and_leave_no_lock(count):
    """A place that is lost is lost for ever, and a lock that stays taken stops everybody.

    However many raise in a row, and also what they leave open on the server is ended.
    """
    pool = pool_of(1, wait=5.0)
    made: list[Connection] = []

    def begin(connection: Connection) -> None:
        made.append(connection)
        connection.pgconn.transaction_status = TransactionStatus.INTRANS
        repr(connection)  # A look for signals.
        connection.pgconn.transaction_status = TransactionStatus.IDLE

    places = 0
    here = sys.modules[__name__]
    act = functools.partial(pool.use, begin)
    for places in at_every_place_at_once(count, act, psycopg_connections, contextlib, here):
        done: list[bool] = []
        user = threading.Thread(
            target=lambda found=done: (pool.use(lambda _: None), found.append(True)), daemon=True
        )
        user.start()
        user.join(LIMIT_SECONDS)
        assert done, f"nobody gets a connection after {count} signals at place {places}"
        assert not pool._places
        for connection in made:
            is_idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
            assert is_idle or connection.is_closed, places
        assert len({id(connection) for connection in pool._idle}) == len(pool._idle) <= 1
    assert places > 10


def test_who_waits_finds_the_place_of_one_that_left_without_a_word():
    """Signals kept it from opening the gate, and nobody else comes."""
    pool = pool_of(1, wait=LIMIT_SECONDS)
    gone = entered(pool)
    told: list[str] = []
    waiter = _waiter(pool, "second", told)
    gone.taken.release()
    waiter.join(LIMIT_SECONDS / 2)
    assert told == ["second"]


def both_used(pool: PsycopgPool, work: Callable[[Connection, Connection], object]) -> None:
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


def entered(pool: PsycopgPool) -> _Place:
    """A place that somebody has taken."""
    place = _Place()
    place.taken.acquire()
    pool._enter(place, 0)
    return place


def _waiter(pool: PsycopgPool, name: str, told: list[str]) -> threading.Thread:
    before = len(pool._places)
    thread = threading.Thread(target=lambda: pool.use(lambda _: told.append(name)))
    thread.start()
    until(lambda: len(pool._places) > before)  # It is in line as soon as it is counted.
    return thread


def test_those_who_wait_are_let_in_in_their_order():
    pool, told = pool_of(1, wait=LIMIT_SECONDS), []
    first = entered(pool)
    threads = [_waiter(pool, name, told) for name in ("second", "third", "fourth")]
    first.taken.release()
    pool.tidy()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert told == ["second", "third", "fourth"]


def test_who_gives_up_in_line_lets_nobody_in():
    """A waiter that leaves has had no place to give."""
    pool = pool_of(1, wait=0)
    first = entered(pool)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError, match="were busy"):
            pool.use(lambda _: None)
    first.taken.release()
    pool.use(lambda _: None)


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
    """By a signal's handler that comes while it is given back; two threads must not share one."""
    pool = pool_of(2, wait=0.5)

    class Handled(Connection):
        @property
        def generation(self) -> object:
            handlers.pop()()
            return pool._generation

    place = entered(pool)
    place.connection = Handled(1.0)
    handlers = [lambda: None, pool.tidy]
    place.taken.release()
    pool.tidy()
    assert len(pool._idle) == 1
