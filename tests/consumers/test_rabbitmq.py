"""What is RabbitMQ's own: delays, counts, channels that close, the broker that goes away."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pamqp.decode
import pamqp.encode
import pytest

from retrysafe import AsyncIdempotency, InvalidInput
from retrysafe.consumers import Action, Consumer, Verdict
from retrysafe.consumers.amqp import RabbitQueue, _encodable
from retrysafe.stores import MemoryStore
from tests.consumers.benches import RabbitBench, wish

DONE = Verdict(Action.ACK, "done")
POISON = Verdict(Action.DEAD_LETTER, "poison")


@pytest.fixture
def kind():
    """The class that consumes; `test_pika` gives another one."""
    return RabbitQueue


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


async def cut(broker):
    """Ends the connection behind the consumer's back."""
    if isinstance(broker, RabbitQueue):
        # Below the library's object: what the broker ends, that one does not count as closed.
        await broker._connection.transport.close(ConnectionError("the broker is gone"))
    else:
        broker._connection.close()


def test_a_retry_waits_outside_of_the_queue_and_keeps_its_id(bench, kind):
    """No hot loop: it comes back after its delay, with its key, and counted."""
    bench.publish(wish("1"), "key-1")

    async def scene():
        broker = kind(bench.server.url, bench.name)
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


def test_a_count_that_is_none_does_not_take_messages_along(rabbitmq, kind):
    """Anybody may write the header; what came with it is handled, retried and acked."""
    bench = RabbitBench(rabbitmq)
    counts = ["9" * 5_000, "9" * 19, 2**63 - 1, "²", "-1", "many", True]
    for count in counts:
        bench.publish(wish("1"), headers={"retrysafe-deliveries": count})

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        try:
            found = await received(broker, len(counts))
            assert {each.deliveries for each in found} == {1}
            soon = Verdict(Action.RETRY, "again", timedelta(milliseconds=1))
            assert list(await broker.settle([(each, soon) for each in found])) == []
            again = await received(broker, len(counts))
            assert {each.deliveries for each in again} == {2}
            await broker.settle([(each, DONE) for each in again])
        finally:
            await broker.close()

    asyncio.run(scene())
    assert bench.left() == 0
    bench.close()


def test_one_consumer_runs_in_one_loop_after_another(rabbitmq, kind):
    """A lock that somebody waited for belongs to its loop for ever."""
    bench = RabbitBench(rabbitmq)
    broker = kind(bench.server.url, bench.name)

    async def scene():
        await broker.open()
        try:
            await asyncio.gather(*(broker._dead_letter_queue() for _ in range(3)))
        finally:
            await broker.close()

    for _ in range(2):
        asyncio.run(scene())
    bench.close()


def test_a_quorum_queue_counts_what_was_requeued(rabbitmq, kind):
    bench = RabbitBench(rabbitmq, {"x-queue-type": "quorum"})
    bench.publish(wish("1"))

    async def scene():
        broker = kind(bench.server.url, bench.name)
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


def test_what_came_over_a_closed_channel_is_lost_and_never_settled_on_another(rabbitmq, kind):
    """Delivery tags start again at 1: an ack on the new channel would drop another message."""
    bench = RabbitBench(rabbitmq)
    bench.publish(wish("1"))
    bench.publish(wish("2"))

    async def scene():
        broker = kind(bench.server.url, bench.name)
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


def test_a_new_channel_brings_as_many_as_the_first(rabbitmq, kind):
    """It is opened when there is little room, and the room comes back."""
    bench = RabbitBench(rabbitmq)
    for number in range(5):
        bench.publish(wish(str(number)))

    async def scene():
        broker = kind(bench.server.url, bench.name)
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


def test_the_connection_breaks_in_the_middle_and_nothing_is_repeated(rabbitmq, kind):
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

        broker = kind(bench.server.url, bench.name)
        async with AsyncIdempotency(MemoryStore(), caller="unused") as idem:
            consumer = Consumer(idem, handle, broker)
            task = asyncio.create_task(consumer.run_async())
            await begun.wait()
            await cut(broker)
            ends.set()
            async with asyncio.timeout(30):
                while not consumer.counts.duplicates:  # noqa: ASYNC110 — counts have no event.
                    await asyncio.sleep(0.02)
            consumer.stop()
            await task

    asyncio.run(scene())
    assert ran == ["slow"]
    bench.close()


