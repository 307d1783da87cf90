"""Dead letters of Kafka: copies with their reasons, in a topic that is made for the first one.

Owns the producer, which is used in one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Verdict
from retrysafe.extras import missing_extra

try:
    import confluent_kafka
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import (  # type: ignore[attr-defined]  # Public by its manual.
        AdminClient,
        NewTopic,
    )
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "kafka", error) from error

_logger = logging.getLogger("retrysafe.consumers")

_OPEN_SECONDS: Final = 10.0
# Below what the loop gives to one batch of verdicts.
_DELIVER_SECONDS: Final = 20.0
_REASON: Final = "retrysafe-reason"
_LARGEST_BYTES: Final = 100 * 1024 * 1024


class DeadLetters:
    """Where messages go that nobody can handle."""

    def __init__(self, cluster: Mapping[str, Any], topic: str) -> None:
        """`cluster` is how every client reaches the brokers, and as whom."""
        self._cluster = dict(cluster)
        self._topic = topic
        self._producer: Any = None

    def bury(self, dead: Sequence[tuple[Message, Verdict]]) -> dict[Message, Exception]:
        """Sends copies and waits until the brokers have them; returns which they do not have."""
        lacking: dict[Message, Exception] = {}
        try:
            producer = self._opened()
        except Exception as error:
            return dict.fromkeys((message for message, _ in dead), error)
        for message, verdict in dead:
            lacking[message] = ConnectionError("the brokers did not answer")
            try:
                self._send(producer, message, verdict.reason, lacking)
            except Exception as error:
                lacking[message] = error
        producer.flush(_DELIVER_SECONDS)
        return lacking

    def _send(
        self, producer: Any, message: Message, reason: str, lacking: dict[Message, Exception]
    ) -> None:
        def told(error: Any, _: Any) -> None:
            if error is None:
                lacking.pop(message, None)
            else:
                lacking[message] = KafkaException(error)

        _, found, sent = message.receipt
        headers = [*sent, (_REASON, reason.encode())]
        producer.produce(self._topic, found.value(), found.key(), headers=headers, on_delivery=told)

    def _opened(self) -> Any:
        if self._producer is None:
            self._make_topic()
            config = {
                **self._cluster,
                "enable.idempotence": True,
                # The broker decides what is too large: it had no fault with the message itself.
                "message.max.bytes": _LARGEST_BYTES,
                # Within the flush: what is not there by then is sent again with its verdict.
                "message.timeout.ms": int(_DELIVER_SECONDS * 900),
            }
            self._producer = confluent_kafka.Producer(config, logger=_logger)
        return self._producer

    def _make_topic(self) -> None:
        admin = AdminClient(self._cluster)
        if self._topic in admin.list_topics(timeout=_OPEN_SECONDS).topics:
            return
        made = admin.create_topics([NewTopic(self._topic, 1)])[self._topic]
        try:
            made.result(timeout=_OPEN_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise
