"""NATS JetStream: a durable pull consumer; ack, nak with a delay, in-progress.

Owns how JetStream carries verdicts out. Messages are pulled only when there is room for them, so
none waits at this end without its deadline being prolonged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from retrysafe.consumers.broker import Buffer, not_buried, readable
from retrysafe.consumers.deadlines import RENEWALS_PER_DEADLINE
from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Action, Verdict
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

try:
    import nats
    from nats.aio.msg import Msg
    from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig
    from nats.js.errors import NotFoundError
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "nats", error) from error

_OPEN_SECONDS: Final = 10.0
_FLUSH_SECONDS: Final = 5
# How long the server keeps a request for the next message; a stop waits for no longer than this.
_WAIT_SECONDS: Final = 1.0
# A word of the server's that is late by more than this is taken by the next call.
_LATE_SECONDS: Final = 0.5
_REASON: Final = "Retrysafe-Reason"
# The stream drops a repeated message id within its window.
_MESSAGE_ID: Final = "Nats-Msg-Id"
# Headers that tell the server what to do with a message in its stream; a copy has its own.
_SERVER_HEADERS: Final = "nats-"
# What the server says instead of a message: it has none, or none has come in time.
_NOTHING_MORE: Final = frozenset({"404", "408"})


class JetStream:
    """One stream, read by one durable consumer; it is made if it is not there.

    Dead letters go to the subject `dead_letter` (default: `dead.STREAM.DURABLE`). A stream that
    takes it is made when the first one comes, unless one is there.
    """

    gives_back = True

    def __init__(
        self,
        servers: str | list[str],
        stream: str,
        durable: str,
        *,
        ack_wait: timedelta = timedelta(seconds=30),
        dead_letter: str | None = None,
        **options: Any,
    ) -> None:
        """`ack_wait` is for a consumer that is made; further options go to `nats.connect`."""
        self._servers = servers
        self._stream = stream
        self._durable = durable
        self._ack_wait_seconds = ack_wait.total_seconds()
        self._dead_letter = dead_letter or f"dead.{stream}.{durable}"
        self._options = options
        self._connection: Any = None
        self._context: Any = None
        self._inbox: Any = None
        self._inbox_name = ""
        # How the durable consumer is made; once there is one, how it was.
        self._config = ConsumerConfig(
            durable_name=durable,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_seconds,
            # Every delivery has a verdict here; a limit of the server's would drop messages.
            max_deliver=-1,
        )
        # Whether the durable consumer may have been deleted.
        self._is_unbound = False
        self._window: timedelta | None = None
        self._refusal: Exception | None = None
        # How often the server delivers a message before it drops it.
        self.delivery_limit: int | None = None
        self.queue, self.group = f"nats:{stream}", durable
        self.deadline_seconds = self._ack_wait_seconds

    @property
    def renew_seconds(self) -> float:
        """Two renewals may fail before the deadline."""
        return self.deadline_seconds / RENEWALS_PER_DEADLINE

    def bind(self, buffer: Buffer) -> None:
        """Nothing is taken back from a consumer here: its deadlines pass by themselves."""

    async def open(self) -> None:
        """Connects, and makes the durable consumer; raises `InvalidInput` without a stream."""
        self._reopening = asyncio.Lock()
        try:
            await self._connect()
            async with asyncio.timeout(_OPEN_SECONDS):
                await self._bind()
            self._is_unbound = False
        except BaseException as error:
            await self.close()
            if isinstance(error, NotFoundError):
                raise InvalidInput(f"there is no stream {self._stream} on this server") from error
            if self._refusal is not None:
                raise ConnectionError(f"the NATS server refuses it: {self._refusal}") from error
            if isinstance(error, TimeoutError | nats.errors.NoServersError):
                raise ConnectionError("no NATS server answers there") from error
            raise

    async def _connect(self) -> None:
        options = {"max_reconnect_attempts": -1, "reconnect_time_wait": 0.5, "error_cb": self._hear}
        async with asyncio.timeout(_OPEN_SECONDS):
            # A client that mends itself would wait for a server that was never there.
            once = {"max_reconnect_attempts": 1, "reconnect_time_wait": 0.1}
            probe = await nats.connect(self._servers, **(options | self._options | once))
            await probe.close()
            self._connection = await nats.connect(self._servers, **(options | self._options))
        self._context = self._connection.jetstream()
        self._inbox, self._is_unbound = None, True

    async def _require_connection(self) -> None:
        """Raises while the server is away; a client that has given up for good is replaced.

        It does so when the server refuses it twice, as while credentials are changed, and after
        as many tries as the options say.
        """
        async with self._reopening:
            if self._connection.is_closed:
                await self._connect()
        if not self._connection.is_connected:
            raise ConnectionError("the NATS server is away")

    async def _bind(self) -> None:
        stream = await self._context.stream_info(self._stream)
        age = stream.config.max_age
        self._window = timedelta(seconds=age) if age else None
        try:
            made = await self._context.consumer_info(self._stream, self._durable)
        except NotFoundError:
            made = await self._context.add_consumer(self._stream, self._config)
        self._config = made.config
        if made.config.ack_policy != AckPolicy.EXPLICIT:
            raise InvalidInput(f"{self._durable} acks by itself: it needs ack policy explicit")
        # With a back-off list of the server's, its first pause is the deadline.
        self.deadline_seconds = min([made.config.ack_wait, *(made.config.backoff or ())])
        if made.config.max_deliver and made.config.max_deliver > 0:
            self.delivery_limit = made.config.max_deliver
        if self._inbox is None:
            self._inbox_name = self._connection.new_inbox()
            self._inbox = await self._connection.subscribe(self._inbox_name)

    async def redelivery_window(self) -> timedelta | None:
        """How long the stream keeps messages; None for a stream without a limit of age."""
        return self._window

    async def receive(self, limit: int) -> list[Message]:
        """What is there now; else waits for one message."""
        await self._require_connection()
        if self._is_unbound:
            await self._bind_again()
        found = await self._pulled({"batch": limit, "no_wait": True}, limit, _LATE_SECONDS)
        if not found:
            wait = {"batch": 1, "expires": int(_WAIT_SECONDS * 1e9)}
            found = await self._pulled(wait, 1, _WAIT_SECONDS + _LATE_SECONDS)
        if not found:
            self._raise_refusal()
        return readable(found, self._message)

    async def _pulled(self, request: dict[str, Any], limit: int, seconds: float) -> list[Msg]:
        """Asks for messages, and takes them until the server says that these are all."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._durable}"
        body = json.dumps(request).encode()
        await self._connection.publish(subject, body, reply=self._inbox_name)
        found: list[Msg] = []
        while len(found) < limit:
            try:
                message = await self._inbox.next_msg(timeout=seconds)
            except TimeoutError:
                break
            if not message.reply:
                status = message.headers or {}
                if not found and status.get("Status") not in _NOTHING_MORE:
                    # As when the stream or its durable consumer was deleted.
                    self._is_unbound = True
                    raise ConnectionError(
                        f"{self._durable} of {self._stream} gives no messages, or is not there: "
                        f"{status.get('Status')} {_one_line(status.get('Description', ''))}"
                    )
                break
            found.append(message)
        return found

    async def _bind_again(self) -> None:
        """Makes a durable consumer that was deleted; what is done already is acked without work."""
        window = self._window
        try:
            await self._bind()
        except NotFoundError as error:
            raise ConnectionError(f"the stream {self._stream} is not there") from error
        if window is not None and (self._window is None or self._window > window):
            # Keys are remembered for as long as was needed at the start.
            self._window, longer = window, self._window
            raise ConnectionError(
                f"the stream {self._stream} keeps messages for {longer or 'ever'}, and kept them "
                f"for {window} when this consumer started: start it again"
            )
        self._is_unbound = False

    def _message(self, message: Msg) -> Message:
        metadata = message.metadata
        return Message(
            message.data,
            dict(message.headers or {}),
            # With the instant at which it was stored: a stream that is made anew counts from 1.
            identity=f"{metadata.sequence.stream}@{metadata.timestamp.isoformat()}",
            deliveries=metadata.num_delivered,
            receipt=message,
        )

    async def extend(self, messages: Sequence[Message]) -> Collection[Message]:
        """Says that they are in progress; the server does not say which ones it has given away."""
        await self._require_connection()
        for message in messages:
            await self._answer(message, Msg.Ack.Progress)
        await self._flush()
        return ()

    async def settle(self, settled: Sequence[tuple[Message, Verdict]]) -> Collection[Message]:
        """Acks, naks and terminates; the server has heard of all of them at the end."""
        await self._require_connection()
        unsettled = []
        for message, verdict in settled:
            if verdict.action is Action.DEAD_LETTER:
                try:
                    await self._bury(message, verdict.reason)
                except Exception as error:
                    not_buried(message, error)
                    unsettled.append(message)
                    continue
                await self._answer(message, Msg.Ack.Term)
            elif verdict.is_final:
                await self._answer(message, Msg.Ack.Ack)
            else:
                delay_ns = int(verdict.delay.total_seconds() * 1e9)
                wait = b' {"delay": %d}' % delay_ns if delay_ns else b""
                await self._answer(message, Msg.Ack.Nak + wait)
        await self._flush()
        return unsettled

    async def _answer(self, message: Message, word: bytes) -> None:
        """Answers over the connection of now; the one that brought the message may be gone."""
        await self._connection.publish(message.receipt.reply, word)

    async def _flush(self) -> None:
        # Twice: nats-py writes its ping ahead of what waits in its buffer, so the first pong says
        # only that the buffer has left, and the second that the server has read it.
        for _ in range(2):
            await self._connection.flush(_FLUSH_SECONDS)
        self._raise_refusal()

    async def _hear(self, error: Exception) -> None:
        """Keeps what the server refuses; what breaks the connection shows in the next call."""
        if "permissions violation" in str(error).lower():
            self._refusal = error

    def _raise_refusal(self) -> None:
        """Raises what the server has refused meanwhile: it answers such a call with nothing."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise ConnectionError(f"the NATS server refuses it: {refusal}")

    async def _bury(self, message: Message, reason: str) -> None:
        """Publishes a dead letter, with its reason; a repeated one is dropped by its stream."""
        given = message.headers.items()
        own = {
            _REASON: _one_line(reason),
            "Retrysafe-Stream": self._stream,
            "Retrysafe-Message": str(message.identity),
            _MESSAGE_ID: f"{self._stream}/{self._durable}/{message.identity}",
        }
        headers = {
            name: value for name, value in given if not name.lower().startswith(_SERVER_HEADERS)
        } | own
        limit = self._connection.max_payload
        if _size(message.body, headers) > limit:
            headers = own
        if _size(message.body, headers) > limit:
            # Sent all the same, it would end the connection, and with it every other message.
            raise InvalidInput(
                f"the message and its reason are larger than the server's max_payload of {limit:,} "
                "bytes: raise it, or settle the message by hand"
            )
        publish = self._context.publish
        try:
            await publish(self._dead_letter, message.body, headers=headers)
        except nats.js.errors.NoStreamResponseError:
            name = f"{self._stream}_{self._durable}_dead"
            await self._context.add_stream(StreamConfig(name=name, subjects=[self._dead_letter]))
            await publish(self._dead_letter, message.body, headers=headers)

    async def close(self) -> None:
        """Ends the connection; what was not settled comes again after its ack wait."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _size(body: bytes, headers: Mapping[str, str]) -> int:
    """What a message counts for with the server, which counts its headers too."""
    lines = sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())
    return len(b"NATS/1.0\r\n\r\n") + lines + len(body)


def _one_line(text: str) -> str:
    """The text as a header may have it."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())
