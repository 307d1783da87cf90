"""Every kind of connection that atomic mode joins, behind one plain interface.

A driver opens a transaction on a connection of its own, reserves a row in the `orders` table, and
runs a body between. The tests are written once; what differs is here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import django
import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from retrysafe import AsyncIdempotency, Idempotency


class Rollback(Exception):
    """Ends a transaction on purpose."""


class Blocking:
    """A family of blocking connections."""

    def __init__(self, server_url: str, schema: str) -> None:
        self.server_url = server_url
        self.orders = f"{schema}.orders"
        self.idem = Idempotency(f"{server_url}?schema={schema}", caller="shop")

    def insert(self, name: str) -> str:
        return f"INSERT INTO {self.orders} (name) VALUES ('{name}')"

    def open(self, isolation: str | None = None, autocommit: bool = False) -> Any:
        raise NotImplementedError

    def transaction(self, connection: Any) -> Any:
        raise NotImplementedError

    def write(self, connection: Any, name: str) -> None:
        raise NotImplementedError

    def nested(self, connection: Any) -> Any:
        return self.transaction(connection)

    def close(self, connection: Any) -> None:
        connection.close()

    @contextlib.contextmanager
    def connected(self, **options: Any) -> Iterator[Any]:
        connection = self.open(**options)
        try:
            yield connection
        finally:
            self.close(connection)

    # The scenario that the tests are made of.

    def place(
        self,
        key: str,
        name: str,
        *,
        value: Any = None,
        connection: Any = None,
        then: Callable[[], None] | None = None,
        isolation: str | None = None,
        **options: Any,
    ) -> tuple[Any, bool]:
        """Permits an order once; the outcome, and whether it was replayed."""
        with contextlib.ExitStack() as stack:
            used = connection or stack.enter_context(self.connected(isolation=isolation))
            stack.enter_context(self.transaction(used))
            with self.idem.atomic(used, key, request=name, **options) as run:
                if not run.replayed:
                    self.write(used, name)
                    if then is not None:
                        then()
                    run.complete({"order": name} if value is None else value)
            return run.value, run.replayed

    def stage(self, connection: Any, payload: Any, **options: Any) -> str:
        """Stages one entry in the open transaction."""
        return self.idem.stage(connection, "orders.placed", payload, **options)

    def place_and_tell(self, key: str, name: str, then: Callable[[], None] | None = None) -> Any:
        """Permits an order once and stages a message about it."""
        with self.connected() as used, self.transaction(used):
            with self.idem.atomic(used, key, request=name) as run:
                if not run.replayed:
                    self.write(used, name)
                    run.outbox.stage("orders.placed", {"order": name}, aggregate=name)
                    run.complete(name)
                if then is not None:
                    then()
            return run.value

    def end(self) -> None:
        self.idem.close()


class Psycopg(Blocking):
    def open(self, isolation=None, autocommit=True):
        connection = psycopg.connect(self.server_url, autocommit=True, row_factory=dict_row)
        if isolation:
            connection.execute(
                f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}"
            )
        return connection

    def transaction(self, connection):
        return connection.transaction()

    def write(self, connection, name):
        connection.execute(self.insert(name))


class SqlalchemyConnection(Blocking):
    def __init__(self, server_url, schema):
        super().__init__(server_url, schema)
        url = server_url.replace("postgresql://", "postgresql+psycopg://")
        self.engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)

    def open(self, isolation=None, autocommit=False):
        connection = self.engine.connect()
        level = "AUTOCOMMIT" if autocommit else isolation
        return connection.execution_options(isolation_level=level) if level else connection

    def transaction(self, connection):
        return connection.begin()

    def nested(self, connection):
        return connection.begin_nested()

    def write(self, connection, name):
        connection.execute(sqlalchemy.text(self.insert(name)))

    def end(self):
        super().end()
        self.engine.dispose()


class SqlalchemySession(SqlalchemyConnection):
    def open(self, isolation=None, autocommit=False):
        level = "AUTOCOMMIT" if autocommit else isolation
        engine = self.engine.execution_options(isolation_level=level) if level else self.engine
        return Session(engine)


class Django(Blocking):
    """Django's connections are global, so each one gets an alias."""

    count = 0

    def open(self, isolation=None, autocommit=False):
        from django.conf import settings
        from django.db import connections

        if not settings.configured:
            settings.configure(DATABASES={"default": {}})
            django.setup()
        parts = psycopg.conninfo.conninfo_to_dict(self.server_url)
        Django.count += 1
        alias = f"alias{Django.count}"
        options = {}
        if isolation:
            levels = psycopg.IsolationLevel
            options["isolation_level"] = levels[isolation.replace(" ", "_").upper()]
        connections.settings[alias] = connections.configure_settings(
            {
                "default": {},
                alias: {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": parts["dbname"],
                    "USER": parts["user"],
                    "HOST": parts["host"],
                    "PORT": parts["port"],
                    "OPTIONS": options,
                },
            }
        )[alias]
        return connections[alias]

    def transaction(self, connection):
        from django.db import transaction

        return transaction.atomic(using=connection.alias)

    def write(self, connection, name):
        with connection.cursor() as cursor:
            cursor.execute(self.insert(name))


