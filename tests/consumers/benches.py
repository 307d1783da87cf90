"""One queue of each broker, as the tests use it: to publish, and to look at what is left."""

from __future__ import annotations

import asyncio
import json
import uuid

import aio_pika
import boto3
import confluent_kafka
import nats
from confluent_kafka.admin import AdminClient, NewTopic
from nats.js.api import StreamConfig

from retrysafe.consumers import consumer_name


class SqsBench:
    """A queue of its own on the server."""

    # Where the class is whose `settle` a test may stop.
    broker = "retrysafe.consumers.sqs:SqsQueue"
    handler = "THREADS"
    # How often in a row the queue must look empty: once where the broker tells what is in flight.
    looks = 1
    # Whether messages are read again from an offset, and not each by itself.
    is_log = False

    def __init__(self, server, *, is_fifo=False):
        suffix = ".fifo" if is_fifo else ""
        self.name = f"t{uuid.uuid4().hex[:12]}{suffix}"
        self.server = server
        self.dead = {}
        self.client = boto3.client(
            "sqs",
            endpoint_url=server.endpoint,
            region_name="eu-central-1",
            aws_access_key_id="local",
            aws_secret_access_key="local",
        )
        attributes = {"FifoQueue": "true"} if is_fifo else {}
        made = self.client.create_queue(QueueName=self.name, Attributes=attributes)
        self.queue_url = made["QueueUrl"]

    @property
    def url(self):
        return (
            f"sqs:///{self.name}?endpoint={self.server.endpoint}&region=eu-central-1"
            "&visibility=3&wait=1"
        )

    @property
    def caller(self):
        return consumer_name(f"sqs:{self.name}")

    def publish(self, body, key=None, **options):
        attributes = {}
        if key is not None:
            attributes["Idempotency-Key"] = {"DataType": "String", "StringValue": key}
        sent = self.client.send_message(
            QueueUrl=self.queue_url, MessageBody=body, MessageAttributes=attributes, **options
        )
        return sent["MessageId"]

    def publish_all(self, pairs):
        """Bodies and keys, ten in a call."""
        for start in range(0, len(pairs), 10):
            entries = [
                {
                    "Id": str(place),
                    "MessageBody": body,
                    "MessageAttributes": {
                        "Idempotency-Key": {"DataType": "String", "StringValue": key}
                    },
                }
                for place, (body, key) in enumerate(pairs[start : start + 10])
            ]
            sent = self.client.send_message_batch(QueueUrl=self.queue_url, Entries=entries)
            assert not sent.get("Failed"), sent

    def dead_letters(self):
        """The bodies of dead letters, with their reasons; what was seen once is remembered."""
        try:
            url = self.client.get_queue_url(QueueName=f"{self.name}-dlq")["QueueUrl"]
        except self.client.exceptions.QueueDoesNotExist:
            return {}
        while True:
            answer = self.client.receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
            )
            if not answer.get("Messages"):
                return self.dead
            for each in answer["Messages"]:
                reason = each["MessageAttributes"]["Retrysafe-Reason"]["StringValue"]
                self.dead[each["Body"]] = reason

    def left(self):
        """How many messages are in the queue, those in flight included."""
        names = [f"ApproximateNumberOfMessages{each}" for each in ("", "NotVisible", "Delayed")]
        found = self.client.get_queue_attributes(QueueUrl=self.queue_url, AttributeNames=names)
        return sum(int(value) for value in found["Attributes"].values())

    def close(self):
        self.client.close()


class AsyncSqsBench(SqsBench):
    """The same, consumed by an async handler and aiobotocore."""

    handler = "ASYNC"


class NatsBench:
    """A stream of its own on the server."""

    broker = "retrysafe.consumers.nats:JetStream"
    handler = "ASYNC"
    looks = 1
    is_log = False

    def __init__(self, server):
        self.server = server
        self.name = f"T{uuid.uuid4().hex[:12]}"
        self.runner = asyncio.Runner()
        self.runner.run(self._open())

    async def _open(self):
        self.connection = await nats.connect(self.server.url)
        self.context = self.connection.jetstream()
        await self.context.add_stream(
            StreamConfig(name=self.name, subjects=[f"{self.name}.>"], max_age=3600)
        )

    def reopen(self):
        """Connects again, to a server that has restarted."""
        self.runner.run(self.connection.close())
        self.runner.run(self._open())

    @property
    def url(self):
        return f"{self.server.url}/{self.name}?durable=billing&ack_wait=3"

    @property
    def caller(self):
        return consumer_name(f"nats:{self.name}", "billing")

    def publish(self, body, key=None):
        headers = None if key is None else {"Idempotency-Key": key}
        self.runner.run(self.context.publish(f"{self.name}.orders", body.encode(), headers=headers))

    def publish_all(self, pairs):
        for body, key in pairs:
            self.publish(body, key)

    def dead_letters(self):
        return self.runner.run(self._dead_letters())

    async def _dead_letters(self):
        try:
            info = await self.context.stream_info(f"{self.name}_billing_dead")
        except nats.js.errors.NotFoundError:
            return {}
        found = {}
        for number in range(1, info.state.messages + 1):
            message = await self.context.get_msg(f"{self.name}_billing_dead", number)
            found[message.data.decode()] = message.headers["Retrysafe-Reason"]
        return found

    def left(self):
        try:
            info = self.runner.run(self.context.consumer_info(self.name, "billing"))
        except nats.js.errors.NotFoundError:  # The first to consume makes it.
            return self.runner.run(self.context.stream_info(self.name)).state.messages
        return info.num_pending + info.num_ack_pending

    def close(self):
        self.runner.run(self.connection.close())
        self.runner.close()


