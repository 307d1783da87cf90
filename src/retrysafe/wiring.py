"""Puts the parts together: a URL becomes a store, and a store an object to work with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final

from retrysafe.core.events import Emit
from retrysafe.core.fingerprint import FingerprintRule
from retrysafe.core.policy import Policy
from retrysafe.core.ports import Store
from retrysafe.errors import StoreUrlInvalid
from retrysafe.observe.logs import EventLog
from retrysafe.runtime.blocking import BlockingIdempotency
from retrysafe.runtime.calls import CallerSource
from retrysafe.runtime.tasks import AsyncFace
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.sqlite import SqliteStore

SECRET_VARIABLE: Final = "RETRYSAFE_SECRET"
_SQLITE_PREFIX: Final = "sqlite:///"
# A worker would rather wait for a slow writer than give up a claim; people at a terminal wait less.
_BUSY_TIMEOUT: Final = timedelta(seconds=30)


def open_store(
    url: str,
    *,
    create: bool = True,
    migrate: bool = True,
    busy_timeout: timedelta = _BUSY_TIMEOUT,
) -> Store:
    """The store that a URL means; raises `StoreUrlInvalid`.

    `sqlite:///relative.db` and `sqlite:////absolute.db` are files; `memory://` is this process.
    `busy_timeout` is how long a locked database is waited for.
    """
    if url.startswith(_SQLITE_PREFIX):
        return SqliteStore(
            sqlite_path(url), create=create, migrate=migrate, busy_timeout=busy_timeout
        )
    if url == "memory://":
        return MemoryStore()
    raise StoreUrlInvalid(
        f"{url!r} names no store: use sqlite:///path/to/file.db (four slashes for an absolute "
        "path), or memory:// for trying things out"
    )


def sqlite_path(url: str) -> Path:
    """The file that a SQLite URL means; raises `StoreUrlInvalid`."""
    path = url.removeprefix(_SQLITE_PREFIX)
    if not path or path == ":memory:":
        raise StoreUrlInvalid(
            f"{url!r} names no file: use sqlite:///path/to/file.db, or memory:// for a store that "
            "ends with the process"
        )
    if "?" in path:
        raise StoreUrlInvalid(f"{url!r}: a SQLite URL takes no options after '?'")
    return Path(path)


def _environment_secret() -> str | None:
    return os.environ.get(SECRET_VARIABLE) or None


class Idempotency(BlockingIdempotency):
    """Runs operations once, for threads and processes."""

    def __init__(
        self,
        store: Store | str,
        *,
        caller: CallerSource | None = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        secret: bytes | str | None = None,
        cache: bool = True,
        observers: Iterable[Emit] = (),
    ) -> None:
        """`store` is a URL such as `sqlite:///app.db`, or a store object that stays yours.

        `caller` says whose keys they are: a text, a function that returns it, or `GLOBAL`.
        `secret` keys the hashes of child keys and body keys (default: `RETRYSAFE_SECRET`).
        """
        super().__init__(
            open_store(store) if isinstance(store, str) else store,
            caller=caller,
            policy=policy,
            rule=rule,
            secret=secret or _environment_secret(),
            cache=cache,
            observers=(EventLog(), *observers),
            owns_store=isinstance(store, str),
        )


class AsyncIdempotency(AsyncFace):
    """Runs operations once, for the tasks of an event loop."""

    def __init__(
        self,
        store: Store | str,
        *,
        caller: CallerSource | None = None,
        policy: Policy | None = None,
        rule: FingerprintRule | None = None,
        secret: bytes | str | None = None,
        cache: bool = True,
        observers: Iterable[Emit] = (),
    ) -> None:
        """Takes what `Idempotency` takes."""
        super().__init__(
            open_store(store) if isinstance(store, str) else store,
            caller=caller,
            policy=policy,
            rule=rule,
            secret=secret or _environment_secret(),
            cache=cache,
            observers=(EventLog(), *observers),
            owns_store=isinstance(store, str),
        )
