"""Dramatiq actors that run once, however often a broker delivers their messages.

Owns what a message of Dramatiq's does when its key is busy or the store is away. The guard wraps
the actor's function and never a middleware's hook: Dramatiq swallows what hooks raise, and the
actor would run unprotected. How an actor becomes a call is in `tasks`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, Unpack

from retrysafe.consumers.verdict import Action, rule_of
from retrysafe.contrib.tasks import (
    ComeBack,
    OnceOptions,
    TaskGuard,
    TaskOptions,
    public_signature,
)
from retrysafe.errors import InvalidInput, RetrysafeError
from retrysafe.extras import missing_extra
from retrysafe.idempotency import Idempotency

try:
    import dramatiq
    from dramatiq.errors import Retry
    from dramatiq.middleware import CurrentMessage
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "dramatiq", error) from None

_logger = logging.getLogger("retrysafe.tasks")

P = ParamSpec("P")
T = TypeVar("T")


def once(
    idempotency: Idempotency, **options: Unpack[OnceOptions]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates the function of an actor, below `@dramatiq.actor`: each message runs it once.

    `key` and `window` make a natural key of the arguments instead, as in `Idempotency.once`. With
    `transaction` the function gets `attempt`, whose `connection` is the open transaction. The
    broker needs the middleware `CurrentMessage`.
    """
    made = TaskOptions(idempotency, **options)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if isinstance(function, dramatiq.Actor):
            raise InvalidInput("write @once(…) below @dramatiq.actor: it wraps the function")
        if inspect.iscoroutinefunction(function):
            raise InvalidInput("once() takes plain functions: Dramatiq runs actors in threads")
        guards: dict[str, TaskGuard] = {}

        def guard_of(name: str) -> TaskGuard:
            if name not in guards:
                guards[name] = TaskGuard(
                    function, made, scope=f"dramatiq:{name}", name=name, control=(Retry,)
                )
            return guards[name]

        # Refuses at once what can be known without a message.
        guard_of("")

        @functools.wraps(function)
        def run_once(*args: P.args, **kwargs: P.kwargs) -> T:
            message = CurrentMessage.get_current_message()
            if message is None or not _is_for(message, run_once):
                return _called(guard_of(""), function, args, kwargs)
            try:
                value: T = guard_of(message.actor_name).run(message.message_id, args, kwargs)
                return value
            except ComeBack as ending:
                raise _sent_back(message, ending) from ending.cause
            except RetrysafeError as error:
                if rule_of(error).action is Action.DEAD_LETTER:
                    # No retry mends it: Dramatiq dead-letters what has none left.
                    message.options["max_retries"] = 0
                raise

        run_once.__signature__ = public_signature(function, made)  # type: ignore[attr-defined]
        return run_once

    return decorate


def _called(guard: TaskGuard, function: Callable[P, T], args: Any, kwargs: Any) -> T:
    """A call without a message: by its key where it has one, else as the plain call that it is."""
    if guard.options.key is None:
        if CurrentMessage.get_current_message() is None:
            _require_messages()
        return function(*args, **kwargs)
    try:
        value: T = guard.run("", args, kwargs)
        return value
    except ComeBack as ending:
        raise ending.cause from None


def _is_for(message: Any, function: Callable[..., Any]) -> bool:
    """Whether the message is the actor's own, and not one whose actor calls this one directly."""
    actor = dramatiq.get_broker().actors.get(message.actor_name)
    return actor is None or actor.fn is function


def _require_messages() -> None:
    """Raises `InvalidInput` in a worker whose broker does not tell the current message."""
    if type(threading.current_thread()).__module__ == "dramatiq.worker":
        raise InvalidInput(
            "the broker has no CurrentMessage, so a message has no id here: write "
            "broker.add_middleware(dramatiq.middleware.CurrentMessage())"
        )


def _sent_back(message: Any, ending: ComeBack) -> Retry:
    """Has Dramatiq enqueue the message again after a pause, without using up one of its retries."""
    _logger.info("%s of message %s comes back: %s", message.actor_name, message.message_id, ending)
    # Dramatiq adds one, and compares before it does.
    message.options["retries"] = message.options.get("retries", 0) - 1
    return Retry(str(ending), delay=int(ending.delay_seconds * 1_000))
