"""What is JetStream's own: streams made anew, what the server refuses, the relay's entries."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from retrysafe import AsyncIdempotency, InvalidInput
from retrysafe.consumers import Action, Consumer, PayloadInvalid, Verdict
from retrysafe.consumers.nats import JetStream
from retrysafe.core.model import StagedEntry
from retrysafe.relay import AsyncRelay
from retrysafe.relay.targets.nats import NatsJetStream
from retrysafe.stores import MemoryStore
from tests.consumers.benches import NatsBench, wish
from tests.relay.scripted import stage
from tests.servers.nats import NatsServer


@pytest.fixture
def bench(nats_server):
    made = NatsBench(nats_server)
    yield made
    made.close()


async def received(broker, count):
    found = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await broker.receive(count - len(found))
    return found


class Consuming:
    """A consumer at work in this loop."""

    def __init__(self, broker, function, store=None):
        self.idem = AsyncIdempotency(store or MemoryStore(), caller="unused")
        self.consumer = Consumer(self.idem, function, broker)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.consumer.run_async())
        return self

    async def until(self, is_so):
        async with asyncio.timeout(30):
            while not is_so(self.consumer.counts):
                if self.task.done():
                    await self.task
                await asyncio.sleep(0.02)

    async def __aexit__(self, *_):
        self.consumer.stop()
        await self.task
        await self.idem.close()


def test_what_comes_and_goes(bench):
    """Identities that last over redeliveries, counts, headers; nak comes back, ack does not."""
    bench.publish(wish("1"), "key-1")
    bench.publish(wish("2"))

    async def scene():
        broker = JetStream(bench.server.url, bench.name, "billing", ack_wait=timedelta(seconds=5))
        await broker.open()
        try:
            assert await broker.redelivery_window() == timedelta(hours=1)
            assert broker.deadline_seconds == 5
            first, second = await received(broker, 2)
            assert first.header("Idempotency-Key") == "key-1"
            assert (first.deliveries, first.identity != second.identity) == (1, True)
            assert list(await broker.extend([first, second])) == []
            back = Verdict(Action.LEAVE, "elsewhere", timedelta(0))
            done = Verdict(Action.ACK, "done")
            assert list(await broker.settle([(first, back), (second, done)])) == []
            (again,) = await received(broker, 1)
            assert (again.identity, again.deliveries) == (first.identity, 2)
            await broker.settle([(again, done)])
        finally:
            await broker.close()

    asyncio.run(scene())
    assert bench.left() == 0


def test_a_stream_that_is_made_anew_counts_from_one_and_its_messages_are_new(bench):
    """The sequence alone would take the new stream's first message for the old one's."""
    ran = []

    async def handle(message):
        ran.append(message.identity)

    async def scene():
        store = MemoryStore()
        for number in (1, 2):
            if number == 2:
                await asyncio.to_thread(bench.runner.run, _again(bench))
            await asyncio.to_thread(bench.publish, wish("same"))
            broker = JetStream(bench.server.url, bench.name, "billing")
            async with Consuming(broker, handle, store) as consuming:
                await consuming.until(lambda counts: counts.handled + counts.duplicates)

    asyncio.run(scene())
    assert len(ran) == 2
    assert [each.partition("@")[0] for each in ran] == ["1", "1"]


async def _again(bench):
    await bench.context.delete_stream(bench.name)
    await _made(bench)


async def _made(bench, **options):
    config = StreamConfig(name=bench.name, subjects=[f"{bench.name}.>"], **options)
    try:
        await bench.context.add_stream(config)
    except nats.js.errors.BadRequestError:  # It is there, and otherwise.
        await bench.context.update_stream(config)


def test_an_entry_of_the_relay_is_recognised_by_its_key(bench):
    """Sent twice, as after a lost answer when the stream's own window is over: it runs once."""
    ran = []

    async def handle(message):
        ran.append(message.body)

    async def scene():
        store = MemoryStore()
        await asyncio.to_thread(
            stage, store, StagedEntry("entry:1", f"{bench.name}.entries", "text/plain", b"paid")
        )
        target = NatsJetStream(bench.server.url)
        await AsyncRelay(store, target).drain()
        await target.close()
        await asyncio.to_thread(bench.publish, "paid", "entry:1")
        async with Consuming(JetStream(bench.server.url, bench.name, "billing"), handle) as here:
            await here.until(lambda counts: counts.handled + counts.duplicates == 2)

    asyncio.run(scene())
    assert ran == [b"paid"]


