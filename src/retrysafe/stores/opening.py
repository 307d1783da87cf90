"""Opening a store: what a URL means, and which driver it needs."""

from __future__ import annotations

import re
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from retrysafe.core.ports import Store
from retrysafe.errors import StoreUrlInvalid
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.postgres import PostgresStore
from retrysafe.stores.postgres.urls import PostgresUrl, postgres_url, without_password
from retrysafe.stores.sqlite import SqliteStore

_SQLITE_PREFIX: Final = "sqlite:///"
_POSTGRES_PREFIXES: Final = ("postgresql://", "postgres://")
# SQLAlchemy's way to write a URL. The driver is for its own connections: retrysafe takes asyncpg
# for an event loop and psycopg for threads.
_WITH_DRIVER: Final = re.compile(r"(postgres|postgresql|sqlite)\+([^:/?#]*)://")
_DRIVERS: Final = {
    "postgres": ("asyncpg", "psycopg", "psycopg_async", "psycopg2"),
    "postgresql": ("asyncpg", "psycopg", "psycopg_async", "psycopg2"),
    "sqlite": ("aiosqlite", "pysqlite"),
}
# What SQLAlchemy passes to asyncpg by another name than libpq's.
_ASYNCPG_OPTIONS: Final = (
    (re.compile(r"(?<=[?&])ssl="), "sslmode="),
    (re.compile(r"(?<=[?&])(?:prepared_)?statement_cache_size=0(?=&|$)"), "prepared=off"),
    (re.compile(r"(?<=[?&])(?:prepared_)?statement_cache_size=[1-9][0-9]*(?=&|$)"), "prepared=on"),
)
# What stands for the password where SQLAlchemy shows a URL.
_HIDDEN_PASSWORD: Final = ":***@"
# A worker would rather wait for a slow writer than give up a claim, and it asks three times;
# people at a terminal wait less.
_BUSY_TIMEOUT: Final = timedelta(seconds=10)


def checked_store(store: object) -> Store | str:
    """A store or its URL; raises `StoreUrlInvalid` for anything else, such as an unset variable."""
    if isinstance(store, str) or hasattr(store, "capabilities"):
        return cast("Store | str", store)
    if hasattr(store, "render_as_string"):
        raise StoreUrlInvalid(
            "this is SQLAlchemy's URL, and a store is a text: pass "
            "engine.url.render_as_string(hide_password=False)"
        )
    raise StoreUrlInvalid(
        f"a store is a URL such as 'sqlite:///app.db', or a store object; got {store!r}"
    )


def open_store(
    url: str,
    *,
    create: bool = True,
    migrate: bool = True,
    busy_timeout: timedelta = _BUSY_TIMEOUT,
    is_async: bool = False,
) -> Store:
    """The store that a URL means; raises `StoreUrlInvalid`.

    `sqlite:///relative.db` and `sqlite:////absolute.db` are files; `postgresql://…` is a database,
    for threads or, with `is_async`, for an event loop; `memory://` is this process. A driver in the
    URL, as SQLAlchemy writes it, is left out: `postgresql+asyncpg://…`, `sqlite+aiosqlite:///…`.
    `busy_timeout` is how long a locked SQLite file is waited for.
    """
    if not isinstance(url, str):
        raise StoreUrlInvalid(f"open_store takes a URL such as 'sqlite:///app.db', got {url!r}")
    url = _without_driver(url)
    if url.startswith(_POSTGRES_PREFIXES):
        return postgres_store(url, is_async=is_async)
    if url.startswith(_SQLITE_PREFIX):
        return SqliteStore(
            sqlite_path(url), create=create, migrate=migrate, busy_timeout=busy_timeout
        )
    if url == "memory://":
        return MemoryStore()
    raise StoreUrlInvalid(
        f"{without_password(url)!r} names no store: use sqlite:///path/to/file.db (four slashes "
        "for an absolute path) or postgresql://user@host/database, or memory:// for trying things "
        "out"
    )


def _without_driver(url: str) -> str:
    """The URL as retrysafe's own drivers take it; raises `StoreUrlInvalid`."""
    if _HIDDEN_PASSWORD in url:
        raise StoreUrlInvalid(
            f"{without_password(url)!r} has *** for a password, as SQLAlchemy shows its URLs: pass "
            "engine.url.render_as_string(hide_password=False)"
        )
    named = _WITH_DRIVER.match(url)
    if named is None:
        return url
    scheme, driver = named.groups()
    known = _DRIVERS[scheme]
    if driver not in known:
        raise StoreUrlInvalid(
            f"{without_password(url)!r} asks for the driver {driver!r}: leave it out, because "
            f"retrysafe chooses its own, or write one of {', '.join(known)}"
        )
    address, question, query = url[named.end() :].partition("?")
    options = question + query
    if driver == "asyncpg":
        for pattern, written in _ASYNCPG_OPTIONS:
            options = pattern.sub(written, options)
    return f"{scheme}://{address}{options}"


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
    if "\x00" in path:
        raise StoreUrlInvalid(f"{url!r}: the name of a file has no NUL character")
    return Path(path)


def postgres_store(url: str, *, is_async: bool) -> PostgresStore:
    """The PostgreSQL store of a URL; raises `StoreUrlInvalid`, also without its driver."""
    parts = postgres_url(url)
    location = parts.location
    extra, module = ("asyncpg", "asyncpg") if is_async else ("postgres", "psycopg")
    try:
        connector = import_module(f"retrysafe.stores.postgres.drivers.{module}")
    except ImportError as error:
        raise StoreUrlInvalid(
            f"{location} needs a driver that is not installed ({error.name}): "
            f"install its extra, from a clone with pip install '/path/to/clone[{extra}]'"
        ) from error
    made = (
        connector.AsyncpgConnector(parts.for_asyncpg, location, parts.pool)
        if is_async
        else connector.PsycopgConnector(_checked_by_libpq(parts), location, parts.pool)
    )
    return PostgresStore(made, location=location, schema_name=parts.schema_name)


def _checked_by_libpq(url: PostgresUrl) -> str:
    """The URL itself; raises `StoreUrlInvalid` for what every try to connect would fail with."""
    conninfo = import_module("psycopg.conninfo")
    errors = import_module("psycopg.errors")
    try:
        conninfo.conninfo_to_dict(url.for_libpq)
    except errors.ProgrammingError:
        # Its words may quote the password.
        names = ", ".join(sorted(url.options)) or "none"
        raise StoreUrlInvalid(
            f"{url.location}: libpq does not understand this URL; check the names of its options "
            f"({names})"
        ) from None
    return url.for_libpq
