"""PostgreSQL through asyncpg, for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from retrysafe import forks
from retrysafe.core.ports import Waits
from retrysafe.errors import StoreUnavailable
from retrysafe.stores.postgres.connector import (
    PLANNER_SETTINGS,
    PoolOptions,
    RowRefused,
    Rows,
    translated,
)


class _Session:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        rows: Rows = await self._connection.fetch(sql, *params)
        return rows

    async def script(self, sql: str) -> None:
        await self._connection.execute(sql)


class _Connection(asyncpg.Connection):  # type: ignore[misc]
    """A connection without session state, so that giving it back to the pool asks nothing.

    asyncpg's own reset is a round trip after every statement, and the statement's caller waits
    for it.
    """

    def get_reset_query(self) -> str:
        return ""


class AsyncpgConnector:
    """A pool of connections of one event loop."""

    waits = Waits.SUSPENDING

    def __init__(self, url: str, location: str, options: PoolOptions) -> None:
        self._url = url
        self._location = location
        self._options = options
        self._pool: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Lock | None = None

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs one statement in a transaction of its own."""
        async with self._connection() as connection:
            rows: Rows = await connection.fetch(sql, *params)
            return rows

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[_Session]:
        """A transaction that commits at the end."""
        async with self._connection() as connection, connection.transaction():
            yield _Session(connection)

    async def close(self) -> None:
        """Closes the connections."""
        pool, self._pool = self._pool, None
        if pool is not None and self._loop is asyncio.get_running_loop():
            await pool.close()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone."""
        forks.park(self._pool)
        self._pool = None
        self._loop = None

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        pool = await self._opened()
        try:
            async with pool.acquire(
                timeout=self._options.connect_timeout.total_seconds()
            ) as connection:
                yield connection
        except (UnicodeError, asyncpg.DataError) as error:
            raise RowRefused(str(error)) from error
        except asyncpg.PostgresError as error:
            if (error.sqlstate or "")[:2] in ("08", "57"):
                await pool.expire_connections()
            raise translated(error.sqlstate, str(error), self._location) from error
        except (asyncpg.InterfaceError, OSError, TimeoutError) as error:
            # A restarted server has killed the others too.
            await pool.expire_connections()
            raise StoreUnavailable(f"{self._location} does not answer: {error!r}") from error

    async def _opened(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._pool is not None and self._loop is loop:
            return self._pool
        if self._loop is not loop:
            # Connections of a loop that has ended cannot be used, nor closed, by this one.
            self._loop, self._pool, self._opening = loop, None, asyncio.Lock()
        assert self._opening is not None  # Set together with the loop.
        async with self._opening:
            if self._pool is None:
                self._pool = await self._new_pool()
        return self._pool

    async def _new_pool(self) -> Any:
        options = self._options
        settings = PLANNER_SETTINGS if options.has_prepared_statements else {}
        try:
            return await asyncpg.create_pool(
                self._url,
                connection_class=_Connection,
                min_size=0,
                max_size=options.size_limit,
                timeout=options.connect_timeout.total_seconds(),
                command_timeout=options.statement_timeout.total_seconds(),
                statement_cache_size=100 if options.has_prepared_statements else 0,
                server_settings={"application_name": "retrysafe", **settings},
            )
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"{self._location} does not answer: {error!r}") from error
