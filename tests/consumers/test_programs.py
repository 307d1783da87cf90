"""Consumers as people write them: in transactions of theirs, renamed, checked at the start."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import timedelta

import asyncpg
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import create_async_engine

from retrysafe import FOREVER, AsyncIdempotency, Idempotency, Policy
from retrysafe.consumers import BackOff, Consumer, Handler, Message
from retrysafe.consumers.engine import engine_of
from retrysafe.consumers.judge import Judge
from retrysafe.consumers.urls import broker_of
from retrysafe.errors import PolicyInvalid
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from tests.consumers.benches import KafkaBench, NatsBench, RabbitBench, SqsBench, wish
from tests.servers.fixtures import migrated

LIMIT_SECONDS = 60
SOON = BackOff(timedelta(milliseconds=125), timedelta(milliseconds=125))
INSERT = "INSERT INTO shop_orders VALUES ('{}')"


@pytest.fixture
def shop(postgres_server, new_postgres_url):
    """A database with a table of the user's and the store's; gives both URLs."""
    store_url = migrated(new_postgres_url())
    url = postgres_server.url()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE shop_orders (name text)")
    yield store_url, url
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE shop_orders")


def kept(shop):
    """The orders, and how many entries are staged."""
    store_url, url = shop
    schema = store_url.rpartition("=")[2]
    with psycopg.connect(url) as connection:
        orders = connection.execute("SELECT name FROM shop_orders").fetchall()
        entries = connection.execute(f"SELECT count(*) FROM {schema}.outbox").fetchone()
    return [name for (name,) in orders], entries[0]


# Transactions, by everything that PostgreSQL is reached by.


def of_psycopg(url):
    @contextmanager
    def transaction():
        with psycopg.connect(url) as connection:
            yield connection

    return transaction, lambda connection, text: connection.execute(text)


def engine_on(url, create=sqlalchemy.create_engine):
    """Without a pool, which somebody would have to close."""
    return create(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sqlalchemy.NullPool)


def of_sqlalchemy(url):
    return engine_on(url).begin, lambda connection, text: connection.exec_driver_sql(text)


def of_session(url):
    sessions = sqlalchemy.orm.sessionmaker(engine_on(url))
    return sessions.begin, lambda session, text: session.execute(sqlalchemy.text(text))


def of_async_psycopg(url):
    @asynccontextmanager
    async def transaction():
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection

    return transaction, lambda connection, text: connection.execute(text)


def of_asyncpg(url):
    @asynccontextmanager
    async def transaction():
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                yield connection
        finally:
            await connection.close()

    return transaction, lambda connection, text: connection.execute(text)


def of_async_sqlalchemy(url):
    engine = engine_on(url, create_async_engine)
    return engine.begin, lambda connection, text: connection.exec_driver_sql(text)


def placing(write):
    """A handler that fails after its writes, the first time."""
    tried = []

    def place(message, attempt):
        name = message.json()["name"]
        write(attempt.connection, INSERT.format(name))
        attempt.outbox.stage("orders.placed", {"name": name})
        tried.append(name)
        if len(tried) == 1:
            raise LookupError("not yet")

    return place


def placing_on_a_loop(write):
    tried = []

    async def place(message, attempt):
        name = message.json()["name"]
        await write(attempt.connection, INSERT.format(name))
        attempt.outbox.stage("orders.placed", {"name": name})
        tried.append(name)
        if len(tried) == 1:
            raise LookupError("not yet")

    return place


def judged(idem, handler):
    return Judge(
        engine_of(idem, handler.function), handler, names=["q"], policy=idem.policy
    ).handle(Message(wish("order").encode(), {"Idempotency-Key": "order-1"}))


@pytest.mark.parametrize("way", [of_psycopg, of_sqlalchemy, of_session])
def test_writes_outcome_and_entries_are_one_transaction(shop, way):
    """What a failed try has written is gone with it, and so is its entry."""
    transaction, write = way(shop[1])
    handler = Handler(placing(write), transaction=transaction)
    with Idempotency(shop[0], caller="unused") as idem:
        verdicts = [run_sync(judged(idem, handler)).action for _ in range(3)]
    assert verdicts == ["retry", "ack", "ack"]
    assert kept(shop) == (["order"], 1)


@pytest.mark.parametrize("way", [of_async_psycopg, of_asyncpg, of_async_sqlalchemy])
def test_and_so_they_are_in_an_event_loop(shop, way):
    async def main():
        transaction, write = way(shop[1])
        handler = Handler(placing_on_a_loop(write), transaction=transaction)
        async with AsyncIdempotency(shop[0], caller="unused") as idem:
            return [(await judged(idem, handler)).action for _ in range(3)]

    assert asyncio.run(main()) == ["retry", "ack", "ack"]
    assert kept(shop) == (["order"], 1)


# The same with every broker.

SERVERS = {
    "sqs": ("moto_server", SqsBench),
    "nats": ("nats_server", NatsBench),
    "rabbitmq": ("rabbitmq", RabbitBench),
    "kafka": ("kafka_server", KafkaBench),
}


@pytest.fixture(params=SERVERS)
def bench(request):
    fixture, kind = SERVERS[request.param]
    made = kind(request.getfixturevalue(fixture))
    yield made
    made.close()


def consumed(idem, handler, url, count):
    """Runs a consumer until so many messages were acked; its counts."""

    async def main():
        consumer = Consumer(idem, handler, broker_of(url))
        task = asyncio.create_task(consumer.run_async())
        async with asyncio.timeout(LIMIT_SECONDS):
            while consumer.counts.handled + consumer.counts.duplicates < count:
                if task.done():
                    await task
                await asyncio.sleep(0.02)
            consumer.stop()
            await task
        return consumer.counts

    return asyncio.run(main())


def test_a_message_of_every_broker_is_handled_in_a_transaction_once(bench, shop):
    transaction, write = of_psycopg(shop[1])
    bench.publish(wish("order"), "order-1")
    bench.publish(wish("order"), "order-1")
    handler = Handler(placing(write), transaction=transaction, back_off=SOON)
    with Idempotency(shop[0], caller="unused") as idem:
        counts = consumed(idem, handler, bench.url, 2)
    assert (counts.handled, counts.duplicates) == (1, 1)
    assert counts.retried >= 1
    assert kept(shop) == (["order"], 1)


def test_a_renamed_consumer_does_not_run_what_it_has_done(bench):
    """A new group reads its log again; a new queue gets what was sent to the old one."""
    ran = []

    def handle(message):
        ran.append(message.json()["name"])

    store = MemoryStore()
    # The broker's own name of the message, where the new consumer sees the same one.
    key = None if isinstance(bench, KafkaBench | NatsBench) else "order-1"
    bench.publish(wish("order"), key)
    with Idempotency(store, caller="unused") as idem:
        assert consumed(idem, handle, bench.url, 1).handled == 1
        other = renamed(bench)
        with closing(other):
            handler = Handler(handle, aliases=[bench.caller])
            counts = consumed(idem, handler, other.url, 1)
    assert (ran, counts.duplicates) == (["order"], 1)


class Group:
    """Another group on the same log."""

    def __init__(self, url, was, now):
        assert was in url
        self.url = url.replace(was, now)

    def close(self):
        """The log is the first one's."""


