"""The connections of renewals through psycopg.

They are no part of the pool: a renewal that waits for what claims and steps have taken, or for a
connection that has gone silent, comes too late for its lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import psycopg

from retrysafe.stores.clock import wall_clock_ms
from retrysafe.stores.postgres.drivers.port import NotOpened, Rows, is_about_statement

# One that rested longer is not used again: the network may have forgotten it, and a fresh one costs
# a renewal less than to find that out.
REST_SECONDS: Final = 30.0
# Long leases are renewed less often than that. A renewal comes after twice the time that it may
# take; kept for twice as long again, its connection is there for the next one.
REST_PER_LIMIT: Final = 4


class Connection(Protocol):
    """As much of a connection as is needed here."""

    statement_seconds: float

    def close(self) -> None:
        """Ends it."""


class RenewalConnections:
    """As many as there are renewals at the same time; mostly that is one.

    A failure closes all of them, unless the server refused the statement alone: those that are idle
    most likely lead nowhere either.
    """

    def __init__(
        self,
        connect: Callable[[float], Any],
        fetch: Callable[[Any, str, Sequence[Any]], Rows],
    ) -> None:
        self._connect = connect
        self._fetch = fetch
        self._idle: list[tuple[Connection, int]] = []
        self._is_closed = False

    def fetch(self, seconds: float, sql: str, params: Sequence[Any]) -> Rows:
        """Runs one statement within that time; raises what psycopg raises, or `NotOpened`."""
        until = time.monotonic() + seconds
        connection = self._rested(seconds) or self._opened(seconds)
        try:
            connection.statement_seconds = until - time.monotonic()
            rows = self._fetch(connection, sql, params)
        except BaseException as error:
            if _is_harmless(error):
                self._keep(connection)
            else:
                connection.close()
                self._close_idle()
            raise
        self._keep(connection)
        return rows

    def _opened(self, seconds: float) -> Connection:
        try:
            connection: Connection = self._connect(seconds)
        except psycopg.Error as error:
            raise NotOpened(str(error)) from error
        return connection

    def _keep(self, connection: Connection) -> None:
        self._idle.append((connection, wall_clock_ms()))
        # Looked at after the append: a close in between would have missed it.
        if self._is_closed:
            self._close_idle()

    def close(self) -> None:
        """Closes what is idle now, and what is in use when it comes back."""
        self._is_closed = True
        self._close_idle()

    def _rested(self, seconds: float) -> Connection | None:
        limit = max(REST_SECONDS, REST_PER_LIMIT * seconds)
        while self._idle:
            try:
                connection, rested_since_ms = self._idle.pop()
            except IndexError:
                return None  # Another thread took the last one.
            # By the clock that counts a suspension, for which no network waits. Where it was set, a
            # fresh connection is made at worst, or a try is lost.
            if 0 <= (wall_clock_ms() - rested_since_ms) / 1000 < limit:
                return connection
            connection.close()
        return None

    def _close_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop()[0].close()
            except IndexError:
                return  # Another thread took the last one.


def _is_harmless(error: BaseException) -> bool:
    return isinstance(error, UnicodeError | psycopg.DataError) or (
        isinstance(error, psycopg.Error) and is_about_statement(error.sqlstate)
    )
