"""RabbitMQ as a target: one persistent message per entry, confirmed by the broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed
from retrysafe.extras import missing_extra
from retrysafe.relay.ports import Delivery
from retrysafe.relay.targets.of_loop import OfLoop

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
    from aio_pika.exceptions import DeliveryError
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "rabbitmq", error) from error

_CONNECT_SECONDS: Final = 10.0


class _Opened(NamedTuple):
    connection: AbstractConnection
    channel: AbstractChannel
    exchange: AbstractExchange


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
        self._open: OfLoop[_Opened] = OfLoop()

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
        async with self._open.opening():
            if self._open.held is not None:
                if not self._open.held.channel.is_closed:
                    return self._open.held.exchange
                await self.close()
            # Not the kind that mends itself: it would hold publishes back while the broker is
            # away, and the relay knows better when to try again.
            connection = await aio_pika.connect(self._url, timeout=_CONNECT_SECONDS)
            try:
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                exchange: AbstractExchange = channel.default_exchange
                if self._exchange_name:
                    exchange = await channel.get_exchange(self._exchange_name)
            except BaseException:
                await connection.close()
                raise
            self._open.held = _Opened(connection, channel, exchange)
            return exchange

    async def close(self) -> None:
        """Closes the connection; the next delivery opens a new one."""
        opened = self._open.taken()
        if opened is not None:
            await opened.connection.close()
