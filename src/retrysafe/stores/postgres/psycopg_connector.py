"""PostgreSQL through psycopg 3, for threads."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import psycopg_pool
from psycopg.conninfo import conninfo_to_dict

from retrysafe import forks
from retrysafe.core.ports import Waits
from retrysafe.stores.postgres.connector import (
    PLANNER_SETTINGS,
    PoolOptions,
    RowRefused,
    Rows,
    translated,
)
from retrysafe.stores.postgres.psycopg_arrays import BytesArray, BytesArrayDumper, encoded

Connection = psycopg.Connection[tuple[Any, ...]]


class _Session:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        return _fetch(self._connection, sql, params)

    async def script(self, sql: str) -> None:
        # Without parameters the simple protocol is used, which takes several statements.
        psycopg.ClientCursor(self._connection).execute(sql.encode())


def _configure(connection: Connection) -> None:
    connection.adapters.register_dumper(BytesArray, BytesArrayDumper)


def _fetch(connection: Connection, sql: str, params: Sequence[Any]) -> Rows:
    cursor = connection.execute(sql.encode(), encoded(params))
    return [] if cursor.description is None else cursor.fetchall()


class PsycopgConnector:
    """A pool of blocking connections."""

    waits = Waits.BLOCKING

    def __init__(self, url: str, location: str, options: PoolOptions) -> None:
        self._url = url
        self._location = location
        self._options = options
        self._lock = threading.Lock()
        self._pool: psycopg_pool.ConnectionPool[Connection] | None = None

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs one statement in a transaction of its own."""
        with self._connection() as connection:
            return _fetch(connection, sql, params)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[_Session]:
        """A transaction that commits at the end."""
        with self._connection() as connection, connection.transaction():
            yield _Session(connection)

    async def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone."""
        forks.park(self._pool)
        self._pool = None
        self._lock = threading.Lock()

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        pool = self._opened()
        try:
            with pool.connection() as connection:
                yield connection
        except (UnicodeError, psycopg.DataError) as error:
            raise RowRefused(str(error)) from error
        except psycopg.OperationalError as error:
            if error.sqlstate is None or error.sqlstate[:2] in ("08", "57"):
                # A restarted server has killed the others too; find out before they are used.
                pool.check()
            raise translated(error.sqlstate, str(error).strip(), self._location) from error
        except psycopg.Error as error:
            raise translated(error.sqlstate, str(error).strip(), self._location) from error

    def _opened(self) -> psycopg_pool.ConnectionPool[Connection]:
        if self._pool is not None:
            return self._pool
        with self._lock:
            if self._pool is None:
                options = self._options
                seconds = options.connect_timeout.total_seconds()
                self._pool = psycopg_pool.ConnectionPool(
                    self._url,
                    min_size=0,
                    max_size=options.size_limit,
                    timeout=seconds,
                    open=True,
                    configure=_configure,
                    name="retrysafe",
                    kwargs={
                        "autocommit": True,
                        "cursor_factory": psycopg.RawCursor,
                        "prepare_threshold": 0 if options.has_prepared_statements else None,
                        "connect_timeout": max(1, int(seconds)),
                        "application_name": "retrysafe",
                        **self._planner_options(),
                    },
                )
            return self._pool

    def _planner_options(self) -> dict[str, str]:
        """The planner's settings, after whatever options the URL has of its own."""
        if not self._options.has_prepared_statements:
            return {}
        own = str(conninfo_to_dict(self._url).get("options") or "")
        ours = " ".join(f"-c {name}={value}" for name, value in PLANNER_SETTINGS.items())
        return {"options": f"{own} {ours}".strip()}