def on_channel(bench, work):
    """Does something with a channel of its own, beside the consumer."""

    async def scene():
        channel = await bench.connection.channel()
        try:
            return await work(channel)
        finally:
            if not channel.is_closed:
                await channel.close()

    return bench.runner.run(scene())


def test_a_dead_letter_queue_with_arguments_of_its_own_is_used(bench, kind):
    name = f"{bench.name}.dead"
    arguments = {"x-message-ttl": 600_000}
    on_channel(bench, lambda it: it.declare_queue(name, durable=True, arguments=arguments))
    bench.publish(wish("poison"))

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        try:
            found = await received(broker, 1)
            assert list(await broker.settle([(found[0], POISON)])) == []
        finally:
            await broker.close()

    asyncio.run(scene())
    letter = on_channel(bench, lambda it: taken(it, name))
    assert letter.headers["retrysafe-reason"] == "poison"


async def taken(channel, name):
    queue = await channel.get_queue(name, ensure=False)
    return await queue.get(no_ack=True, fail=False)


def test_a_dead_letter_that_is_not_taken_waits_and_is_never_requeued(bench, monkeypatch, kind):
    """A requeued one is back at once, and a quorum queue drops it after so many times."""
    monkeypatch.setattr("retrysafe.consumers.amqp_queue._NOT_TAKEN_SECONDS", 0.5)
    full = {"x-max-length": 0, "x-overflow": "reject-publish"}
    name = f"{bench.name}.dead"
    on_channel(bench, lambda it: it.declare_queue(name, durable=True, arguments=full))
    bench.publish(wish("poison"))

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        try:
            for number in (1, 2, 3):
                (found,) = await received(broker, 1)
                began = time.monotonic()
                assert found.deliveries == number
                assert "x-delivery-count" not in found.headers
                assert list(await broker.settle([(found, POISON)])) == [found]
            (found,) = await received(broker, 1)
            assert time.monotonic() - began >= 0.5
            # Once it is taken, it is gone from here.
            broker._dead_letter = f"{bench.name}.other"
            assert list(await broker.settle([(found, POISON)])) == []
        finally:
            await broker.close()

    asyncio.run(scene())
    assert bench.left() == 0
    letter = on_channel(bench, lambda it: taken(it, f"{bench.name}.other"))
    assert letter.body.decode() == wish("poison")


def test_where_nothing_can_be_published_the_message_stays_and_is_tried_again(
    rabbitmq, monkeypatch, kind
):
    """It is neither requeued nor lost, and the others of its batch are settled."""
    monkeypatch.setattr("retrysafe.consumers.amqp_queue._NOT_TAKEN_SECONDS", 0.125)
    bench = RabbitBench(rabbitmq)
    bench.publish(wish("poison"))
    bench.publish(wish("good"))
    tried = []

    async def scene():
        broker = kind(bench.server.url, bench.name)
        move = broker._move

        async def refused(message, verdict):
            tried.append(verdict.action)
            if len(tried) < 4:
                raise ConnectionError("not now")
            await move(message, verdict)

        monkeypatch.setattr(broker, "_move", refused)
        await broker.open()
        try:
            first, second = await received(broker, 2)
            assert list(await broker.settle([(first, POISON), (second, DONE)])) == [first]
            (again,) = await received(broker, 1)
            assert (again.identity, again.deliveries) == (first.identity, 2)
            await broker.settle([(again, DONE)])
        finally:
            await broker.close()

    asyncio.run(scene())
    assert len(tried) == 4
    assert bench.left() == 0
    bench.close()


def test_a_copy_does_not_count_again_what_the_quorum_queue_has_counted(rabbitmq, kind):
    bench = RabbitBench(rabbitmq, {"x-queue-type": "quorum"})
    bench.publish(wish("1"))

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        counts = []
        try:
            for delay in (0, 0, 125, 125, 125):
                (found,) = await received(broker, 1)
                counts.append(found.deliveries)
                verdict = Verdict(Action.RETRY, "again", timedelta(milliseconds=delay))
                await broker.settle([(found, verdict)])
        finally:
            await broker.close()
        return counts

    assert asyncio.run(scene()) == [1, 2, 3, 4, 5]
    bench.close()


