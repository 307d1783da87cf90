"""Spans around the deliveries of a relay, by OpenTelemetry's messaging conventions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import SpanKind, Tracer

__all__ = ["traced_target"]


@contextmanager
def _span(tracer: Tracer, delivery: Any) -> Iterator[None]:
    # What the target raises is recorded, and makes the span an error.
    with tracer.start_as_current_span(
        f"send {delivery.topic}",
        kind=SpanKind.PRODUCER,
        attributes={
            "messaging.system": "retrysafe",
            "messaging.destination.name": delivery.topic,
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.message.id": delivery.key,
            "messaging.message.body.size": len(delivery.body),
            "retrysafe.attempt": delivery.attempt,
        },
    ):
        yield


class _TracedTarget:
    """A target with `deliver`, and a span around each call of it."""

    def __init__(self, tracer: Tracer, target: Any) -> None:
        self._tracer = tracer
        self._target = target
        self.waits = target.waits

    async def deliver(self, delivery: Any) -> None:
        """Hands one entry over."""
        with _span(self._tracer, delivery):
            await self._target.deliver(delivery)

    async def close(self) -> None:
        """Closes the target."""
        await self._target.close()


def traced_target(tracer: Tracer, target: Any) -> Any:
    """The same target, or the same function of a delivery, with a span around each delivery."""
    if hasattr(target, "deliver"):
        return _TracedTarget(tracer, target)
    if inspect.iscoroutinefunction(target):

        @functools.wraps(target)
        async def deliver_on_loop(delivery: Any) -> Any:
            with _span(tracer, delivery):
                return await target(delivery)

        return deliver_on_loop

    @functools.wraps(target)
    def deliver(delivery: Any) -> Any:
        with _span(tracer, delivery):
            return target(delivery)

    return deliver
