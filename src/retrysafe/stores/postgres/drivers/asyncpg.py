"""PostgreSQL through asyncpg, for event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, TypeVar

import asyncpg

from retrysafe import forks
from retrysafe.core.ports import Waits
from retrysafe.errors import StoreNotWritable, StoreUnavailable
from retrysafe.stores.postgres.drivers.asyncpg_renewals import (
    RenewalConnections,
    drop,
    is_open,
    set_keepalive,
)
from retrysafe.stores.postgres.drivers.port import (
    READ_ONLY_CODE,
    NotOpened,
    PoolOptions,
    RowRefused,
    Rows,
    Session,
    translated,
)
from retrysafe.stores.postgres.drivers.servers import (
    Servers,
    most_informative,
    opening_script,
    require_writable,
)

T = TypeVar("T")

# What asyncpg raises when the server, or only a connection to it, is gone. A connection that ends
# while it is given back to the pool is an internal error to it.
_GONE: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)

# The errors that an answer of the server, or none that was needed, leaves behind: the connection is
# as good as before.
_ANSWERED: Final = (asyncpg.PostgresError, asyncpg.DataError, UnicodeError)

# A connection that rested longer goes through the pool, which closes what nobody uses.
REST_SECONDS: Final = 30.0

# How long the server may take to take leave. asyncpg would wait for ever for a silent one.
CLOSING_SECONDS: Final = 2.0

# How much of the time that callers wait for a connection the pool takes to open one. It must end
# first: what the servers said then reaches the callers, instead of a bare time-out.
_CONNECTING_SHARE: Final = 0.9


class _Session:
    def __init__(self, connection: Any, patient_seconds: float) -> None:
        self._connection = connection
        self._patient_seconds = patient_seconds

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        try:
            rows: Rows = await self._connection.fetch(sql, *params)
        except TimeoutError:
            # At once: asyncpg would ask for a rollback, and wait for that answer too.
            drop(self._connection)
            raise
        return rows

    async def script(self, sql: str) -> None:
        await self._connection.execute(sql, timeout=self._patient_seconds)


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection without session state, so that giving it back to the pool asks nothing.

    asyncpg's own reset is a round trip after every statement, and the statement's caller waits
    for it.
    """

    def get_reset_query(self) -> str:
        return ""


async def _release(pool: Any, connection: Any) -> None:
    """Gives a connection back to its pool, which also has it back when this fails.

    A restarted server ends all connections at once, each of them perhaps at this very moment.
    """
    with suppress(*_GONE):
        await pool.release(connection)


class _Borrowed:
    """A connection of the pool, for as long as an `async with` lasts.

    No async generator: a loop that ends closes all of those, in the middle of what they are used
    for, and would cut the connection that an outcome is just being stored over.
    """

    def __init__(self, connector: AsyncpgConnector) -> None:
        self._connector = connector

    async def __aenter__(self) -> Any:
        self._pool = await self._connector.opened()
        try:
            self._connection = await self._connector.taken(self._pool)
        except Exception as error:
            await self._connector.raise_translated(self._pool, error)
            raise
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, _ANSWERED):
            # To give it back would wait for the server to take note, as long again.
            drop(self._connection)
        try:
            await self._connector.give_back(self._pool, self._connection, is_fine=error is None)
        except Exception as failure:
            await self._connector.raise_translated(self._pool, failure)
            raise
        if isinstance(error, Exception):
            await self._connector.raise_translated(self._pool, error)


