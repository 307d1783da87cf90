"""RabbitMQ, whichever library speaks to it: manual acks, delayed retries, dead letters.

Owns how AMQP carries verdicts out. The broker has no deadline that could be prolonged: a message is
this consumer's as long as its channel is open, and goes to another one when it closes. It must not
know a library: `amqp` and `pika` do.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from retrysafe.consumers.amqp_copies import Size, buried, returning, text_of
from retrysafe.consumers.amqp_frames import UNREADABLE
from retrysafe.consumers.broker import Buffer, count_of, not_buried
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput

_logger = logging.getLogger("retrysafe.consumers")

CONNECT_SECONDS: Final = 10.0
# For everything that it takes to settle one message, or to tell the broker of a stop.
SETTLE_SECONDS: Final = 10.0
# How long `receive` waits for a message; a stop waits for no longer than this.
WAIT_SECONDS: Final = 1.0
# How long a message stays away whose copy was not taken, and between two tries to send it there.
_NOT_TAKEN_SECONDS: Final = 30.0
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
# What a frame has beside the properties: its own ends, and the size of the body.
_FRAME_BYTES: Final = 8 + 12
_NAMED_HEADERS: Final = 10


class AmqpQueue:
    """One queue, which must be there.

    The receipt of a message is what the library gave, and the channel that brought it.
    """

    gives_back = True
    deadline_seconds = math.inf
    renew_seconds = _LOOK_SECONDS

    def __init__(
        self, url: str, queue: str, *, dead_letter: str | None = None, group: str = ""
    ) -> None:
        if not queue:
            raise InvalidInput(f"which queue? Name it: {type(self).__name__}(url, 'payments')")
        self._server_url = url
        self._name = queue
        self._dead_letter = dead_letter or f"{queue}.dead"
        # A name is one queue in each virtual host.
        host = unquote(urlsplit(url).path[1:]) or "/"
        scheme = "amqp" if host == "/" else f"amqp@{quote(host, safe='')}"
        self.queue, self.group = f"{scheme}:{queue}", group
        self._start()
        self._has_dead_letter_queue = False
        self._prefetch = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def _start(self) -> None:
        """Locks for the loop that runs now: those of a run before belong to another one."""
        self._opening, self._making = asyncio.Lock(), asyncio.Lock()
        self._channel: Any = None
        self._publishing: Any = None

    # What a library does.

    async def _is_there(self, name: str) -> bool:
        """Whether there is a queue of that name, whatever its arguments are."""
        raise NotImplementedError

    async def _declare(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Makes a durable queue where there is none."""
        raise NotImplementedError

    @staticmethod
    def _copy(message: Message, headers: dict[str, Any]) -> Any:
        """A persistent copy with these headers, as the library publishes it."""
        raise NotImplementedError

    @staticmethod
    def _size(copy: Any) -> int:
        """How many bytes its properties have; raises for what the library cannot write."""
        raise NotImplementedError

    def _frame_max(self) -> int:
        """How large a frame may be on this connection; 0 without a limit."""
        raise NotImplementedError

    async def _publish(self, copy: Any, name: str) -> None:
        """Publishes a copy to a queue; raises unless the broker confirms it."""
        raise NotImplementedError

    async def _publisher(self) -> Any:
        """The channel for copies; one that is new has looked at nothing yet."""
        raise NotImplementedError

    async def _ack(self, message: Message) -> None:
        raise NotImplementedError

    async def _requeue(self, message: Message) -> None:
        raise NotImplementedError

    @staticmethod
    def _headers_of(message: Message) -> Mapping[str, Any]:
        """The headers as the library gave them."""
        raise NotImplementedError

    # What is the same for each of them.

    def bind(self, buffer: Buffer) -> None:
        """Nothing is taken back from a consumer here, but by closing its channel."""

    async def redelivery_window(self) -> timedelta | None:
        """A queue keeps messages until they are consumed."""
        return None

    async def _require_queue(self) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            is_there = await self._is_there(self._name)
        if not is_there:
            raise InvalidInput(f"there is no queue {self._name} on this server")

    @staticmethod
    def _message_of(
        body: bytes, given: Mapping[str, Any], message_id: str | None, receipt: tuple[Any, Any]
    ) -> Message:
        unreadable = given.get(UNREADABLE)
        try:
            headers = {name: text_of(value) for name, value in given.items()}
        except RecursionError as error:
            headers, unreadable = {}, repr(error)
        # Ours counts retries, the broker's what was requeued, by quorum queues only.
        before = sum(count_of(headers.get(name, "0")) for name in (_DELIVERIES, _REQUEUED))
        return Message(
            body,
            headers,
            identity=message_id,
            deliveries=before + 1,
            receipt=receipt,
            unreadable=None if unreadable is None else str(unreadable),
        )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

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
        is_final = verdict.is_final
        async with asyncio.timeout(SETTLE_SECONDS):
            if verdict.action is Action.DEAD_LETTER or (verdict.delay and not is_final):
                await self._move(message, verdict)
                is_final = True
            if is_final:
                await self._ack(message)
            else:
                await self._requeue(message)

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
        if verdict.action is Action.DEAD_LETTER:
            await self._bury(message, verdict.reason)
            return
        headers = returning(
            self._given(message), {_DELIVERIES: message.deliveries}, *self._bounds(message)
        )
        if headers is None:
            await self._bury(message, f"its headers do not fit into a copy; {verdict.reason}")
            return
        # It may have been removed since the last time.
        name, arguments = self._waiting_room(verdict.delay)
        await self._declare(name, arguments)
        await self._publish(self._copy(message, headers), name)

    async def _bury(self, message: Message, reason: str) -> None:
        given = self._given(message)
        name = await self._dead_letter_queue()
        headers = buried(given, {_REASON: reason}, *self._bounds(message))
        dropped = [each for each in given if each not in headers]
        if dropped:
            _logger.error(
                "the dead letter of %s lacks %d headers, which cannot be sent: %s",
                *(message.identity, len(dropped), dropped[:_NAMED_HEADERS]),
            )
        await self._publish(self._copy(message, headers), name)

    def _given(self, message: Message) -> dict[str, Any]:
        headers = dict(self._headers_of(message))
        headers.pop(_REQUEUED, None)
        return headers

    def _bounds(self, message: Message) -> tuple[Size, float]:
        """How large a copy's properties are, and how large they may be."""

        def size(headers: dict[str, Any]) -> float:
            try:
                return self._size(self._copy(message, headers))
            except Exception:
                return math.inf

        return size, (self._frame_max() or math.inf) - _FRAME_BYTES

    async def _dead_letter_queue(self) -> str:
        """Makes it where it is not; one that is there may have other arguments than ours."""
        await self._publisher()
        async with self._opening:
            if not self._has_dead_letter_queue and not await self._is_there(self._dead_letter):
                await self._declare(self._dead_letter)
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
