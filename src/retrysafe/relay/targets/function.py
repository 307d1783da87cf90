"""Functions as targets: any Python callable that takes a delivery."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput
from retrysafe.relay.ports import Deliver, Delivery, Target, require_begun
from retrysafe.runtime.closing import Limit, end_aside_within
from retrysafe.runtime.thread_pool import ThreadPool

# For threads that are idle; what hangs is not waited for.
_END_LIMIT: Final = timedelta(seconds=1)


class _Function:
    """A plain function, called in the thread that delivers."""

    waits = Waits.BLOCKING

    def __init__(self, function: Callable[[Delivery], Any]) -> None:
        self._function = function

    async def deliver(self, delivery: Delivery) -> None:
        value = self._function(delivery)
        if inspect.iscoroutine(value):
            value.close()
            raise InvalidInput("the target is async: use AsyncRelay for it")

    async def close(self) -> None:
        """Holds nothing."""


class _Coroutine:
    """An async function."""

    waits = Waits.SUSPENDING

    def __init__(self, function: Callable[[Delivery], Any]) -> None:
        self._function = function

    async def deliver(self, delivery: Delivery) -> None:
        await self._function(delivery)

    async def close(self) -> None:
        """Holds nothing."""


class FunctionInThreads:
    """A plain function under an event loop, which must not be held up by it.

    With a thread for each delivery that may be under way: in the loop's own few threads, most
    deliveries would count as begun and wait for each other.
    """

    waits = Waits.SUSPENDING

    def __init__(self, function: Callable[[Delivery], Any], size: int) -> None:
        self._function = function
        self._pool = ThreadPool(size, "retrysafe-relay")

    async def deliver(self, delivery: Delivery) -> None:
        """Calls the function in a thread."""
        value = await self._pool.run(contextvars.copy_context().run, self._call, delivery)
        if inspect.isawaitable(value):
            await value

    def _call(self, delivery: Delivery) -> Any:
        # Once more, in the thread: all of them may be taken by functions that hang.
        require_begun()
        return self._function(delivery)

    async def close(self) -> None:
        """Ends the threads; one whose function hangs is left behind. The next use starts others."""
        await end_aside_within(self._pool.close, Limit(_END_LIMIT))


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 — an object with an async __call__.
    )


def target_for(target: Target, waits: Waits, size: int) -> Deliver:
    """The target as a relay of this kind and size works with it; raises `InvalidInput`."""
    kind = getattr(target, "waits", None)
    if isinstance(kind, Waits):
        made: Deliver = target  # type: ignore[assignment]
        if kind is not waits:
            needed = "AsyncRelay" if kind is Waits.SUSPENDING else "Relay"
            raise InvalidInput(f"use {needed} with {type(target).__name__}")
        return made
    if not callable(target):
        raise InvalidInput(f"a target is a function of a delivery or has `deliver`, got {target!r}")
    if waits is Waits.SUSPENDING:
        return _Coroutine(target) if _is_async(target) else FunctionInThreads(target, size)
    if inspect.iscoroutinefunction(target):
        raise InvalidInput(f"{target!r} is async: use AsyncRelay for it")
    return _Function(target)
