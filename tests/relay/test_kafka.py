"""Kafka as a target, with a real broker that comes and goes."""

from __future__ import annotations

import asyncio
import threading
import uuid
from datetime import timedelta
from functools import partial

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from retrysafe import InvalidInput
from retrysafe.errors import DeliveryFailed
from retrysafe.relay import AsyncRelay, Relay
from retrysafe.relay.targets.kafka import AsyncKafka, Kafka, _judged
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import MemoryStore
from tests.forking import exit_code, fork
from tests.relay.scripted import deliver_by, entry, stage
from tests.relay.test_webhooks import delivery
from tests.servers.process import free_port

PARTITIONS = 3


class Topic:
    """A topic of its own, and what is in it."""

    def __init__(self, address):
        self.address = address
        self.name = f"t{uuid.uuid4().hex[:12]}"
        admin = AdminClient({"bootstrap.servers": address})
        admin.create_topics([NewTopic(self.name, PARTITIONS)])[self.name].result(10)

    def records(self, count):
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self.address, "group.id": uuid.uuid4().hex}
        )
        try:
            consumer.assign(
                [confluent_kafka.TopicPartition(self.name, each, 0) for each in range(PARTITIONS)]
            )
            found = []
            while len(found) < count:
                record = consumer.poll(10)
                assert record is not None, f"{len(found)} of {count} records"
                assert record.error() is None, record.error()
                found.append(record)
            assert consumer.poll(0.3) is None
            return found
        finally:
            consumer.close()


@pytest.fixture
def topic(kafka_server):
    return Topic(kafka_server.address)


def sent(kind, address, *items, **options):
    deliver_by(partial(kind, address, **options), *items, is_blocking=kind is Kafka)
    assert "retrysafe-kafka" not in {each.name for each in threading.enumerate()}


@pytest.mark.parametrize("kind", [Kafka, AsyncKafka])
def test_a_record_has_the_aggregate_as_key_and_the_entry_s_key_as_header(topic, kind):
    item = delivery()
    sent(kind, topic.address, item, topic=topic.name)
    (record,) = topic.records(1)
    assert (record.key(), record.value()) == (b"order-7", item.body)
    assert record.headers() == [
        ("Idempotency-Key", item.key.encode()),
        ("Content-Type", item.content_type.encode()),
        ("Retrysafe-Topic", item.topic.encode()),
        ("Retrysafe-Attempt", b"2"),
    ]


def test_without_a_topic_the_entry_s_own_is_used_behind_the_prefix(topic):
    start, rest = topic.name[:4], topic.name[4:]
    sent(Kafka, topic.address, delivery(topic=rest, aggregate=None), prefix=start)
    (record,) = topic.records(1)
    assert record.key() is None


@pytest.mark.parametrize("kind", [Kafka, AsyncKafka])
def test_a_relay_keeps_the_order_of_every_aggregate(topic, kind):
    store = MemoryStore()
    lanes = [f"lane-{number}" for number in range(5)]
    stage(store, *(entry(f"{lane}:{number:02}", lane) for number in range(12) for lane in lanes))
    if kind is Kafka:
        target = Kafka(topic.address, topic=topic.name)
        report = Relay(store, target).drain()
        run_sync(target.close())
    else:

        async def main():
            target = AsyncKafka(topic.address, topic=topic.name)
            try:
                return await AsyncRelay(store, target).drain()
            finally:
                await target.close()

        report = asyncio.run(main())
    assert report.delivered == 60
    records = topic.records(60)
    for lane in lanes:
        own = [each for each in records if each.key() == lane.encode()]
        assert len({each.partition() for each in own}) == 1
        own.sort(key=lambda each: each.offset())
        assert [each.value().decode() for each in own] == [f"{lane}:{n:02}" for n in range(12)]


def test_a_record_too_large_is_final(topic):
    with pytest.raises(DeliveryFailed, match="MSG_SIZE_TOO_LARGE") as raised:
        sent(Kafka, topic.address, delivery(body=b"x" * 1_000_000), topic=topic.name)
    assert raised.value.is_final


def test_a_name_that_no_topic_can_have_is_final(topic):
    with pytest.raises(DeliveryFailed, match="no topic of Kafka can be named 'a/b'") as raised:
        sent(Kafka, topic.address, delivery(topic="a/b"))
    assert raised.value.is_final
    for options in ({"topic": "a/b"}, {"prefix": "a b"}):
        with pytest.raises(InvalidInput, match="a topic has letters"):
            Kafka(topic.address, **options)
    with pytest.raises(InvalidInput, match="which brokers"):
        Kafka("")


@pytest.mark.parametrize("kind", [Kafka, AsyncKafka])
def test_a_broker_that_is_away_is_an_outage_within_the_time_limit(kind):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(DeliveryFailed, match="_MSG_TIMED_OUT") as raised:
        sent(kind, address, delivery(), timeout=timedelta(seconds=0.5))
    assert not raised.value.is_final


def test_a_delivery_that_is_cancelled_leaves_the_target_usable(topic):
    """The relay's own limit may end it first; the broker's word then comes to nobody."""

    async def main():
        target = AsyncKafka(topic.address, topic=topic.name)
        try:
            task = asyncio.create_task(target.deliver(delivery(key="entry:1")))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await target.deliver(delivery(key="entry:2"))
        finally:
            await target.close()

    asyncio.run(main())
    keys = [dict(each.headers())["Idempotency-Key"] for each in topic.records(2)]
    assert keys == [b"entry:1", b"entry:2"]


def test_a_child_makes_a_producer_of_its_own(topic):
    """Its parent's has no threads there: every delivery would wait in vain, for ever."""
    target = Kafka(topic.address, topic=topic.name)
    try:
        run_sync(target.deliver(delivery(key="entry:1")))

        def in_child():
            run_sync(target.deliver(delivery(key="entry:2")))
            run_sync(target.close())

        # As if a thread of the parent were just about to open it.
        with target._lock:
            child = fork(in_child)
        assert exit_code(child) == 0
        run_sync(target.deliver(delivery(key="entry:3")))
    finally:
        run_sync(target.close())
    keys = {dict(each.headers())["Idempotency-Key"] for each in topic.records(3)}
    assert keys == {b"entry:1", b"entry:2", b"entry:3"}


def test_a_producer_that_is_broken_is_made_anew(topic):
    """After a fatal error it takes nothing more, and every later entry would fail."""
    target = Kafka(topic.address, topic=topic.name)
    try:
        run_sync(target.deliver(delivery(key="entry:1")))
        first = target._reports
        fatal = confluent_kafka.KafkaError(confluent_kafka.KafkaError._FATAL, fatal=True)
        assert not _judged(fatal, first, "entry:1").is_final
        run_sync(target.deliver(delivery(key="entry:2")))
        assert target._reports is not first
    finally:
        run_sync(target.close())
        first.join()
    assert len(topic.records(2)) == 2