class RabbitBench:
    """A queue of its own on the broker."""

    broker = "retrysafe.consumers.amqp:RabbitQueue"
    handler = "THREADS"
    looks = 8
    is_log = False

    def __init__(self, server, arguments=None):
        self.server = server
        self.name = f"t{uuid.uuid4().hex[:12]}"
        self.count = 0
        self.dead = {}
        self.runner = asyncio.Runner()
        self.arguments = arguments
        self.runner.run(self._open(arguments))

    async def _open(self, arguments):
        self.connection = await aio_pika.connect(self.server.url)
        self.channel = await self.connection.channel()
        await self.channel.declare_queue(self.name, durable=True, arguments=arguments)

    def reopen(self):
        """Connects again, to a broker that has restarted."""
        self.runner.run(self._open(self.arguments))

    @property
    def url(self):
        return f"{self.server.url}?queue={self.name}"

    @property
    def caller(self):
        return consumer_name(f"amqp:{self.name}")

    def publish(self, body, key=None, headers=None):
        self.count += 1
        message = aio_pika.Message(
            body.encode(),
            message_id=f"{self.name}-{self.count}",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            headers=(headers or {}) | ({} if key is None else {"Idempotency-Key": key}),
        )
        self.runner.run(self.channel.default_exchange.publish(message, self.name))

    def publish_all(self, pairs):
        for body, key in pairs:
            self.publish(body, key)

    def dead_letters(self):
        return self.runner.run(self._dead_letters())

    async def _dead_letters(self):
        channel = await self.connection.channel()
        queue = await channel.declare_queue(f"{self.name}.dead", durable=True)
        while (message := await queue.get(fail=False, no_ack=True)) is not None:
            self.dead[message.body.decode()] = message.headers["retrysafe-reason"]
        await channel.close()
        return self.dead

    def left(self):
        """What is ready, here and in the queues of delayed messages; in flight is not told."""
        return self.runner.run(self._left())

    async def _left(self):
        count = 0
        for name in (self.name, *(f"{self.name}.retry.{125 * 2**power}" for power in range(7))):
            channel = await self.connection.channel()
            try:
                queue = await channel.get_queue(name, ensure=True)
            except aio_pika.exceptions.ChannelNotFoundEntity:
                continue
            count += queue.declaration_result.message_count
            await channel.close()
        return count

    def close(self):
        self.runner.run(self.connection.close())
        self.runner.close()


class PikaBench(RabbitBench):
    """The same, consumed by pika."""

    broker = "retrysafe.consumers.pika:PikaQueue"

    @property
    def url(self):
        return f"{super().url}&client=pika"


class KafkaBench:
    """A topic of its own on the broker."""

    broker = "retrysafe.consumers.kafka:KafkaTopic"
    handler = "THREADS"
    # Offsets are committed in the background.
    looks = 1
    is_log = True

    def __init__(self, server, partitions=3):
        self.server = server
        self.name = f"t{uuid.uuid4().hex[:12]}"
        self.config = {"bootstrap.servers": server.address}
        self.partitions = partitions
        admin = AdminClient(self.config)
        admin.create_topics([NewTopic(self.name, partitions)])[self.name].result(10)
        self.producer = confluent_kafka.Producer(self.config)
        # Never subscribes, so it is no member of the group.
        self.looker = confluent_kafka.Consumer({**self.config, "group.id": self.name})
        self.sent = [0] * partitions

    @property
    def url(self):
        return f"kafka://{self.server.address}/{self.name}?group={self.name}&session_timeout=6"

    @property
    def caller(self):
        return consumer_name(f"kafka:{self.name}", self.name)

    def publish(self, body, key=None, *, partition=None, lane=None):
        self._produce(body, key, partition=partition, lane=lane)
        assert self.producer.flush(10) == 0

    def publish_all(self, pairs):
        for body, key in pairs:
            self._produce(body, key)
        assert self.producer.flush(30) == 0

    def _produce(self, body, key, *, partition=None, lane=None):
        headers = [] if key is None else [("Idempotency-Key", key.encode())]
        if partition is None:
            partition = sum(self.sent) % self.partitions
        self.sent[partition] += 1
        self.producer.produce(
            self.name, body.encode(), key=lane, headers=headers, partition=partition
        )

    def dead_letters(self):
        consumer = confluent_kafka.Consumer(
            {**self.config, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
        )
        name = f"{self.name}.dead-letters"
        found = {}
        if name in consumer.list_topics(timeout=10).topics:
            consumer.assign([confluent_kafka.TopicPartition(name, 0, 0)])
            _, end = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(name, 0), 10)
            last = -1
            # Tansu counts batches where the end of a log counts messages: there may be more.
            while (message := consumer.poll(1)) is not None or last < end - 1:
                if message is None:
                    continue
                last = message.offset()
                found[message.value().decode()] = dict(message.headers())[
                    "retrysafe-reason"
                ].decode()
        consumer.close()
        return found

    def left(self):
        """What was published past the group's committed offsets."""
        asked = [
            confluent_kafka.TopicPartition(self.name, number) for number in range(self.partitions)
        ]
        committed = self.looker.committed(asked, timeout=10)
        return sum(self.sent[each.partition] - max(each.offset, 0) for each in committed)

    def close(self):
        self.looker.close()
        # Both go on trying to connect, and to tell of it, for as long as they are there.
        self.looker = self.producer = None


def wish(name, **options):
    return json.dumps({"name": name, **options})
