"""What is RabbitMQ's own: delays, counts, channels that close, the broker that goes away."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, InvalidInput
from retrysafe.consumers import Action, Consumer, Verdict
from retrysafe.consumers.amqp import RabbitQueue
from retrysafe.stores import MemoryStore
from tests.consumers.benches import RabbitBench, wish

DONE = Verdict(Action.ACK, "done")


@pytest.fixture(params=[None, {"x-queue-type": "quorum"}], ids=["classic", "quorum"])
def bench(request, rabbitmq):
    made = RabbitBench(rabbitmq, request.param)
    yield made
    made.close()


async def received(broker, count):
    found = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await broker.receive(max(count - len(found), 1))
    return found


def test_a_retry_waits_outside_of_the_queue_and_keeps_its_id(bench):
    """No hot loop: it comes back after its delay, with its key, and counted."""
    bench.publish(wish("1"), "key-1")

    async def scene():
        broker = RabbitQueue(bench.server.url, bench.name)
        await broker.open()
        try:
            (first,) = await received(broker, 1)
            assert (first.deliveries, first.header("Idempotency-Key")) == (1, "key-1")
            later = Verdict(Action.RETRY, "again", timedelta(milliseconds=400))
            began = time.monotonic()
            assert list(await broker.settle([(first, later)])) == []
            (again,) = await received(broker, 1)
            assert time.monotonic() - began >= 0.4
            assert (again.identity, again.deliveries) == (first.identity, 2)
            assert again.header("Idempotency-Key") == "key-1"
            # At once, as at a stop: the broker itself gives it back.
            await broker.settle([(again, Verdict(Action.LEAVE, "stop"))])
            (last,) = await received(broker, 1)
            assert last.identity == first.identity
            await broker.settle([(last, DONE)])
        finally:
            await broker.close()

    asyncio.run(scene())
    assert bench.left() == 0


def test_a_quorum_queue_counts_what_was_requeued(rabbitmq):
    bench = RabbitBench(rabbitmq, {"x-queue-type": "quorum"})
    bench.publish(wish("1"))

    async def scene():
        broker = RabbitQueue(bench.server.url, bench.name)
        await broker.open()
        try:
            counts = []
            for _ in range(3):
                (message,) = await received(broker, 1)
                counts.append(message.deliveries)
                await broker.settle([(message, Verdict(Action.LEAVE, "stop"))])
        finally:
            await broker.close()
        return counts

    assert asyncio.run(scene()) == [1, 2, 3]
    bench.close()


def test_what_came_over_a_closed_channel_is_lost_and_never_settled_on_another(rabbitmq):
    """Delivery tags start again at 1: an ack on the new channel would drop another message."""
    bench = RabbitBench(rabbitmq)
    bench.publish(wish("1"))
    bench.publish(wish("2"))

    async def scene():
        broker = RabbitQueue(bench.server.url, bench.name)
        await broker.open()
        try:
            first, second = await received(broker, 2)
            assert list(await broker.extend([first, second])) == []
            await broker._channel.close()
            assert list(await broker.extend([first, second])) == [first, second]
            assert list(await broker.settle([(first, DONE)])) == [first]
            again = await received(broker, 2)
            assert {each.identity for each in again} == {first.identity, second.identity}
            await broker.settle([(each, DONE) for each in again])
        finally:
            await broker.close()

    asyncio.run(scene())
    assert bench.left() == 0
    bench.close()


def test_a_new_channel_brings_as_many_as_the_first(rabbitmq):
    """It is opened when there is little room, and the room comes back."""
    bench = RabbitBench(rabbitmq)
    for number in range(5):
        bench.publish(wish(str(number)))

    async def scene():
        broker = RabbitQueue(bench.server.url, bench.name)
        await broker.open()
        try:
            await received(broker, 5)
            await broker._channel.close()
            assert len(await broker.receive(1)) == 1
            assert len(await received(broker, 4)) == 4
        finally:
            await broker.close()

    asyncio.run(scene())
    bench.close()


def test_the_connection_breaks_in_the_middle_and_nothing_is_repeated(rabbitmq):
    """What ran is stored; its next delivery, over a new connection, is acked without work."""
    bench = RabbitBench(rabbitmq)
    bench.publish(wish("slow"))
    ran = []

    async def scene():
        begun, ends = asyncio.Event(), asyncio.Event()

        async def handle(message):
            ran.append(message.json()["name"])
            begun.set()
            await ends.wait()

        broker = RabbitQueue(bench.server.url, bench.name)
        async with AsyncIdempotency(MemoryStore(), caller="unused") as idem:
            consumer = Consumer(idem, handle, broker)
            task = asyncio.create_task(consumer.run_async())
            await begun.wait()
            await broker._connection.close()
            ends.set()
            async with asyncio.timeout(30):
                while not consumer.counts.duplicates:  # noqa: ASYNC110 — counts have no event.
                    await asyncio.sleep(0.02)
            consumer.stop()
            await task

    asyncio.run(scene())
    assert ran == ["slow"]
    bench.close()


def test_a_queue_that_is_not_there_is_said_so(rabbitmq):
    async def scene():
        with pytest.raises(InvalidInput, match="no queue nowhere"):
            await RabbitQueue(rabbitmq.url, "nowhere").open()

    asyncio.run(scene())
    with pytest.raises(InvalidInput, match="which queue"):
        RabbitQueue(rabbitmq.url, "")
