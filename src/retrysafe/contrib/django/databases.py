"""The store in a database of the project, by its alias: `"STORE": "default"`.

Owns which store that is at the moment. Django's test runner changes the settings of a database in
place, so they are read whenever the store is used. In a test everything goes over Django's own
connection: what a `TestCase` rolls back takes the keys with it, and no connection of ours keeps a
test database from being dropped.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Final
from urllib.parse import quote, urlencode

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from retrysafe import forks
from retrysafe.core.ports import Capabilities, Store, Waits
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import open_store

# Options of a database that libpq knows, and not Django or psycopg alone.
_LIBPQ_OPTIONS: Final = (
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "sslcrl",
    "target_session_attrs",
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
)


def schema_name() -> str:
    """The schema of the tables in PostgreSQL."""
    name: str = getattr(settings, "RETRYSAFE_SCHEMA", "retrysafe")
    return name


def url_of(alias: str) -> str:
    """The URL of a store in a database of the project; raises `ImproperlyConfigured`."""
    connection: Any = connections[alias]
    options: Mapping[str, Any] = connection.settings_dict
    if connection.vendor == "sqlite":
        name = str(options["NAME"])
        if ":memory:" in name or "mode=memory" in name:
            raise ImproperlyConfigured(
                f"the database {alias!r} is in memory, where a store would forget its keys: name a "
                "file, or another database in RETRYSAFE['STORE']"
            )
        return f"sqlite:///{name}"
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"the database {alias!r} is {connection.display_name}, and a store is in PostgreSQL or "
            "SQLite: name another database in RETRYSAFE['STORE'], or the URL of a store"
        )
    given = options.get("OPTIONS", {})
    if "service" in given or "passfile" in given:
        raise ImproperlyConfigured(
            f"the database {alias!r} is found by a service or a password file, which the store "
            "cannot read: write its URL in RETRYSAFE['STORE']"
        )
    parts = {name: str(given[name]) for name in _LIBPQ_OPTIONS if name in given}
    host, port = str(options["HOST"]), str(options["PORT"])
    parts |= {name: text for name, text in (("host", host), ("port", port)) if text}
    parts["schema"] = schema_name()
    login = quote(str(options["USER"]), safe="")
    if options["PASSWORD"]:
        login += f":{quote(str(options['PASSWORD']), safe='')}"
    name = quote(str(options["NAME"]), safe="")
    address = f"{login}@/{name}" if login else f"/{name}"
    return f"postgresql://{address}?{urlencode(parts, quote_via=quote)}"


def is_testing() -> bool:
    """Whether Django's test environment is set up; no public name tells it."""
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")  # noqa: SLF001


def _shared_store(alias: str) -> Store:
    """The store over Django's connection; its module is not imported by servers."""
    if connections[alias].vendor == "sqlite":
        module = import_module("retrysafe.contrib.django.testing_sqlite")
        in_sqlite: Store = module.SharedSqliteStore(alias)
        return in_sqlite
    url_of(alias)  # Raises where it is no PostgreSQL.
    module = import_module("retrysafe.contrib.django.testing_postgres")
    in_postgres: Store = module.SharedPostgresStore(alias)
    return in_postgres


class DatabaseStore:
    """The store in a database of the project, whichever that is at the moment."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._url: str | None = None
        self._own: Store | None = None
        self._shared: Store | None = None
        self.after_fork_in_child()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Takes another lock: that one may be held by a thread of the parent."""
        self._lock = threading.RLock()

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store."""
        found: Capabilities = self._now.capabilities
        return found

    def __getattr__(self, name: str) -> Any:
        # Asked again with every call: whoever keeps a method must not keep a store with it.
        found = getattr(self._now, name)
        if not callable(found):
            return found

        def ask(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._now, name)(*args, **kwargs)

        return ask

    @property
    def _now(self) -> Any:
        return self._in_tests() if is_testing() else self._outside()

    def _outside(self) -> Store:
        if self._own is None:
            with self._lock:
                if self._own is None:
                    self._own = open_store(url_of(self.alias))
        return self._own

    def _in_tests(self) -> Store:
        if self._shared is None:
            self._shared = _shared_store(self.alias)
        return self._shared

    def for_loop(self) -> Store | str:
        """The same for async views."""
        return _OnLoop(self) if is_testing() else url_of(self.alias)

    async def close(self) -> None:
        """Closes the connections; the next use opens new ones."""
        if self._own is not None:
            await self._own.close()


class _OnLoop:
    """A store in a test's database for an event loop: used in the thread with its connection."""

    def __init__(self, store: DatabaseStore) -> None:
        self._store = store

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._store.capabilities, waits=Waits.SUSPENDING)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found) or name == "join":
            return found

        async def hop(*args: Any, **kwargs: Any) -> Any:
            return await sync_to_async(lambda: run_sync(found(*args, **kwargs)))()

        return hop
