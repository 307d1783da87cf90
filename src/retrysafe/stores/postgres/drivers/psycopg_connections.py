"""The connections of psycopg, and the pool that threads take them from."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import islice
from typing import Any, Final, TypeVar

import psycopg
from psycopg import waiting
from psycopg.pq import TransactionStatus

from retrysafe.stores.postgres.drivers.port import PoolOptions

T = TypeVar("T")

# How often an exchange looks whether its time is over, where psycopg does not say.
_LOOK_SECONDS: Final = 0.1
# How often those who wait for a place look for one that was left without a word. Rare enough to
# cost nothing, and short against any lease.
_TIDY_SECONDS: Final = 0.25


class PsycopgConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that does not wait for ever for a server that hangs."""

    statement_seconds: float
    # Which one of the pool's generations it is of, see `PsycopgPool.discard`.
    generation: object

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Drives one exchange with the server, within the limit."""
        exchange = _limited(gen, self.statement_seconds)
        if select.poll.__module__.startswith("gevent"):
            # psycopg chooses how to wait when it is imported. Where gevent has patched since, that
            # would stop all greenlets, also the one whose transaction this one waits for.
            return waiting.wait_poll(exchange, self.pgconn.socket, interval=_LOOK_SECONDS)
        return super().wait(exchange, *args, **options)


def _limited(gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """The same exchange; psycopg looks in several times a second, and then the time is checked."""
    until = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > until:
                raise psycopg.OperationalError(f"no answer within {seconds:.3g} s")
            wanted = gen.send(ready)
    except StopIteration as stop:
        result: T = stop.value
        return result


class _Place:
    """One caller's place in the pool, from its coming to its going."""

    __slots__ = ("connection", "gate", "here", "taken")

    def __init__(self) -> None:
        # Held by the caller's `with` for as long as it is there. No signal, however many raise in a
        # row, keeps C from giving it back, so everybody can see who is gone.
        self.taken = threading.Lock()
        # The same until it has tidied up as well.
        self.here = threading.Lock()
        # Closed until it is this one's turn.
        self.gate = threading.Lock()
        self.gate.acquire()
        self.connection: PsycopgConnection | None = None


class PsycopgPool:
    """Idle connections, used again last in first out, and a limit on all of them together.

    A connection is made by the thread that needs it, so a server that is down is reported at once
    and one that is back is found at the next call; there is no thread and no back-off in between.
    Nobody is relied on to give back what it holds: `tidy` does that for all who are gone.
    """

    def __init__(self, connect: Callable[[float], PsycopgConnection], options: PoolOptions) -> None:
        self._connect = connect
        self._wait_seconds = options.connect_timeout.total_seconds()
        self._size_limit = options.size_limit
        # One that its own thread may take again: nobody waits for itself in here.
        self._lock = threading.RLock()
        # Who is in here, by thread: a signal's handler may call from inside.
        self._inside: dict[int, _Place] = {}
        # In the order in which they came; those behind the limit wait at their gates.
        self._places: dict[_Place, None] = {}
        self._idle: list[PsycopgConnection] = []
        self._generation = object()
        self._is_closed = False

    def use(self, work: Callable[[PsycopgConnection], T], limit_seconds: float = math.inf) -> T:
        """What the work returns, done with one connection; raises what psycopg raises.

        Waiting for it, and making it, take no longer than the limit and the pool's options say. Not
        a context manager: a signal that raises before its body would keep connection and slot, and
        a transaction open, while the handlers of that exception ask for them (decision 31).
        """
        place, thread = _Place(), threading.get_ident()
        try:
            with place.here:
                self._inside[thread] = place
                return self._use(place, work, limit_seconds)
        finally:
            self._inside.pop(thread, None)

    def _use(
        self, place: _Place, work: Callable[[PsycopgConnection], T], limit_seconds: float
    ) -> T:
        try:
            with place.taken:
                self._enter(place, min(limit_seconds, self._wait_seconds))
                # Looked at first: what is opened while others are discarded may lead where they do.
                generation = self._generation
                connection = self._quiet_one()
                if connection is None:
                    connection = self._connect(limit_seconds)
                    connection.generation = generation
                place.connection = connection
                try:
                    return work(connection)
                except psycopg.errors.ReadOnlySqlTransaction:
                    self.discard(connection)
                    raise
        finally:
            try:
                self.tidy()
            except BaseException:
                # A signal may raise before its first line. After yet another one whoever comes next
                # does it, and a transaction that was left open waits for that.
                self.tidy()
                raise

    def is_inside(self) -> bool:
        """Whether the running thread is at work in here: then a signal's handler asks."""
        place = self._inside.get(threading.get_ident())
        return place is not None and place.here.locked()

    def _enter(self, place: _Place, wait_seconds: float) -> None:
        """Waits for a turn; raises `OperationalError` when the time ran out."""
        until = time.monotonic() + wait_seconds
        with self._lock:
            self._places[place] = None
        self.tidy()
        # Whoever leaves opens the gate of the next; here it is looked for those who could not.
        while not place.gate.acquire(
            timeout=min(max(0.0, until - time.monotonic()), _TIDY_SECONDS)
        ):
            if time.monotonic() >= until:
                raise psycopg.OperationalError(
                    f"all {self._size_limit} connections were busy for {wait_seconds:g} s"
                )
            self.tidy()

    def tidy(self) -> None:
        """Gives back what is held by nobody any more, and opens the gates of the next in line.

        It may be interrupted anywhere: whoever leaves, comes or waits does it again.
        """
        with self._lock:
            for place in [item for item in list(self._places) if not item.taken.locked()]:
                self._give_back(place)
                self._places.pop(place, None)
            for place in list(islice(self._places, self._size_limit)):
                with suppress(RuntimeError):  # Open already; a signal's handler may have done it.
                    place.gate.release()

    def discard(self, connection: PsycopgConnection) -> None:
        """Uses this connection no more, nor those that were opened before or along with it.

        Its server takes no writes any more, and they lead to the same one. Those that were opened
        since then are kept: several callers at once hear of the same demotion.
        """
        if connection.generation is self._generation:
            self._generation = object()
            self.discard_idle()

    def discard_idle(self) -> None:
        """Closes the idle connections: a restarted server has killed all of them."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return  # Another thread took the last one.

    def close(self) -> None:
        """Closes the idle connections now and those in use when they come back."""
        self._is_closed = True
        self.discard_idle()

    def _quiet_one(self) -> PsycopgConnection | None:
        """An idle connection that the server has not ended meanwhile."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None  # Another thread took the last one.
            poll = select.poll()
            poll.register(connection.pgconn.socket, select.POLLIN)
            if not poll.poll(0):
                return connection
            # An idle server has nothing to say but good-bye.
            connection.close()
        return None

    def _give_back(self, place: _Place) -> None:
        connection = place.connection
        if connection is None:
            return
        if (
            connection.pgconn.transaction_status != TransactionStatus.IDLE
            or connection.generation is not self._generation
        ):
            connection.close()
        elif place.connection is not None:  # Else a signal's handler has done it meanwhile.
            # Taken out first: one that was given back twice would be used by two threads at a time.
            place.connection = None
            self._idle.append(connection)
            # Looked at after the append: a close in between would have missed it.
            if self._is_closed:
                self.discard_idle()
        place.connection = None
