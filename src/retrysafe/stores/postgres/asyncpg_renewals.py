"""The connections of renewals through asyncpg, and how one that leads nowhere is ended.

They are no part of the pool: a renewal that waits for what claims and steps have taken, or for a
connection that has gone silent, comes too late for its lease. Each belongs to the loop that it was
opened in, which need not be the loop of the pool.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg

from retrysafe.stores.postgres.connector import Keepalive, Rows

# One that rested longer is not used again: the network may have forgotten it, and a fresh one costs
# a renewal less than to find that out.
REST_SECONDS: Final = 30.0


def is_open(connection: Any) -> bool:
    """Whether the server has not ended the connection; the pool takes such a one back by itself."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:
        return False


def drop(connection: Any) -> None:
    """Ends a connection without a word to its server, which would be waited for."""
    with suppress(asyncpg.InterfaceError):  # The pool has ended it already.
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

    Any failure closes all of the loop: those that are idle most likely lead nowhere either.
    """

    def __init__(self, connect: Callable[[float], Awaitable[Any]]) -> None:
        self._connect = connect
        # Each with its loop, and since when it rests.
        self._idle: list[tuple[asyncio.AbstractEventLoop, Any, float]] = []

    async def fetch(self, seconds: float, sql: str, params: Sequence[Any]) -> Rows:
        """Runs one statement within that time; raises what asyncpg raises, or `TimeoutError`."""
        loop = asyncio.get_running_loop()
        connection = self._rested(loop)
        try:
            async with asyncio.timeout(seconds):
                if connection is None:
                    connection = await self._connect(seconds)
                rows: Rows = await connection.fetch(sql, *params)
        except BaseException:
            if connection is not None:
                drop(connection)
            self._drop_idle(loop)
            raise
        self._idle.append((loop, connection, time.monotonic()))
        return rows

    async def close(self) -> None:
        """Closes those of the running loop."""
        self._drop_idle(asyncio.get_running_loop())
        # What was dropped closes its socket in the next turn of the loop.
        await asyncio.sleep(0)

    def _rested(self, loop: asyncio.AbstractEventLoop) -> Any:
        for item in list(self._idle):
            own_loop, connection, rested_since = item
            if own_loop is loop:
                self._idle.remove(item)
                if time.monotonic() - rested_since < REST_SECONDS and is_open(connection):
                    return connection
                drop(connection)
        return None

    def _drop_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        for item in list(self._idle):
            if item[0] is loop:
                self._idle.remove(item)
                drop(item[1])
