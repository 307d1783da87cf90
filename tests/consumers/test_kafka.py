"""What is Kafka's own: offsets in their order, rebalances, topics made anew, membership."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from retrysafe import AsyncIdempotency, InvalidInput
from retrysafe.consumers import Action, BackOff, Consumer, Handler
from retrysafe.consumers.kafka import KafkaTopic, Partition
from retrysafe.consumers.verdict import Verdict
from retrysafe.stores import MemoryStore
from tests.consumers.benches import KafkaBench, wish

SOON = BackOff(timedelta(milliseconds=50), timedelta(milliseconds=50))
DEAD = Verdict(Action.DEAD_LETTER, "bad")


# How far may be committed.


def received(*offsets):
    partition = Partition("t", 0)
    for offset in offsets:
        partition.receive(offset)
    return partition


def test_a_later_success_never_commits_past_a_message_that_is_not_settled():
    partition = received(0, 1, 2)
    assert partition.settle(1, is_done=True) is None
    assert partition.settle(2, is_done=True) is None
    assert partition.next_offset is None
    assert partition.settle(0, is_done=True) == 3


def test_a_gap_in_the_offsets_is_no_message():
    """Compaction and transactions leave numbers out; what was received decides."""
    partition = received(5, 9, 10)
    assert partition.settle(5, is_done=True) == 6
    assert partition.settle(9, is_done=True) == 10
    assert partition.settle(10, is_done=True) == 11


def test_what_was_given_back_is_in_the_way_of_all_behind_it():
    """The next owner of the partition must get it again, so nothing behind it is committed."""
    partition = received(0, 1)
    partition.settle(0, is_done=False)
    assert partition.settle(1, is_done=True) is None
    assert partition.drain(0)


def test_a_drain_waits_for_what_runs_and_no_longer_than_its_limit():
    partition = received(0)
    assert not partition.drain(0.01)
    thread = threading.Timer(0.05, partition.settle, [0], {"is_done": True})
    thread.start()
    assert partition.drain(10)
    assert partition.next_offset == 1
    thread.join()


# Without a broker.


class Found:
    """A message as the client gives it."""

    def __init__(self, offset, instant=1, key=b"k"):
        values = {"partition": 0, "offset": offset, "timestamp": (1, instant), "value": b"x"}
        self.values = {**values, "key": key, "error": None, "headers": None}

    def __getattr__(self, name):
        return lambda: self.values[name]


class Client:
    """As much of the client as a poll needs."""

    def __init__(self, *found):
        self.found = list(found)
        self.stored = []

    def poll(self, timeout):
        found = self.found.pop(0) if self.found else None
        return found() if callable(found) and not isinstance(found, Found) else found

    def store_offsets(self, offsets):
        self.stored += [each.offset for each in offsets]

    def commit(self, **_):
        pass

    def pause(self, partitions):
        pass

    resume = pause

    def assignment(self):
        return []


def topic_with(*found, **options):
    broker = KafkaTopic("h:1", "t", "g", **options)
    broker._consumer = Client(*found)
    broker._assigned(broker._consumer, [TopicPartition("t", 0)])
    return broker


def test_an_assignment_that_comes_back_has_lanes_of_its_own():
    """What an earlier one left here must not hold back, or give back, what the new one brings."""
    broker = topic_with(Found(5))
    (old,) = broker._poll(9)
    broker._lost(None, [TopicPartition("t", 0)])
    broker._assigned(None, [TopicPartition("t", 0)])
    broker._consumer.found = [Found(5), Found(6)]
    new = broker._poll(9)
    assert new[0].lane == new[1].lane != old.lane
    assert new[0].identity == old.identity


def test_what_came_before_a_rebalance_has_no_say_in_the_offsets_after_it():
    """In one call that takes several messages: the new assignment begins further back."""
    broker = topic_with()

    def rebalance():
        broker._lost(None, [TopicPartition("t", 0)])
        broker._assigned(None, [TopicPartition("t", 0)])
        return Found(5)

    broker._consumer.found = [Found(7), rebalance]
    old, new = broker._poll(9)
    old.receipt[0].settle(7, is_done=True)
    broker._store_offsets()
    assert broker._consumer.stored == []
    new.receipt[0].settle(5, is_done=True)
    broker._store_offsets()
    assert broker._consumer.stored == [6]


def test_what_a_keep_alive_took_goes_with_its_assignment():
    """The next one reads it again in its turn: before that it would commit past the others."""
    broker = topic_with(Found(7))
    broker._keep_alive()
    broker._revoked(broker._consumer, [TopicPartition("t", 0)])
    broker._assigned(None, [TopicPartition("t", 0)])
    assert broker._poll(9) == []


def test_what_a_keep_alive_paused_is_resumed_also_when_it_was_taken_away_meanwhile():
    """The client remembers a pause: a partition that comes back would stand still for ever."""
    broker = topic_with()
    client, paused = broker._consumer, set()
    client.assignment = lambda: [] if broker._partitions == {} else [TopicPartition("t", 0)]
    client.pause = lambda partitions: paused.update(each.partition for each in partitions)
    client.resume = lambda partitions: paused.difference_update(
        each.partition for each in partitions
    )

    def lose():
        assert paused == {0}
        broker._lost(None, [TopicPartition("t", 0)])

    client.found = [lose]
    broker._keep_alive()
    assert not broker._partitions
    assert paused == set()


def test_a_partition_is_read_only_so_far_ahead_of_a_message_that_fails(monkeypatch):
    """What is remembered, and read again after a crash, has a limit; then it waits alone."""
    monkeypatch.setattr("retrysafe.consumers.kafka.AHEAD_LIMIT", 2)
    broker = topic_with(Found(0), Found(1))
    client, paused = broker._consumer, set()
    client.assignment = lambda: [TopicPartition("t", 0), TopicPartition("t", 1)]
    client.pause = lambda partitions: paused.update(each.partition for each in partitions)
    client.resume = lambda partitions: paused.difference_update(
        each.partition for each in partitions
    )
    broker._assigned(client, [TopicPartition("t", 1)])
    first, second = broker._poll(9)
    second.receipt[0].settle(1, is_done=True)
    broker._poll(9)
    broker._keep_alive()
    assert paused == {0}
    first.receipt[0].settle(0, is_done=True)
    broker._poll(9)
    assert paused == set()
    # One that leaves while it waits must not stand still when it comes back.
    client.found = [Found(2), Found(3)]
    broker._poll(9)
    broker._poll(9)
    assert paused == {0}
    broker._lost(None, [TopicPartition("t", 0)])
    broker._poll(9)
    assert paused == set()


def test_what_a_keep_alive_paused_is_resumed_also_when_its_poll_fails():
    """Nobody else would: the consumer would stay in the group, and read nothing."""
    broker = topic_with()
    client, paused = broker._consumer, []
    client.assignment = lambda: [TopicPartition("t", 0)]
    client.pause = paused.extend
    client.resume = lambda partitions: paused.clear()

    def fail():
        raise KafkaException(KafkaError(KafkaError._FATAL))

    client.found = [fail]
    with pytest.raises(KafkaException):
        broker._keep_alive()
    assert paused == []


def test_a_message_that_cannot_be_read_holds_back_those_behind_it_alone():
    """Those before it are handled; passed over, it would be lost with the next commit."""
    broker = topic_with(Found(5), Found(6), Found(7))
    bad = broker._consumer.found[1]
    bad.values["headers"] = [("name", "no bytes")]
    assert [each.receipt[1].offset() for each in broker._poll(9)] == [5]
    for _ in range(2):
        with pytest.raises(AttributeError):
            broker._poll(9)
    bad.values["headers"] = None
    assert [each.receipt[1].offset() for each in broker._poll(9)] == [6, 7]


def test_every_client_of_the_cluster_gets_how_to_reach_it(monkeypatch):
    """Dead letters and the topic's settings need the same security as the messages."""
    configs = []

    def client(config, **_):
        configs.append(config)
        raise KafkaException("stop here")

    monkeypatch.setattr("retrysafe.consumers.kafka.AdminClient", client)
    monkeypatch.setattr("retrysafe.consumers.kafka_dead.AdminClient", client)
    login = print
    options = {"security_protocol": "SASL_SSL", "sasl_username": "u", "oauth_cb": login}
    broker = topic_with(Found(0), session_timeout_ms=6000, **options)
    (message,) = broker._poll(9)
    assert broker._retention() is None
    assert message in broker._dead_letters.bury([(message, DEAD)])
    expected = {"bootstrap.servers": "h:1", "security.protocol": "SASL_SSL", "sasl.username": "u"}
    assert configs == [{**expected, "oauth_cb": login}] * 2
    assert broker._config["session.timeout.ms"] == 6000
    assert broker._config["oauth_cb"] is login


