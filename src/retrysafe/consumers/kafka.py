"""Kafka: offsets up to the last settled message, in their order; a drain before partitions leave.

Owns how a log carries verdicts out. A message cannot be given back alone, so the loop holds it and
tries again; its lane is its partition and key, so that only its own key waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

from retrysafe.consumers.broker import Buffer, not_buried
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

try:
    import confluent_kafka
    from confluent_kafka import KafkaException, TopicPartition
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # Public by its manual.
        AdminClient,
        ConfigResource,
        NewTopic,
        ResourceType,
    )
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "kafka", error) from error

_logger = logging.getLogger("retrysafe.consumers")

_OPEN_SECONDS: Final = 10.0
# How long a poll waits for messages; a stop waits for no longer than this.
_WAIT_SECONDS: Final = 0.5
# Far below `max.poll.interval.ms` of any consumer: who has no room for messages polls all the same.
_KEEP_ALIVE_SECONDS: Final = 5.0
_DELIVER_SECONDS: Final = 30.0
_REASON: Final = "retrysafe-reason"


class Partition:
    """One assignment of one partition: what was received, and how far it may be committed.

    A partition that comes back after it was taken away is another object: what was received before
    has no say in its offsets.
    """

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number
        self.is_lost = False
        self._changed = threading.Condition()
        # Received and not yet committed past, in the log's order. Numbers may be missing in a log:
        # only what was received counts.
        self._received: deque[int] = deque()
        self._done: set[int] = set()
        self._outstanding: set[int] = set()
        # The offset up to which everything is settled; None when nothing is.
        self.next_offset: int | None = None
        # What the client was told of that.
        self.stored_offset: int | None = None

    def receive(self, offset: int) -> None:
        """Notes a message that has come."""
        with self._changed:
            self._received.append(offset)
            self._outstanding.add(offset)

    def settle(self, offset: int, *, is_done: bool) -> int | None:
        """Notes what became of it; returns how far may be committed now, if that has changed.

        A message that is given back stays in the way of all behind it: the next owner of the
        partition gets it, and them, again.
        """
        with self._changed:
            self._outstanding.discard(offset)
            if is_done:
                self._done.add(offset)
            before = self.next_offset
            while self._received and self._received[0] in self._done:
                passed = self._received.popleft()
                self._done.discard(passed)
                self.next_offset = passed + 1
            self._changed.notify_all()
            return self.next_offset if self.next_offset != before else None

    def drain(self, seconds: float) -> bool:
        """Waits for what is outstanding; False when the time was over first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._outstanding, seconds)


