"""RabbitMQ: manual acks, delayed retries through queues of their own, dead letters with reasons.

Owns how AMQP carries verdicts out. The broker has no deadline that could be prolonged: a message is
this consumer's as long as its channel is open, and goes to another one when it closes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from retrysafe.consumers.broker import Buffer, not_buried
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput
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

_CONNECT_SECONDS: Final = 10.0
# For everything that it takes to settle one message, or to tell the broker of a stop.
_SETTLE_SECONDS: Final = 10.0
# How long a message stays away whose copy was not taken, and between two tries to send it there.
_NOT_TAKEN_SECONDS: Final = 30.0
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
# How often a quorum queue has requeued a message; a copy is a new message.
_REQUEUED: Final = "x-delivery-count"
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
        # A name is one queue in each virtual host.
        host = unquote(urlsplit(url).path[1:]) or "/"
        scheme = "amqp" if host == "/" else f"amqp@{quote(host, safe='')}"
        self.queue, self.group = f"{scheme}:{queue}", group
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._publishing: AbstractChannel | None = None
        self._arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._consumed: AbstractQueue | None = None
        self._consumer_tag = ""
        self._opening = asyncio.Lock()
        self._has_dead_letter_queue = False
        self._prefetch = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def bind(self, buffer: Buffer) -> None:
        """Nothing is taken back from a consumer here, but by closing its channel."""

    async def open(self) -> None:
        """Connects; raises `InvalidInput` for a queue that is not there."""
        try:
            self._connection = await aio_pika.connect(self._server_url, timeout=_CONNECT_SECONDS)
            async with asyncio.timeout(_CONNECT_SECONDS):
                is_there = await self._is_there(self._name)
            if not is_there:
                raise InvalidInput(f"there is no queue {self._name} on this server")
        except BaseException:
            await self.close()
            raise

    async def _is_there(self, name: str) -> bool:
        """Whether there is a queue of that name, whatever its arguments are."""
        assert self._connection is not None  # Opened before.
        # On a channel of its own: the broker closes it if there is none.
        probe = await self._connection.channel()
        try:
            await probe.get_queue(name, ensure=True)
        except ChannelNotFoundEntity:
            return False
        await probe.close()
        return True

    async def redelivery_window(self) -> timedelta | None:
        """A queue keeps messages until they are consumed."""
        return None

    async def receive(self, limit: int) -> list[Message]:
        """What has arrived, or the first that does; connects again where that is needed."""
        async with asyncio.timeout(_CONNECT_SECONDS):
            if not await self._is_consuming():
                await self._consume(limit)
        found: list[AbstractIncomingMessage] = []
        try:
            found.append(await asyncio.wait_for(self._arrived.get(), _WAIT_SECONDS))
        except TimeoutError:
            return []
        while len(found) < limit and not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return [self._message(each) for each in found]

    async def _is_consuming(self) -> bool:
        """False also when the broker has ended it, as when the queue is deleted or moves."""
        if self._channel is None or self._channel.is_closed:
            return False
        underlay: Any = await self._channel.get_underlay_channel()
        return self._consumer_tag in underlay.consumers

    async def _consume(self, limit: int) -> None:
        # Not the kind that mends itself: a message must be settled on the channel that brought it.
        if self._connection is None or self._connection.is_closed:
            self._connection = await aio_pika.connect(self._server_url, timeout=_CONNECT_SECONDS)
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
        await self._consumed.cancel(self._consumer_tag, timeout=_SETTLE_SECONDS)
        while not self._arrived.empty():
            await self._arrived.get_nowait().nack(requeue=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _message(self, found: AbstractIncomingMessage) -> Message:
        headers = {name: _text(value) for name, value in (found.headers or {}).items()}
        # Ours counts retries, the broker's what was requeued, by quorum queues only.
        counted = (headers.get(name, "0") for name in (_DELIVERIES, _REQUEUED))
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
        # Together: one that the broker does not take holds up no other.
        is_settled = await asyncio.gather(*(self._settle(*each) for each in settled))
        return [each for (each, _), is_done in zip(settled, is_settled, strict=True) if not is_done]

    async def _settle(self, message: Message, verdict: Verdict) -> bool:
        if message.receipt[1].is_closed:
            return False
        try:
            await self._carry_out(message, verdict)
        except Exception as error:
            not_buried(message, error)
            self._has_dead_letter_queue = False
            self._begin(self._put_off(message))
            return False
        return True

    async def _carry_out(self, message: Message, verdict: Verdict) -> None:
        found: AbstractIncomingMessage = message.receipt[0]
        is_final = verdict.is_final
        async with asyncio.timeout(_SETTLE_SECONDS):
            if verdict.action is Action.DEAD_LETTER or (verdict.delay and not is_final):
                await self._move(message, verdict)
                is_final = True
            if is_final:
                await found.ack()
            else:
                await found.nack(requeue=True)

    async def _put_off(self, message: Message) -> None:
        """Lets a message that could not be settled come again later, and never at once.

        Requeued, it would be back in a moment, and a quorum queue drops what comes back too often.
        """
        later = Verdict(Action.RETRY, "", timedelta(seconds=_NOT_TAKEN_SECONDS))
        while not message.receipt[1].is_closed:
            try:
                await self._carry_out(message, later)
            except Exception as error:
                not_buried(message, error)
                await asyncio.sleep(_NOT_TAKEN_SECONDS)
            else:
                return

    # Dead letters, and messages that come back later.

    async def _move(self, message: Message, verdict: Verdict) -> None:
        """Publishes a copy where it belongs, and waits for the broker's confirm."""
        found: AbstractIncomingMessage = message.receipt[0]
        headers: dict[str, Any] = dict(found.headers or {})
        headers.pop(_REQUEUED, None)
        if verdict.action is Action.DEAD_LETTER:
            headers[_REASON] = verdict.reason
        else:
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
        if verdict.action is Action.DEAD_LETTER:
            name = await self._dead_letter_queue(channel)
        else:
            # It may have been removed since the last time.
            name, arguments = self._waiting_room(verdict.delay)
            await channel.declare_queue(name, durable=True, arguments=arguments)
        await channel.default_exchange.publish(copy, name, mandatory=True)

    async def _dead_letter_queue(self, channel: AbstractChannel) -> str:
        """Makes it where it is not; one that is there may have other arguments than ours."""
        async with self._opening:
            if not self._has_dead_letter_queue and not await self._is_there(self._dead_letter):
                await channel.declare_queue(self._dead_letter, durable=True)
            self._has_dead_letter_queue = True
        return self._dead_letter

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
        async with self._opening:
            if self._publishing is None or self._publishing.is_closed:
                assert self._connection is not None  # Messages came over it.
                self._publishing = await self._connection.channel(
                    publisher_confirms=True, on_return_raises=True
                )
                self._has_dead_letter_queue = False
            return self._publishing

    async def close(self) -> None:
        """Ends the connection; the broker gives what was not settled to others at once."""
        for task in self._tasks:
            task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CONNECT_SECONDS):
                    await connection.close()


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
