"""What is refused of operations: mostly before anything is claimed, since they could not be run.

Owns the likely slips of those who write calls, and what they are told. Refused later, a slip would
cost an attempt of its key, and the corrected call would be another request than the first one.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
import sys
import threading
from collections.abc import Callable, Collection
from functools import partial
from types import CoroutineType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from retrysafe.core.callables import require_function
from retrysafe.core.keys.key import Key
from retrysafe.core.machine import decide, operator_trigger
from retrysafe.core.model import Condition, Decision, OperatorCommand, StoredKey
from retrysafe.errors import (
    AwaitForgotten,
    FingerprintImpossible,
    InvalidInput,
    OperatorRefused,
)
from retrysafe.runtime.describe import shown_name, unpacked

_PASS_THE_FUNCTION: Final = (
    'pass the function and its arguments, run(key, charge, "c1", 500), not its result'
)
_SOME_CALL: Final = 'charge, "c1", 500'
_GENERATOR_FLAGS: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


def require_runnable(operation: Callable[..., Any]) -> None:
    """Raises `InvalidInput` for what is no function, and for generator functions.

    Calling one runs none of its body, so its key would be settled as done before any work.
    """
    if type(operation) is FunctionType and not operation.__code__.co_flags & _GENERATOR_FLAGS:
        return  # The usual case, without the long way that sees through partials and methods.
    require_function(operation, _PASS_THE_FUNCTION)
    if inspect.isgeneratorfunction(operation) or inspect.isasyncgenfunction(operation):
        raise InvalidInput(
            f"{shown_name(operation)} is a generator, and calling it runs nothing: wrap it in a "
            "function that consumes it and returns the result"
        )


def require_plain(operation: Callable[..., Any]) -> None:
    """Raises `InvalidInput` for an async function where nobody could await it."""
    if type(operation) is FunctionType and not operation.__code__.co_flags & inspect.CO_COROUTINE:
        return  # The usual case, without the long way that sees through partials and methods.
    if inspect.iscoroutinefunction(operation):
        raise InvalidInput(f"{shown_name(operation)} is async: use AsyncIdempotency for it")


def require_async(function: Callable[..., Any], otherwise: str = "") -> None:
    """Raises `InvalidInput` for a function whose decoration would be awaited without need."""
    if not inspect.iscoroutinefunction(function):
        require_function(function, _PASS_THE_FUNCTION)
        raise InvalidInput(f"{shown_name(function)} is not async: write async def{otherwise}")


def require_call(operation: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises `InvalidInput` for what cannot be called with these arguments."""
    if type(operation) is FunctionType:
        code = operation.__code__
        # The usual case: a plain function with as many arguments as it has parameters.
        if (
            len(args) == code.co_argcount
            and not code.co_kwonlyargcount
            and not code.co_flags & _GENERATOR_FLAGS
        ):
            return
    require_runnable(operation)
    keywords: Collection[str] = ()
    function, count = operation, len(args)
    if isinstance(operation, partial):
        function, held, keywords = unpacked(operation)
        count += len(held)
    if isinstance(function, MethodType):
        function, count = function.__func__, count + 1
    # What a class or an object with __call__ takes, nobody can say as cheaply.
    if isinstance(function, FunctionType) and not _fits(function, count, keywords):
        misfit = _misfit(operation, args)
        if misfit is not None:
            raise InvalidInput(
                f"{shown_name(operation)} cannot be called with these arguments: {misfit}"
            )


def _fits(function: FunctionType, count: int, keywords: Collection[str]) -> bool:
    """Whether so many positional arguments and these keywords reach the function's first line.

    Read off the code: binding a signature takes longer than all the rest of a call.
    """
    code = function.__code__
    flags = code.co_flags
    limit = code.co_argcount
    if count > limit and not flags & inspect.CO_VARARGS:
        return False
    named = code.co_varnames[: limit + code.co_kwonlyargcount]
    if keywords and not flags & inspect.CO_VARKEYWORDS:
        takes = named[code.co_posonlyargcount :]
        if any(keyword not in takes for keyword in keywords):
            return False
    if any(name in keywords for name in named[code.co_posonlyargcount : min(count, limit)]):
        return False  # Given twice.
    required = limit - len(function.__defaults__ or ())
    if any(name not in keywords for name in named[count:required]):
        return False
    if any(name in keywords for name in named[count : min(required, code.co_posonlyargcount)]):
        return False  # Swallowed by **keywords, so that the parameter itself is missing.
    defaults = function.__kwdefaults__ or {}
    return all(name in keywords or name in defaults for name in named[limit:])


