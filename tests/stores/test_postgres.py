"""The PostgreSQL store is a store: with each driver, through PgBouncer, and on an older server.

Each driver plays every case in every run. The others play the races, behind a pooler and reading
first also every other case with one row of its table; a long run plays everything everywhere.
"""

import asyncio

import pytest

from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.testing import StoreSuite
from retrysafe.testing.suite.batches import BatchCases
from retrysafe.testing.suite.claims import ClaimCases
from retrysafe.testing.suite.collisions import CollisionCases
from retrysafe.testing.suite.concurrency import ConcurrencyCases
from retrysafe.testing.suite.leases import LeaseCases
from tests.servers.fixtures import schema_on
from tests.stores.postgres_stores import ClockedStore, Table


class _Suite(StoreSuite):
    """The shipped suite on a schema and connections that the class shares; a test finds it empty.

    Two connectors, for the store of a test and for the one that joins it as another process would.
    """

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

    @pytest.fixture(scope="class")
    @classmethod
    def connectors(cls, table):
        made = [postgres_store(table.url, is_async=False)._connector for _ in range(2)]
        yield made
        for connector in made:
            run_sync(connector.close())

    @pytest.fixture(autouse=True)
    def _emptied(self, table, connectors):
        table.empty()
        self.url = table.url
        self.connectors = connectors

    def make_store(self, clock):
        return self._store(clock, self.connectors[0])

    def join_store(self, store, clock):
        return self._store(clock, self.connectors[1])

    def _store(self, clock, connector):
        return ClockedStore(
            self.url,
            clock,
            is_async=self.is_async,
            reads_first=self.reads_first,
            connector=connector,
        )


class _AsyncSuite(_Suite):
    is_async = True

    @pytest.fixture(scope="class")
    @classmethod
    def connectors(cls, table):
        with asyncio.Runner() as runner:
            cls.loop = runner
            made = [postgres_store(table.url, is_async=True)._connector for _ in range(2)]
            yield made
            for connector in made:
                runner.run(connector.close())

    def run(self, flow):
        return self.loop.run(flow)


def is_race(item):
    """Whether the case is about who wins: what depends on the server's locks and snapshots."""
    return item.function.__module__ in {
        cases.__module__
        for cases in (BatchCases, ClaimCases, CollisionCases, ConcurrencyCases, LeaseCases)
    }


def is_race_or_first(item):
    """Also every other case once: every statement is sent, with one of the rows of its table."""
    indices = item.callspec.indices.values() if hasattr(item, "callspec") else ()
    return is_race(item) or not any(indices)


class TestPsycopg(_Suite):
    """Threads."""


class TestAsyncpg(_AsyncSuite):
    """Tasks of an event loop."""


class TestPsycopgReadingFirst(_Suite):
    """Threads whose claims expect rows: the answers are the same, whatever they meet."""

    is_in_every_run = staticmethod(is_race_or_first)
    reads_first = True


class TestPsycopgThroughPgBouncer(_Suite):
    """Threads whose every transaction may meet another server connection."""

    is_in_every_run = staticmethod(is_race_or_first)
    proxy = "pgbouncer"
    options = "&prepared=off"


class TestAsyncpgThroughPgBouncer(_AsyncSuite):
    """Tasks whose every transaction may meet another server connection."""

    is_in_every_run = staticmethod(is_race_or_first)
    proxy = "pgbouncer"
    options = "&prepared=off"


class TestPostgres15(_Suite):
    """Threads on the older server."""

    is_in_every_run = staticmethod(is_race)
    server = "postgres_15"


class TestPostgres15Asyncpg(_AsyncSuite):
    """Tasks on the older server."""

    is_in_every_run = staticmethod(is_race)
    server = "postgres_15"
