"""Taskiq tasks that run once, however often a broker delivers their messages.

Owns what a message of Taskiq's does when its key is busy or the store is away. How a task becomes a
call is in `tasks`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, NoReturn, ParamSpec, TypeVar, Unpack

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.contrib.tasks import (
    ComeBack,
    OnceOptions,
    TaskGuard,
    TaskOptions,
    public_signature,
)
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra

try:
    from taskiq import Context, NoResultError, TaskiqDepends
    from taskiq.decor import AsyncTaskiqDecoratedTask
    from taskiq.exceptions import TaskRejectedError
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "taskiq", error) from None

_logger = logging.getLogger("retrysafe.tasks")

P = ParamSpec("P")
T = TypeVar("T")

# The parameter through which Taskiq tells which message it is.
_CONTEXT: Final = "retrysafe_context"
# Taskiq has no delay that every broker knows. The message waits here, unacked, before it goes back;
# no longer than a broker lets it.
LONGEST_WAIT_SECONDS: Final = 5.0


def once(
    idempotency: AsyncIdempotency, **options: Unpack[OnceOptions]
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Decorates the function of a task, below `@broker.task`, so that each task id runs it once.

    `key` and `window` make a natural key of the arguments instead, as in `Idempotency.once`. With
    `transaction` the function gets `attempt`, whose `connection` is the open transaction. Leave
    parameters that Taskiq injects out of the request by `ignore`.
    """
    made = TaskOptions(idempotency, **options)

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        if isinstance(function, AsyncTaskiqDecoratedTask):
            raise InvalidInput("write @once(…) below @broker.task: it wraps the function")
        guards: dict[str, TaskGuard] = {}

        def guard_of(name: str) -> TaskGuard:
            if name not in guards:
                guards[name] = TaskGuard(
                    function,
                    made,
                    scope=f"taskiq:{name}",
                    name=name,
                    control=(NoResultError, TaskRejectedError),
                )
            return guards[name]

        # Refuses at once what can be known without a message.
        guard_of("")

        @functools.wraps(function)
        async def run_once(*args: Any, **kwargs: Any) -> T:
            context: Context | None = kwargs.pop(_CONTEXT, None)
            # Called directly, Taskiq does not fill it in.
            if not isinstance(context, Context):
                called: T = await guard_of("").run_directly_async(args, kwargs)
                return called
            message = context.message
            try:
                value: T = await guard_of(message.task_name).run_async(
                    message.task_id, args, kwargs
                )
                return value
            except ComeBack as ending:
                await _send_back(context, ending)

        run_once.__signature__ = _with_context(public_signature(function, made))  # type: ignore[attr-defined]
        run_once.__annotations__ = {
            **run_once.__annotations__,
            _CONTEXT: Annotated[Context, TaskiqDepends()],
        }
        return run_once

    return decorate


def _with_context(signature: inspect.Signature) -> inspect.Signature:
    """The signature with one more parameter, which Taskiq fills in."""
    added = inspect.Parameter(
        _CONTEXT,
        inspect.Parameter.KEYWORD_ONLY,
        default=TaskiqDepends(),
        annotation=Context,
    )
    parameters = list(signature.parameters.values())
    keep_last = parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - bool(keep_last), added)
    return signature.replace(parameters=parameters)


async def _send_back(context: Context, ending: ComeBack) -> NoReturn:
    """Publishes the message again after a pause: no result is set, and no retry is used up."""
    message = context.message
    _logger.info("%s of task %s comes back: %s", message.task_name, message.task_id, ending)
    await asyncio.sleep(min(ending.delay_seconds, LONGEST_WAIT_SECONDS))
    pause = 0.1
    while True:
        try:
            await context.requeue()
        except NoResultError:
            raise
        except Exception as problem:
            # Taskiq acks what ends, however it ends: until it is sent, the message must stay here.
            _logger.warning("task %s cannot be sent back yet: %r", message.task_id, problem)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_WAIT_SECONDS)