def _misfit(operation: Callable[..., Any], args: tuple[Any, ...]) -> str | None:
    """Why the arguments do not fit, in Python's own words; None when they do."""
    try:
        inspect.signature(operation, follow_wrapped=False).bind(*args)
    except (TypeError, ValueError) as error:
        # What a partial holds may not fit by itself, which its signature says in a roundabout way.
        return str(error.__cause__ or error)
    return None


def require_visible(operation: Callable[..., Any]) -> None:
    """Raises `FingerprintImpossible` for an operation without arguments that hides its values.

    A lambda, a closure, a bound method or a class of a function may ask for something else each
    time, and nothing of that is in the request: another amount would get the first one's outcome,
    in silence.
    """
    operation, held, keywords = unpacked(operation)
    if held or keywords:
        return
    name = getattr(operation, "__qualname__", "")  # Objects that can be called have none.
    owner = getattr(operation, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType):
        hidden = f"{name} is a method, and what it is bound to is no part of the request"
        raise _hidden(hidden, f"service.{name.split('.')[-1]}, …")
    if not name:
        raise _hidden(f"{shown_name(operation)} is an object, which is no part of the request")
    if name.endswith("<lambda>"):
        raise _hidden("a lambda hides its values", _called_by(operation))
    # What its module holds is the same in every call, whatever its decorators hold.
    if _is_held_by_module(operation, name):
        return
    if names := _captured(operation):
        hidden = f"{shown_name(operation)} takes {', '.join(names)} from the code around it"
        raise _hidden(hidden, ", ".join((operation.__name__, *names)))
    if not isinstance(operation, FunctionType):
        # A class has methods and attributes; a wrapper may hold anything.
        kind = "class" if isinstance(operation, type) else "wrapper"
        hidden = f"{shown_name(operation)} is a {kind} that was made in a function"
        raise _hidden(f"{hidden}, and what it brings along is no part of the request")


def _captured(operation: Callable[..., Any]) -> tuple[str, ...]:
    """The variables that a function has brought along from where it was defined."""
    function = operation if isinstance(operation, FunctionType) else inspect.unwrap(operation)
    if not isinstance(function, FunctionType):
        return ()
    code = function.__code__
    defaults = len(function.__defaults__ or ())
    by_place = code.co_varnames[code.co_argcount - defaults : code.co_argcount]
    return (*code.co_freevars, *by_place, *(function.__kwdefaults__ or ()))