def test_a_consumer_that_the_broker_has_cancelled_consumes_again(bench, kind):
    """As when the queue is deleted and made anew, or its leader moves."""

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        try:
            assert await broker.receive(1) == []
            await asyncio.to_thread(on_channel, bench, lambda it: it.queue_delete(bench.name))
            with pytest.raises(Exception, match="NOT_FOUND"):
                await received(broker, 1)
            await asyncio.to_thread(
                on_channel, bench, lambda it: it.declare_queue(bench.name, durable=True)
            )
            await asyncio.to_thread(bench.publish, wish("after"))
            (found,) = await received(broker, 1)
            assert found.json()["name"] == "after"
        finally:
            await broker.close()

    asyncio.run(scene())


def test_a_stop_ends_the_pushing_while_handlers_run(rabbitmq, kind):
    """What comes meanwhile is there for other consumers, and not kept until the last has ended."""
    bench = RabbitBench(rabbitmq)
    bench.publish(wish("slow"))

    async def scene():
        begun, ends = asyncio.Event(), asyncio.Event()

        async def handle(message):
            begun.set()
            await ends.wait()

        broker = kind(bench.server.url, bench.name)
        async with AsyncIdempotency(MemoryStore(), caller="unused") as idem:
            consumer = Consumer(idem, handle, broker)
            task = asyncio.create_task(consumer.run_async())
            await begun.wait()
            consumer.stop()
            async with asyncio.timeout(10):
                while not broker._tasks:  # noqa: ASYNC110 — begun in the loop's next round.
                    await asyncio.sleep(0)
                await asyncio.gather(*broker._tasks)
            await asyncio.to_thread(bench.publish, wish("next"))
            async with asyncio.timeout(10):
                while await asyncio.to_thread(bench.left) != 1:  # noqa: ASYNC110 — the broker tells when asked.
                    await asyncio.sleep(0.02)
            ends.set()
            assert await task

    asyncio.run(scene())
    assert bench.left() == 1
    bench.close()


def test_an_answer_that_never_comes_is_not_waited_for(rabbitmq, monkeypatch, kind):
    """The broker stands still between the message and its copy."""
    monkeypatch.setattr("retrysafe.consumers.amqp_queue.SETTLE_SECONDS", 0.2)
    bench = RabbitBench(rabbitmq)
    bench.publish(wish("poison"))

    async def scene():
        broker = kind(bench.server.url, bench.name)
        await broker.open()
        try:
            (found,) = await received(broker, 1)
            monkeypatch.setattr(broker, "_is_there", lambda _: asyncio.Event().wait())
            async with asyncio.timeout(5):
                assert list(await broker.settle([(found, POISON)])) == [found]
        finally:
            await broker.close()

    asyncio.run(scene())
    bench.close()


def test_one_name_in_two_virtual_hosts_is_two_queues(kind):
    hosts = ["", "/", "/%2F", "/shop", "/shop%2Fa", "/shop%252Fa"]
    names = [kind(f"amqp://u:p@h:1{host}", "pay").queue for host in hosts]
    assert names[:4] == ["amqp:pay", "amqp:pay", "amqp:pay", "amqp@shop:pay"]
    assert len(set(names)) == 4


def test_a_queue_that_is_not_there_is_said_so(rabbitmq, kind):
    async def scene():
        with pytest.raises(InvalidInput, match="no queue nowhere"):
            await kind(rabbitmq.url, "nowhere").open()

    asyncio.run(scene())
    with pytest.raises(InvalidInput, match="which queue"):
        kind(rabbitmq.url, "")


def test_a_header_that_is_no_text_can_be_sent_again():
    """The library reads it as bytes and cannot write bytes: its message could not be retried."""
    read = {"customer": b"M\xfcller", "more": [{"deep": b"\xff"}]}
    with pytest.raises(TypeError):
        pamqp.encode.field_table(read)
    again = {name: _encodable(value) for name, value in read.items()}
    _, found = pamqp.decode.field_table(pamqp.encode.field_table(again))
    assert found == read