class AsyncpgConnector:
    """A pool of connections of one event loop."""

    waits = Waits.SUSPENDING

    def __init__(self, url: str, location: str, options: PoolOptions) -> None:
        self._servers = Servers(url)
        self._location = location
        self._options = options
        self._pool: Any = None
        # Connections at hand. The pool's own way to take one and to give it back costs two tasks.
        self._resting: list[tuple[Any, float]] = []
        self._waiting = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Lock | None = None
        self._commit_seconds = min(
            options.commit_timeout.total_seconds(), options.statement_timeout.total_seconds()
        )
        self._renewals = RenewalConnections(self._connect_for_renewal)

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs one statement in a transaction of its own."""
        async with _Borrowed(self) as connection:
            rows: Rows = await connection.fetch(sql, *params)
            return rows

    async def transact(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Runs the work in a transaction that commits at the end."""
        patient_seconds = self._options.statement_timeout.total_seconds()
        async with _Borrowed(self) as connection, connection.transaction():
            return await work(_Session(connection, patient_seconds))

    def refuse_reentry(self) -> None:
        """Nobody waits here: whoever asks suspends."""

    async def has_forgetful_pooler(self) -> bool:
        """Whether prepared statements would meet a server connection that does not know them."""
        if not self._options.has_prepared_statements:
            return False
        # A connection of its own, because those of the pool prepare every statement.
        seconds = self._options.connect_timeout.total_seconds()
        try:
            connection = await self._connect(
                timeout=seconds, command_timeout=seconds, statement_cache_size=0
            )
            try:
                pid: int = await connection.fetchval("SELECT pg_backend_pid()")
                return bool(pid != connection.get_server_pid())
            finally:
                await connection.close()
        except asyncpg.InvalidCatalogNameError as error:
            raise translated(error.sqlstate, str(error), self._location) from error
        except _GONE as error:
            raise StoreUnavailable(f"{self._location} does not answer: {error!r}") from error

    async def fetch_patiently(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same for a statement that may take long."""
        seconds = self._options.statement_timeout.total_seconds()
        async with _Borrowed(self) as connection:
            rows: Rows = await connection.fetch(sql, *params, timeout=seconds)
            return rows

    async def fetch_renewal(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same over a connection that nobody else uses, or else the pool; in any loop."""
        until = time.monotonic() + seconds
        try:
            return await self._renewals.fetch(seconds, sql, params)
        except NotOpened as error:
            loop, left_seconds = self._loop, until - time.monotonic()
            if loop is None or loop.is_closed() or left_seconds <= 0:
                raise StoreUnavailable(f"{self._location} does not answer: {error}") from error
        except Exception as error:
            translation = self._translated(error)
            if translation is None:
                raise
            raise translation from error
        return await self._fetch_in(loop, left_seconds, sql, params)

    async def _fetch_in(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        sql: str,
        params: Sequence[Any],
    ) -> Rows:
        """Runs a statement over the pool, in the loop that it belongs to."""
        flow = self.fetch_within(seconds, sql, params)
        if loop is asyncio.get_running_loop():
            return await flow
        try:
            future = asyncio.run_coroutine_threadsafe(flow, loop)
        except RuntimeError as error:  # The loop was closed in this moment.
            flow.close()
            raise StoreUnavailable(f"{self._location} cannot be asked: {error}") from error
        try:
            # The loop may be blocked, and then nobody there looks at the time.
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._location} did not answer in time") from error

    async def close_renewals(self) -> None:
        """Closes the connections of `fetch_renewal` that belong to the running loop."""
        await self._renewals.close()

    async def fetch_within(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs a statement that must not take long, waiting for a connection included."""
        try:
            async with asyncio.timeout(seconds), _Borrowed(self) as connection:
                rows: Rows = await connection.fetch(sql, *params)
                return rows
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._location} did not answer in time") from error

    async def close(self) -> None:
        """Closes the connections."""
        pool, self._pool = self._pool, None
        resting, self._resting = self._resting, []
        await self.close_renewals()
        if pool is not None and self._loop is asyncio.get_running_loop():
            for connection, _ in resting:
                await _release(pool, connection)
            try:
                async with asyncio.timeout(CLOSING_SECONDS):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone."""
        forks.park((self._pool, self._resting, self._renewals))
        self._pool = None
        self._renewals = RenewalConnections(self._connect_for_renewal)
        self._resting = []
        self._loop = None

    async def raise_translated(self, pool: Any, error: Exception) -> None:
        """Raises the error in the store's words, if it is PostgreSQL's; drops dead connections.

        A restarted server has killed the other connections too, and a network that has gone silent
        carries nothing for them either.
        """
        if isinstance(error, asyncpg.PostgresError):
            code = error.sqlstate or ""
            if code[:2] in ("08", "57") or code == READ_ONLY_CODE:
                # The others lead to the same server.
                await self._expire(pool)
        elif isinstance(error, _GONE) and not isinstance(error, _ANSWERED):
            await self._expire(pool)
        translation = self._translated(error)
        if translation is not None:
            raise translation from error

    def _translated(self, error: BaseException) -> Exception | None:
        if isinstance(error, UnicodeError | asyncpg.DataError):
            return RowRefused(str(error))
        if isinstance(error, asyncpg.PostgresError):
            return translated(error.sqlstate, str(error), self._location)
        if isinstance(error, _GONE):
            return StoreUnavailable(f"{self._location} does not answer: {error!r}")
        return None

    async def taken(self, pool: Any) -> Any:
        """A connection of the pool, of those at hand if there is one."""
        while self._resting:
            connection, rested_since = self._resting.pop()
            if time.monotonic() - rested_since < REST_SECONDS and is_open(connection):
                return connection
            await _release(pool, connection)
        self._waiting += 1
        try:
            return await pool.acquire(timeout=self._options.connect_timeout.total_seconds())
        finally:
            self._waiting -= 1

    async def give_back(self, pool: Any, connection: Any, *, is_fine: bool) -> None:
        """Takes a connection back that `taken` gave."""
        # Whether it is still open is looked at when it is taken again.
        if is_fine and not self._waiting and pool is self._pool:
            self._resting.append((connection, time.monotonic()))
        else:
            # The pool looks after what was cancelled or broken, and after those who wait for one.
            await _release(pool, connection)

    async def _expire(self, pool: Any) -> None:
        if pool is not self._pool:
            return  # It was closed meanwhile, and those at hand are another one's.
        await pool.expire_connections()
        resting, self._resting = self._resting, []
        for connection, _ in resting:
            # Given back in order, each would wait for a server that may say nothing.
            drop(connection)
            await _release(pool, connection)

    async def opened(self) -> Any:
        """The pool of the running loop."""
        loop = asyncio.get_running_loop()
        if self._pool is not None and self._loop is loop:
            return self._pool
        if self._loop is not loop:
            # Connections of a loop that has ended cannot be used, nor closed, by this one.
            self._loop, self._pool, self._opening = loop, None, asyncio.Lock()
            self._resting = []
        assert self._opening is not None  # Set together with the loop.
        async with self._opening:
            if self._pool is None:
                self._pool = await self._new_pool()
        return self._pool

    async def _connect(self, _: str | None = None, *, timeout: float, **options: Any) -> Any:
        """A connection to a server that takes writes, the first of the URL's that answers.

        It stands in for `asyncpg.connect`, so the pool gives it a URL, of which it has none.
        """
        errors: list[Exception] = []
        for url, seconds in self._servers.in_turn(timeout):
            try:
                async with asyncio.timeout(seconds):
                    return await self._connect_to(url, options)
            except (*_GONE, StoreNotWritable) as error:
                self._servers.put_last(url)
                errors.append(error)
        raise most_informative(errors)

    async def _connect_to(self, url: str, options: dict[str, Any]) -> Any:
        try:
            connection = await asyncpg.connect(
                url, timeout=None, server_settings={"application_name": "retrysafe"}, **options
            )
        except asyncpg.TargetServerAttributeNotMatched as error:
            raise StoreNotWritable(f"{self._location} takes no writes now: {error}") from error
        script = opening_script(
            connection.get_server_pid(),
            has_prepared_statements=self._options.has_prepared_statements,
        )
        try:
            # It needs a descriptor, of which there may be none left.
            set_keepalive(connection, self._options.keepalive)
            require_writable(await connection.execute(script), self._location)
        except BaseException:
            # Not closed in order: a pooler that has no session for us would be waited for.
            drop(connection)
            raise
        return connection

    async def _connect_for_renewal(self, seconds: float) -> Any:
        return await self._connect(timeout=seconds, **self._connection_options())

    def _connection_options(self) -> dict[str, Any]:
        return {
            "connection_class": _Connection,
            "command_timeout": self._commit_seconds,
            "statement_cache_size": 100 if self._options.has_prepared_statements else 0,
        }

    async def _new_pool(self) -> Any:
        options = self._options
        try:
            return await asyncpg.create_pool(
                connect=self._connect,
                min_size=0,
                max_size=options.size_limit,
                timeout=options.connect_timeout.total_seconds() * _CONNECTING_SHARE,
                **self._connection_options(),
            )
        except _GONE as error:
            raise StoreUnavailable(f"{self._location} does not answer: {error!r}") from error