def _is_held_by_module(operation: Callable[..., Any], name: str) -> bool:
    """Whether the operation is what its name stands for; nothing local to a function is."""
    found: object = sys.modules.get(operation.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is operation


def _called_by(operation: Callable[..., Any]) -> str:
    """The call that a lambda makes, as `run` takes it: `lambda: pay("c", 5)` is `pay, "c", 5`."""
    if not isinstance(operation, FunctionType):
        return _SOME_CALL  # Wrapped by something that is no function, such as a cache.
    code = operation.__code__
    # The first and the last character of all that it does. Instructions of Python's own have none.
    spans = [
        ((first, start), (last, end))
        for first, last, start, end in code.co_positions()
        if first is not None and last is not None and end
    ]
    if not spans:
        return _SOME_CALL
    first, start = min(begin for begin, _ in spans)
    last, end = max(ending for _, ending in spans)
    lines = [linecache.getline(code.co_filename, line).encode() for line in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        body = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except Exception:  # The file has changed since; Python 3.11 also fails while it is parsing.
        return _SOME_CALL
    if not isinstance(body, ast.Call):
        return _SOME_CALL
    function = ast.unparse(body.func)
    if body.keywords:
        function = f"partial({', '.join((function, *map(ast.unparse, body.keywords)))})"
    return ", ".join((function, *map(ast.unparse, body.args)))


def _hidden(hidden: str, instead: str = _SOME_CALL) -> FingerprintImpossible:
    return FingerprintImpossible(
        f"{hidden}, so a retry that asks for something else would get this outcome: pass the "
        f"values as arguments, run(key, {instead}), or as request=…; request=None says that the "
        "key alone tells what is asked for"
    )


def not_awaited(what: str, coroutine: CoroutineType[Any, Any, Any]) -> AwaitForgotten:
    """The refusal of a coroutine as a result: it was only made, and what it stands for has not run.

    It is closed, so that it never will.
    """
    coroutine.close()
    return AwaitForgotten(
        f"{what} returned a coroutine that was not awaited, so {coroutine.__qualname__} has not "
        "run: write return await",
        is_final=True,
    )


def async_here(
    what: str, call: Callable[..., Any], coroutine: CoroutineType[Any, Any, Any]
) -> InvalidInput | AwaitForgotten:
    """The refusal of a coroutine where nobody can await it.

    A function that is async itself has done nothing yet; a plain one that returns a coroutine has.
    """
    coroutine.close()
    # Seen through partials; an object may have an async __call__ of its class.
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__):
        return InvalidInput(f"{what} is async: use AsyncIdempotency for it")
    return AwaitForgotten(
        f"{what} returned a coroutine that nobody awaits here, so {coroutine.__qualname__} has not "
        "run: use AsyncIdempotency for it",
        is_final=True,
    )


def misplaced_keywords(method: str, operation: object, misplaced: Collection[str]) -> TypeError:
    """The refusal of keyword arguments that neither `run` nor `answer` has.

    They are taken only to be refused: Python's own words would not say where they belong.
    """
    name = getattr(operation, "__name__", "charge")
    named = ", ".join(f"{keyword}=…" for keyword in misplaced)
    return TypeError(
        f"{method}() has no option {', '.join(misplaced)}: keyword arguments of the operation go "
        f"along with functools.partial({name}, {named})"
    )


def require_no_positional(misplaced: tuple[object, ...]) -> None:
    """Raises `InvalidInput` for `once(something, key=…)`.

    Positional arguments are taken only to be refused: Python's own words for a bare `@once` would
    be about their number, and not about the key that is missing.
    """
    if misplaced:
        raise InvalidInput(
            "once takes no positional arguments: write @idem.once(key=…) above the function, with "
            "the names of the parameters that identify the operation"
        )


def require_waiting_threads() -> None:
    """Raises `InvalidInput` where threads are something that cannot wait as ours do.

    Refused at the start: later such a process freezes, or answers nothing but errors.
    """
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise InvalidInput(
            "eventlet has patched this process, and retrysafe does not work with it: use gevent "
            "(gunicorn -k gevent) or threads (gunicorn -k gthread) instead"
        )
    uwsgi = sys.modules.get("uwsgi")
    options = {} if uwsgi is None else uwsgi.opt
    is_to_be_patched = "gevent-monkey-patch" in options
    if "gevent" in options and not is_to_be_patched and not is_patched_by_gevent():
        raise InvalidInput(
            "uWSGI runs requests in greenlets here, and a thread's lock stops all of them: set "
            "gevent-monkey-patch = true, or use threads instead of gevent"
        )


def is_patched_by_gevent() -> bool:
    """Whether threads are gevent's greenlets."""
    return threading.Lock.__module__.startswith("gevent")


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop of asyncio that runs here; raises `InvalidInput` where there is none.

    Trio and its like run coroutines as well, but no futures of asyncio. They need not be known by
    their names: what they have in common is that no loop of asyncio is running.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidInput(
            "no event loop of asyncio is running here: call AsyncIdempotency from a coroutine "
            "under asyncio or uvloop. Trio and other loops cannot run it: serve with uvicorn, "
            "granian or hypercorn's asyncio worker instead of hypercorn -k trio, and use anyio "
            "with its asyncio backend"
        ) from None


def require_name(name: object) -> None:
    """Raises `InvalidInput` where the function stands in the place of its name."""
    if name is not None and not isinstance(name, str):
        raise InvalidInput(
            "resumable takes the name of an operation: write @idem.resumable() or "
            "@idem.resumable('name') above the function"
        )


def checked_limit(limit: int) -> int:
    """The limit itself; raises `InvalidInput` for one that would mean everything or nothing."""
    if limit < 1:
        raise InvalidInput(f"a limit is a whole number from 1 up, got {limit}")
    return limit


def operator_outcome(
    decision: Decision, command: OperatorCommand, key: Key, stored: StoredKey | None
) -> None:
    """Raises `OperatorRefused` with what to do instead, when the command was refused."""
    if decision is not Decision.REFUSE:
        return
    if stored is None:
        raise OperatorRefused(
            f"there is no record of {key}: check the key and the caller", key=key.text
        )
    condition = stored.condition
    if decide(operator_trigger(command), condition) is not Decision.REFUSE:
        raise OperatorRefused(
            f"cannot {command.value} {key}: it has changed since somebody looked, and is "
            f"{condition.value} now; look again, then decide again",
            key=key.text,
        )
    advice = {
        (OperatorCommand.RELEASE, Condition.RUNNING): (
            "its owner may still be at work; wait for the lease, or force the release if you know "
            "that the owner is gone"
        ),
    }.get((command, condition))
    if advice is None and command is OperatorCommand.EXPIRE:
        advice = "a pending record never expires; release it first, or wait for its lease"
    if advice is None:
        advice = "the operation succeeded; expire the key if it must be able to run again"
    raise OperatorRefused(
        f"cannot {command.value} {key} while it is {condition.value}: {advice}", key=key.text
    )
