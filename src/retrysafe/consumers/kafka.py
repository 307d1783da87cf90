"""Kafka: offsets up to the last settled message, in their order; a drain before partitions leave.

Owns how a log carries verdicts out. A message cannot be given back alone, so the loop holds it and
tries again; its lane is its partition and key, so that only its own key waits for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

from retrysafe.consumers.broker import Buffer, not_buried
from retrysafe.consumers.kafka_dead import DeadLetters
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.librdkafka import option_name

try:
    import confluent_kafka
    from confluent_kafka import KafkaException, TopicPartition
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # Public by its manual.
        AdminClient,
        ConfigResource,
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
# How often a rebalance asks for what has failed since, and so waits here again.
_DRAIN_SECONDS: Final = 0.5
# Messages of a partition past the first that is not settled: what a consumer remembers, and what is
# read again after a crash. Far more than wait while others are slow; reached where one fails.
AHEAD_LIMIT: Final = 10_000
# How to reach the cluster, and as whom: what the producer of dead letters needs as well.
_CONNECTION: Final = (
    *("security.", "sasl.", "ssl.", "ssl_", "enable.ssl.", "enable.sasl.", "oauth_cb", "https."),
    *("client.", "broker.", "socket.", "reconnect.", "api.", "plugin.", "message.max.bytes"),
)


class Partition:
    """One assignment of one partition: what was received, and how far it may be committed.

    A partition that comes back after it was taken away is another object: what was received before
    has no say in its offsets.
    """

    _serials = itertools.count()

    def __init__(self, topic: str, number: int) -> None:
        self.topic = topic
        self.number = number
        self.serial = next(self._serials)
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

    @property
    def ahead(self) -> int:
        """How many messages are here that cannot be committed past yet."""
        return len(self._received)

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
            if offset not in self._outstanding:
                return None  # Told twice.
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
        self._drain_seconds = drain_limit.total_seconds()
        options = {option_name(name): value for name, value in config.items()}
        # What every client of the cluster needs, not only this consumer.
        self._cluster: dict[str, Any] = {
            "bootstrap.servers": servers,
            **{name: value for name, value in options.items() if name.startswith(_CONNECTION)},
        }
        self._dead_letters = DeadLetters(self._cluster, dead_letter or f"{topic}.dead-letters")
        self._config = {
            "bootstrap.servers": servers,
            "group.id": group,
            # Stored here when a message is settled; committed in the background, and at the end.
            "enable.auto.offset.store": False,
            "enable.auto.commit": True,
            "auto.commit.interval.ms": 500,
            "auto.offset.reset": "earliest",
            **options,
        }
        self.queue, self.group = f"kafka:{topic}", group
        self._consumer: Any = None
        self._window: timedelta | None = None
        # The consumer is used by one thread; dead letters have another.
        self._polls: ThreadPoolExecutor | None = None
        self._deliveries: ThreadPoolExecutor | None = None
        self._is_polling = False
        self._partitions: dict[int, Partition] = {}
        # Numbers of partitions that are read no further until their first message is settled.
        self._full: set[int] = set()
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
            asked = AdminClient(self._cluster).describe_configs([resource])[resource]
            told = asked.result(timeout=_OPEN_SECONDS)
            kept = int(told["retention.ms"].value)
            # The newest segment is never deleted, however old its first message is.
            segment = int(told["segment.ms"].value) if "segment.ms" in told else 0
            policy = told["cleanup.policy"].value if "cleanup.policy" in told else "delete"
        except (KafkaException, TimeoutError, KeyError, TypeError, ValueError):
            return None
        if kept < 0 or policy != "delete":
            return None
        return timedelta(milliseconds=kept + segment)

    async def redelivery_window(self) -> timedelta | None:
        """How long the topic keeps messages; None without a limit, or when it is not told."""
        return self._window

    # Called inside of polls, in their thread.

    def _assigned(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self._partitions[each.partition] = Partition(each.topic, each.partition)

    def _revoked(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """Lets what runs end, and commits it, before another consumer gets the partitions.

        Fencing first would repeat work that was finished.
        """
        known = self._taken_away(partitions)
        ends = time.monotonic() + self._drain_seconds
        for each in known:
            while not each.drain(min(_DRAIN_SECONDS, max(0, ends - time.monotonic()))):
                if time.monotonic() >= ends:
                    _logger.warning("partition %d left while its messages ran", each.number)
                    break
                # What has failed meanwhile is held here again.
                self._withdraw(set(known))
        for each in known:
            each.is_lost = True
        offsets = [
            TopicPartition(each.topic, each.number, each.next_offset)
            for each in known
            if each.next_offset is not None
        ]
        if offsets:
            try:
                # Stored too: the client commits what is stored as it leaves, and would go back.
                consumer.store_offsets(offsets=offsets)
                consumer.commit(offsets=offsets, asynchronous=False)
            except KafkaException as error:
                # Their messages come again, and are found to be done.
                _logger.warning("offsets were not committed: %s", error)

    def _lost(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """Another consumer has the partitions already: nothing may be committed any more."""
        for each in self._taken_away(partitions):
            each.is_lost = True

    def _taken_away(self, partitions: Sequence[TopicPartition]) -> list[Partition]:
        """Takes back all that has not begun: first, so that nothing of a lane overtakes."""
        popped = [self._partitions.pop(each.partition, None) for each in partitions]
        known = [each for each in popped if each is not None]
        # The next assignment reads it again, after what is before it.
        numbers = {each.number for each in known}
        self._stash = [each for each in self._stash if each.partition() not in numbers]
        self._withdraw(set(known))
        return known

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

    def _hold_full(self) -> None:
        """Reads only so far ahead of a message that is not settled."""
        full = {each.number for each in self._partitions.values() if each.ahead >= AHEAD_LIMIT}
        for number in full - self._full:
            _logger.warning("partition %d waits: a message of it is not settled", number)
        self._consumer.pause([TopicPartition(self._topic, each) for each in full - self._full])
        # Also those that have left meanwhile: the client remembers a pause.
        self._consumer.resume([TopicPartition(self._topic, each) for each in self._full - full])
        self._full = full

    def _poll(self, limit: int) -> list[Message]:
        self._store_offsets()
        self._hold_full()
        messages: list[Message] = []
        while len(messages) < limit:
            # One by one: a batch may begin before a rebalance and end after it, and what was
            # fetched for the old assignment would move the offsets of the new one.
            if self._stash:
                found = self._stash.pop(0)
            else:
                found = self._consumer.poll(0 if messages else _WAIT_SECONDS)
            if found is None:
                break
            if found.error() is not None:
                _logger.warning("Kafka: %s", found.error())
                break
            partition = self._partitions.get(found.partition())
            if partition is not None:
                try:
                    message = self._message(found, partition)
                except Exception:
                    # A log has an order: none may be passed over, and those before it are whole.
                    self._stash.insert(0, found)
                    if messages:
                        break
                    raise
                partition.receive(found.offset())
                messages.append(message)
        return messages

    def _message(self, found: Any, partition: Partition) -> Message:
        sent: tuple[tuple[str, bytes | None], ...] = ()
        unreadable = None
        try:
            # Once: after a name that is not UTF-8 the client library dies of a second call.
            sent = tuple(found.headers() or ())
        except Exception as error:
            unreadable = repr(error)
        headers = {name: (value or b"").decode(errors="replace") for name, value in sent}
        key = found.key()
        return Message(
            found.value() or b"",
            headers,
            # With its instant: a topic that is made anew counts from 0.
            identity=f"{found.partition()}:{found.offset()}@{found.timestamp()[1]}",
            # By assignment: what an earlier one left here has no say in this one.
            lane=None if key is None else f"{partition.serial}:{key.hex()}",
            receipt=(partition, found, sent),
            unreadable=unreadable,
        )

    async def extend(self, messages: Sequence[Message]) -> Collection[Message]:
        """Stays in the group, also without room for messages; says what was taken away."""
        if not self._is_polling:
            await self._in_thread(self._keep_alive)
        return [each for each in messages if each.receipt[0].is_lost]

    def _keep_alive(self) -> None:
        """Polls without taking anything."""
        self._store_offsets()
        paused = self._consumer.assignment()
        self._consumer.pause(paused)
        try:
            found = self._consumer.poll(0)
        finally:
            # Also what the poll has taken away: the client remembers a pause, and a partition that
            # comes back would stand still for ever.
            self._consumer.resume([each for each in paused if each.partition not in self._full])
        if found is not None:
            self._stash.append(found)

    async def settle(self, settled: Sequence[tuple[Message, Verdict]]) -> Collection[Message]:
        """Notes what is settled; the next poll moves the offsets as far as they may go."""
        dead = [each for each in settled if each[1].action is Action.DEAD_LETTER]
        unsettled = []
        if dead:
            loop = asyncio.get_running_loop()
            told = await loop.run_in_executor(self._deliveries, self._dead_letters.bury, dead)
            for message, error in told.items():
                not_buried(message, error)
                unsettled.append(message)
        for message, verdict in settled:
            # Where its dead letter was not taken, it is as if nothing had been said: told again.
            if message not in unsettled:
                partition, found, _ = message.receipt
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
                try:
                    self._consumer.store_offsets(offsets=[stored])
                except KafkaException as error:
                    # Taken away just now: its messages come again, and are found to be done.
                    _logger.warning("an offset was not stored: %s", error)
                partition.stored_offset = offset

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
