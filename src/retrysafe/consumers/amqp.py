"""RabbitMQ by aio-pika; what becomes of its messages is in `amqp_queue`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from retrysafe.consumers.amqp_queue import (
    CONNECT_SECONDS,
    SETTLE_SECONDS,
    WAIT_SECONDS,
    AmqpQueue,
)
from retrysafe.consumers.broker import readable
from retrysafe.consumers.message import Message
from retrysafe.extras import missing_extra

try:
    import aio_pika
    from aio_pika.abc import (
        AbstractChannel,
        AbstractConnection,
        AbstractIncomingMessage,
        AbstractQueue,
    )
    from aio_pika.exceptions import ChannelNotFoundEntity
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "rabbitmq", error) from error


class RabbitQueue(AmqpQueue):
    """One queue, which must be there.

    Dead letters go to the queue `dead_letter` (default: `QUEUE.dead`). Retries wait in queues named
    `QUEUE.retry.MILLISECONDS`. All of them are made when they are first needed.
    """

    _channel: AbstractChannel | None
    _publishing: AbstractChannel | None

    def __init__(
        self, url: str, queue: str, *, dead_letter: str | None = None, group: str = ""
    ) -> None:
        super().__init__(url, queue, dead_letter=dead_letter, group=group)
        self._connection: AbstractConnection | None = None
        self._arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._consumed: AbstractQueue | None = None
        self._consumer_tag = ""

    async def open(self) -> None:
        """Connects; raises `InvalidInput` for a queue that is not there."""
        self._start()
        try:
            self._connection = await aio_pika.connect(self._server_url, timeout=CONNECT_SECONDS)
            await self._require_queue()
        except BaseException:
            await self.close()
            raise

    async def _is_there(self, name: str) -> bool:
        assert self._connection is not None  # Opened before.
        # On a channel of its own: the broker closes it if there is none.
        probe = await self._connection.channel()
        try:
            await probe.get_queue(name, ensure=True)
        except ChannelNotFoundEntity:
            return False
        await probe.close()
        return True

    async def receive(self, limit: int) -> list[Message]:
        """What has arrived, or the first that does; connects again where that is needed."""
        async with asyncio.timeout(CONNECT_SECONDS):
            if not await self._is_consuming():
                await self._consume(limit)
        # Together: a message is settled on the channel that brought it.
        channel, arrived = self._channel, self._arrived
        found: list[AbstractIncomingMessage] = []
        try:
            found.append(await asyncio.wait_for(arrived.get(), WAIT_SECONDS))
        except TimeoutError:
            return []
        while len(found) < limit and not arrived.empty():
            found.append(arrived.get_nowait())
        return readable(
            found,
            lambda each: self._message_of(
                each.body, each.headers or {}, each.message_id, (each, channel)
            ),
        )

    async def _is_consuming(self) -> bool:
        """False also when the broker has ended it, as when the queue is deleted or moves."""
        if self._channel is None or self._channel.is_closed:
            return False
        underlay: Any = await self._channel.get_underlay_channel()
        return self._consumer_tag in underlay.consumers

    async def _consume(self, limit: int) -> None:
        # Not the kind that mends itself: a message must be settled on the channel that brought it.
        # `is_closed` says only that this end has closed it.
        if self._connection is None or not self._connection.connected.is_set():
            self._connection = await aio_pika.connect(self._server_url, timeout=CONNECT_SECONDS)
            self._publishing = None
        if self._channel is None or self._channel.is_closed:
            # What came over the old channel is delivered again.
            self._arrived = asyncio.Queue()
            self._channel = await self._connection.channel()
        # As many as there can be room for, by the first call, when all of it is free: none waits
        # here that another consumer could handle.
        self._prefetch = max(self._prefetch, limit)
        await self._channel.set_qos(prefetch_count=self._prefetch)
        self._consumed = await self._channel.get_queue(self._name, ensure=False)
        self._consumer_tag = await self._consumed.consume(self._arrived.put)

    def stop(self) -> None:
        """Has the broker push no more; what it has pushed and nobody has taken goes back."""
        self._begin(self._stop())

    async def _stop(self) -> None:
        if self._consumed is None or not await self._is_consuming():
            return
        await self._consumed.cancel(self._consumer_tag, timeout=SETTLE_SECONDS)
        while not self._arrived.empty():
            await self._arrived.get_nowait().nack(requeue=True)

    async def _ack(self, message: Message) -> None:
        await message.receipt[0].ack()

    async def _requeue(self, message: Message) -> None:
        await message.receipt[0].nack(requeue=True)

    @staticmethod
    def _headers_of(message: Message) -> Mapping[str, Any]:
        return message.receipt[0].headers or {}

    async def _declare(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        channel = await self._publisher()
        await channel.declare_queue(name, durable=True, arguments=arguments)

    async def _publish_copy(self, message: Message, name: str, headers: dict[str, Any]) -> None:
        found: AbstractIncomingMessage = message.receipt[0]
        copy = aio_pika.Message(
            found.body,
            headers={name: _encodable(value) for name, value in headers.items()},
            message_id=found.message_id,
            content_type=found.content_type,
            content_encoding=found.content_encoding,
            correlation_id=found.correlation_id,
            reply_to=found.reply_to,
            type=found.type,
            app_id=found.app_id,
            timestamp=found.timestamp,
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        )
        channel = await self._publisher()
        await channel.default_exchange.publish(copy, name, mandatory=True)

    async def _publisher(self) -> AbstractChannel:
        async with self._making:
            if self._publishing is None or self._publishing.is_closed:
                assert self._connection is not None  # Messages came over it.
                self._publishing = await self._connection.channel(
                    publisher_confirms=True, on_return_raises=True
                )
                self._has_dead_letter_queue = False
            return self._publishing

    async def close(self) -> None:
        """Ends the connection; the broker gives what was not settled to others at once."""
        self._cancel_tasks()
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.close()


def _encodable(value: Any) -> Any:
    """A header's value as the library can send it again.

    It reads a text that is not UTF-8 as bytes, which it does not write: a good message with such a
    header could neither be retried nor dead-lettered.
    """
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, dict):
        return {name: _encodable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value
