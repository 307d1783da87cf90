"""The connections of renewals through asyncpg, and how one that leads nowhere is ended.

They are no part of the pool: a renewal that waits for what claims and steps have taken, or for a
connection that has gone silent, comes too late for its lease. Each belongs to the loop that it was
opened in, which need not be the loop of the pool.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg

from retrysafe.errors import StoreError
from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.postgres.drivers.port import Keepalive, NotOpened, Rows, is_about_statement

# One that rested longer is not used again: the network may have forgotten it, and a fresh one costs
# a renewal less than to find that out.
REST_SECONDS: Final = 30.0
# Long leases are renewed less often than that. A renewal comes after twice the time that it may
# take; kept for twice as long again, its connection is there for the next one.
REST_PER_LIMIT: Final = 4


def is_open(connection: Any) -> bool:
    """Whether the server has not ended the connection; the pool takes such a one back by itself."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:
        return False


def drop(connection: Any) -> None:
    """Ends a connection without a word to its server, which would be waited for."""
    # The pool has ended it already, or the loop is closed; then the socket goes with its transport.
    with suppress(asyncpg.InterfaceError, RuntimeError):
        connection.terminate()


def set_keepalive(connection: Any, wanted: Keepalive) -> None:
    """Sets on the socket what libpq sets by options of the same names; asyncpg has none."""
    transport = connection._transport  # noqa: SLF001 — there is no other way to the socket.
    shared = transport.get_extra_info("socket")
    if shared is None or shared.family not in (socket.AF_INET, socket.AF_INET6):
        return
    if not wanted.keepalives:
        return  # As in libpq, which then leaves all of it to the system.
    # A second descriptor of the same socket: uvloop lets nobody change what its transport gives.
    with socket.socket(fileno=os.dup(shared.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", wanted.keepalives_idle),
            ("TCP_KEEPINTVL", wanted.keepalives_interval),
            ("TCP_KEEPCNT", wanted.keepalives_count),
            ("TCP_USER_TIMEOUT", wanted.tcp_user_timeout),
        ):
            # As in libpq, zero is the system's own, and what a system does not know is left out.
            if value > 0 and hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class RenewalConnections:
    """As many as there are renewals at the same time; mostly that is one.

    A failure closes all of the loop, unless the server refused the statement alone: those that are
    idle most likely lead nowhere either.
    """

    def __init__(self, connect: Callable[[float], Awaitable[Any]]) -> None:
        self._connect = connect
        # Each with its loop, and since when it rests.
        self._idle: list[tuple[asyncio.AbstractEventLoop, Any, int]] = []

    async def fetch(self, seconds: float, sql: str, params: Sequence[Any]) -> Rows:
        """Runs one statement within that time.

        Raises what asyncpg raises, `TimeoutError`, `StoreNotWritable`, or `NotOpened`.
        """
        loop = asyncio.get_running_loop()
        connection = self._rested(loop, seconds)
        try:
            async with asyncio.timeout(seconds):
                if connection is None:
                    connection = await self._opened(seconds)
                rows: Rows = await connection.fetch(sql, *params)
        except BaseException as error:
            if connection is not None and _is_harmless(error):
                self._keep(loop, connection)
                raise
            if connection is not None:
                drop(connection)
            self._drop_idle(loop)
            raise
        self._keep(loop, connection)
        return rows

    async def _opened(self, seconds: float) -> Any:
        try:
            return await self._connect(seconds)
        except StoreError:
            raise  # A server that takes no writes; the pool would find the same one.
        except Exception as error:
            raise NotOpened(repr(error)) from error

    def _keep(self, loop: asyncio.AbstractEventLoop, connection: Any) -> None:
        self._idle.append((loop, connection, wall_clock_ms()))

    async def close(self) -> None:
        """Closes those of the running loop."""
        self._drop_idle(asyncio.get_running_loop())
        # What was dropped closes its socket in the next turn of the loop.
        await asyncio.sleep(0)

    def _rested(self, loop: asyncio.AbstractEventLoop, seconds: float) -> Any:
        limit = max(REST_SECONDS, REST_PER_LIMIT * seconds)
        for item in list(self._idle):
            own_loop, connection, rested_since_ms = item
            if own_loop.is_closed():
                # Nobody else comes for it: its loop was closed before the store was.
                self._drop_item(item)
            elif own_loop is loop:
                # By the clock that counts a suspension, for which no network waits. Where it was
                # set, a fresh connection is made at worst, or a try is lost.
                rested_seconds = (wall_clock_ms() - rested_since_ms) / 1000
                if 0 <= rested_seconds < limit and is_open(connection):
                    self._idle.remove(item)
                    return connection
                self._drop_item(item)
        return None

    def _drop_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        for item in list(self._idle):
            if item[0] is loop:
                self._drop_item(item)

    def _drop_item(self, item: tuple[asyncio.AbstractEventLoop, Any, int]) -> None:
        with suppress(ValueError):  # Another thread met the same one of a closed loop.
            self._idle.remove(item)
            drop(item[1])


def _is_harmless(error: BaseException) -> bool:
    return isinstance(error, UnicodeError | asyncpg.DataError) or (
        isinstance(error, asyncpg.PostgresError) and is_about_statement(error.sqlstate)
    )
