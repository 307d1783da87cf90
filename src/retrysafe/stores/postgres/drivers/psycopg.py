"""PostgreSQL through psycopg 3, for threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import psycopg

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
from retrysafe.stores.postgres.drivers.psycopg_connections import (
    PsycopgConnection,
    PsycopgPool,
)
from retrysafe.stores.postgres.drivers.psycopg_renewals import RenewalConnections
from retrysafe.stores.postgres.drivers.servers import (
    Servers,
    most_informative,
    opening_script,
    require_writable,
)

T = TypeVar("T")


class _Session:
    def __init__(self, connection: PsycopgConnection, patient_seconds: float) -> None:
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


def _fetch(connection: PsycopgConnection, sql: str, params: Sequence[Any]) -> Rows:
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
        self._pool = PsycopgPool(self._connect, options)
        self._renewals = RenewalConnections(self._connect, _fetch)

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs one statement in a transaction of its own."""
        return self._use(lambda connection: _fetch(connection, sql, params))

    async def fetch_patiently(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same for a statement that may take long."""
        seconds = self._options.statement_timeout.total_seconds()
        return self._use(lambda connection: self._fetch_within(connection, seconds, sql, params))

    def _fetch_within(
        self, connection: PsycopgConnection, seconds: float, sql: str, params: Sequence[Any]
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

        def work(connection: PsycopgConnection) -> Rows:
            left_seconds = max(0.0, until - time.monotonic())
            limit = min(left_seconds, self._commit_seconds)
            return self._fetch_within(connection, limit, sql, params)

        return self._use(work, seconds)

    async def transact(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Runs the work in a transaction that commits at the end."""
        patient_seconds = self._options.statement_timeout.total_seconds()

        def run(connection: PsycopgConnection) -> T:
            # What this leaves open when it is interrupted ends with the connection.
            with connection.transaction():
                return _driven(work(_Session(connection, patient_seconds)))

        return self._use(run)

    async def has_forgetful_pooler(self) -> bool:
        """Whether prepared statements would meet a server connection that does not know them."""
        if not self._options.has_prepared_statements:
            return False

        def ask(connection: PsycopgConnection) -> bool:
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
        pool, self._pool = self._pool, PsycopgPool(self._connect, self._options)
        pool.close()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone."""
        forks.park((self._pool, self._renewals))
        self._pool = PsycopgPool(self._connect, self._options)
        self._renewals = RenewalConnections(self._connect, _fetch)

    def refuse_reentry(self) -> None:
        """Raises `StoreUnavailable` in a thread that is inside the pool: a signal's handler, then.

        It would wait for a place that its own thread holds, or for a lock that it has taken.
        """
        if self._pool.is_inside():
            raise reentered(self._location)

    def _use(self, work: Callable[[PsycopgConnection], T], limit_seconds: float = math.inf) -> T:
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

    def _connect(self, limit_seconds: float) -> PsycopgConnection:
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

    def _connect_to(self, url: str, limit_seconds: float) -> PsycopgConnection:
        options = self._options
        connection = PsycopgConnection.connect(
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
