"""Steps as functions: calling one inside an operation is a step of that operation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from retrysafe.core.steps.history import (
    ONE_TRY,
    Exceptions,
    StepRetry,
    checked_exceptions,
    checked_name,
    require_undo,
)
from retrysafe.errors import InvalidInput
from retrysafe.runtime.checks import require_runnable
from retrysafe.runtime.current import current_attempt

P = ParamSpec("P")
T = TypeVar("T")

# Annotations that are texts themselves, of functions that certainly return no step's name.
_NO_TEXTS: Final = frozenset({"None", "bool", "bytes", "dict", "float", "int", "list", "tuple"})


def step(
    name: str | Callable[..., str],
    *,
    retry: StepRetry = ONE_TRY,
    terminal: Exceptions = (),
    returns: type | tuple[type, ...] | None = None,
    compensate: Callable[[Any], Any] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function so that calling it inside an operation is a step of that operation.

    `name` is the step's name, or a function of the arguments that makes one for each call. The
    rest is as for `Attempt.step`. In an operation of `AsyncIdempotency` the call is awaited.
    """
    if not callable(name):
        checked_name(name)
    elif not _can_name(name):
        raise _without_brackets(name)
    terminal_types = checked_exceptions("terminal", terminal)
    require_undo(compensate)

    def decorate(*functions: Callable[P, T], **misplaced: object) -> Callable[P, T]:
        if misplaced or len(functions) != 1 or not callable(functions[0]):
            # These are the arguments of a call: what looks like the step's name is the step.
            raise _without_brackets(name)
        (function,) = functions
        require_runnable(function)

        @functools.wraps(function)
        def run_step(*args: P.args, **kwargs: P.kwargs) -> T:
            given = name(*args, **kwargs) if callable(name) else name
            value: T = current_attempt().step(
                given,
                functools.partial(function, *args, **kwargs),
                retry=retry,
                terminal=terminal_types,
                returns=returns,
                compensate=compensate,
            )
            return value

        return run_step

    return decorate


def _can_name(function: Callable[..., Any]) -> bool:
    """Whether a function may be one that makes names, as far as it tells before it is called."""
    if inspect.iscoroutinefunction(function):
        return False
    returned = getattr(function, "__annotations__", {}).get("return", str)
    if isinstance(returned, str):
        return returned.split("[")[0] not in _NO_TEXTS
    return returned is not None and not (
        isinstance(returned, type) and not issubclass(returned, str)
    )


def _without_brackets(function: object) -> InvalidInput:
    shown = getattr(function, "__name__", repr(function))
    return InvalidInput(
        f"{shown} was not run: step takes the name of the step, so write @step('name') above the "
        "function"
    )
