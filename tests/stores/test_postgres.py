"""The PostgreSQL store is a store: with each driver, through PgBouncer, and on an older server."""

import asyncio

import pytest

from retrysafe.testing import StoreSuite
from tests.servers.fixtures import schema_on
from tests.stores.postgres_stores import ClockedStore, Table


class _Suite(StoreSuite):
    """The shipped suite on a schema that the class shares; a test finds it empty."""

    server = "postgres_server"
    proxy = None
    options = ""
    is_async = False
    reads_first = False

    @pytest.fixture(scope="class")
    @classmethod
    def table(cls, request):
        server = request.getfixturevalue(cls.server)
        port = request.getfixturevalue(cls.proxy).port if cls.proxy else server.port
        with schema_on(server.url()) as url:
            reached = url.replace(f":{server.port}/", f":{port}/")
            table = Table(f"{reached}{cls.options}", server.url())
            yield table
            table.close()

    @pytest.fixture(autouse=True)
    def _emptied(self, table):
        table.empty()
        self.url = table.url

    def make_store(self, clock):
        return ClockedStore(self.url, clock, is_async=self.is_async, reads_first=self.reads_first)

    def join_store(self, store, clock):
        return self.make_store(clock)


class _AsyncSuite(_Suite):
    is_async = True

    @pytest.fixture(autouse=True)
    def runner(self):
        with asyncio.Runner() as self.loop:
            yield

    def run(self, flow):
        return self.loop.run(flow)


class TestPsycopg(_Suite):
    """Threads."""


class TestAsyncpg(_AsyncSuite):
    """Tasks of an event loop."""


class TestPsycopgReadingFirst(_Suite):
    """Threads whose claims expect rows: the answers are the same, whatever they meet."""

    reads_first = True


class TestPsycopgThroughPgBouncer(_Suite):
    """Threads whose every transaction may meet another server connection."""

    proxy = "pgbouncer"
    options = "&prepared=off"


class TestAsyncpgThroughPgBouncer(_AsyncSuite):
    """Tasks whose every transaction may meet another server connection."""

    proxy = "pgbouncer"
    options = "&prepared=off"


class TestPostgres15(_Suite):
    """Threads on the older server."""

    server = "postgres_15"


class TestPostgres15Asyncpg(_AsyncSuite):
    """Tasks on the older server."""

    server = "postgres_15"
