"""RabbitMQ by pika: all that holds with aio-pika, and what is pika's own."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pika
import pytest

from retrysafe import Idempotency, InvalidInput
from retrysafe.consumers import Action, Consumer, Verdict
from retrysafe.consumers import pika as module
from retrysafe.consumers.pika import PikaQueue, _Channel
from retrysafe.consumers.urls import QueueUrlInvalid, broker_of
from retrysafe.stores import MemoryStore
from tests.consumers import test_rabbitmq
from tests.consumers.benches import RabbitBench, wish
from tests.servers.fixtures import again

globals().update(again(test_rabbitmq))


@pytest.fixture
def kind():
    return PikaQueue


@pytest.fixture
def queue(rabbitmq):
    made = RabbitBench(rabbitmq)
    yield made
    made.close()


def test_heartbeats_are_served_while_handlers_block_their_threads(queue):
    """The broker ends a connection that is silent for two of them."""
    queue.publish(wish("slow"))
    ran = []

    def handle(message):
        ran.append(message.json()["name"])
        time.sleep(4)

    async def scene():
        broker = PikaQueue(f"{queue.server.url}?heartbeat=1", queue.name)
        with Idempotency(MemoryStore(), caller="unused") as idem:
            consumer = Consumer(idem, handle, broker, concurrency=1)
            task = asyncio.create_task(consumer.run_async())
            async with asyncio.timeout(30):
                while not consumer.counts.handled:  # noqa: ASYNC110 — counts have no event.
                    await asyncio.sleep(0.02)
            consumer.stop()
            await task
            return consumer.counts

    counts = asyncio.run(scene())
    assert (ran, counts.received, counts.lost) == (["slow"], 1, 0)
    assert queue.left() == 0


def test_a_copy_that_no_queue_takes_is_not_taken_for_safe(queue):
    """The broker returns it and confirms it all the same."""

    async def scene():
        broker = PikaQueue(queue.server.url, queue.name)
        await broker.open()
        try:
            publisher = await broker._publisher()
            properties = pika.BasicProperties()
            sent = [
                publisher.publish(b"1", "nowhere", properties),
                publisher.publish(b"2", queue.name, properties),
                publisher.publish(b"3", "nowhere", properties),
            ]
            return await asyncio.gather(*sent, return_exceptions=True)
        finally:
            await broker.close()

    first, second, third = asyncio.run(scene())
    assert second is None
    assert str(first) == str(third) == "there is no queue nowhere"
    assert queue.left() == 1


def test_a_copy_that_pika_cannot_send_does_not_shift_the_confirms_of_others(queue):
    """The broker counts what it gets; a confirm must never be taken for another copy's."""

    async def scene():
        broker = PikaQueue(queue.server.url, queue.name)
        await broker.open()
        try:
            first = await broker._publisher()
            with pytest.raises(pika.exceptions.UnsupportedAMQPFieldException):
                await first.publish(b"1", queue.name, pika.BasicProperties(headers={"a": object()}))
            second = await broker._publisher()
            assert second is not first
            async with asyncio.timeout(10):
                await second.publish(b"2", queue.name, pika.BasicProperties())
        finally:
            await broker.close()

    asyncio.run(scene())
    assert queue.left() == 1


def test_what_waits_for_the_broker_ends_with_its_channel(queue, monkeypatch):
    """Nobody would ever answer."""
    queue.publish(wish("poison"))

    async def scene():
        broker = PikaQueue(queue.server.url, queue.name)
        await broker.open()
        try:
            (found,) = await test_rabbitmq.received(broker, 1)
            publisher = await broker._publisher()
            # The broker never hears of it, so it cannot be faster than the cut.
            with monkeypatch.context() as patch:
                patch.setattr(type(publisher), "_send", lambda *_: None)
                sending = asyncio.create_task(
                    publisher.publish(b"1", queue.name, pika.BasicProperties())
                )
                await asyncio.sleep(0)
            await test_rabbitmq.cut(broker)
            with pytest.raises(pika.exceptions.AMQPError):
                await sending
            later = Verdict(Action.RETRY, "again", timedelta(seconds=1))
            assert list(await broker.settle([(found, later)])) == [found]
        finally:
            await broker.close()

    asyncio.run(scene())


def test_all_that_find_the_connection_gone_make_one_together(queue, monkeypatch):
    """A second one would stay open unknown, and take messages that nobody handles."""
    made, kind = [], module._Connection

    def connection(*given, **options):
        made.append(kind(*given, **options))
        return made[-1]

    monkeypatch.setattr(module, "_Connection", connection)
    queue.publish(wish("1"))

    async def scene():
        broker = PikaQueue(queue.server.url, queue.name)
        try:
            found, *_ = await asyncio.gather(
                test_rabbitmq.received(broker, 1),
                broker._publisher(),
                broker._is_there(queue.name),
                broker._dead_letter_queue(),
            )
            await broker.settle([(found[0], Verdict(Action.ACK, "done"))])
            assert len(made) == 1
            # A close ends one also that is only about to be made.
            await test_rabbitmq.cut(broker)
            await broker._gone
            making = asyncio.create_task(broker._connect())
            await asyncio.sleep(0)
        finally:
            await broker.close()
        await making

    asyncio.run(scene())
    assert [each.is_closed for each in made] == [True, True]
    assert queue.left() == 0


def test_a_channel_nobody_waits_for_any_more_is_closed(queue, monkeypatch):
    """Each settle is limited in time; a connection has only so many channels."""

    called = []
    call = _Channel.call

    async def noted(channel, method, *given, **options):
        called.append(method)
        return await call(channel, method, *given, **options)

    async def cut_off(_):
        raise TimeoutError

    async def scene():
        broker = PikaQueue(queue.server.url, queue.name)
        await broker.open()
        try:
            connection = broker._connection
            opening = asyncio.create_task(_Channel.opened(connection))
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            called.clear()
            probing = asyncio.create_task(broker._is_there(queue.name))
            while "queue_declare" not in called:  # noqa: ASYNC110 — pika tells nobody.
                await asyncio.sleep(0)
            probing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await probing
            with monkeypatch.context() as patch:
                patch.setattr(module._Publisher, "confirm", cut_off)
                with pytest.raises(TimeoutError):
                    await broker._publisher()
            # The broker answers in order: by now it has answered all of the above.
            assert await broker._is_there(queue.name)
            return list(connection._channels)
        finally:
            await broker.close()

    monkeypatch.setattr(_Channel, "call", noted)
    assert asyncio.run(scene()) == []


def test_no_broker_there_is_said_so():
    async def scene(url):
        await PikaQueue(url, "pay").open()

    with pytest.raises(ConnectionError, match="no broker answers"):
        asyncio.run(scene("amqp://guest:guest@127.0.0.1:1/"))
    with pytest.raises(InvalidInput, match="cannot be read"):
        PikaQueue("amqp://guest:guest@127.0.0.1:port/", "pay")


def test_a_url_chooses_the_library():
    url = "amqp://guest:guest@127.0.0.1/?queue=pay"
    assert type(broker_of(f"{url}&client=pika")) is PikaQueue
    assert type(broker_of(f"{url}&client=aio-pika")) is test_rabbitmq.RabbitQueue
    assert type(broker_of(url)) is test_rabbitmq.RabbitQueue
    with pytest.raises(QueueUrlInvalid, match="client is aio-pika or pika"):
        broker_of(f"{url}&client=kombu")
