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
    innermost,
    public_signature,
)
from retrysafe.errors import InvalidInput, RetrysafeError
from retrysafe.extras import missing_extra
from retrysafe.idempotency import Idempotency

try:
    import dramatiq
    from dramatiq.errors import Retry
    from dramatiq.middleware import CurrentMessage, Retries
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
            actor = _actor_of(message, function)
            guard = guard_of("" if actor is None else actor.actor_name)
            value: T
            if message is None or actor is None or guard.is_running(message.message_id):
                value = guard.run_directly(args, kwargs)
                return value
            try:
                value = guard.run(message.message_id, args, kwargs)
                return value
            except ComeBack as ending:
                raise _sent_back(message, actor, ending) from ending.cause
            except RetrysafeError as error:
                if rule_of(error).action is Action.DEAD_LETTER:
                    # No retry mends it: Dramatiq dead-letters what has none left.
                    message.options["max_retries"] = 0
                raise

        run_once.__signature__ = public_signature(function, made)  # type: ignore[attr-defined]
        return run_once

    return decorate


def _actor_of(message: Any, function: Callable[..., Any]) -> Any | None:
    """The actor that the message is for, if the function is its; None for a direct call.

    Raises `InvalidInput` when nobody can tell: an actor must not run unprotected by mistake.
    """
    # A worker's thread knows its broker, which need not be the global one.
    broker = getattr(threading.current_thread(), "broker", None)
    if broker is None:
        return None
    if message is None:
        raise InvalidInput(
            "the broker has no CurrentMessage, so a message has no id here: write "
            "broker.add_middleware(dramatiq.middleware.CurrentMessage())"
        )
    own = [each for each in broker.actors.values() if innermost(each.fn) is innermost(function)]
    if not own:
        raise InvalidInput(
            f"{message.actor_name} hides the function that once() protects: use functools.wraps in "
            "the decorators between @dramatiq.actor and @once"
        )
    return next((each for each in own if each.actor_name == message.actor_name), None)


class _ComeBackRetry(Retry):
    """A retry that is none of the actor's own."""


def _sent_back(message: Any, actor: Any, ending: ComeBack) -> Retry:
    """Has Dramatiq enqueue the message again after a pause, without using up one of its retries."""
    _logger.info("%s of message %s comes back: %s", message.actor_name, message.message_id, ending)
    # Dramatiq adds one, and compares before it does.
    message.options["retries"] = message.options.get("retries", 0) - 1
    _let_come_back(actor)
    return _ComeBackRetry(str(ending), delay=int(ending.delay_seconds * 1_000))


def _let_come_back(actor: Any) -> None:
    """Has an actor's `retry_when` judge its own failures alone: it might give the message up."""
    judge = actor.options.get("retry_when")
    if judge is None:
        found = (each for each in actor.broker.middleware if isinstance(each, Retries))
        judge = next((each.retry_when for each in found), None)
    if judge is None or getattr(judge, "lets_come_back", False):
        return

    def retry_when(retries: int, error: BaseException) -> bool:
        return isinstance(error, _ComeBackRetry) or bool(judge(retries, error))

    retry_when.lets_come_back = True  # type: ignore[attr-defined]
    actor.options["retry_when"] = retry_when
