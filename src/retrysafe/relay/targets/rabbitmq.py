"""RabbitMQ as a target: one persistent message per entry, confirmed by the broker."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Final

from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed
from retrysafe.extras import missing_extra
from retrysafe.relay.ports import Delivery

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
    from aio_pika.exceptions import DeliveryError
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "rabbitmq", error) from error

_CONNECT_SECONDS: Final = 10.0


class RabbitMQ:
    """Publishes entries to an exchange, for `AsyncRelay`; the routing key is the topic.

    The key travels as the message's id. A message that no queue takes is not delivered: it is
    tried again, and dead in the end, rather than dropped by the broker.
    """

    waits = Waits.SUSPENDING

    def __init__(
        self,
        url: str,
        *,
        exchange: str = "",
        timeout: timedelta = timedelta(seconds=10),
    ) -> None:
        """`exchange` must exist; the default one leads to the queue that the topic names."""
        self._url = url
        self._exchange_name = exchange
        self._timeout_seconds = timeout.total_seconds()
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._exchange: AbstractExchange | None = None
        self._opening: asyncio.Lock | None = None

    async def deliver(self, delivery: Delivery) -> None:
        """Publishes one entry and waits for the broker's confirm; raises what aio-pika raises."""
        headers: dict[str, Any] = {
            "Idempotency-Key": delivery.key,
            "retrysafe-attempt": delivery.attempt,
        }
        if delivery.aggregate is not None:
            headers["retrysafe-aggregate"] = delivery.aggregate
        message = aio_pika.Message(
            delivery.body,
            message_id=delivery.key,
            content_type=delivery.content_type,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            timestamp=delivery.staged_at,
            type=delivery.topic,
            headers=headers,
        )
        exchange = await self._opened()
        try:
            await exchange.publish(
                message, delivery.topic, mandatory=True, timeout=self._timeout_seconds
            )
        except DeliveryError as error:
            raise DeliveryFailed(
                f"no queue of exchange {self._exchange_name!r} takes {delivery.topic!r}, or the "
                f"broker refused it: {error}",
                key=delivery.key,
            ) from error

    async def _opened(self) -> AbstractExchange:
        """The exchange on a channel that is open; deliveries that find none open one together."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._exchange is not None and self._channel is not None:
                if not self._channel.is_closed:
                    return self._exchange
                await self.close()
            # Not the kind that mends itself: it would hold publishes back while the broker is
            # away, and the relay knows better when to try again.
            self._connection = await aio_pika.connect(self._url, timeout=_CONNECT_SECONDS)
            self._channel = await self._connection.channel(
                publisher_confirms=True, on_return_raises=True
            )
            if self._exchange_name:
                self._exchange = await self._channel.get_exchange(self._exchange_name)
            else:
                self._exchange = self._channel.default_exchange
            return self._exchange

    async def close(self) -> None:
        """Closes the connection; the next delivery opens a new one."""
        connection, self._connection = self._connection, None
        self._channel = self._exchange = None
        if connection is not None:
            await connection.close()