@pytest.mark.parametrize("what", ["stream", "consumer"])
def test_a_stream_or_a_durable_that_is_deleted_is_told_and_no_hot_loop(bench, what):
    """The durable is made again by the next call, as at the start; a stream is its owner's."""

    async def scene():
        broker = JetStream(bench.server.url, bench.name, "billing")
        await broker.open()
        try:
            assert await broker.receive(1) == []
            names = {"stream": (bench.name,), "consumer": (bench.name, "billing")}[what]
            delete = getattr(broker._context, f"delete_{what}")
            assert await delete(*names)
            with pytest.raises(ConnectionError, match=r"billing of .* is not there: 503"):
                await broker.receive(1)
            if what == "stream":
                with pytest.raises(ConnectionError, match=r"stream .* is not there"):
                    await broker.receive(1)
                # What it keeps for longer would come again when its keys are forgotten.
                await asyncio.to_thread(bench.runner.run, _made(bench))
                for _ in range(2):
                    with pytest.raises(ConnectionError, match="for ever, and kept them for 1:00"):
                        await broker.receive(1)
                await asyncio.to_thread(bench.runner.run, _made(bench, max_age=60))
            await asyncio.to_thread(bench.publish, wish("after"))
            (found,) = await received(broker, 1)
            assert found.json()["name"] == "after"
            await broker.settle([(found, Verdict(Action.ACK, "done"))])
            again = await broker._context.consumer_info(bench.name, "billing")
            assert (again.config.ack_wait, broker.deadline_seconds) == (7, 7)
        finally:
            await broker.close()

    # As it was, and not as this consumer would have made it.
    config = ConsumerConfig(durable_name="billing", ack_policy=AckPolicy.EXPLICIT, ack_wait=7)
    bench.runner.run(bench.context.add_consumer(bench.name, config))
    asyncio.run(scene())
    assert bench.left() == 0


DENIED = """
authorization {
  users = [
    {user: admin, password: admin}
    {user: noacks, password: x, permissions: {publish: {deny: "$JS.ACK.>"}}}
    {user: nopulls, password: x, permissions: {publish: {deny: "$JS.API.CONSUMER.MSG.NEXT.>"}}}
    {user: nothing, password: x, permissions: {publish: {deny: "$JS.API.STREAM.INFO.>"}}}
  ]
}
"""


def test_what_the_server_refuses_is_told(monkeypatch):
    """It answers with nothing: an ack would count as made, a pull as one that found nothing."""
    monkeypatch.setattr("retrysafe.consumers.nats._OPEN_SECONDS", 2)
    monkeypatch.setattr(NatsServer, "url", property(lambda it: at(it, "admin:admin")))

    def at(server, user):
        return f"nats://{user}@127.0.0.1:{server.port}"

    server = NatsServer(DENIED).start()
    bench = NatsBench(server)

    async def scene():
        acking = JetStream(at(server, "noacks:x"), bench.name, "billing")
        pulling = JetStream(at(server, "nopulls:x"), bench.name, "billing")
        await acking.open()
        await pulling.open()
        try:
            (message,) = await received(acking, 1)
            with pytest.raises(ConnectionError, match=r"refuses it: .*js\.ack"):
                await acking.extend([message])
            with pytest.raises(ConnectionError, match=r"refuses it: .*js\.ack"):
                await acking.settle([(message, Verdict(Action.ACK, "done"))])
            with pytest.raises(ConnectionError, match=r"refuses it: .*msg\.next"):
                await pulling.receive(1)
        finally:
            await acking.close()
            await pulling.close()
        with pytest.raises(ConnectionError, match=r"refuses it: .*stream\.info"):
            await JetStream(at(server, "nothing:x"), bench.name, "billing").open()

    try:
        bench.publish(wish("1"))
        asyncio.run(scene())
    finally:
        bench.close()
        server.remove()


