"""Conflicts and outages: how they show in each driver, and the retry that they ask for.

A conflict means that the database rolled the transaction back because of a rival, and nothing of
it happened; in an outage nobody may know. Owns what is recognised as either. It must not know what
the transaction was for.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple, cast

from retrysafe.errors import InvalidInput

__all__ = ["is_conflict", "retry_serialization"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Serialization failure and deadlock: the two that PostgreSQL asks its clients to try again.
CONFLICT_CODES: Final = frozenset({"40001", "40P01"})
# Classes of SQLSTATE: connection lost, rolled back, out of resources, locked, shut down.
_OUTAGE_CLASSES: Final = frozenset({"08", "40", "53", "55", "57"})
# The server is a standby, or was demoted: after a failover another one takes the write.
_READ_ONLY_CODE: Final = "25006"
# SQLite's results of the same kind: busy, locked, input or output failed, disk full, cannot open.
_OUTAGE_RESULTS: Final = frozenset({5, 6, 10, 13, 14})
_PRIMARY_MASK: Final = 0xFF
# Names of PEP 249, which every driver and every ORM gives to what the server does not answer.
_OUTAGE_NAMES: Final = frozenset({"OperationalError", "InterfaceError"})
# Rivals move on within milliseconds; the pause grows so that many of them spread out.
_PAUSE_SECONDS: Final = 0.005
_PAUSE_MAXIMUM_SECONDS: Final = 0.5


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of a driver's error, also when SQLAlchemy or Django has wrapped it."""
    for item in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(item, "sqlstate", None) or getattr(item, "pgcode", None)
        if isinstance(code, str):
            return code
    return None


def is_conflict(error: BaseException) -> bool:
    """Whether the transaction was rolled back because of a rival, and may be tried again."""
    if isinstance(error, sqlite3.OperationalError):
        # Somebody wrote after this transaction had read: it can only start over.
        return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY_SNAPSHOT
    return sqlstate_of(error) in CONFLICT_CODES


def is_outage(error: BaseException) -> bool:
    """Whether the database was out of reach, out of resources or gave up, so a retry can help."""
    if isinstance(error, OSError):
        return True  # No connection, or none in time.
    result = getattr(error, "sqlite_errorcode", None)
    if isinstance(result, int):
        return result & _PRIMARY_MASK in _OUTAGE_RESULTS
    code = sqlstate_of(error)
    if code is not None:
        return code[:2] in _OUTAGE_CLASSES or code == _READ_ONLY_CODE
    return any(ancestor.__name__ in _OUTAGE_NAMES for ancestor in type(error).__mro__)


def _pause_seconds(number: int) -> float:
    longest = min(_PAUSE_SECONDS * 2**number, _PAUSE_MAXIMUM_SECONDS)
    return random.uniform(longest / 2, longest)  # noqa: S311 — spreads rivals, guards nothing.


def retry_serialization(operation: Callable[[*Ts], T], /, *args: *Ts, tries: int = 10) -> T:
    """Calls `operation(*args)` again when its transaction lost against a rival's.

    The operation must open the transaction and end it, so that every try has a new one. An async
    operation gives something to await. After the last try the driver's own error is raised.
    """
    if tries < 1:
        raise InvalidInput(f"tries is a whole number from 1 up, got {tries}")
    if inspect.iscoroutinefunction(operation):
        return cast("T", _retry_async(operation, args, tries))
    for number in range(1, tries):
        try:
            return operation(*args)
        except Exception as error:
            if not is_conflict(error):
                raise
        time.sleep(_pause_seconds(number))
    return operation(*args)


async def _retry_async(operation: Callable[..., Any], args: tuple[Any, ...], tries: int) -> Any:
    for number in range(1, tries):
        try:
            return await operation(*args)
        except Exception as error:
            if not is_conflict(error):
                raise
        await asyncio.sleep(_pause_seconds(number))
    return await operation(*args)