class Suspending(Blocking):
    """A family of async connections, driven by a loop of its own through plain calls."""

    def __init__(self, server_url: str, schema: str) -> None:
        self.server_url = server_url
        self.orders = f"{schema}.orders"
        self.runner = asyncio.Runner()
        self.idem = AsyncIdempotency(f"{server_url}?schema={schema}", caller="shop")

    def run(self, flow: Any) -> Any:
        return self.runner.run(flow)

    def end(self) -> None:
        self.run(self.idem.close())
        self.runner.close()

    async def open_async(self, isolation=None, autocommit=False) -> Any:
        raise NotImplementedError

    async def write_async(self, connection: Any, name: str) -> None:
        raise NotImplementedError

    async def close_async(self, connection: Any) -> None:
        await connection.close()

    def open(self, isolation=None, autocommit=False):
        return self.run(self.open_async(isolation, autocommit))

    def close(self, connection):
        self.run(self.close_async(connection))

    def write(self, connection, name):
        self.run(self.write_async(connection, name))

    def transaction(self, connection):
        return Plain(self, self.transaction_async(connection))

    def nested(self, connection):
        return Plain(self, self.nested_async(connection))

    def nested_async(self, connection):
        return self.transaction_async(connection)

    def transaction_async(self, connection: Any) -> Any:
        return connection.transaction()

    @property
    def atomic(self) -> Any:
        return self.idem.atomic

    def place(
        self,
        key,
        name,
        *,
        value=None,
        connection=None,
        then=None,
        isolation=None,
        **options,
    ):
        async def flow():
            used = connection or await self.open_async(isolation)
            try:
                async with self.transaction_async(used):
                    async with self.idem.atomic(used, key, request=name, **options) as run:
                        if not run.replayed:
                            await self.write_async(used, name)
                            if then is not None:
                                then()
                            await run.complete({"order": name} if value is None else value)
                    return run.value, run.replayed
            finally:
                if connection is None:
                    await self.close_async(used)

        return self.run(flow())

    def stage(self, connection, payload, **options):
        async def flow():
            return await self.idem.stage(connection, "orders.placed", payload, **options)

        return self.run(flow())

    def place_and_tell(self, key, name, then=None):
        async def flow():
            used = await self.open_async()
            try:
                async with self.transaction_async(used):
                    async with self.idem.atomic(used, key, request=name) as run:
                        if not run.replayed:
                            await self.write_async(used, name)
                            run.outbox.stage("orders.placed", {"order": name}, aggregate=name)
                            await run.complete(name)
                        if then is not None:
                            then()
                    return run.value
            finally:
                await self.close_async(used)

        return self.run(flow())


class Plain:
    """An async context as a plain one."""

    def __init__(self, driver: Suspending, context: Any) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> Any:
        async def enter():
            return await self._context.__aenter__()

        return self._driver.run(enter())

    def __exit__(self, *details: Any) -> Any:
        async def leave():
            return await self._context.__aexit__(*details)

        return self._driver.run(leave())


class PsycopgAsync(Suspending):
    async def open_async(self, isolation=None, autocommit=True):
        connection = await psycopg.AsyncConnection.connect(self.server_url, autocommit=True)
        if isolation:
            await connection.execute(
                f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}"
            )
        return connection

    async def write_async(self, connection, name):
        await connection.execute(self.insert(name))


class Asyncpg(Suspending):
    async def open_async(self, isolation=None, autocommit=True):
        connection = await asyncpg.connect(self.server_url)
        if isolation:
            await connection.execute(
                f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation}"
            )
        return connection

    async def write_async(self, connection, name):
        await connection.execute(self.insert(name))


class SqlalchemyAsync(Suspending):
    driver = "asyncpg"

    def __init__(self, server_url, schema):
        super().__init__(server_url, schema)
        url = server_url.replace("postgresql://", f"postgresql+{self.driver}://")
        self.engine = create_async_engine(url, poolclass=sqlalchemy.NullPool)

    async def open_async(self, isolation=None, autocommit=False):
        connection = await self.engine.connect()
        level = "AUTOCOMMIT" if autocommit else isolation
        if level:
            await connection.execution_options(isolation_level=level)
        return connection

    def transaction_async(self, connection):
        return connection.begin()

    def nested_async(self, connection):
        return connection.begin_nested()

    async def write_async(self, connection, name):
        await connection.execute(sqlalchemy.text(self.insert(name)))

    def end(self):
        self.run(self.engine.dispose())
        super().end()


class SqlalchemyAsyncPsycopg(SqlalchemyAsync):
    driver = "psycopg"


class SqlalchemyAsyncSession(SqlalchemyAsync):
    async def open_async(self, isolation=None, autocommit=False):
        level = "AUTOCOMMIT" if autocommit else isolation
        engine = self.engine.execution_options(isolation_level=level) if level else self.engine
        return AsyncSession(engine)


DRIVERS = [
    Psycopg,
    SqlalchemyConnection,
    SqlalchemySession,
    Django,
    PsycopgAsync,
    Asyncpg,
    SqlalchemyAsync,
    SqlalchemyAsyncPsycopg,
    SqlalchemyAsyncSession,
]
