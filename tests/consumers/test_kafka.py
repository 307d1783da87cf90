"""What is Kafka's own: offsets in their order, rebalances, topics made anew, membership."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from retrysafe import AsyncIdempotency, InvalidInput
from retrysafe.consumers import BackOff, Consumer, Handler
from retrysafe.consumers.kafka import KafkaTopic, Partition
from retrysafe.stores import MemoryStore
from tests.consumers.benches import KafkaBench, wish

SOON = BackOff(timedelta(milliseconds=50), timedelta(milliseconds=50))


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

    class Found:
        def __init__(self, instant):
            self.instant = instant

        def __getattr__(self, name):
            values = {"partition": 0, "offset": 0, "timestamp": (1, self.instant), "value": b"x"}
            return lambda: values.get(name)

    old, same, new = (broker._message(Found(instant), partition) for instant in (1, 1, 2))
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
