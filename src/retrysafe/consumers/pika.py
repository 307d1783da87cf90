"""RabbitMQ by pika, in the consumer's own event loop.

What becomes of messages is in `amqp_queue`. Not by pika's `BlockingConnection`: one confirm that
does not come would hold up heartbeats, acks and messages of the whole connection. Here the loop
serves them, whatever the handlers do in their threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from retrysafe.consumers.amqp_frames import HEAD, mended
from retrysafe.consumers.amqp_queue import (
    CONNECT_SECONDS,
    SETTLE_SECONDS,
    WAIT_SECONDS,
    AmqpQueue,
)
from retrysafe.consumers.message import Message
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

try:
    import pika
    from pika.adapters.asyncio_connection import AsyncioConnection
    from pika.exceptions import AMQPError, ChannelClosedByBroker
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "pika", error) from error

_NOT_FOUND = 404
_PERSISTENT = 2
# A call of pika that tells of its end by a callback.
Call = Callable[..., Any]


class _Connection(AsyncioConnection):  # type: ignore[misc]  # pika has no types.
    """A connection that survives frames which pika cannot read."""

    def _read_frame(self) -> Any:
        try:
            length, frame = super()._read_frame()
            if isinstance(frame, pika.frame.Header):
                _require_text(frame.properties)
            return length, frame
        except Exception as error:
            _, _, size = HEAD.unpack_from(self._frame_buffer)
            length = HEAD.size + size + 1
            _, frame = pika.frame.decode_frame(mended(self._frame_buffer[:length], error))
            return length, frame


def _require_text(properties: Any) -> None:
    """Raises for names that are not UTF-8, which pika leaves as bytes.

    Copies would carry them on, to readers of dead letters whose library gives up on them.
    """
    if any(isinstance(value, bytes) for value in vars(properties).values()):
        raise ValueError("a property of the message is not UTF-8")
    tables = [properties.headers or {}]
    while tables:
        table = tables.pop()
        values = table.values() if isinstance(table, dict) else table
        if isinstance(table, dict) and any(isinstance(name, bytes) for name in table):
            raise ValueError("the name of a header is not UTF-8")
        tables += [value for value in values if isinstance(value, dict | list)]


class _Channel:
    """A channel of pika whose calls can be awaited; each fails when the channel closes."""

    def __init__(self) -> None:
        self.raw: Any = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._reason: BaseException | None = None

    @classmethod
    async def opened(cls, connection: AsyncioConnection) -> _Channel:
        """A new channel of a connection."""
        made = cls()
        opening = made._begun()
        made.raw = connection.channel(on_open_callback=lambda raw: _end(opening, raw))
        made.raw.add_on_close_callback(made._closed)
        try:
            await opening
        except BaseException:
            made.drop()
            raise
        return made

    @property
    def is_closed(self) -> bool:
        """Whether the broker, or this side, has closed it."""
        return self._reason is not None or not self.raw.is_open

    def _begun(self) -> asyncio.Future[Any]:
        begun: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(begun)
        begun.add_done_callback(self._waiting.discard)
        return begun

    def _closed(self, _: Any, reason: BaseException) -> None:
        self._reason = reason
        for each in list(self._waiting):
            if not each.done():
                each.set_exception(reason)

    async def call(self, method: str, *given: Any, **options: Any) -> Any:
        """Calls a method of pika and waits for the broker's answer."""
        answer = self._begun()
        try:
            getattr(self.raw, method)(*given, callback=lambda frame: _end(answer, frame), **options)
            return await answer
        finally:
            # Nobody waits for it any more, should pika have raised.
            answer.cancel()

    def drop(self) -> None:
        """Closes it without waiting, also one that is not open yet: nobody else would."""
        with suppress(AMQPError):
            self.raw.close()

    async def close(self) -> None:
        """Closes it; what it brought and was not settled is delivered again."""
        if not self.is_closed:
            closed = self._begun()
            self.raw.close()
            with suppress(AMQPError):
                await closed


