"""NATS JetStream as a target: one message per entry, acknowledged by its stream."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from retrysafe.core.ports import Waits
from retrysafe.errors import DeliveryFailed
from retrysafe.extras import missing_extra
from retrysafe.relay.ports import Delivery
from retrysafe.relay.targets.of_loop import OfLoop

try:
    import nats
    from nats.errors import NoRespondersError
    from nats.js.errors import NoStreamResponseError
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "nats", error) from error

_CONNECT_SECONDS: Final = 10


class NatsJetStream:
    """Publishes entries to JetStream, for `AsyncRelay`; the subject is the topic.

    The key travels as `Nats-Msg-Id`, by which the stream itself drops repetitions within its
    window. A subject that no stream takes is not delivered, and tried again.
    """

    waits = Waits.SUSPENDING

    def __init__(
        self,
        servers: str | list[str],
        *,
        prefix: str = "",
        timeout: timedelta = timedelta(seconds=10),
        **options: Any,
    ) -> None:
        """`prefix` is put before every topic; further options go to `nats.connect`."""
        self._servers = servers
        self._prefix = prefix
        self._timeout_seconds = timeout.total_seconds()
        self._options = options
        # The connection, and its context of JetStream.
        self._open: OfLoop[tuple[Any, Any]] = OfLoop()

    async def deliver(self, delivery: Delivery) -> None:
        """Publishes one entry and waits for the stream's word; raises what nats-py raises."""
        subject = f"{self._prefix}{delivery.topic}"
        headers = {
            "Nats-Msg-Id": delivery.key,
            "Idempotency-Key": delivery.key,
            "Content-Type": delivery.content_type,
            "Retrysafe-Attempt": str(delivery.attempt),
        }
        stream = await self._opened()
        try:
            await stream.publish(
                subject, delivery.body, timeout=self._timeout_seconds, headers=headers
            )
        except (NoStreamResponseError, NoRespondersError) as error:
            raise DeliveryFailed(f"no stream takes {subject!r}", key=delivery.key) from error

    async def _opened(self) -> Any:
        """A context on a connection that is open; deliveries that find none open one together."""
        async with self._open.opening():
            if self._open.held is None or self._open.held[0].is_closed:
                options = {
                    "connect_timeout": _CONNECT_SECONDS,
                    # The relay tries again; a client that waits for a server would only hang.
                    "allow_reconnect": False,
                    "error_cb": _ignore,
                } | self._options
                connection = await nats.connect(self._servers, **options)
                self._open.held = (connection, connection.jetstream())
            return self._open.held[1]

    async def close(self) -> None:
        """Closes the connection; the next delivery opens a new one."""
        opened = self._open.taken()
        if opened is not None:
            await opened[0].close()


async def _ignore(error: Exception) -> None:
    """What breaks the connection shows in the next publish, which the relay reports."""