def test_a_dead_letter_is_taken_whatever_its_message_told_its_own_stream(bench):
    headers = {"Nats-Expected-Stream": bench.name, "Idempotency-Key": "key-1"}
    bench.runner.run(bench.context.publish(f"{bench.name}.orders", b"poison", headers=headers))

    async def scene():
        broker = JetStream(bench.server.url, bench.name, "billing")
        await broker.open()
        try:
            (message,) = await received(broker, 1)
            assert list(await broker.settle([(message, Verdict(Action.DEAD_LETTER, "bad"))])) == []
            letter = await broker._context.get_msg(f"{bench.name}_billing_dead", 1)
        finally:
            await broker.close()
        assert (letter.data, letter.headers["Idempotency-Key"]) == (b"poison", "key-1")

    asyncio.run(scene())
    assert bench.left() == 0


def test_what_cannot_be_read_takes_no_message_along(bench, caplog):
    """Whoever can publish to the inbox may send there what no stream has sent."""
    bench.publish(wish("1"))

    async def scene():
        broker = JetStream(bench.server.url, bench.name, "billing")
        await broker.open()
        try:
            await broker._connection.publish(broker._inbox_name, b"x", reply="elsewhere")
            found = await broker.receive(2)
            await broker.settle([(each, Verdict(Action.ACK, "done")) for each in found])
            return found
        finally:
            await broker.close()

    (message,) = asyncio.run(scene())
    assert message.text == wish("1")
    assert "a message cannot be read" in caplog.text


def test_a_limit_of_deliveries_is_known(bench):
    async def scene(name):
        broker = JetStream(bench.server.url, bench.name, name)
        await broker.open()
        await broker.close()
        return broker.delivery_limit

    config = ConsumerConfig(durable_name="few", ack_policy=AckPolicy.EXPLICIT, max_deliver=5)
    bench.runner.run(bench.context.add_consumer(bench.name, config))
    assert (asyncio.run(scene("few")), asyncio.run(scene("billing"))) == (5, None)


def test_a_stream_or_a_consumer_that_cannot_be_used_is_said_so(bench):
    async def scene():
        with pytest.raises(InvalidInput, match="no stream nowhere"):
            await JetStream(bench.server.url, "nowhere", "billing").open()
        with pytest.raises(InvalidInput, match="ack policy explicit"):
            await JetStream(bench.server.url, bench.name, "careless").open()

    bench.runner.run(
        bench.context.add_consumer(
            bench.name, ConsumerConfig(durable_name="careless", ack_policy=AckPolicy.NONE)
        )
    )
    asyncio.run(scene())


def test_a_client_that_has_given_up_for_good_is_replaced(bench):
    """What it brought is prolonged and settled over the next connection, and more comes."""
    for name in ("1", "2", "poison"):
        bench.publish(wish(name))

    async def scene():
        broker = JetStream(bench.server.url, bench.name, "billing", max_reconnect_attempts=1)
        await broker.open()
        try:
            first, second, third = await received(broker, 3)
            await broker._connection.close()
            assert list(await broker.extend([first])) == []
            await broker._connection.close()
            back = Verdict(Action.LEAVE, "elsewhere")
            done, dead = Verdict(Action.ACK, "done"), Verdict(Action.DEAD_LETTER, "poison")
            settled = [(first, done), (second, back), (third, dead)]
            assert list(await broker.settle(settled)) == []
            await broker._connection.close()
            (again,) = await received(broker, 1)
            assert (again.identity, again.deliveries) == (second.identity, 2)
            await broker.settle([(again, done)])
        finally:
            await broker.close()

    asyncio.run(scene())
    assert bench.left() == 0
    assert list(bench.dead_letters()) == [wish("poison")]


def test_a_dead_letter_that_is_too_large_does_not_end_the_connection(bench):
    """The server closes it for such a copy; the other messages go on, and the large one stays."""

    async def scene():
        limit = bench.connection.max_payload
        done = []

        async def handle(message):
            done.append(len(message.body))
            if len(message.body) > 100:
                raise PayloadInvalid("poison")

        broker = JetStream(bench.server.url, bench.name, "billing")
        async with Consuming(broker, handle) as consuming:
            await bench.context.publish(f"{bench.name}.a", b"x" * (limit - 8))
            await consuming.until(lambda counts: counts.unsettled >= 1)
            await bench.context.publish(f"{bench.name}.a", b"y")
            await consuming.until(lambda counts: counts.handled == 1)
        assert done == [limit - 8, 1]

    bench.runner.run(scene())
