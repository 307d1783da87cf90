"""Functions as targets: any Python callable that takes a delivery."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput
from retrysafe.relay.ports import Deliver, Delivery, Target


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
    """An async function, or a plain one in a worker thread: a loop must not be held up by it."""

    waits = Waits.SUSPENDING

    def __init__(self, function: Callable[[Delivery], Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 — an object with an async __call__.
        )

    async def deliver(self, delivery: Delivery) -> None:
        if self._is_async:
            await self._function(delivery)
            return
        value = await asyncio.to_thread(self._function, delivery)
        if inspect.isawaitable(value):
            await value

    async def close(self) -> None:
        """Holds nothing."""


def target_for(target: Target, waits: Waits) -> Deliver:
    """The target as a relay of this kind works with it; raises `InvalidInput`."""
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
        return _Coroutine(target)
    if inspect.iscoroutinefunction(target):
        raise InvalidInput(f"{target!r} is async: use AsyncRelay for it")
    return _Function(target)
