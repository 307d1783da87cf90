"""The brokers of FastStream: which subscribers can be protected, and how a message is settled.

Owns what differs between Kafka, RabbitMQ, NATS JetStream and Redis streams. Names and identities
are those of `retrysafe.consumers`, so that a queue may change from one to the other. It must not
know the engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

from retrysafe.extras import missing_extra

try:
    from faststream import AckPolicy
    from faststream.message import AckStatus
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "faststream", error) from None

_logger = logging.getLogger("retrysafe.consumers")

# Of what a consumer of Kafka may take between two polls: what is left is the handler's.
_KAFKA_SHARE: Final = 0.2
# RabbitMQ closes a channel that keeps a message for 30 minutes; handlers need their share.
_RABBIT_HOLD_SECONDS: Final = 600.0
_NO_BATCH: Final = (
    "it takes batches, and a batch has no key: take one message at a time, without batch=True"
)


class Broker:
    """One kind of broker."""

    # Whether a rejected message goes, or stays, where people can find it.
    keeps_rejected = True
    # Whether a message that is not sent back is passed over by the next one.
    is_ordered = False
    # What FastStream may do with a message that never reached its handler.
    ack_policies: tuple[AckPolicy, ...] = (AckPolicy.NACK_ON_ERROR, AckPolicy.REJECT_ON_ERROR)

    def refusal(self, subscriber: Any) -> str | None:
        """Why a subscriber cannot be protected, and what to do; None when it can."""
        return (
            "only KafkaBroker of faststream.confluent, RabbitBroker, NatsBroker and RedisBroker "
            "are known: use one of them"
        )

    def source(self, subscriber: Any, message: Any) -> tuple[str, str]:
        """The queue and the group, as consumers name them."""
        raise NotImplementedError

    def identity(self, message: Any) -> str | None:
        """What the broker calls the message."""
        raise NotImplementedError

    def deliveries(self, message: Any) -> int:
        """How often the broker has delivered it, as far as it counts."""
        return 1

    def hold_seconds(self, message: Any) -> float:
        """How long a message may wait here, unsettled; 0 where the broker keeps it away itself."""
        return 0.0

    def warning(self, subscriber: Any, others: Any, *, has_dead_letter: bool) -> str | None:
        """What may lose messages in how the subscriber is set up."""
        return None

    async def ack(self, message: Any) -> None:
        """Has the broker forget the message."""
        await message.ack()

    async def nack(self, message: Any, delay: timedelta) -> None:
        """Has the message come again; raises when it would be passed over."""
        await message.nack()


class Kafka(Broker):
    """Kafka by confluent-kafka: messages of a partition one after the other."""

    # FastStream's reject commits: the message would be passed over.
    keeps_rejected = False
    is_ordered = True
    ack_policies = (AckPolicy.NACK_ON_ERROR,)

    def refusal(self, subscriber: Any) -> str | None:
        from faststream.confluent.subscriber.usecase import (
            BatchSubscriber,
            ConcurrentDefaultSubscriber,
        )

        if isinstance(subscriber, BatchSubscriber):
            return _NO_BATCH
        if isinstance(subscriber, ConcurrentDefaultSubscriber):
            return (
                "with max_workers a later message would commit the offset of one that failed: "
                "leave it out, and start more processes"
            )
        if not subscriber.group_id:
            return "it has no group to commit for: set group_id='…'"
        # What the broker's `config` says wins over FastStream's own settings.
        config = subscriber._outer_config.builder.config.consumer_config
        if config.get("enable.auto.commit"):
            return "its client commits by itself: leave enable.auto.commit out of the config"
        return None

    def source(self, subscriber: Any, message: Any) -> tuple[str, str]:
        config = getattr(message.consumer, "config", {})
        group = config.get("group.id", subscriber.group_id)
        return f"kafka:{message.raw_message.topic()}", group

    def identity(self, message: Any) -> str | None:
        raw = message.raw_message
        return f"{raw.partition()}:{raw.offset()}@{raw.timestamp()[1]}"

    def hold_seconds(self, message: Any) -> float:
        # FastStream's test broker has none: nothing comes again there, so nothing waits.
        config = getattr(message.consumer, "config", {})
        return float(config.get("max.poll.interval.ms", 0)) / 1000 * _KAFKA_SHARE

    async def ack(self, message: Any) -> None:
        """Commits this message alone.

        FastStream commits what was polled of every partition, also of one whose message was sent
        back: a crash would then pass that message over.
        """
        from confluent_kafka import TopicPartition

        raw, consumer = message.raw_message, message.consumer
        if not hasattr(consumer, "consumer"):
            await message.ack()  # FastStream's test broker.
            return
        message.committed = AckStatus.ACKED
        done = TopicPartition(raw.topic(), raw.partition(), raw.offset() + 1)
        commit = functools.partial(consumer.consumer.commit, offsets=[done], asynchronous=True)
        await _in_thread_of(consumer, commit)

    async def nack(self, message: Any, delay: timedelta) -> None:
        """Seeks back to the message."""
        try:
            await message.nack()
        except Exception:
            # Whatever happens next, FastStream must not commit it.
            message.committed = AckStatus.NACKED
            raw, consumer = message.raw_message, message.consumer
            assigned = await _in_thread_of(consumer, consumer.consumer.assignment)
            mine = (raw.topic(), raw.partition())
            if any((each.topic, each.partition) == mine for each in assigned):
                raise
            _logger.info("partition %d left with its message", raw.partition())


async def _in_thread_of(consumer: Any, call: Any) -> Any:
    """Calls the client in the one thread in which FastStream uses it."""
    return await asyncio.get_running_loop().run_in_executor(consumer._thread_pool, call)


class RabbitMQ(Broker):
    """RabbitMQ by aio-pika."""

    def refusal(self, subscriber: Any) -> str | None:
        if not subscriber.queue.name:
            return "its queue has no name, which its keys are stored under: name it"
        if (subscriber.queue.arguments or {}).get("x-queue-type") == "stream":
            return "a stream of RabbitMQ delivers nothing again: use a quorum queue"
        return None

    def warning(self, subscriber: Any, others: Any, *, has_dead_letter: bool) -> str | None:
        if has_dead_letter or "x-dead-letter-exchange" in (subscriber.queue.arguments or {}):
            return None
        return (
            "RabbitMQ drops rejected messages of a queue without a dead letter exchange: declare "
            "the queue with arguments={'x-dead-letter-exchange': …}, set one by a policy, or pass "
            "dead_letter=…"
        )

    def source(self, subscriber: Any, message: Any) -> tuple[str, str]:
        # A name is one queue in each virtual host. Without a channel it is not known, and nothing
        # may run under another name: that raises, and the message comes again.
        is_test = self._is_test(message)
        host = "/" if is_test else message.raw_message.channel.connection.vhost
        scheme = "amqp" if host == "/" else f"amqp@{quote(host, safe='')}"
        return f"{scheme}:{subscriber._outer_config.prefix}{subscriber.queue.name}", ""

    def identity(self, message: Any) -> str | None:
        # Not FastStream's: it makes one up, a new one for each delivery.
        found: str | None = message.raw_message.message_id
        return found

    def deliveries(self, message: Any) -> int:
        counted = message.headers.get("x-delivery-count", 0)
        return 1 + (counted if isinstance(counted, int) else 0)

    def hold_seconds(self, message: Any) -> float:
        return 0.0 if self._is_test(message) else _RABBIT_HOLD_SECONDS

    @staticmethod
    def _is_test(message: Any) -> bool:
        """Whether it comes from FastStream's test broker, where nothing comes again."""
        return type(message.raw_message).__module__ == "faststream.rabbit.testing"