class _Publisher(_Channel):
    """A channel whose publishes the broker confirms."""

    def __init__(self) -> None:
        super().__init__()
        self._published = 0
        # By number, with where it goes.
        self._unconfirmed: dict[int, tuple[asyncio.Future[Any], str]] = {}

    async def confirm(self) -> None:
        """Has the broker confirm what is published from now on."""
        self.raw.add_on_return_callback(self._returned)
        await self.call("confirm_delivery", self._told)

    def _told(self, frame: Any) -> None:
        number, is_taken = frame.method.delivery_tag, isinstance(frame.method, pika.spec.Basic.Ack)
        numbers = [number]
        if frame.method.multiple:
            numbers = [each for each in self._unconfirmed if each <= number]
        for each in numbers:
            if each in self._unconfirmed:
                told, name = self._unconfirmed.pop(each)
                if is_taken:
                    _end(told, None)
                else:
                    _fail(told, ConnectionError(f"the broker refused a message for {name}"))

    def _returned(self, _: Any, method: Any, *__: Any) -> None:
        """Fails all that goes there: the broker does not say which one it has returned.

        Its ack follows, and must not be taken for a copy that is safe.
        """
        for told, name in self._unconfirmed.values():
            if name == method.routing_key:
                _fail(told, ConnectionError(f"there is no queue {name}"))

    async def publish(self, body: bytes, name: str, properties: Any) -> None:
        """Publishes to a queue; raises unless the broker has it."""
        told = self._begun()
        self._published += 1
        number = self._published
        self._unconfirmed[number] = (told, name)
        try:
            self._send(name, body, properties)
            await told
        finally:
            told.cancel()
            self._unconfirmed.pop(number, None)

    def _send(self, name: str, body: bytes, properties: Any) -> None:
        try:
            self.raw.basic_publish("", name, body, properties, mandatory=True)
        except Exception:
            # Perhaps the broker has not counted it, and would confirm all others under numbers
            # that are not theirs: this channel is of no use any more.
            if self.raw.is_open:
                self.raw.close()
            raise


