"""RabbitMQ and NATS JetStream as targets, with real brokers that come and go."""

from __future__ import annotations

import asyncio
import uuid

import aio_pika
import nats
import pytest
from nats.js.api import StreamConfig

from retrysafe.core.outbox.entries import EntryQuery
from retrysafe.errors import DeliveryFailed
from retrysafe.relay import AsyncRelay
from retrysafe.relay.targets.nats import NatsJetStream
from retrysafe.relay.targets.of_loop import OfLoop
from retrysafe.relay.targets.rabbitmq import RabbitMQ
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from tests.forking import answer_of_child
from tests.relay.scripted import entry, stage
from tests.relay.test_webhooks import delivery
from tests.servers.nats import NatsServer
from tests.servers.process import free_port

LIMIT_SECONDS = 30


@pytest.fixture
def name():
    """A name of queues and subjects that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"


def last_error(store):
    (found,) = run_sync(store.outbox.list_entries(EntryQuery()))
    return found.entry.last_error


def deliver_in_loops(target, topic):
    """Two loops of three deliveries each."""

    async def main(number):
        keys = [f"entry:{number}-{each}" for each in range(3)]
        await asyncio.gather(*(target.deliver(delivery(topic=topic, key=each)) for each in keys))
        await target.close()

    for number in range(2):
        asyncio.run(main(number))


def test_what_a_loop_left_open_is_neither_used_nor_closed_in_the_next_one():
    """Nor in a child: its parent's loop waits for that very connection."""
    opened = OfLoop()

    async def main(held):
        async with opened.opening():
            found, opened.held = opened.held, held
        return found

    async def taken():
        return opened.taken()

    assert asyncio.run(main("first")) is None
    assert asyncio.run(main("second")) is None
    assert asyncio.run(taken()) is None
    with asyncio.Runner() as runner:
        runner.run(main("third"))
        assert answer_of_child(lambda: str(runner.run(taken()))) == "None"
        assert runner.run(taken()) == "third"


# RabbitMQ.


class Queue:
    """A queue on the broker, seen by a consumer of its own."""

    def __init__(self, url, name, exchange=""):
        self._url, self._name, self._exchange = url, name, exchange

    async def __aenter__(self):
        self._connection = await aio_pika.connect(self._url)
        channel = await self._connection.channel()
        self.queue = await channel.declare_queue(self._name, auto_delete=False)
        if self._exchange:
            exchange = await channel.declare_exchange(self._exchange, auto_delete=False)
            await self.queue.bind(exchange, self._name)
        return self

    async def messages(self, count):
        found = []
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(found) < count:
                message = await self.queue.get(fail=False)
                if message is None:
                    await asyncio.sleep(0.01)
                    continue
                await message.ack()
                found.append(message)
        return found

    async def __aexit__(self, *_):
        await self.queue.delete(if_unused=False, if_empty=False)
        await self._connection.close()


async def published(url, item, **options):
    target = RabbitMQ(url, **options)
    try:
        await target.deliver(item)
    finally:
        await target.close()
        await target.close()


@pytest.mark.parametrize("exchange", ["", "an exchange"])
def test_rabbitmq_gets_a_persistent_message_with_the_key_as_its_id(rabbitmq, name, exchange):
    """Through the default exchange to the queue of that name, or through one that is bound."""

    async def main():
        async with Queue(rabbitmq.url, name, exchange) as queue:
            await published(rabbitmq.url, delivery(topic=name), exchange=exchange)
            return (await queue.messages(1))[0]

    message = asyncio.run(main())
    item = delivery()
    assert (message.message_id, message.body) == (item.key, item.body)
    assert (message.content_type, message.type) == (item.content_type, name)
    assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    assert message.timestamp == item.staged_at
    assert message.headers == {
        "Idempotency-Key": item.key,
        "retrysafe-attempt": 2,
        "retrysafe-aggregate": "order-7",
    }


def test_rabbitmq_keeps_the_order_of_an_aggregate(rabbitmq, name):
    store = MemoryStore()
    stage(store, *(entry(f"n{number:02}", "lane") for number in range(20)))
    for found in store.outbox._entries.values():
        found.topic = name

    async def main():
        async with Queue(rabbitmq.url, name) as queue:
            target = RabbitMQ(rabbitmq.url)
            try:
                report = await AsyncRelay(store, target).drain()
            finally:
                await target.close()
            return report, [message.body for message in await queue.messages(20)]

    report, bodies = asyncio.run(main())
    assert report.delivered == 20
    assert bodies == [f"n{number:02}".encode() for number in range(20)]


def test_a_message_that_no_queue_takes_is_not_delivered(rabbitmq, name):
    """The broker would drop it without a word, and the entry would be lost."""
    with pytest.raises(DeliveryFailed, match="no queue"):
        asyncio.run(published(rabbitmq.url, delivery(topic=name)))