class JetStream(Broker):
    """NATS JetStream; core subjects have no acknowledgement."""

    def refusal(self, subscriber: Any) -> str | None:
        from faststream.nats.subscriber.usecases import BatchPullStreamSubscriber
        from faststream.nats.subscriber.usecases.stream_basic import StreamSubscriber

        if isinstance(subscriber, BatchPullStreamSubscriber):
            return _NO_BATCH
        if not isinstance(subscriber, StreamSubscriber):
            return (
                "only JetStream streams are acknowledged, so a message of a core subject, a key "
                "value bucket or an object store is lost with its worker: set stream='…'"
            )
        if subscriber.extra_options.get("ordered_consumer"):
            return "an ordered consumer acknowledges nothing: leave ordered_consumer out"
        if not self._durable(subscriber):
            return "the server forgets a consumer without a name: set durable='…'"
        if subscriber.config.ack_policy not in (None, "explicit"):
            return (
                f"with the server's ack policy {subscriber.config.ack_policy!s} a later message "
                "acknowledges one that failed: use AckPolicy.EXPLICIT"
            )
        return None

    @staticmethod
    def _durable(subscriber: Any) -> str:
        found = subscriber.extra_options.get("durable") or subscriber.config.durable_name
        return str(found or subscriber.queue or "")

    def source(self, subscriber: Any, message: Any) -> tuple[str, str]:
        return f"nats:{message.raw_message.metadata.stream}", self._durable(subscriber)

    def identity(self, message: Any) -> str | None:
        metadata = message.raw_message.metadata
        return f"{metadata.sequence.stream}@{metadata.timestamp.isoformat()}"

    def deliveries(self, message: Any) -> int:
        return int(message.raw_message.metadata.num_delivered)

    async def nack(self, message: Any, delay: timedelta) -> None:
        await message.nack(delay=delay.total_seconds())