def renamed(bench):
    if isinstance(bench, NatsBench):
        return Group(bench.url, "durable=billing", "durable=invoices")
    if isinstance(bench, KafkaBench):
        return Group(bench.url, f"group={bench.name}", "group=invoices")
    other = type(bench)(bench.server)
    other.publish(wish("order"), "order-1")
    return other


def test_a_window_that_is_too_short_for_the_broker_is_refused_with_the_numbers(bench):
    numbers = {
        SqsBench: "for 18 days, 12:00:00",
        NatsBench: "for 1:00:00",
        RabbitBench: "without a limit",
        KafkaBench: "without a limit",
    }[type(bench)]
    policy = Policy(active_window=timedelta(minutes=7))
    with Idempotency(MemoryStore(), caller="unused") as idem:
        with pytest.raises(PolicyInvalid) as raised:
            consumed(idem, Handler(print, policy=policy), bench.url, 1)
        assert numbers in str(raised.value)
        assert "active_window is 0:07:00" in str(raised.value)
        long = Policy(active_window=FOREVER)
        bench.publish(wish("order"), "order-1")
        # In a group of its own: a broker of logs may wait for the one that was refused.
        url = bench.url.replace("group=", "group=long-")
        assert consumed(idem, Handler(print, policy=long), url, 1).handled == 1
