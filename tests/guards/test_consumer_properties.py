"""One property per guard of the queue consumers; as `test_properties`, plain and short."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from confluent_kafka import TopicPartition

from retrysafe import AsyncIdempotency, OperationInFlight, Policy
from retrysafe.consumers import Action, BackOff, Consumer, Handler, Verdict, consumer_name
from retrysafe.consumers.amqp import RabbitQueue
from retrysafe.consumers.consumer import checked_policy
from retrysafe.consumers.message import Message, PayloadInvalid
from retrysafe.consumers.nats import JetStream
from retrysafe.consumers.sqs import SqsQueue
from retrysafe.errors import KeyInvalid, OutcomeUnavailable, PolicyInvalid
from retrysafe.stores import MemoryStore
from retrysafe.testing import FaultyStore, Moment
from tests.consumers.scripted import ScriptedBroker, Threads, message
from tests.consumers.test_kafka import Found, topic_with

DONE = Verdict(Action.ACK, "done")
DEAD = Verdict(Action.DEAD_LETTER, "poison")
SOON = BackOff(timedelta(milliseconds=1), timedelta(milliseconds=1))
FIRST = [TopicPartition("t", 0)]


def judged(function, item=None, *, store=None, **options):
    """The verdict over one delivery."""
    way = Threads(store or MemoryStore(), caller="unused", cache=False)
    try:
        judge = way.judge(function, **options)
        return way.run(judge.handle(item or message()))
    finally:
        way.close()


def fails(error):
    def handle(message):
        raise error

    return handle


# Verdicts.


def test_a_message_is_acked_only_when_its_handler_has_ended_well():
    assert judged(fails(LookupError())).action is Action.RETRY


def test_what_a_handler_raises_never_acks_its_message():
    """It may speak of another key: one whose outcome cannot be shown is done, this one is not."""
    assert judged(fails(OutcomeUnavailable("another key"))).action is Action.RETRY


def test_what_a_handler_met_in_flight_never_drops_its_own_message():
    error = OperationInFlight("busy", key="another", retry_after=timedelta(seconds=1))
    assert judged(fails(error), in_flight=Action.DROP).action is not Action.DROP


def test_an_outage_never_counts_against_a_message():
    assert judged(fails(ConnectionError("away")), tries=1).action is Action.RETRY


def test_another_payload_under_the_same_id_is_not_taken_for_the_first():
    store = MemoryStore()
    assert judged(lambda _: None, message(body=b'{"amount": 5}'), store=store) is not None
    other = judged(lambda _: None, message(body=b'{"amount": 6}'), store=store)
    assert other.action is Action.DEAD_LETTER


# Keys.


def test_a_publisher_cannot_take_the_key_of_another_message():
    with pytest.raises(KeyInvalid):
        Handler(print).key_text(message("8", headers={"Idempotency-Key": "message:7"}))


def test_null_is_nobodys_key():
    with pytest.raises(PayloadInvalid):
        Handler(print, key=("order",)).key_text(message(body=b'{"order": null}'))


def test_queue_and_group_are_told_apart():
    assert consumer_name("a/b") != consumer_name("a", "b")


def test_a_renamed_consumer_does_not_run_its_messages_again():
    runs, store = [], MemoryStore()
    judged(runs.append, store=store, queue="old")
    judged(runs.append, store=store, queue="new", aliases=["old"])
    assert len(runs) == 1


def test_a_window_shorter_than_what_the_broker_may_deliver_again_is_refused():
    short = Handler(print, policy=Policy(active_window=timedelta(days=1)))
    with pytest.raises(PolicyInvalid):
        checked_policy(short, Policy(), "orders", timedelta(days=4))


def test_a_stream_that_is_made_anew_brings_new_messages():
    broker = JetStream("nats://h", "S", "d")

    def identity(second):
        stored = datetime(2026, 1, 1, second=second, tzinfo=UTC)
        metadata = SimpleNamespace(
            sequence=SimpleNamespace(stream=1), timestamp=stored, num_delivered=1
        )
        return broker._message(SimpleNamespace(metadata=metadata, data=b"", headers=None)).identity

    assert identity(1) == identity(1) != identity(2)


def test_a_topic_that_is_made_anew_brings_new_messages():
    old, new = (topic_with(Found(0, instant))._poll(1)[0] for instant in (1, 2))
    assert old.identity != new.identity


# The loop.


def consumed(broker, function, until, *, store=None, **settings):
    """Runs a consumer until something is so; returns its counts."""

    async def scene():
        idem = AsyncIdempotency(store or MemoryStore(), caller="unused", cache=False)
        consumer = Consumer(idem, Handler(function, back_off=SOON), broker, **settings)
        task = asyncio.create_task(consumer.run_async())
        async with asyncio.timeout(10):
            while not until(consumer.counts):  # noqa: ASYNC110 — counts have no event.
                await asyncio.sleep(0.002)
            consumer.stop()
            await task
            await idem.close()
        return consumer.counts

    return asyncio.run(scene())


async def extended(broker, times=1):
    async with asyncio.timeout(10):
        while len(broker.extended) < times:  # noqa: ASYNC110 — the script has no event.
            await asyncio.sleep(0.002)


def test_what_waits_in_the_buffer_has_its_deadline_prolonged():
    broker = ScriptedBroker(message("1"), message("2"), renew_seconds=0.02)

    async def handle(item):
        if item.identity == "1":
            await extended(broker, 2)

    consumed(broker, handle, lambda counts: counts.handled + counts.lost, concurrency=1)
    assert any("2" in each for each in broker.extended)


def test_what_was_lost_in_the_buffer_does_not_begin():
    broker = ScriptedBroker(message("1"), message("2"), renew_seconds=0.02)
    broker.lost = {"2"}
    begun = []

    async def handle(item):
        begun.append(item.identity)
        await extended(broker)

    consumed(broker, handle, lambda counts: counts.handled + counts.lost == 2, concurrency=1)
    assert begun == ["1"]


def test_what_was_lost_while_it_ran_is_not_settled():
    broker = ScriptedBroker(message("1"), renew_seconds=0.02)
    broker.lost = {"1"}

    async def handle(item):
        await extended(broker)

    consumed(broker, handle, lambda counts: counts.handled + counts.lost)
    assert broker.settled == []


def test_while_the_store_is_away_no_message_is_taken():
    """Each delivery counts at the broker, which dead-letters by that count."""
    store = FaultyStore(MemoryStore())
    store.fail(Moment.BEFORE, method="commit", times=None)
    broker = ScriptedBroker(message("1"))

    async def handle(item):
        return None

    asked = []

    def has_waited(counts):
        if counts.retried:
            asked.append(len(broker.limits))
        return counts.retried >= 4

    consumed(broker, handle, has_waited, store=store)
    assert asked[-1] == asked[0]


def test_messages_of_a_lane_do_not_run_side_by_side():
    running = set()
    broker = ScriptedBroker(message("1", lane="a"), message("2", lane="a"))

    async def handle(item):
        running.add(item.identity)
        assert len(running) == 1
        await asyncio.sleep(0.01)
        running.clear()

    counts = consumed(broker, handle, lambda counts: counts.handled + counts.retried >= 2)
    assert (counts.handled, counts.retried) == (2, 0)


def test_nothing_overtakes_a_message_of_its_lane_that_comes_back():
    broker = ScriptedBroker(message("1", lane="a"), message("2", lane="a"))
    seen = []

    async def handle(item):
        seen.append(item.identity)
        raise LookupError

    consumed(broker, handle, lambda counts: counts.retried + counts.left == 2)
    assert seen == ["1"]


# Offsets.


def test_a_later_success_does_not_commit_past_a_message_that_runs():
    broker = topic_with(Found(0), Found(1))
    _, second = broker._poll(9)
    asyncio.run(broker.settle([(second, DONE)]))
    broker._store_offsets()
    assert broker._consumer.stored == []


def test_what_is_given_back_is_not_committed_past():
    broker = topic_with(Found(0), Found(1))
    first, second = broker._poll(9)
    asyncio.run(broker.settle([(first, Verdict(Action.LEAVE, "stop")), (second, DONE)]))
    broker._store_offsets()
    assert broker._consumer.stored == []


def test_lost_partitions_fence_what_runs():
    broker = topic_with(Found(0))
    (item,) = broker._poll(9)
    broker._lost(None, FIRST)
    broker._is_polling = True
    assert asyncio.run(broker.extend([item])) == [item]


def test_nothing_is_committed_for_partitions_that_are_lost():
    broker = topic_with(Found(0))
    (item,) = broker._poll(9)
    broker._lost(None, FIRST)
    asyncio.run(broker.settle([(item, DONE)]))
    broker._store_offsets()
    assert broker._consumer.stored == []


def test_a_rebalance_lets_what_runs_end_and_commits_it():
    """Fenced first, the next owner would repeat what was finished."""
    broker = topic_with(Found(0))
    (item,) = broker._poll(9)
    partition = item.receipt[0]
    drain = partition.drain

    def ends_meanwhile(seconds):
        if seconds > 0:
            partition.settle(0, is_done=True)
        return drain(0)

    partition.drain = ends_meanwhile
    broker._revoked(broker._consumer, FIRST)
    assert broker._consumer.stored == [1]


def test_what_was_fetched_for_an_assignment_goes_with_it():
    broker = topic_with(Found(7))
    broker._keep_alive()
    broker._lost(None, FIRST)
    broker._assigned(None, FIRST)
    assert broker._poll(9) == []


# Dead letters: safe elsewhere before their message is gone.


def test_sqs_deletes_nothing_whose_dead_letter_is_not_safe():
    calls = []

    class Refusing(SqsQueue):
        async def _call(self, method, **_):
            calls.append(method)
            if method == "send_message":
                raise ConnectionError("not now")
            return {}

    queue = Refusing("orders")
    queue._dead_url = "dead"
    item = Message(b"x", receipt={"Body": "x", "ReceiptHandle": "r"})
    assert asyncio.run(queue.settle([(item, DEAD)])) == [item]
    assert calls == ["send_message"]


class Receipt:
    """Takes acks of AMQP."""

    headers = body = message_id = None

    def __init__(self):
        self.acks = []

    async def ack(self):
        self.acks.append("ack")

    async def nack(self, requeue):
        self.acks.append("nack")


async def refused(*_, **__):
    raise ConnectionError("not now")


def test_jetstream_ends_nothing_whose_dead_letter_is_not_safe():
    async def flush(_):
        return None

    async def publish(*answer):
        answers.append(answer)

    answers = []
    broker = JetStream("nats://h", "S", "d")
    broker._connection = SimpleNamespace(
        is_connected=True, is_closed=False, flush=flush, publish=publish
    )
    broker._reopening = asyncio.Lock()
    broker._bury = refused
    item = Message(b"x", receipt=SimpleNamespace(reply="reply"))
    assert asyncio.run(broker.settle([(item, DEAD)])) == [item]
    assert answers == []


def test_kafka_commits_nothing_whose_dead_letter_is_not_safe():
    broker = topic_with(Found(0))
    (item,) = broker._poll(9)
    broker._dead_letters.bury = lambda dead: {item: ConnectionError("not now")}
    assert asyncio.run(broker.settle([(item, DEAD)])) == [item]
    assert item.receipt[0].next_offset is None


def settled_by_rabbitmq(verdict, *, is_closed):
    """What the broker was told of one message, where nothing can be published."""

    async def scene():
        broker = RabbitQueue("amqp://h", "orders")
        broker._move = refused
        receipt = Receipt()
        item = Message(b"x", receipt=(receipt, SimpleNamespace(is_closed=is_closed)))
        await broker.settle([(item, verdict)])
        for task in list(broker._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return receipt.acks

    return asyncio.run(scene())


def test_rabbitmq_acks_nothing_whose_dead_letter_is_not_safe():
    assert settled_by_rabbitmq(DEAD, is_closed=False) == []


def test_what_came_over_a_closed_channel_is_not_acked_on_another():
    """Delivery tags start again at 1."""
    assert settled_by_rabbitmq(DONE, is_closed=False) == ["ack"]
    assert settled_by_rabbitmq(DONE, is_closed=True) == []