def test_a_dead_letter_that_was_not_taken_stays_and_the_others_go(monkeypatch):
    """It is told again by the loop; nothing is committed past it, and nothing forgotten."""

    class Producer:
        refused = frozenset({1})

        def __init__(self, *_, **__):
            self.calls = []

        def produce(self, topic, value, key, headers, on_delivery):
            if headers[-1][1] == b"too large":
                raise BufferError
            self.calls.append(on_delivery)

        def flush(self, seconds):
            for number, told in enumerate(self.calls):
                told(KafkaError(1) if number in self.refused else None, None)
            self.calls = []

    monkeypatch.setattr("retrysafe.consumers.kafka_dead.DeadLetters._make_topic", lambda self: None)
    monkeypatch.setattr("retrysafe.consumers.kafka_dead.confluent_kafka.Producer", Producer)
    broker = topic_with(*(Found(number) for number in range(4)))
    messages = broker._poll(9)
    large = Verdict(Action.DEAD_LETTER, "too large")
    verdicts = [DEAD, large, DEAD, Verdict(Action.ACK, "")]
    batch = list(zip(messages, verdicts, strict=True))
    assert asyncio.run(broker.settle(batch)) == messages[1:3]
    partition = messages[0].receipt[0]
    assert partition.next_offset == 1
    Producer.refused = frozenset()
    again = [(each, DEAD) for each in messages[1:3]]
    # Whatever is told twice counts once.
    assert asyncio.run(broker.settle([*again, batch[0]])) == []
    assert partition.next_offset == 4
    assert not any((partition._done, partition._received, partition._outstanding))


