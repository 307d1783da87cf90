"""How an operation is performed: called with its arguments, as the current attempt.

With None for arguments it gets its attempt instead. Plain functions that the engine is given once,
and not closures: what every operation in flight brings along, the garbage collector walks over.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import Token
from types import CoroutineType
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.errors import StoreError
from retrysafe.runtime.checks import async_here, not_awaited
from retrysafe.runtime.current import current


async def perform_in_thread(
    attempt: Attempt, operation: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls the operation in this thread."""
    before = current.get()
    try:
        # Inside the try, and undone by one call of C: a signal must not leave it to this thread.
        current.set(attempt)
        value = operation(attempt) if args is None else operation(*args, **kwargs)
    finally:
        current.set(before)
    if type(value) is CoroutineType:
        raise async_here("the operation", operation, value)
    return value


def _is_reset(token: Token[Attempt | None]) -> bool:
    """Takes the attempt back; False in another context than the one that it was set in."""
    try:
        current.reset(token)
    except ValueError:
        return False
    return True


async def perform_in_task(
    attempt: Attempt, operation: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Calls the operation in this task, and awaits what it gives."""
    if not attempt.is_first:
        # Read at its end anyway; a thread that completes on a blocking connection needs it
        # before that, and cannot wait for the loop.
        try:
            await attempt.load_steps()
        except StoreError:
            pass  # Asked again where it is needed, and raised there.
        # That took its time, and nothing starts on a lease that may be over.
        await attempt.hold()
    token = current.set(attempt)
    try:
        value: Any = operation(attempt) if args is None else operation(*args, **kwargs)
        # A plain function has done its work by now, so what it returned is the outcome.
        # Futures are told by their class: asking an abstract class takes ten times as long.
        if (
            type(value) is CoroutineType
            or isinstance(value, asyncio.Future)
            or inspect.isawaitable(value)
        ):
            value = await value
            if type(value) is CoroutineType:
                raise not_awaited("the operation", value)
    except Exception as error:
        if not _is_reset(token):
            # Not the operation's ending: a task that nobody held is being ended by the garbage
            # collector, in the context of whatever was running, and the operation could not take
            # that: it awaited on its way out, or reset a variable of its own. Nobody knows how far
            # it got, so only the lease frees the key.
            raise GeneratorExit from error
        raise
    except BaseException:
        _is_reset(token)
        raise
    _is_reset(token)
    steps = attempt.steps
    if steps is not None:
        steps.require_begun()
    return value