class KafkaTopic:
    """One topic, read as a member of a group.

    Dead letters go to the topic `dead_letter` (default: `TOPIC.dead-letters`), which is made when
    the first one comes.
    """

    gives_back = False
    deadline_seconds = math.inf
    renew_seconds = _KEEP_ALIVE_SECONDS

    def __init__(
        self,
        servers: str,
        topic: str,
        group: str,
        *,
        dead_letter: str | None = None,
        drain_limit: timedelta = timedelta(seconds=30),
        **config: Any,
    ) -> None:
        """`drain_limit` is how long a rebalance waits for running handlers.

        Further options go to librdkafka, with underscores for dots.
        """
        if not topic or not group:
            raise InvalidInput("which topic and group? Write KafkaTopic(servers, 'pay', 'billing')")
        self._topic = topic
        self._dead_letter = dead_letter or f"{topic}.dead-letters"
        self._drain_seconds = drain_limit.total_seconds()
        self._servers: dict[str, Any] = {"bootstrap.servers": servers}
        self._config = {
            **self._servers,
            "group.id": group,
            # Stored here when a message is settled; committed in the background, and at the end.
            "enable.auto.offset.store": False,
            "enable.auto.commit": True,
            "auto.commit.interval.ms": 500,
            "auto.offset.reset": "earliest",
            **{name.replace("_", "."): value for name, value in config.items()},
        }
        self.queue, self.group = f"kafka:{topic}", group
        self._consumer: Any = None
        self._producer: Any = None
        self._window: timedelta | None = None
        # The consumer is used by one thread; dead letters have another.
        self._polls: ThreadPoolExecutor | None = None
        self._deliveries: ThreadPoolExecutor | None = None
        self._is_polling = False
        self._partitions: dict[int, Partition] = {}
        self._stash: list[Any] = []
        self._buffer: Buffer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, buffer: Buffer) -> None:
        """A rebalance takes back what has not begun."""
        self._buffer = buffer

    async def _in_thread(self, call: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._polls, call, *given)

    # The group.

    async def open(self) -> None:
        """Joins the group; raises `InvalidInput` for a topic that is not there."""
        self._loop = asyncio.get_running_loop()
        self._polls = ThreadPoolExecutor(1, "retrysafe-kafka")
        self._deliveries = ThreadPoolExecutor(1, "retrysafe-kafka-dead")
        try:
            await self._in_thread(self._join)
        except BaseException:
            await self.close()
            raise

    def _join(self) -> None:
        self._consumer = confluent_kafka.Consumer(self._config, logger=_logger)
        try:
            found = self._consumer.list_topics(self._topic, timeout=_OPEN_SECONDS)
        except KafkaException as error:
            raise ConnectionError(f"no Kafka broker answers there: {error}") from error
        if found.topics[self._topic].error is not None:
            raise InvalidInput(f"there is no topic {self._topic} on this cluster")
        self._window = self._retention()
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def _retention(self) -> timedelta | None:
        """How long the topic keeps messages; None when that is without a limit, or not told."""
        resource = ConfigResource(ResourceType.TOPIC, self._topic)
        try:
            asked = AdminClient(self._servers).describe_configs([resource])[resource]
            told = int(asked.result(timeout=_OPEN_SECONDS)["retention.ms"].value)
        except (KafkaException, TimeoutError, KeyError, TypeError, ValueError):
            return None
        return None if told < 0 else timedelta(milliseconds=told)

    async def redelivery_window(self) -> timedelta | None:
        """The topic's retention; None when it has no limit, or the cluster does not tell."""
        return self._window

    # Called inside of polls, in their thread.

    def _assigned(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._partitions[each.partition] = Partition(each.topic, each.partition)

    def _revoked(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """Lets what runs end, and commits it, before another consumer gets the partitions.

        Fencing first would repeat work that was finished.
        """
        leaving = [self._partitions.pop(each.partition, None) for each in partitions]
        known = [each for each in leaving if each is not None]
        self._withdraw(set(known))
        for each in known:
            if not each.drain(self._drain_seconds):
                _logger.warning("partition %d left while its messages ran", each.number)
            each.is_lost = True
        offsets = [
            TopicPartition(each.topic, each.number, each.next_offset)
            for each in known
            if each.next_offset is not None
        ]
        if offsets:
            try:
                consumer.commit(offsets=offsets, asynchronous=False)
            except KafkaException as error:
                # Their messages come again, and are found to be done.
                _logger.warning("offsets were not committed: %s", error)

    def _lost(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """Another consumer has the partitions already: nothing may be committed any more."""
        for each in partitions:
            found = self._partitions.pop(each.partition, None)
            if found is not None:
                found.is_lost = True
                self._withdraw({found})

    def _withdraw(self, leaving: set[Partition]) -> None:
        if self._buffer is not None and self._loop is not None and leaving:
            self._loop.call_soon_threadsafe(
                self._buffer.withdraw, lambda message: message.receipt[0] in leaving
            )

    # Messages.

    async def receive(self, limit: int) -> list[Message]:
        """One poll."""
        self._is_polling = True
        try:
            found: list[Message] = await self._in_thread(self._poll, limit)
        finally:
            self._is_polling = False
        return found

    def _poll(self, limit: int) -> list[Message]:
        self._store_offsets()
        stash, self._stash = self._stash, []
        found = stash + self._consumer.consume(limit, timeout=0 if stash else _WAIT_SECONDS)
        messages = []
        for each in found:
            if each.error() is not None:
                _logger.warning("Kafka: %s", each.error())
                continue
            partition = self._partitions.get(each.partition())
            if partition is not None:
                partition.receive(each.offset())
                messages.append(self._message(each, partition))
        return messages

    def _message(self, found: Any, partition: Partition) -> Message:
        headers = {
            name: (value or b"").decode(errors="replace") for name, value in found.headers() or ()
        }
        key = found.key()
        return Message(
            found.value() or b"",
            headers,
            # With its instant: a topic that is made anew counts from 0.
            identity=f"{found.partition()}:{found.offset()}@{found.timestamp()[1]}",
            lane=None if key is None else f"{found.partition()}:{key.hex()}",
            receipt=(partition, found),
        )

    async def extend(self, messages: Sequence[Message]) -> Collection[Message]:
        """Stays in the group, also without room for messages; says what was taken away."""
        if not self._is_polling:
            await self._in_thread(self._keep_alive)
        return [each for each in messages if each.receipt[0].is_lost]

    def _keep_alive(self) -> None:
        """Polls without taking anything."""
        self._store_offsets()
        assignment = self._consumer.assignment()
        self._consumer.pause(assignment)
        found = self._consumer.poll(0)
        if found is not None:
            self._stash.append(found)
        # Of what is left: the poll may have taken partitions away.
        self._consumer.resume(self._consumer.assignment())

    async def settle(self, settled: Sequence[tuple[Message, Verdict]]) -> Collection[Message]:
        """Notes what is settled; the next poll moves the offsets as far as they may go."""
        unsettled = []
        for message, verdict in settled:
            partition, found = message.receipt
            if verdict.action is Action.DEAD_LETTER:
                try:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._deliveries, self._bury, found, verdict.reason)
                except Exception as error:
                    not_buried(message, error)
                    partition.settle(found.offset(), is_done=False)
                    unsettled.append(message)
                    continue
            partition.settle(found.offset(), is_done=verdict.is_final)
        return unsettled

    def _store_offsets(self) -> None:
        """Has the client commit what is settled, in its own time.

        In the thread of the polls only: anywhere else it waits for a rebalance to end, which itself
        may wait for that thread's messages to be settled.
        """
        for partition in self._partitions.values():
            offset = partition.next_offset
            if offset is not None and offset != partition.stored_offset:
                stored = TopicPartition(partition.topic, partition.number, offset)
                self._consumer.store_offsets(offsets=[stored])
                partition.stored_offset = offset

    # Dead letters.

    def _bury(self, found: Any, reason: str) -> None:
        """Sends a copy with the reason, and waits until the brokers have it."""
        if self._producer is None:
            self._make_dead_letter_topic()
            self._producer = confluent_kafka.Producer(
                {**self._servers, "enable.idempotence": True}, logger=_logger
            )
        failures: list[Any] = []

        def told(error: Any, _: Any) -> None:
            if error is not None:
                failures.append(error)

        headers = [*(found.headers() or ()), (_REASON, reason.encode())]
        self._producer.produce(
            self._dead_letter, found.value(), found.key(), headers=headers, on_delivery=told
        )
        if self._producer.flush(_DELIVER_SECONDS) or failures:
            raise ConnectionError(f"the dead letter was not taken: {failures or 'no answer'}")

    def _make_dead_letter_topic(self) -> None:
        admin = AdminClient(self._servers)
        if self._dead_letter in admin.list_topics(timeout=_OPEN_SECONDS).topics:
            return
        made = admin.create_topics([NewTopic(self._dead_letter, 1)])[self._dead_letter]
        try:
            made.result(timeout=_OPEN_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def _leave(self, consumer: Any) -> None:
        self._store_offsets()
        consumer.close()

    async def close(self) -> None:
        """Commits what is settled and leaves the group."""
        polls, self._polls = self._polls, None
        if polls is not None:
            consumer = self._consumer
            if consumer is not None:
                # Nothing runs any more that a drain could wait for.
                self._drain_seconds = 0
                await asyncio.get_running_loop().run_in_executor(polls, self._leave, consumer)
            polls.shutdown(wait=False)
        if self._deliveries is not None:
            self._deliveries.shutdown(wait=False)
            self._deliveries = None