def _end(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class PikaQueue(AmqpQueue):
    """One queue, which must be there; as `RabbitQueue`, for those who have pika."""

    _channel: _Channel | None
    _publishing: _Publisher | None

    def __init__(
        self, url: str, queue: str, *, dead_letter: str | None = None, group: str = ""
    ) -> None:
        super().__init__(url, queue, dead_letter=dead_letter, group=group)
        try:
            self._parameters = pika.URLParameters(url)
        except ValueError as error:
            raise InvalidInput(f"the URL of the broker cannot be read: {error}") from None
        self._connection: AsyncioConnection | None = None
        self._gone: asyncio.Future[None] | None = None
        self._arrived: asyncio.Queue[tuple[Any, Any, bytes]] = asyncio.Queue()
        self._consumer_tag = ""

    # The connection.

    def _start(self) -> None:
        super()._start()
        self._connecting = asyncio.Lock()

    async def open(self) -> None:
        """Connects; raises `InvalidInput` for a queue that is not there."""
        self._start()
        try:
            await self._connect()
            await self._require_queue()
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> AsyncioConnection:
        # One at a time: of two connections the first would stay open, and nobody would know it.
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                self._connection, self._gone = await self._connected()
            return self._connection

    async def _connected(self) -> tuple[AsyncioConnection, asyncio.Future[None]]:
        """A new connection, and what ends with it."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        gone: asyncio.Future[None] = loop.create_future()
        connection = _Connection(
            self._parameters,
            on_open_callback=lambda _: _end(opened, None),
            on_open_error_callback=lambda _, error: _fail(
                opened, ConnectionError(f"no broker answers there: {error!r}")
            ),
            on_close_callback=lambda *_: _end(gone, None),
            custom_ioloop=loop,
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await opened
        except BaseException:
            with suppress(AMQPError):
                connection.close()
            raise
        return connection, gone

    async def _is_there(self, name: str) -> bool:
        # On a channel of its own: the broker closes it if there is none.
        probe = await _Channel.opened(await self._connect())
        try:
            await probe.call("queue_declare", name, passive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code == _NOT_FOUND:
                return False
            raise
        except BaseException:
            probe.drop()
            raise
        await probe.close()
        return True

    # Messages.

    async def receive(self, limit: int) -> list[Message]:
        """What has arrived, or the first that does; connects again where that is needed."""
        async with asyncio.timeout(CONNECT_SECONDS):
            if not self._is_consuming():
                await self._consume(limit)
        # Together: a message is settled on the channel that brought it.
        channel, arrived = self._channel, self._arrived
        try:
            found = [await asyncio.wait_for(arrived.get(), WAIT_SECONDS)]
        except TimeoutError:
            return []
        while len(found) < limit and not arrived.empty():
            found.append(arrived.get_nowait())
        return [
            self._message_of(each[2], each[1].headers or {}, each[1].message_id, (each, channel))
            for each in found
        ]

    def _is_consuming(self) -> bool:
        """False also when the broker has ended it, as when the queue is deleted or moves."""
        channel = self._channel
        return (
            channel is not None
            and not channel.is_closed
            and self._consumer_tag in channel.raw.consumer_tags
        )

    async def _consume(self, limit: int) -> None:
        connection = await self._connect()
        if self._channel is None or self._channel.is_closed:
            # What came over the old channel is delivered again.
            self._channel, self._arrived = await _Channel.opened(connection), asyncio.Queue()
        channel = self._channel
        # As many as there can be room for, by the first call, when all of it is free: none waits
        # here that another consumer could handle.
        self._prefetch = max(self._prefetch, limit)
        await channel.call("basic_qos", prefetch_count=self._prefetch)
        arrived = self._arrived

        def put(_: Any, method: Any, properties: Any, body: bytes) -> None:
            arrived.put_nowait((method, properties, body))

        answer = await channel.call("basic_consume", self._name, put)
        self._consumer_tag = answer.method.consumer_tag

    def stop(self) -> None:
        """Has the broker push no more; what it has pushed and nobody has taken goes back."""
        self._begin(self._stop())

    async def _stop(self) -> None:
        channel, arrived = self._channel, self._arrived
        if channel is None or not self._is_consuming():
            return
        async with asyncio.timeout(SETTLE_SECONDS):
            await channel.call("basic_cancel", self._consumer_tag)
        while not arrived.empty():
            method, _, _ = arrived.get_nowait()
            channel.raw.basic_nack(method.delivery_tag, requeue=True)

    # Verdicts.

    async def _ack(self, message: Message) -> None:
        (method, _, _), channel = message.receipt
        channel.raw.basic_ack(method.delivery_tag)

    async def _requeue(self, message: Message) -> None:
        (method, _, _), channel = message.receipt
        channel.raw.basic_nack(method.delivery_tag, requeue=True)

    @staticmethod
    def _headers_of(message: Message) -> Mapping[str, Any]:
        return message.receipt[0][1].headers or {}

    def _frame_max(self) -> int:
        return 0 if self._connection is None else int(self._connection.params.frame_max)

    async def _declare(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        channel = await self._publisher()
        await channel.call("queue_declare", name, durable=True, arguments=arguments)

    @staticmethod
    def _copy(message: Message, headers: dict[str, Any]) -> tuple[Any, bytes]:
        _, found, body = message.receipt[0]
        copy = pika.BasicProperties(
            headers=headers,
            message_id=found.message_id,
            content_type=found.content_type,
            content_encoding=found.content_encoding,
            correlation_id=found.correlation_id,
            reply_to=found.reply_to,
            type=found.type,
            app_id=found.app_id,
            timestamp=found.timestamp,
            priority=found.priority,
            delivery_mode=_PERSISTENT,
        )
        return copy, body

    @staticmethod
    def _size(copy: tuple[Any, bytes]) -> int:
        return sum(map(len, copy[0].encode()))

    async def _publish(self, copy: tuple[Any, bytes], name: str) -> None:
        properties, body = copy
        channel = await self._publisher()
        await channel.publish(body, name, properties)

    async def _publisher(self) -> _Publisher:
        async with self._making:
            if self._publishing is None or self._publishing.is_closed:
                made = await _Publisher.opened(await self._connect())
                assert isinstance(made, _Publisher)  # By the class that opened it.
                try:
                    await made.confirm()
                except BaseException:
                    made.drop()
                    raise
                self._publishing = made
                self._has_dead_letter_queue = False
            return self._publishing

    async def close(self) -> None:
        """Ends the connection; the broker gives what was not settled to others at once."""
        self._cancel_tasks()
        # After one who connects just now: nobody else would close that connection.
        async with self._connecting:
            connection, self._connection = self._connection, None
        if connection is not None and self._gone is not None:
            if connection.is_open:
                connection.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._gone
