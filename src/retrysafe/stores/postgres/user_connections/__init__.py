"""The connections of users that atomic mode can work on, behind one small port.

A connection is recognised by the modules of its classes, so no driver is imported that the user
has not imported already. Each module next to this one knows one family of drivers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Protocol

from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput
from retrysafe.stores.postgres.drivers.port import Rows

_FAMILIES: Final = ("psycopg", "asyncpg", "sqlalchemy", "django")
_PLACEHOLDER: Final = re.compile(r"\$(\d+)")


class UserConnection(Protocol):
    """A user's connection, with the driver's errors passed through as they are."""

    @property
    def waits(self) -> Waits:
        """Whether its methods block or suspend."""

    async def lasting(self) -> object:
        """The driver's own connection, which outlives what a pool or a session wraps around it."""

    async def catch_up(self) -> None:
        """Raises what became of statements that the user has queued; most drivers queue none."""

    async def fetch(self, sql: str, params: Sequence[Any]) -> Rows:
        """Runs a statement with `$1`-style parameters in the open transaction."""

    async def begin_savepoint(self) -> None:
        """Sets a savepoint the way that the driver knows about it; fails without a transaction."""

    async def release_savepoint(self) -> None:
        """Releases the savepoint."""

    async def roll_back_savepoint(self) -> None:
        """Rolls back to the savepoint and ends it."""


def adapted(connection: object) -> UserConnection:
    """The port over a user's connection; raises `InvalidInput` for a kind that is not known."""
    modules = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    for family in _FAMILIES:
        if family in modules:
            module = import_module(f"retrysafe.stores.postgres.user_connections.{family}_family")
            made: UserConnection = module.adapted(connection)
            return made
    raise unknown(connection)


def unknown(connection: object) -> InvalidInput:
    """The refusal of something that is no connection to PostgreSQL that we know."""
    kind = type(connection)
    return InvalidInput(
        f"{kind.__module__}.{kind.__qualname__} is no connection that the PostgreSQL store can "
        "join: pass a psycopg or asyncpg connection, a SQLAlchemy Connection or Session (also "
        "async) with one of these drivers, or django.db.connection on PostgreSQL"
    )


def with_percent_signs(sql: str, params: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """The statement for drivers that take `%s`: a parameter used twice is passed twice."""
    order: list[int] = []

    def numbered(match: re.Match[str]) -> str:
        order.append(int(match.group(1)) - 1)
        return "%s"

    text = _PLACEHOLDER.sub(numbered, sql.replace("%", "%%"))
    return text, tuple(params[index] for index in order)