def test_a_rebalance_takes_back_what_fails_while_it_waits(monkeypatch):
    """It does not wait for a retry, and all partitions share one limit."""
    monkeypatch.setattr("retrysafe.consumers.kafka._DRAIN_SECONDS", 0.01)
    broker = topic_with(Found(0))
    (message,) = broker._poll(9)
    asked = []

    def withdraw(leaving):
        asked.append(leaving)
        # At first it runs; then it has failed, and is given back.
        if len(asked) == 3:
            message.receipt[0].settle(0, is_done=False)

    monkeypatch.setattr(broker, "_withdraw", withdraw)
    broker._revoked(broker._consumer, [TopicPartition("t", 0)])
    assert len(asked) == 3
    assert message.receipt[0].is_lost


def test_what_a_rebalance_commits_is_stored_so_that_the_client_commits_no_less():
    broker = topic_with(Found(0))
    (message,) = broker._poll(9)
    message.receipt[0].settle(0, is_done=True)
    broker._revoked(broker._consumer, [TopicPartition("t", 0)])
    assert broker._consumer.stored == [1]


def test_an_offset_that_cannot_be_stored_does_not_keep_the_consumer_from_polling():
    broker = topic_with(Found(0))
    (message,) = broker._poll(9)
    message.receipt[0].settle(0, is_done=True)

    def refuse(offsets):
        raise KafkaException("taken away")

    broker._consumer.store_offsets = refuse
    broker._consumer.found = [Found(1)]
    assert len(broker._poll(9)) == 1


@pytest.mark.parametrize(
    ("told", "days"),
    [
        ({"retention.ms": "86400000"}, 1),
        ({"retention.ms": "86400000", "segment.ms": "172800000", "cleanup.policy": "delete"}, 3),
        ({"retention.ms": "86400000", "cleanup.policy": "compact,delete"}, None),
        ({"retention.ms": "-1"}, None),
    ],
)
def test_the_window_is_how_long_a_message_can_stay_in_the_log(told, days, monkeypatch):
    class Admin:
        def __init__(self, config):
            pass

        def describe_configs(self, resources):
            return {resources[0]: self}

        def result(self, timeout):
            return {name: SimpleNamespace(value=value) for name, value in told.items()}

    monkeypatch.setattr("retrysafe.consumers.kafka.AdminClient", Admin)
    expected = None if days is None else timedelta(days=days)
    assert topic_with()._retention() == expected


# With a broker.


@pytest.fixture
def bench(kafka_server):
    made = KafkaBench(kafka_server)
    yield made
    made.close()


