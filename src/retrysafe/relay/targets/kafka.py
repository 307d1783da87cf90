"""Kafka as a target: one record per entry, in its replicas before the entry counts as delivered.

`Kafka` is for the threads of a `Relay`, `AsyncKafka` for an `AsyncRelay`; both use one producer of
confluent-kafka, whose reports a thread of its own waits for.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from retrysafe import forks
from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed, InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.librdkafka import option_name
from retrysafe.relay.ports import Delivery

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "kafka", error) from error

_logger = logging.getLogger("retrysafe.relay")

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
# How often the thread looks whether it is needed any more.
_POLL_SECONDS: Final = 0.5
# librdkafka looks for records whose time is over once a second.
_GRACE_SECONDS: Final = 2.0
# Refusals of the record itself, which is the same at every try.
_FINAL: Final = frozenset(
    {
        *(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE),
        *(KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION),
    }
)


class _Reports:
    """A producer, and the thread that hears what became of its records."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.producer = Producer(config, logger=_logger)
        self.is_broken = False
        self._is_ending = False
        # A daemon: a broker that is away must not keep a process that wants to end.
        self._thread = threading.Thread(target=self._wait, name="retrysafe-kafka", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while not self._is_ending:
            self.producer.poll(_POLL_SECONDS)
        # Of what was given up.
        self.producer.poll(0)

    def end(self) -> None:
        """Gives up what is still queued; the thread ends after its last reports."""
        self.producer.purge()
        self._is_ending = True

    def join(self) -> None:
        """Waits for the thread."""
        self._thread.join(4 * _POLL_SECONDS)


class _KafkaTarget:
    """What both kinds share: how a delivery becomes a record, and a report a verdict."""

    def __init__(
        self,
        servers: str,
        *,
        topic: str | None = None,
        prefix: str = "",
        timeout: timedelta = timedelta(seconds=10),
        **config: Any,
    ) -> None:
        """Records go to `topic`, else to the entry's own topic behind `prefix`.

        Further options go to librdkafka, with underscores for dots. `timeout` limits a delivery:
        what is not in its replicas by then is given up, and sent no more. One that was on its way
        then may still arrive, next to the copy of the next try. Raises `InvalidInput` for a name
        that no topic can have.
        """
        if not servers:
            raise InvalidInput("which brokers? Name them, such as Kafka('127.0.0.1:9092')")
        for name in (topic, prefix):
            if name and not _TOPIC.fullmatch(name):
                raise InvalidInput(f"a topic has letters, digits and the signs . _ -, got {name!r}")
        self._topic = topic
        self._prefix = prefix
        self._timeout_seconds = timeout.total_seconds()
        self._config = {
            "bootstrap.servers": servers,
            # A record that librdkafka sends again is written once, in its order, to all replicas.
            "enable.idempotence": True,
            "message.timeout.ms": max(1, int(self._timeout_seconds * 1000)),
            # Producers in Java choose the same partition for an aggregate.
            "partitioner": "murmur2_random",
            "linger.ms": 0,
            **{option_name(name): value for name, value in config.items()},
        }
        self._lock = threading.Lock()
        self._reports: _Reports | None = None
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Makes a producer of its own: its parent's has no threads here, and sends nothing."""
        self._lock = threading.Lock()
        if self._reports is not None:
            forks.park(self._reports)
            self._reports = None

    def _opened(self) -> _Reports:
        forks.refresh_if_stale()
        with self._lock:
            if self._reports is not None and self._reports.is_broken:
                self._reports.end()
                self._reports = None
            if self._reports is None:
                self._reports = _Reports(self._config)
            return self._reports

    def _ended(self) -> _Reports | None:
        """Ends the producer; its thread, to be waited for."""
        with self._lock:
            reports, self._reports = self._reports, None
        if reports is not None:
            reports.end()
        return reports

    def _send(self, delivery: Delivery) -> Future[None]:
        """Queues a record; the future ends with the brokers' word about it."""
        topic = self._topic or f"{self._prefix}{delivery.topic}"
        if not _TOPIC.fullmatch(topic):
            raise DeliveryFailed(
                f"no topic of Kafka can be named {topic!r}: send all entries to one topic with "
                "topic=…, or stage them under names of letters, digits and . _ -",
                key=delivery.key,
                is_final=True,
            )
        headers = {
            "Idempotency-Key": delivery.key,
            "Content-Type": delivery.content_type,
            "Retrysafe-Topic": delivery.topic,
            "Retrysafe-Attempt": str(delivery.attempt),
        }
        reports = self._opened()
        ended: Future[None] = Future()

        def told(error: KafkaError | None, _: Any) -> None:
            if not ended.set_running_or_notify_cancel():
                return  # Nobody waits any more.
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(_judged(error, reports, delivery.key))

        # One key, one partition: that is the order of an aggregate.
        key = None if delivery.aggregate is None else delivery.aggregate.encode()
        try:
            reports.producer.produce(
                topic, delivery.body, key, headers=list(headers.items()), on_delivery=told
            )
        except KafkaException as raised:
            raise _judged(raised.args[0], reports, delivery.key) from raised
        return ended


def _judged(error: KafkaError, reports: _Reports, key: str) -> DeliveryFailed:
    """What to raise for a report: whether another try can help."""
    if error.fatal():
        # Such a producer takes no more; the next delivery makes another one.
        reports.is_broken = True
    return DeliveryFailed(
        f"Kafka did not take the record: {error.name()}: {error.str()}",
        key=key,
        is_final=error.code() in _FINAL,
    )


class Kafka(_KafkaTarget):
    """Produces entries to Kafka, for `Relay`; the record's key is the aggregate.

    The entry's key is the header `Idempotency-Key`.
    """

    waits = Waits.BLOCKING

    async def deliver(self, delivery: Delivery) -> None:
        """Produces one entry; raises `DeliveryFailed`, and `TimeoutError` without a report."""
        self._send(delivery).result(self._timeout_seconds + _GRACE_SECONDS)

    async def close(self) -> None:
        """Ends the producer; the next delivery makes a new one."""
        reports = self._ended()
        if reports is not None:
            reports.join()


class AsyncKafka(_KafkaTarget):
    """Produces entries to Kafka, for `AsyncRelay`; takes what `Kafka` takes."""

    waits = Waits.SUSPENDING

    async def deliver(self, delivery: Delivery) -> None:
        """Produces one entry; raises `DeliveryFailed`, and `TimeoutError` without a report."""
        sent = self._send(delivery)
        async with asyncio.timeout(self._timeout_seconds + _GRACE_SECONDS):
            await asyncio.wrap_future(sent)

    async def close(self) -> None:
        """Ends the producer; the next delivery makes a new one."""
        reports = self._ended()
        if reports is not None:
            await asyncio.to_thread(reports.join)
