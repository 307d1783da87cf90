"""RabbitMQ by aio-pika; what becomes of its messages is in `amqp_queue`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from retrysafe.consumers.amqp_frames import DELIVER, HEAD, HEADER, METHOD, mended
from retrysafe.consumers.amqp_queue import (
    CONNECT_SECONDS,
    SETTLE_SECONDS,
    WAIT_SECONDS,
    AmqpQueue,
)
from retrysafe.consumers.message import Message
from retrysafe.extras import missing_extra

try:
    import aio_pika
    import pamqp.frame
    from aio_pika.abc import (
        AbstractChannel,
        AbstractConnection,
        AbstractIncomingMessage,
        AbstractQueue,
    )
    from aio_pika.exceptions import ChannelNotFoundEntity
    from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "rabbitmq", error) from error


class _Frames:
    """The stream that the library reads, with frames mended that it could not read."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self._ready = b""
        # Whether the rest of a frame comes next, as it is.
        self._is_within = False

    def at_eof(self) -> bool:
        """Whether there is no more."""
        return not self._ready and self._stream.at_eof()

    async def read(self) -> bytes:
        """The rest."""
        ready, self._ready = self._ready, b""
        return ready + await self._stream.read()

    async def readexactly(self, count: int) -> bytes:
        """The next bytes, of one frame at most."""
        if not self._ready:
            if self._is_within:
                self._is_within = False
                return await self._stream.readexactly(count)
            await self._begin()
        given, self._ready = self._ready[:count], self._ready[count:]
        return given

    async def _begin(self) -> None:
        head = await self._stream.readexactly(HEAD.size)
        kind, _, size = HEAD.unpack(head)
        if kind not in (METHOD, HEADER):
            self._ready, self._is_within = head, True
            return
        frame = head + await self._stream.readexactly(size + 1)
        self._ready = frame
        if kind == HEADER or frame.startswith(DELIVER, HEAD.size):
            try:
                # The library does it once more: it has no place for another who does.
                pamqp.frame.unmarshal(frame)
            except Exception as error:
                self._ready = mended(frame, error)


class _Transport(TransportFactory):
    """The library's own connections, read through `_Frames`."""

    async def create(self, url: Any, **options: Any) -> Any:
        """Connects."""
        factory = TLSTransportFactory if url.scheme == "amqps" else TCPTransportFactory
        reader, writer = await factory().create(url, **options)
        return _Frames(reader), writer


class _Connection(aio_pika.Connection):
    def __init__(self, url: Any, **options: Any) -> None:
        super().__init__(url, **options)
        self.kwargs["transport_factory"] = _Transport()


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
            self._connection = await self._connected()
            await self._require_queue()
        except BaseException:
            await self.close()
            raise

    async def _connected(self) -> _Connection:
        return await aio_pika.connect(
            self._server_url, timeout=CONNECT_SECONDS, connection_class=_Connection
        )

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
        return [
            self._message_of(each.body, each.headers or {}, each.message_id, (each, channel))
            for each in found
        ]

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
            self._connection = await self._connected()
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

    def _frame_max(self) -> int:
        transport: Any = self._connection and self._connection.transport
        return int(transport.connection.connection_tune.frame_max) if transport else 0

    async def _declare(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        channel = await self._publisher()
        await channel.declare_queue(name, durable=True, arguments=arguments)

    @staticmethod
    def _copy(message: Message, headers: dict[str, Any]) -> aio_pika.Message:
        found: AbstractIncomingMessage = message.receipt[0]
        copy = aio_pika.Message(
            found.body,
            headers=_encodable(headers),
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
        # The library makes 0 of none, which takes a byte that may not be there.
        copy.priority = found.priority or None
        return copy

    @staticmethod
    def _size(copy: aio_pika.Message) -> int:
        return len(copy.properties.marshal())

    async def _publish(self, copy: aio_pika.Message, name: str) -> None:
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
