"""The connections of renewals through psycopg.

They are no part of the pool: a renewal that waits for what claims and steps have taken, or for a
connection that has gone silent, comes too late for its lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from retrysafe.stores.postgres.connector import Rows

# One that rested longer is not used again: the network may have forgotten it, and a fresh one costs
# a renewal less than to find that out.
REST_SECONDS: Final = 30.0


class Connection(Protocol):
    """As much of a connection as is needed here."""

    statement_seconds: float

    def close(self) -> None:
        """Ends it."""


class RenewalConnections:
    """As many as there are renewals at the same time; mostly that is one.

    Any failure closes all of them: those that are idle most likely lead nowhere either.
    """

    def __init__(
        self,
        connect: Callable[[float], Any],
        fetch: Callable[[Any, str, Sequence[Any]], Rows],
    ) -> None:
        self._connect = connect
        self._fetch = fetch
        self._idle: list[tuple[Connection, float]] = []
        self._is_closed = False

    def fetch(self, seconds: float, sql: str, params: Sequence[Any]) -> Rows:
        """Runs one statement within that time; raises what psycopg raises."""
        until = time.monotonic() + seconds
        connection: Connection = self._rested() or self._connect(seconds)
        try:
            connection.statement_seconds = until - time.monotonic()
            rows = self._fetch(connection, sql, params)
        except BaseException:
            connection.close()
            self._close_idle()
            raise
        self._idle.append((connection, time.monotonic()))
        # Looked at after the append: a close in between would have missed it.
        if self._is_closed:
            self._close_idle()
        return rows

    def close(self) -> None:
        """Closes what is idle now, and what is in use when it comes back."""
        self._is_closed = True
        self._close_idle()

    def _rested(self) -> Connection | None:
        while self._idle:
            try:
                connection, rested_since = self._idle.pop()
            except IndexError:
                return None  # Another thread took the last one.
            if time.monotonic() - rested_since < REST_SECONDS:
                return connection
            connection.close()
        return None

    def _close_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop()[0].close()
            except IndexError:
                return  # Another thread took the last one.