def test_a_broker_that_is_away_is_a_failure_and_is_found_again(rabbitmq, name):
    """Whatever is wrong with the connection, the next try makes a new one."""

    async def main():
        async with Queue(rabbitmq.url, name) as queue:
            target = RabbitMQ(rabbitmq.url)
            try:
                await target.deliver(delivery(topic=name))
                await target._open.held.connection.close()
                await target.deliver(delivery(topic=name, key="entry:again"))
            finally:
                await target.close()
            return [message.message_id for message in await queue.messages(2)]

    assert asyncio.run(main()) == [delivery().key, "entry:again"]
    nobody = f"amqp://guest:guest@127.0.0.1:{free_port()}/"
    with pytest.raises(aio_pika.exceptions.AMQPConnectionError):
        asyncio.run(published(nobody, delivery()))


def test_rabbitmq_is_reached_from_one_loop_after_another(rabbitmq, name):
    """A lock that somebody waited for belongs to its loop for ever."""

    async def main():
        async with Queue(rabbitmq.url, name) as queue:
            await asyncio.to_thread(deliver_in_loops, RabbitMQ(rabbitmq.url), name)
            return len(await queue.messages(6))

    assert asyncio.run(main()) == 6


def test_a_missing_exchange_is_a_failure(rabbitmq, name):
    with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
        asyncio.run(published(rabbitmq.url, delivery(), exchange=name))


# NATS.


async def stream_of(url, name):
    connection = await nats.connect(url)
    stream = connection.jetstream()
    await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.>"]))
    return connection, stream


async def messages(stream, name, count):
    found = []
    for number in range(1, count + 1):
        message = await stream.get_msg(name, seq=number)
        found.append(message)
    return found


def test_nats_gets_a_message_with_the_key_as_its_id(nats_server, name):
    """The stream drops a repetition by itself."""

    async def main():
        connection, stream = await stream_of(nats_server.url, name)
        target = NatsJetStream(nats_server.url, prefix=f"{name}.")
        try:
            item = delivery(key="entry:1")
            await target.deliver(item)
            await target.deliver(item)
            state = (await stream.stream_info(name)).state
            return state.messages, await stream.get_msg(name, seq=1)
        finally:
            await target.close()
            await target.close()
            await connection.close()

    count, message = asyncio.run(main())
    assert count == 1
    assert (message.subject, message.data) == (f"{name}.orders.paid", delivery().body)
    assert message.headers["Nats-Msg-Id"] == "entry:1"
    assert message.headers["Content-Type"] == "application/json"


def test_nats_is_reached_from_one_loop_after_another(nats_server, name):
    """A lock that somebody waited for belongs to its loop for ever."""

    async def main():
        connection, stream = await stream_of(nats_server.url, name)
        try:
            await asyncio.to_thread(deliver_in_loops, NatsJetStream(nats_server.url), f"{name}.x")
            return (await stream.stream_info(name)).state.messages
        finally:
            await connection.close()

    assert asyncio.run(main()) == 6


def test_a_relay_keeps_the_order_in_a_stream(nats_server, name):
    store = MemoryStore()
    stage(store, *(entry(f"n{number:02}", "lane") for number in range(20)))

    async def main():
        connection, stream = await stream_of(nats_server.url, name)
        target = NatsJetStream(nats_server.url, prefix=f"{name}.")
        try:
            report = await AsyncRelay(store, target).drain()
            return report, [item.data for item in await messages(stream, name, 20)]
        finally:
            await target.close()
            await connection.close()

    report, bodies = asyncio.run(main())
    assert report.delivered == 20
    assert bodies == [f"n{number:02}".encode() for number in range(20)]


def test_a_subject_that_no_stream_takes_is_not_delivered(nats_server, name):
    """Without a stream there is nobody who would keep it."""
    store = MemoryStore()
    stage(store, entry("a"))

    async def main():
        target = NatsJetStream(nats_server.url, prefix=f"{name}.")
        try:
            return await AsyncRelay(store, target).drain()
        finally:
            await target.close()

    assert asyncio.run(main()).failed == 1
    assert "no stream takes" in last_error(store)


@pytest.mark.long
def test_a_server_that_was_restarted_is_found_again(name):
    """A try while it is away fails at once; the next one makes a new connection."""
    server = NatsServer().start()
    try:

        async def main():
            connection, _ = await stream_of(server.url, name)
            await connection.close()
            target = NatsJetStream(server.url, prefix=f"{name}.")
            try:
                await target.deliver(delivery(key="entry:1"))
                server.stop()
                with pytest.raises(Exception):  # noqa: B017 — whatever the library says.
                    await target.deliver(delivery(key="entry:2"))
                server.start()
                await target.deliver(delivery(key="entry:2"))
            finally:
                await target.close()
            connection = await nats.connect(server.url)
            try:
                found = await messages(connection.jetstream(), name, 2)
            finally:
                await connection.close()
            return [item.headers["Nats-Msg-Id"] for item in found]

        assert asyncio.run(main()) == ["entry:1", "entry:2"]
    finally:
        server.remove()
