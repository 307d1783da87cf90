"""What becomes of FastStream's messages, by how they ended; which set-ups are refused."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from faststream import AckPolicy, BaseMiddleware
from faststream.confluent import KafkaBroker, KafkaResponse
from faststream.exceptions import AckMessage, RejectMessage, StopConsume
from faststream.nats import JStream, NatsBroker, NatsResponse, PullSub
from faststream.rabbit import (
    QueueType,
    RabbitBroker,
    RabbitQueue,
    RabbitResponse,
    TestRabbitBroker,
)
from faststream.redis import RedisBroker, RedisResponse, StreamSub
from faststream.response import Response
from nats.js.api import AckPolicy as ServerAckPolicy
from nats.js.api import ConsumerConfig

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.contrib.faststream import OnceMiddleware, _restored, _stored
from retrysafe.contrib.faststream_brokers import refusal_of
from retrysafe.core.values.codec import ValueCodec
from retrysafe.errors import InvalidInput
from retrysafe.stores import MemoryStore
from tests.consumers.handlers import PAUSE

LATE = {"ack_policy": AckPolicy.NACK_ON_ERROR}
GROUP = {"group": "shop", "consumer": "one"}
STREAM = JStream("orders")


async def bury(message, reason):
    raise AssertionError(reason)


def subscribed(broker, *args, **options):
    broker.subscriber(*args, **options)(lambda body: None)
    return broker


REFUSED = {
    "Kafka acks first by default": (
        lambda once: subscribed(KafkaBroker(middlewares=[once]), "t", group_id="g"),
        "ACK_FIRST forgets a message before it is done",
    ),
    "ack on error": (
        lambda once: subscribed(
            KafkaBroker(middlewares=[once]), "t", group_id="g", ack_policy=AckPolicy.ACK
        ),
        "AckPolicy.ACK forgets",
    ),
    "Kafka, where a reject commits": (
        lambda once: subscribed(
            KafkaBroker(middlewares=[once]),
            "t",
            group_id="g",
            ack_policy=AckPolicy.REJECT_ON_ERROR,
        ),
        "AckPolicy.REJECT_ON_ERROR forgets",
    ),
    "Kafka, whose client commits by itself": (
        lambda once: subscribed(
            KafkaBroker(middlewares=[once], config={"enable.auto.commit": True}),
            "t",
            group_id="g",
            **LATE,
        ),
        "its client commits by itself",
    ),
    "Kafka batch": (
        lambda once: subscribed(
            KafkaBroker(middlewares=[once]), "t", group_id="g", batch=True, **LATE
        ),
        "a batch has no key",
    ),
    "Kafka workers, by the policy of the broker": (
        lambda once: subscribed(
            KafkaBroker(middlewares=[once], **LATE), "t", group_id="g", max_workers=2
        ),
        "would commit the offset of one that failed",
    ),
    "manual acks": (
        lambda once: subscribed(RabbitBroker(middlewares=[once]), "q", ack_policy=AckPolicy.MANUAL),
        "AckPolicy.MANUAL",
    ),
    "RabbitMQ acks first": (
        lambda once: subscribed(
            RabbitBroker(middlewares=[once]), "q", ack_policy=AckPolicy.ACK_FIRST
        ),
        "AckPolicy.ACK_FIRST",
    ),
    "a stream of RabbitMQ": (
        lambda once: subscribed(
            RabbitBroker(middlewares=[once]),
            RabbitQueue("q", durable=True, queue_type=QueueType.STREAM),
        ),
        "delivers nothing again",
    ),
    "a core subject": (
        lambda once: subscribed(NatsBroker(middlewares=[once]), "s"),
        "only JetStream streams are acknowledged",
    ),
    "an ordered consumer": (
        lambda once: subscribed(
            NatsBroker(middlewares=[once]), "s", stream=STREAM, ordered_consumer=True
        ),
        "an ordered consumer acknowledges nothing",
    ),
    "no durable": (
        lambda once: subscribed(NatsBroker(middlewares=[once]), "s", stream=STREAM),
        "set durable=",
    ),
    "a server that acks all before": (
        lambda once: subscribed(
            NatsBroker(middlewares=[once]),
            "s",
            stream=STREAM,
            durable="d",
            config=ConsumerConfig(ack_policy=ServerAckPolicy.ALL),
        ),
        "acknowledges one that failed",
    ),
    "NATS batch": (
        lambda once: subscribed(
            NatsBroker(middlewares=[once]),
            "s",
            stream=STREAM,
            durable="d",
            pull_sub=PullSub(batch=True),
        ),
        "a batch has no key",
    ),
    "a list": (
        lambda once: subscribed(RedisBroker(middlewares=[once]), list="l"),
        "of a list or a channel",
    ),
    "a channel": (
        lambda once: subscribed(RedisBroker(middlewares=[once]), "c"),
        "of a list or a channel",
    ),
    "a stream without a group": (
        lambda once: subscribed(RedisBroker(middlewares=[once]), stream="s"),
        "without a group nothing is acknowledged",
    ),
    "a stream without acks": (
        lambda once: subscribed(
            RedisBroker(middlewares=[once]), stream=StreamSub("s", **GROUP, no_ack=True)
        ),
        "without no_ack",
    ),
    "Redis batch": (
        lambda once: subscribed(
            RedisBroker(middlewares=[once]), stream=StreamSub("s", **GROUP, batch=True)
        ),
        "a batch has no key",
    ),
}


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
@pytest.mark.parametrize("case", REFUSED)
def test_a_subscriber_that_would_lose_messages_is_refused(case):
    """With what to do instead, before any message is taken."""
    make, says = REFUSED[case]
    once = OnceMiddleware(AsyncIdempotency(MemoryStore()), dead_letter=bury)
    with pytest.raises(InvalidInput, match=says):
        once.check(make(once))


@pytest.mark.parametrize(
    "make",
    [
        lambda once: subscribed(KafkaBroker(middlewares=[once]), "t", group_id="g", **LATE),
        lambda once: subscribed(RedisBroker(middlewares=[once]), stream=StreamSub("s", **GROUP)),
    ],
    ids=["kafka", "redis"],
)
def test_a_broker_without_dead_letters_needs_a_place_for_them(make):
    once = OnceMiddleware(AsyncIdempotency(MemoryStore()))
    with pytest.raises(InvalidInput, match="pass dead_letter="):
        once.check(make(once))


def test_only_subscribers_that_it_protects_are_checked_and_warned_of(caplog):
    once = OnceMiddleware(AsyncIdempotency(MemoryStore()), dead_letter=bury)
    once.check(subscribed(RedisBroker(), list="l"))
    assert not caplog.records
    once.check(subscribed(RedisBroker(middlewares=[once]), stream=StreamSub("s", **GROUP)))
    assert "nobody here takes up what stays pending in group shop of s" in caplog.text
    own = OnceMiddleware(AsyncIdempotency(MemoryStore()))
    own.check(subscribed(RabbitBroker(middlewares=[own]), "q"))
    assert "drops rejected messages" in caplog.text


def test_another_broker_is_refused():
    """As the one of faststream.kafka, which is another client."""
    other = type("DefaultSubscriber", (), {"__module__": "faststream.kafka.subscriber.usecase"})
    assert "only KafkaBroker of faststream.confluent" in refusal_of(other(), has_dead_letter=True)


def test_a_blocking_object_is_refused():
    with pytest.raises(InvalidInput, match="needs AsyncIdempotency"):
        OnceMiddleware(Idempotency(MemoryStore()))


class Shop:
    """A program with one subscriber, in this process, on a real stream."""

    def __init__(self, url, idem, function, *, middlewares=(), returns=True):
        self.name = f"s{uuid.uuid4().hex[:8]}"
        self.ran, self.dead, self.published = [], [], []
        self.once = OnceMiddleware(idem, dead_letter=self._bury, back_off=PAUSE, tries=2)
        self.broker = RedisBroker(url, middlewares=[self.once, *middlewares], logger=None)

        async def handle(order: str):
            self.ran.append(order)
            return function(self, order)

        made = self.broker.publisher(stream=f"{self.name}-done")(handle) if returns else handle
        for idle in (None, 200):
            source = StreamSub(self.name, **GROUP, min_idle_time=idle, polling_interval=20)
            made = self.broker.subscriber(stream=source)(made)
        self.once.check(self.broker)

    async def _bury(self, message, reason):
        self.dead.append(reason)

    async def until(self, is_so):
        async with asyncio.timeout(30):
            while not await is_so():  # noqa: ASYNC110 — other processes have no events.
                await asyncio.sleep(0.02)

    async def send(self, order):
        await self.broker.publish(order, stream=self.name)

    async def is_settled(self):
        return (await self.broker._connection.xpending(self.name, "shop"))["pending"] == 0

    async def done(self):
        """What was published, as a consumer in another program gets it."""
        found = await self.broker._connection.xrange(f"{self.name}-done")
        source = self.broker.subscriber(stream=StreamSub(f"{self.name}-done", last_id="0"))
        await source.start()
        messages = [await source.get_one() for _ in found]
        await source.stop()
        return [(await each.decode(), each.headers) for each in messages]


def in_shop(url, tmp_path, scenario, function, **options):
    async def run():
        async with AsyncIdempotency(f"sqlite:///{tmp_path}/store.db") as idem:
            await scenario_in(Shop(url, idem, function, **options))

    async def scenario_in(shop):
        await shop.broker.start()
        try:
            await scenario(shop)
        finally:
            await shop.broker.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "text",
        b"\x00bytes",
        {"a": [1, 2.5]},
        KafkaResponse({"a": 1}, key=b"k", headers={"h": "v"}, timestamp_ms=5),
        RabbitResponse("text", headers={"h": "v"}, priority=3, mandatory=False),
        NatsResponse(b"b", stream="s", correlation_id="c"),
        type("Mine", (RedisResponse,), {})({"a": 1}, maxlen=7),
    ],
    ids=repr,
)
def test_what_is_stored_of_a_result_publishes_the_same(returned):
    """Body, headers and the options of the broker."""
    codec = ValueCodec()
    back = _restored(codec.decode(codec.encode(_stored(returned, None))))
    if isinstance(returned, Response):
        assert isinstance(returned, type(back))
        assert vars(back) == vars(returned)
    else:
        assert back == returned


def test_a_result_that_was_not_published_is_published_by_the_replay(valkey_server, tmp_path):
    """With the same body, the same headers and the same key; the handler runs once."""
    sent = []

    class LosesAnswers(BaseMiddleware):
        async def publish_scope(self, call_next, cmd):
            await call_next(cmd)
            if self.msg is not None:
                sent.append(cmd)
                if len(sent) == 1:
                    raise ConnectionError("the answer was lost")

    def answer(shop, order):
        return RedisResponse({"paid": order}, headers={"trace": "t1"})

    async def scenario(shop):
        await shop.send("o1")
        await shop.until(lambda: asyncio.sleep(0, len(sent) == 2))
        await shop.until(shop.is_settled)
        first, second = await shop.done()
        assert shop.ran == ["o1"]
        assert first[0] == second[0] == {"paid": "o1"}
        keys = [headers["Idempotency-Key"] for _, headers in (first, second)]
        assert keys[0] == keys[1]
        assert second[1]["trace"] == "t1"

    in_shop(valkey_server.url(8), tmp_path, scenario, answer, middlewares=[LosesAnswers])


def test_the_words_of_faststream_keep_their_meaning(valkey_server, tmp_path):
    """`AckMessage` is done and publishes nothing, `RejectMessage` is a dead letter at once."""

    def say(shop, order):
        raise {"ack": AckMessage, "reject": RejectMessage}[order]

    async def scenario(shop):
        await shop.send("ack")
        await shop.send("reject")
        await shop.until(lambda: asyncio.sleep(0, len(shop.dead) == 1))
        await shop.until(shop.is_settled)
        assert sorted(shop.ran) == ["ack", "reject"]
        assert await shop.done() == []

    in_shop(valkey_server.url(8), tmp_path, scenario, say)


def test_a_handler_that_stops_its_subscriber_leaves_the_message(valkey_server, tmp_path):
    def stop(shop, order):
        raise StopConsume

    async def scenario(shop):
        await shop.send("o1")
        await shop.until(
            lambda: asyncio.sleep(0, not all(each.running for each in shop.broker.subscribers))
        )
        assert not await shop.is_settled()
        assert not shop.dead

    in_shop(valkey_server.url(8), tmp_path, scenario, stop)


def test_without_its_store_nothing_runs_and_nothing_is_lost(valkey_server, tmp_path):
    async def scenario(shop):
        await shop.send("o1")
        await shop.until(lambda: asyncio.sleep(0.5, True))
        assert not shop.ran
        assert not shop.dead
        (tmp_path / "later").mkdir()
        await shop.until(shop.is_settled)
        assert shop.ran == ["o1"]

    in_shop(valkey_server.url(8), tmp_path / "later", scenario, lambda shop, order: None)


def test_an_unchecked_subscriber_stops_at_its_first_message(caplog):
    """It would run unprotected."""
    ran = []
    once = OnceMiddleware(AsyncIdempotency(MemoryStore()))
    broker = RabbitBroker(middlewares=[once])

    @broker.subscriber("orders", ack_policy=AckPolicy.ACK)
    async def handle(order):
        ran.append(order)

    async def run():
        async with TestRabbitBroker(broker):
            with pytest.raises(StopConsume):
                await broker.publish("o1", "orders", message_id="1")

    asyncio.run(run())
    assert not ran
    assert "AckPolicy.ACK forgets" in caplog.text


def test_the_test_broker_of_faststream_works():
    """One message id runs once; nothing comes again there, so a failure waits for nothing."""
    ran = []
    idem = AsyncIdempotency(MemoryStore())
    broker = RabbitBroker(middlewares=[OnceMiddleware(idem)])

    @broker.subscriber("orders")
    async def handle(order):
        ran.append(order)
        if order == "bad":
            raise LookupError(order)

    async def run():
        async with TestRabbitBroker(broker):
            await broker.publish("bad", "orders", message_id="0")
            for _ in range(2):
                await broker.publish("o1", "orders", message_id="1")
            await broker.publish("o2", "orders", message_id="2")
        await idem.close()

    asyncio.run(run())
    assert ran == ["bad", "o1", "o2"]
