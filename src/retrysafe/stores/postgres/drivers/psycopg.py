"""PostgreSQL through psycopg 3, for threads."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import Any, Final, TypeVar

import psycopg
from psycopg import waiting
from psycopg.pq import TransactionStatus

from retrysafe import forks
from retrysafe.core.ports import Waits
from retrysafe.errors import StoreNotWritable, StoreUnavailable
from retrysafe.reentry import reentered
from retrysafe.stores.postgres.drivers.arrays import BytesArray, BytesArrayDumper, encoded
from retrysafe.stores.postgres.drivers.port import (
    NotOpened,
    PoolOptions,
    RowRefused,
    Rows,
    Session,
    translated,
)
from retrysafe.stores.postgres.drivers.psycopg_renewals import RenewalConnections
from retrysafe.stores.postgres.drivers.servers import (
    Servers,
    most_informative,
    opening_script,
    require_writable,
)

T = TypeVar("T")

# How often an exchange looks whether its time is over, where psycopg does not say.
_LOOK_SECONDS: Final = 0.1
# How often those who wait for a place look for one that was left without a word. Rare enough to
# cost nothing, and short against any lease.
_TIDY_SECONDS: Final = 0.25


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that does not wait for ever for a server that hangs."""

    statement_seconds: float
    # Which one of the pool's generations it is of, see `_Pool.discard`.
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
        self.connection: _Connection | None = None


class _Pool:
    """Idle connections, used again last in first out, and a limit on all of them together.

    A connection is made by the thread that needs it, so a server that is down is reported at once
    and one that is back is found at the next call; there is no thread and no back-off in between.
    Nobody is relied on to give back what it holds: `tidy` does that for all who are gone.
    """

    def __init__(self, connect: Callable[[float], _Connection], options: PoolOptions) -> None:
        self._connect = connect
        self._wait_seconds = options.connect_timeout.total_seconds()
        self._size_limit = options.size_limit
        # One that its own thread may take again: nobody waits for itself in here.
        self._lock = threading.RLock()
        # Who is in here, by thread: a signal's handler may call from inside.
        self._inside: dict[int, _Place] = {}
        # In the order in which they came; those behind the limit wait at their gates.
        self._places: dict[_Place, None] = {}
        self._idle: list[_Connection] = []
        self._generation = object()
        self._is_closed = False

    def use(self, work: Callable[[_Connection], T], limit_seconds: float = math.inf) -> T:
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

    def _use(self, place: _Place, work: Callable[[_Connection], T], limit_seconds: float) -> T:
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

    def discard(self, connection: _Connection) -> None:
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

    def _quiet_one(self) -> _Connection | None:
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


class _Session:
    def __init__(self, connection: _Connection, patient_seconds: float) -> None:
        self._connection = connection
        self._patient_seconds = patient_seconds

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        return _fetch(self._connection, sql, params)

    async def script(self, sql: str) -> None:
        connection = self._connection
        usual, connection.statement_seconds = connection.statement_seconds, self._patient_seconds
        try:
            # Without parameters the simple protocol is used, which takes several statements.
            psycopg.ClientCursor(connection).execute(sql.encode())
        finally:
            connection.statement_seconds = usual


def _fetch(connection: _Connection, sql: str, params: Sequence[Any]) -> Rows:
    cursor = connection.execute(sql.encode(), encoded(params))
    return [] if cursor.description is None else cursor.fetchall()


def _driven(flow: Coroutine[Any, Any, T]) -> T:
    """The result of a flow whose statements block, so that it never suspends."""
    try:
        flow.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        flow.close()
    raise AssertionError("unreachable: a blocking session never suspends")


