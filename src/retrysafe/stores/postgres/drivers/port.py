"""The port between the PostgreSQL store and a driver: statements in, rows out, errors translated.

The store is written once over this port. A blocking driver's methods never suspend, so the same
store serves threads and event loops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from retrysafe.core.ports import Waits
from retrysafe.errors import (
    SchemaMissing,
    StoreError,
    StoreMissing,
    StoreNotWritable,
    StoreUnavailable,
)

T = TypeVar("T")

Rows = Sequence[Sequence[Any]]


# For connections with prepared statements. Planning a batch anew takes longer than running it, so
# it is planned once; and always by the primary key, because a plan that was made while the tables
# were empty would go on reading them from end to end as they grow.
PLANNER_SETTINGS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How the operating system finds out that a peer is gone, in the words and units of libpq.

    Without it a connection whose packets are dropped is waited for as long as a statement may take,
    and one that is idle is never found out. A peer that acknowledges and never answers is not found
    out by it at all: for that one there are limits on statements.
    """

    keepalives: int = 1
    # Seconds. Often enough that no firewall forgets an idle connection, which takes it minutes.
    keepalives_idle: int = 10
    keepalives_interval: int = 5
    keepalives_count: int = 3
    # Milliseconds that what was sent may stay unacknowledged.
    tcp_user_timeout: int = 10_000


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How connections are made and kept."""

    # Three small batches in flight, a step, an operator and one to spare; more only adds
    # contention. They are opened when they are needed. Renewals have their own beside them.
    size_limit: int = 6
    # How long a call waits for a free connection, and for the server to accept a new one.
    connect_timeout: timedelta = timedelta(seconds=5)
    # How long a claim, a step or an ending may take before its connection is given up and the
    # same is asked over another one. They take milliseconds; a network that has gone silent costs
    # an operation this much.
    commit_timeout: timedelta = timedelta(seconds=5)
    # The same for statements that read much, of operators, sweeps and migrations.
    statement_timeout: timedelta = timedelta(seconds=30)
    keepalive: Keepalive = Keepalive()
    # Off behind PgBouncer in transaction mode: another server connection would not know them.
    has_prepared_statements: bool = True


class RowRefused(Exception):
    """The server or the driver cannot take these values; the connection is fine."""


class Conflict(Exception):
    """A deadlock or a serialization failure: nothing happened, and trying again may help."""


class NotOpened(Exception):
    """No connection for a renewal could be opened; the driver's error is the cause."""


class Locked(StoreUnavailable):
    """Somebody else held a lock for longer than we wanted to wait; nothing happened."""


class Session(Protocol):
    """One open transaction."""

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs a statement with `$1`-style parameters."""

    async def script(self, sql: str) -> None:
        """Runs several statements without parameters, which may take long."""


class Connector(Protocol):
    """A pool of connections."""

    @property
    def waits(self) -> Waits:
        """Whether its methods block or suspend."""

    async def fetch(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs one statement in a transaction of its own, within the time of a commit.

        Raises `StoreUnavailable`, `RowRefused`, `Conflict`, `SchemaMissing` or another
        `StoreError`.
        """

    async def fetch_patiently(self, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same for a statement that may take long."""

    async def fetch_renewal(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        """The same over a connection that nobody else uses, within that time.

        Where none can be opened it goes over the pool: a full server refuses new connections, and
        a healthy owner must not lose its key for that. After a failure that is not about the
        statement the next call gets a fresh connection. Raises what `fetch` raises.
        """

    async def fetch_within(self, seconds: float, sql: str, params: Sequence[Any] = ()) -> Rows:
        """Runs a statement that must not take long, waiting for a connection included.

        Raises what `fetch` raises; `StoreUnavailable` when the time is over.
        """

    async def transact(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Runs the work in a transaction that commits at its end, or rolls back when it raises.

        Its statements are within the time of a commit, unless they are patient.
        """

    def refuse_reentry(self) -> None:
        """Raises `StoreUnavailable` where a signal's handler would wait for its own thread."""

    async def has_forgetful_pooler(self) -> bool:
        """Whether prepared statements are on and the server is not the one that was dialled.

        A pooler announces a process id of its own making; the server answers with its real one.
        """

    async def close_renewals(self) -> None:
        """Closes the connections of `fetch_renewal` that belong to the running loop."""

    async def close(self) -> None:
        """Closes the connections; the next use opens new ones."""

    def after_fork_in_child(self) -> None:
        """Leaves the parent's connections alone."""


# The classes of SQLSTATE codes that mean something for a caller.
ROW_CLASSES: Final = ("22", "23", "21", "54")
CONFLICT_CODES: Final = ("40001", "40P01")
UNAVAILABLE_CLASSES: Final = ("08", "53", "57", "58", "25")
UNPREPARED_CODES: Final = ("26000", "42P05")
MISSING_CODES: Final = ("42P01", "3F000", "42703")
LOCKED_CODE: Final = "55P03"
# The server is a standby or was demoted; and it starts up, shuts down or recovers from a crash.
READ_ONLY_CODE: Final = "25006"
NOT_WRITABLE_CODES: Final = (READ_ONLY_CODE, "57P03")
NO_DATABASE_CODE: Final = "3D000"
_NO_DATABASE_WORDS: Final = re.compile(r'database "[^"]*" does not exist')
# libpq has no codes for what it is told while it connects; these are its words and the server's.
_NOT_WRITABLE_WORDS: Final = (
    "session is read-only",
    "server is in hot standby mode",
    "the database system is ",
)


def translated(code: str | None, message: str, location: str) -> Exception:
    """The error of a SQLSTATE code in retrysafe's words."""
    if code is None and any(words in message for words in _NOT_WRITABLE_WORDS):
        code = READ_ONLY_CODE
    if code == NO_DATABASE_CODE or (code is None and _NO_DATABASE_WORDS.search(message)):
        return StoreMissing(
            f"{location}: there is no such database. Check its name in the URL, or create it, for "
            "example with createdb, and then run 'retrysafe migrate'"
        )
    code = code or "08000"
    if code in UNPREPARED_CODES:
        return StoreError(
            f"{location} does not know a prepared statement ({message}): add ?prepared=off to the "
            "URL when PgBouncer is in between"
        )
    if code in CONFLICT_CODES:
        return Conflict(message)
    if code == LOCKED_CODE:
        return Locked(f"{location} is locked by somebody else: {message}")
    if code in MISSING_CODES:
        return SchemaMissing(
            f"{location} has no current retrysafe schema ({message}): run 'retrysafe migrate "
            f"--store {location}', with your own URL"
        )
    if code in NOT_WRITABLE_CODES:
        return StoreNotWritable(f"{location} takes no writes now: {message}")
    if code[:2] in ROW_CLASSES:
        return RowRefused(message)
    if code[:2] in UNAVAILABLE_CLASSES:
        return StoreUnavailable(f"{location} does not answer: {message}")
    return StoreError(f"{location} refuses: {message} ({code})")


def is_about_statement(code: str | None) -> bool:
    """Whether the server refused a statement alone: the connection is as good as before."""
    return code is not None and (
        code[:2] in ROW_CLASSES or code in CONFLICT_CODES or code == LOCKED_CODE
    )