class RedisStream(Broker):
    """Redis streams with a group; lists and channels have no acknowledgement."""

    # FastStream's reject does nothing: the message would stay pending for ever.
    keeps_rejected = False

    def refusal(self, subscriber: Any) -> str | None:
        from faststream.redis.subscriber.usecases.stream_subscriber import (
            StreamBatchSubscriber,
            StreamSubscriber,
        )

        if isinstance(subscriber, StreamBatchSubscriber):
            return _NO_BATCH
        if not isinstance(subscriber, StreamSubscriber):
            return (
                "Redis forgets a message of a list or a channel when it hands it out, so it is "
                "lost with its worker: use stream=StreamSub('…', group='…', consumer='…')"
            )
        if not subscriber.stream_sub.group or subscriber.stream_sub.no_ack:
            return (
                "without a group nothing is acknowledged: write StreamSub('…', group='…', "
                "consumer='…'), without no_ack"
            )
        return None

    def warning(self, subscriber: Any, others: Any, *, has_dead_letter: bool) -> str | None:
        mine = subscriber.stream_sub
        for other in others:
            its = getattr(other, "stream_sub", None)
            if its is None or (its.name, its.group) != (mine.name, mine.group):
                continue
            if its.min_idle_time is not None or its.claim_min_idle_time is not None:
                return None
        return (
            f"nobody here takes up what stays pending in group {mine.group} of {mine.name}, so a "
            "message that fails, or whose worker dies, does not come again: add a subscriber with "
            "StreamSub(…, min_idle_time=…) for the same handler"
        )

    def source(self, subscriber: Any, message: Any) -> tuple[str, str]:
        return f"redis:{message.raw_message['channel']}", message.group

    def identity(self, message: Any) -> str | None:
        (found,) = message.raw_message["message_ids"]
        return found.decode() if isinstance(found, bytes) else str(found)

    def deliveries(self, message: Any) -> int:
        return 1 + int((message.raw_message.get("delivery_counts") or [0])[0])


_UNKNOWN: Final = Broker()
_BROKERS: Final = {
    "confluent": Kafka(),
    "rabbit": RabbitMQ(),
    "nats": JetStream(),
    "redis": RedisStream(),
}


def broker_of(subscriber: Any) -> Broker:
    """The broker of a subscriber; one that refuses every subscriber where it is not known here."""
    for ancestor in type(subscriber).__mro__:
        package, _, rest = ancestor.__module__.partition(".")
        if package == "faststream":
            return _BROKERS.get(rest.partition(".")[0], _UNKNOWN)
    return _UNKNOWN


def refusal_of(subscriber: Any, *, has_dead_letter: bool) -> str | None:
    """Why a subscriber cannot be protected, and what to do; None when it can."""
    broker = broker_of(subscriber)
    found = broker.refusal(subscriber)
    if found is not None:
        return found
    if subscriber.ack_policy not in broker.ack_policies:
        return (
            f"ack_policy=AckPolicy.{subscriber.ack_policy.name} forgets a message before it is "
            "done, or whatever becomes of it, or leaves that to you: set "
            "ack_policy=AckPolicy.NACK_ON_ERROR"
        )
    if not broker.keeps_rejected and not has_dead_letter:
        return (
            "this broker has no place for messages that nobody can handle: pass dead_letter=…, an "
            "async function of the message and the reason that publishes it where people look"
        )
    return None