class Consuming:
    """A member of the group, at work in this loop."""

    def __init__(self, bench, function, store, **options):
        self.idem = AsyncIdempotency(store, caller="unused")
        broker = KafkaTopic(
            bench.server.address,
            bench.name,
            bench.name,
            session_timeout_ms=6000,
            heartbeat_interval_ms=500,
        )
        self.consumer = Consumer(self.idem, Handler(function, back_off=SOON), broker, **options)

    async def __aenter__(self):
        self.task = asyncio.create_task(self.consumer.run_async())
        return self

    async def __aexit__(self, *_):
        self.consumer.stop()
        async with asyncio.timeout(30):
            await self.task
        await self.idem.close()


async def until(is_so):
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 — counts have no event.
            await asyncio.sleep(0.05)


def test_a_failed_message_is_tried_in_place_and_only_its_key_waits(bench):
    """Order within a key, and nothing is committed past the message that fails."""
    for name, lane in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        bench.publish(wish(name), partition=0, lane=lane)
    seen = []
    store = MemoryStore()
    fails = asyncio.Event()

    async def handle(message):
        name = message.json()["name"]
        seen.append(name)
        if name == "a1" and not fails.is_set():
            raise LookupError("not yet")

    async def scene():
        async with Consuming(bench, handle, store):
            await until(lambda: seen.count("a1") >= 3 and "b2" in seen)
            assert "a2" not in seen
            assert await asyncio.to_thread(bench.left) == 4
            fails.set()
            await until(lambda: "a2" in seen)
        assert [name for name in seen if name[0] == "b"] == ["b1", "b2"]
        assert bench.left() == 0

    asyncio.run(scene())


def test_a_rebalance_in_the_middle_of_work_repeats_nothing(bench):
    """What runs ends and is committed before its partition leaves; the rest moves on."""
    seen, sent = [], []
    store = MemoryStore()

    async def handle(message):
        seen.append(message.json()["name"])
        await asyncio.sleep(0.1)

    async def publish(is_enough):
        while not is_enough():
            sent.append(f"m{len(sent)}")
            await asyncio.to_thread(bench.publish, wish(sent[-1]))
            await asyncio.sleep(0.02)

    async def scene():
        async with Consuming(bench, handle, store, concurrency=3) as first:
            await publish(lambda: len(seen) >= 6)
            async with Consuming(bench, handle, store, concurrency=3) as second:
                await publish(lambda: second.consumer.counts.received >= 6)
                async with asyncio.timeout(30):
                    while await asyncio.to_thread(bench.left):  # noqa: ASYNC110 — no event.
                        await asyncio.sleep(0.1)
                return first.consumer.counts, second.consumer.counts

    first, second = asyncio.run(scene())
    assert sorted(seen) == sorted(sent)
    # Drained and committed first: the new owner did not even see again what the old one had done.
    assert (first.lost, first.unsettled, second.duplicates) == (0, 0, 0)
    assert second.handled >= 6


def test_a_topic_that_is_made_anew_counts_from_zero_and_its_messages_are_new(bench):
    """Partition and offset alone would take the new topic's first message for the old one's."""
    broker = KafkaTopic(bench.server.address, bench.name, bench.name)
    partition = Partition(bench.name, 0)
    old, same, new = (broker._message(Found(0, instant), partition) for instant in (1, 1, 2))
    assert old.identity == same.identity != new.identity


def test_a_slow_handler_does_not_leave_the_group(bench, monkeypatch):
    """No room for more messages, and no poll for them: the membership is kept all the same."""
    monkeypatch.setattr(KafkaTopic, "renew_seconds", 0.2)
    polls = []
    keep_alive = KafkaTopic._keep_alive

    def counted(self):
        polls.append(1)
        keep_alive(self)

    monkeypatch.setattr(KafkaTopic, "_keep_alive", counted)
    for number in range(4):
        bench.publish(wish(f"m{number}"), partition=0)
    ends = asyncio.Event()
    seen = []

    async def handle(message):
        seen.append(message.json()["name"])
        await ends.wait()

    async def scene():
        async with Consuming(bench, handle, MemoryStore(), concurrency=1):
            await until(lambda: len(polls) >= 5)
            ends.set()
            await until(lambda: len(seen) == 4)
        assert bench.left() == 0

    asyncio.run(scene())


def test_what_cannot_be_consumed_is_said_so(bench):
    async def scene():
        with pytest.raises(InvalidInput, match="no topic nowhere"):
            await KafkaTopic(bench.server.address, "nowhere", "g").open()

    asyncio.run(scene())
    with pytest.raises(InvalidInput, match="which topic"):
        KafkaTopic("h", "", "g")
