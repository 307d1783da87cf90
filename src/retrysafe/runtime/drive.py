"""Drives an `async def` flow over blocking ports without an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from retrysafe.errors import FlowSuspended

T = TypeVar("T")


def run_sync(flow: Coroutine[Any, Any, T]) -> T:
    """The flow's result. Blocking ports never suspend, so one `send` runs the flow to its end.

    Raises `FlowSuspended` when a port does suspend: waiting for it would need an event loop.
    """
    try:
        flow.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    flow.close()
    raise FlowSuspended(
        "a blocking call met a store that needs an event loop: use AsyncIdempotency with it"
    )
