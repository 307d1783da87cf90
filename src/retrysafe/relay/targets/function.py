"""Functions as targets: any Python callable that takes a delivery."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput
from retrysafe.relay.ports import Deliver, Delivery, Target, require_begun

# For threads that are idle; what hangs is not waited for.
_END_SECONDS: Final = 1.0


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
        self._size = size
        self._pool: ThreadPoolExecutor | None = None

    async def deliver(self, delivery: Delivery) -> None:
        """Calls the function in a thread."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._size, thread_name_prefix="retrysafe-relay")
        run = partial(contextvars.copy_context().run, self._call, delivery)
        value = await asyncio.get_running_loop().run_in_executor(self._pool, run)
        if inspect.isawaitable(value):
            await value

    def _call(self, delivery: Delivery) -> Any:
        # Once more, in the thread: all of them may be taken by functions that hang.
        require_begun()
        return self._function(delivery)

    async def close(self) -> None:
        """Ends the threads; one whose function hangs is left behind. The next use starts others."""
        pool, self._pool = self._pool, None
        if pool is not None:
            ended = asyncio.get_running_loop().run_in_executor(None, pool.shutdown)
            await asyncio.wait((ended,), timeout=_END_SECONDS)


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
