from __future__ import annotations

import itertools
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from retrysafe.core.model import SettleKind
from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from retrysafe.stores.postgres import PostgresStore, schema
from retrysafe.stores.postgres.partitions import DAY_MS, Partitions, day_start_ms
from retrysafe.testing import ManualClock
from retrysafe.testing.suite.probe import Probe, key_of


def wait_for_a_waiter(connection):
    """Returns when somebody waits for the lock that migrations take."""
    for _ in range(6000):
        is_waiting, _ = connection.execute(
            "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
            ", pg_sleep(0.01)"
        ).fetchone()
        if is_waiting:
            return
    raise TimeoutError


class TurnedStore(PostgresStore):
    """The store with a test's clock where its statements ask for the server's."""

    def __init__(self, connector, clock, **names):
        super().__init__(connector, **names)
        self._clock = clock
        self._statements.text = self._text_at_the_clock

    def _text_at_the_clock(self, name):
        return schema.statements(self.schema_name, f"{self._clock()}::bigint")[name]


class Desk(Probe):
    """A migrated schema, stores on it with one clock, and a plain connection beside them."""

    def __init__(self, url, connection):
        self.url = url
        self.plain_url = url.partition("?")[0]
        self.schema = parse_qs(urlsplit(url).query)["schema"][0]
        self.connection = connection
        # The server's own day, as the migration makes partitions by it, at noon: no test comes
        # near midnight unless it wants to.
        ((now_ms,),) = self.sql(f"SELECT {schema.NOW_MS}")
        self.stores = []
        self._numbers = itertools.count()
        clock = ManualClock(day_start_ms(now_ms) + DAY_MS // 2)
        super().__init__(None, clock, run_sync)
        self.store = self.another()
        run_sync(self.store.migrate())

    def another(self):
        """One more store object on the schema, as another process would have."""
        made = postgres_store(self.url, is_async=False)
        names = {"location": made.location, "schema_name": self.schema}
        store = TurnedStore(made._connector, self.clock, **names)
        self.stores.append(store)
        return store

    def sql(self, statement, *params):
        """Runs a statement as another program would."""
        text = statement.replace("{schema}", self.schema)
        cursor = self.connection.execute(text, params or None)
        return cursor.fetchall() if cursor.description else []

    def done(self, count=1, **windows):
        """Settled keys."""
        keys = [key_of(f"done-{next(self._numbers)}") for _ in range(count)]
        for key in keys:
            assert self.end(SettleKind.COMPLETE, self.hold(key), key, **windows).value == "apply"
        return keys

    def fill(self, count, *, state=2, expires_at_ms=None, lease_ends_at_ms=0, first=1):
        """Many rows at once, as if they had been claimed and settled."""
        self.sql(
            "INSERT INTO {schema}.keys SELECT decode(lpad(to_hex(n), 32, '0'), 'hex'), 'caller-1', "
            "'key-' || n, 'charge', 1, '\\x00', %s, decode(lpad(to_hex(n), 32, '0'), 'hex'), 1, 0, "
            "0, %s, 0, %s, NULL, 'owner' FROM generate_series(%s::int, %s::int) AS n",
            state,
            lease_ends_at_ms,
            self.clock() if expires_at_ms is None and state != 1 else expires_at_ms,
            first,
            first + count - 1,
        )

    def days(self, count):
        self.clock.advance(timedelta(days=count))

    def partitions(self):
        """The names of the days that have a partition."""
        rows = self.sql(schema.statements(self.schema)["list_partitions"])
        return [name for (name,) in rows]

    def tend(self):
        """What tending did."""
        store = self.store
        return run_sync(Partitions(store._connector, self.schema, store._statements.text).tend())


class Spied:
    """The statements that a store runs, and what is done just before one of them."""

    def __init__(self, store):
        self.names = []
        self.before = {}
        text = store._statements.text

        def told(name):
            self.names.append(name)
            act = self.before.pop(name, None)
            if act is not None:
                act()
            return text(name)

        store._statements.text = told

    def taken(self):
        names, self.names = self.names, []
        return names


@pytest.fixture
def connection(postgres_server):
    with psycopg.connect(postgres_server.url(), autocommit=True) as made:
        yield made


@pytest.fixture
def desk(migrated_url, connection):
    made = Desk(migrated_url, connection)
    yield made
    for store in made.stores:
        run_sync(store.close())


@pytest.fixture
def spied(desk):
    return Spied(desk.store)
