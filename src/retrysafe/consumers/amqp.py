"""RabbitMQ: manual acks, delayed retries through queues of their own, dead letters with reasons.

Owns how AMQP carries verdicts out. The broker has no deadline that could be prolonged: a message is
this consumer's as long as its channel is open, and goes to another one when it closes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Final

from retrysafe.consumers.broker import Buffer, not_buried
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

try:
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
    from aio_pika.exceptions import ChannelNotFoundEntity
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "rabbitmq", error) from error

_CONNECT_SECONDS: Final = 10.0
_PUBLISH_SECONDS: Final = 10.0
# How long `receive` waits for a message; a stop waits for no longer than this.
_WAIT_SECONDS: Final = 1.0
# How often is looked whether the channel is still open.
_LOOK_SECONDS: Final = 2.0
# Delays are rounded up to one of few: each has a queue, which holds its messages in their order.
_SHORTEST_DELAY: Final = timedelta(milliseconds=125)
_LONGEST_DOUBLING: Final = 20
# A queue of delayed messages that nobody uses is removed by the broker.
_IDLE_MS: Final = 600_000
_DELIVERIES: Final = "retrysafe-deliveries"
_REASON: Final = "retrysafe-reason"


class RabbitQueue:
    """One queue, which must be there.

    Dead letters go to the queue `dead_letter` (default: `QUEUE.dead`). Retries wait in queues named
    `QUEUE.retry.MILLISECONDS`. All of them are made when they are first needed.
    """

    gives_back = True
    deadline_seconds = math.inf
    renew_seconds = _LOOK_SECONDS

    def __init__(
        self, url: str, queue: str, *, dead_letter: str | None = None, group: str = ""
    ) -> None:
        if not queue:
            raise InvalidInput("which queue? Name it, such as RabbitQueue(url, 'payments')")
        self._server_url = url
        self._name = queue
        self._dead_letter = dead_letter or f"{queue}.dead"
        self.queue, self.group = f"amqp:{queue}", group
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._publishing: AbstractChannel | None = None
        self._arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._declared: set[str] = set()
        self._prefetch = 0

    def bind(self, buffer: Buffer) -> None:
        """Nothing is taken back from a consumer here, but by closing its channel."""

    async def open(self) -> None:
        """Connects; raises `InvalidInput` for a queue that is not there."""
        try:
            self._connection = await aio_pika.connect(self._server_url, timeout=_CONNECT_SECONDS)
            probe = await self._connection.channel()
            try:
                await probe.get_queue(self._name, ensure=True)
            except ChannelNotFoundEntity as error:
                raise InvalidInput(f"there is no queue {self._name} on this server") from error
        except BaseException:
            await self.close()
            raise

    async def redelivery_window(self) -> timedelta | None:
        """A queue keeps messages until they are consumed."""
        return None

    async def receive(self, limit: int) -> list[Message]:
        """What has arrived, or the first that does; connects again where that is needed."""
        if self._channel is None or self._channel.is_closed:
            await self._consume(limit)
        found: list[AbstractIncomingMessage] = []
        try:
            found.append(await asyncio.wait_for(self._arrived.get(), _WAIT_SECONDS))
        except TimeoutError:
            return []
        while len(found) < limit and not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return [self._message(each) for each in found]

    async def _consume(self, limit: int) -> None:
        # Not the kind that mends itself: a message must be settled on the channel that brought it.
        if self._connection is None or self._connection.is_closed:
            self._connection = await aio_pika.connect(self._server_url, timeout=_CONNECT_SECONDS)
        # What came over the old channel is delivered again.
        self._arrived = asyncio.Queue()
        self._channel = await self._connection.channel()
        self._publishing = None
        # As many as there can be room for, by the first call, when all of it is free: none waits
        # here that another consumer could handle.
        self._prefetch = max(self._prefetch, limit)
        await self._channel.set_qos(prefetch_count=self._prefetch)
        queue = await self._channel.get_queue(self._name, ensure=False)
        await queue.consume(self._arrived.put)

    def _message(self, found: AbstractIncomingMessage) -> Message:
        headers = {name: _text(value) for name, value in (found.headers or {}).items()}
        # Ours counts retries, the broker's what was requeued, by quorum queues only.
        counted = (headers.get(name, "0") for name in (_DELIVERIES, "x-delivery-count"))
        before = sum(int(each) for each in counted if each.isdecimal())
        return Message(
            found.body,
            headers,
            identity=found.message_id,
            deliveries=before + 1,
            receipt=(found, self._channel),
        )

    async def extend(self, messages: Sequence[Message]) -> Collection[Message]:
        """Nothing to prolong; what came over a channel that is closed is lost."""
        return [each for each in messages if each.receipt[1].is_closed]

    async def settle(self, settled: Sequence[tuple[Message, Verdict]]) -> Collection[Message]:
        """Acks what is final; what comes back later is first safe in the queue of its delay."""
        unsettled: list[Message] = []
        for message, verdict in settled:
            found, channel = message.receipt
            if channel.is_closed:
                unsettled.append(message)
            elif verdict.action is Action.DEAD_LETTER or (verdict.delay and not verdict.is_final):
                try:
                    await self._move(message, verdict)
                except Exception as error:
                    not_buried(message, error)
                    unsettled.append(message)
                    if not channel.is_closed:
                        await found.nack(requeue=True)
                else:
                    await found.ack()
            elif verdict.is_final:
                await found.ack()
            else:
                await found.nack(requeue=True)
        return unsettled

    # Dead letters, and messages that come back later.

    async def _move(self, message: Message, verdict: Verdict) -> None:
        """Publishes a copy where it belongs, and waits for the broker's confirm."""
        found: AbstractIncomingMessage = message.receipt[0]
        headers: dict[str, Any] = dict(found.headers or {})
        if verdict.action is Action.DEAD_LETTER:
            name, arguments = self._dead_letter, dict[str, Any]()
            headers[_REASON] = verdict.reason
        else:
            name, arguments = self._waiting_room(verdict.delay)
            headers[_DELIVERIES] = message.deliveries
        copy = aio_pika.Message(
            found.body,
            headers=headers,
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
        if name not in self._declared:
            await channel.declare_queue(name, durable=True, arguments=arguments)
            # A queue of delayed messages may have been removed since: it is declared each time.
            if not arguments:
                self._declared.add(name)
        exchange = channel.default_exchange
        await exchange.publish(copy, name, mandatory=True, timeout=_PUBLISH_SECONDS)

    def _waiting_room(self, delay: timedelta) -> tuple[str, dict[str, Any]]:
        """The queue in which messages wait that long; then they go back to where they came from."""
        doublings = math.ceil(math.log2(max(1.0, delay / _SHORTEST_DELAY)))
        wait_ms = 125 * 2 ** min(doublings, _LONGEST_DOUBLING)
        arguments: dict[str, Any] = {
            "x-message-ttl": wait_ms,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self._name,
            "x-expires": wait_ms + _IDLE_MS,
        }
        return f"{self._name}.retry.{wait_ms}", arguments

    async def _publisher(self) -> AbstractChannel:
        if self._publishing is None or self._publishing.is_closed:
            assert self._connection is not None  # Messages came over it.
            self._publishing = await self._connection.channel(
                publisher_confirms=True, on_return_raises=True
            )
            self._declared.clear()
        return self._publishing

    async def close(self) -> None:
        """Ends the connection; the broker gives what was not settled to others at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
