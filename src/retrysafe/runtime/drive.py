"""Drives an `async def` flow: over blocking ports without an event loop, or out of sight of one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from retrysafe.core.handlers import is_of_handler
from retrysafe.core.stop_iteration import raisable
from retrysafe.errors import FlowSuspended

T = TypeVar("T")


def run_sync(flow: Coroutine[Any, Any, T]) -> T:
    """The flow's result. Blocking ports never suspend, so one `send` runs the flow to its end.

    Raises `FlowSuspended` when a port does suspend: waiting for it would need an event loop.
    """
    try:
        flow.send(None)
    except StopIteration as stop:
        # A step's flow has a method in Python for this. A handler may raise in there, and that is
        # not what the step has returned. The whole traceback is kept in no variable: a frame that
        # holds itself is only freed by the garbage collector.
        method = getattr(stop.__traceback__, "tb_next", None)
        if method is not None and method.tb_next is not None and is_of_handler(stop):
            raise raisable(stop) from stop
        result: T = stop.value
        return result
    flow.close()
    raise FlowSuspended(
        "a blocking call met a store that needs an event loop: use AsyncIdempotency with it"
    )


def hidden_task(
    flow: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
) -> asyncio.Task[None]:
    """A task for what has to be written whatever becomes of its callers.

    Whoever ends a loop cancels all tasks that it can find, as `asyncio.run` does. This one cannot
    be found, so that the row is written before the loop ends: see `LoopPorts`. It does not begin
    within this call either, as the loop's own factory may have it.
    """
    task = asyncio.Task(flow, loop=loop)
    asyncio._unregister_task(task)  # noqa: SLF001 — documented for those who extend asyncio.
    return task