class PsycopgConnector:
    """A pool of blocking connections."""

    waits = Waits.BLOCKING

    def __init__(self, url: str, location: str, options: PoolOptions) -> None:
        self._servers = Servers(url)
        self._location = location
        self._options = options
        self._commit_seconds = min(
            options.commit_timeout.total_seconds(), options.statement_timeout.total_seconds()
        )
        self._pool = _Pool(self._connect, options)
        self._renewals = RenewalConnections(self._connect, _fetch)

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs one statement in a transaction of its own."""
        return self._use(lambda connection: _fetch(connection, sql, params))

    async def fetch_patiently(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same for a statement that may take long."""
        seconds = self._options.statement_timeout.total_seconds()
        return self._use(lambda connection: self._fetch_within(connection, seconds, sql, params))

    def _fetch_within(
        self, connection: _Connection, seconds: float, sql: str, params: Sequence[Any]
    ) -> Rows:
        try:
            connection.statement_seconds = seconds
            return _fetch(connection, sql, params)
        finally:
            connection.statement_seconds = self._commit_seconds

    async def fetch_renewal(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same over a connection that nobody else uses, or else the pool; within that time."""
        until = time.monotonic() + seconds
        try:
            return self._renewals.fetch(seconds, sql, params)
        except NotOpened as error:
            left_seconds = until - time.monotonic()
            if left_seconds <= 0:
                raise StoreUnavailable(f"{self._location} does not answer: {error}") from error
        except (UnicodeError, psycopg.Error) as error:
            raise self._translated(error) from error
        return await self.fetch_within(left_seconds, sql, params)

    async def fetch_within(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs a statement that must not take long, waiting for a connection included."""
        until = time.monotonic() + seconds

        def work(connection: _Connection) -> Rows:
            left_seconds = max(0.0, until - time.monotonic())
            limit = min(left_seconds, self._commit_seconds)
            return self._fetch_within(connection, limit, sql, params)

        return self._use(work, seconds)

    async def transact(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Runs the work in a transaction that commits at the end."""
        patient_seconds = self._options.statement_timeout.total_seconds()

        def run(connection: _Connection) -> T:
            # What this leaves open when it is interrupted ends with the connection.
            with connection.transaction():
                return _driven(work(_Session(connection, patient_seconds)))

        return self._use(run)

    async def has_forgetful_pooler(self) -> bool:
        """Whether prepared statements would meet a server connection that does not know them."""
        if not self._options.has_prepared_statements:
            return False

        def ask(connection: _Connection) -> bool:
            row = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchone()
            return row is not None and row[0] != connection.info.backend_pid

        return self._use(ask)

    async def close_renewals(self) -> None:
        """Closes the connections of `fetch_renewal`."""
        renewals = self._renewals
        self._renewals = RenewalConnections(self._connect, _fetch)
        renewals.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self.close_renewals()
        pool, self._pool = self._pool, _Pool(self._connect, self._options)
        pool.close()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone."""
        forks.park((self._pool, self._renewals))
        self._pool = _Pool(self._connect, self._options)
        self._renewals = RenewalConnections(self._connect, _fetch)

    def refuse_reentry(self) -> None:
        """Raises `StoreUnavailable` in a thread that is inside the pool: a signal's handler, then.

        It would wait for a place that its own thread holds, or for a lock that it has taken.
        """
        if self._pool.is_inside():
            raise reentered(self._location)

    def _use(self, work: Callable[[_Connection], T], limit_seconds: float = math.inf) -> T:
        self.refuse_reentry()
        pool = self._pool
        try:
            return pool.use(work, limit_seconds)
        except (UnicodeError, psycopg.Error) as error:
            # One that could not be opened says nothing about those that are: a full server refuses
            # it and serves them, and would not let them be opened again.
            if (
                isinstance(error, psycopg.OperationalError)
                and error.pgconn is None
                and (error.sqlstate is None or error.sqlstate[:2] in ("08", "57"))
            ):
                # A restarted server has killed the others too, and a network that has gone silent
                # carries nothing for them either.
                pool.discard_idle()
            raise self._translated(error) from error

    def _translated(self, error: UnicodeError | psycopg.Error) -> Exception:
        """The error in the store's words."""
        if isinstance(error, UnicodeError | psycopg.DataError):
            return RowRefused(str(error))
        return translated(error.sqlstate, str(error).strip(), self._location)

    def _connect(self, limit_seconds: float) -> _Connection:
        """A connection to a server that takes writes, the first of the URL's that answers."""
        seconds = min(limit_seconds, self._options.connect_timeout.total_seconds())
        errors: list[Exception] = []
        for url, share_seconds in self._servers.in_turn(seconds):
            try:
                return self._connect_to(url, share_seconds)
            except (psycopg.Error, StoreNotWritable) as error:
                self._servers.put_last(url)
                errors.append(error)
        raise most_informative(errors)

    def _connect_to(self, url: str, limit_seconds: float) -> _Connection:
        options = self._options
        connection = _Connection.connect(
            url,
            autocommit=True,
            cursor_factory=psycopg.RawCursor,
            prepare_threshold=0 if options.has_prepared_statements else None,
            # To psycopg two seconds is the least.
            connect_timeout=max(1, int(limit_seconds)),
            application_name="retrysafe",
            **asdict(options.keepalive),
        )
        connection.adapters.register_dumper(BytesArray, BytesArrayDumper)
        connection.statement_seconds = min(limit_seconds, self._commit_seconds)
        script = opening_script(
            connection.info.backend_pid, has_prepared_statements=options.has_prepared_statements
        )
        try:
            cursor = psycopg.ClientCursor(connection)
            cursor.execute(script.encode())
            while cursor.nextset():
                continue
            require_writable(cursor.statusmessage, self._location)
        except BaseException:
            # Nobody else has it yet.
            connection.close()
            raise
        connection.statement_seconds = self._commit_seconds
        return connection
