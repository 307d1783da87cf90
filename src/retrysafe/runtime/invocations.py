"""What the engine invokes: an operation with its arguments, run as the current attempt.

Objects with slots and not closures: every operation in flight has one, and the garbage collector
walks over a closure, its cells and its function each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from types import CoroutineType
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.errors import StoreError
from retrysafe.runtime.current import current
from retrysafe.runtime.refusals import async_here, not_awaited


class ThreadInvocation:
    """An operation in this thread. With None for arguments it gets its attempt instead."""

    __slots__ = ("args", "kwargs", "operation")

    def __init__(self, operation: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.operation = operation
        self.args = args
        self.kwargs = kwargs

    async def invoke(self, attempt: Attempt) -> Any:
        """Calls the operation."""
        args = self.args
        token = current.set(attempt)
        try:
            value = (
                self.operation(attempt) if args is None else self.operation(*args, **self.kwargs)
            )
        finally:
            current.reset(token)
        if type(value) is CoroutineType:
            raise async_here("the operation", self.operation, value)
        return value


class TaskInvocation:
    """An operation in this task. With None for arguments it gets its attempt instead."""

    __slots__ = ("args", "kwargs", "operation")

    def __init__(self, operation: Callable[..., Awaitable[Any]], args: Any, kwargs: Any) -> None:
        self.operation = operation
        self.args = args
        self.kwargs = kwargs

    async def invoke(self, attempt: Attempt) -> Any:
        """Calls the operation, and awaits what it gives."""
        if not attempt.is_first:
            # Read at its end anyway; a thread that completes on a blocking connection needs it
            # before that, and cannot wait for the loop.
            try:
                await attempt.load_steps()
            except StoreError:
                pass  # Asked again where it is needed, and raised there.
        args = self.args
        token = current.set(attempt)
        try:
            value: Any = (
                self.operation(attempt) if args is None else self.operation(*args, **self.kwargs)
            )
            # A plain function has done its work by now, so what it returned is the outcome.
            if type(value) is CoroutineType or inspect.isawaitable(value):
                value = await value
                if type(value) is CoroutineType:
                    raise not_awaited("the operation", value)
        finally:
            current.reset(token)
        steps = attempt.steps
        if steps is not None:
            steps.require_begun()
        return value
