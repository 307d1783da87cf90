"""`StopIteration` of an operation, which Python lets no coroutine raise.

Owns both ways: Python makes a `RuntimeError` of it, with the `StopIteration` as its cause. A list
of exceptions may name either.
"""

from __future__ import annotations

from typing import Final, TypeVar

E = TypeVar("E", bound=BaseException)

# What Python says (PEP 479). Somebody's own RuntimeError says something else.
_MESSAGE: Final = "coroutine raised StopIteration"


def kinds_of(error: BaseException) -> tuple[type, ...]:
    """The classes of an error, the most special first: of both, where Python has made another."""
    own = own_error(error)
    if own is error:
        return type(error).__mro__
    stops = tuple(kind for kind in type(own).__mro__ if issubclass(kind, StopIteration))
    return (*stops, *type(error).__mro__)


def is_listed(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    """Whether a list of exceptions names the error, or what Python has made it of."""
    return isinstance(error, kinds) or isinstance(own_error(error), kinds)


def own_error(error: E) -> E | StopIteration:
    """What the operation raised, before Python made another error of it."""
    # Its very class first: in another one, what looks like a cause may do anything.
    if type(error) is not RuntimeError or error.args != (_MESSAGE,):
        return error
    cause = error.__cause__
    return cause if isinstance(cause, StopIteration) else error


def raisable(error: E) -> E | RuntimeError:
    """The exception for a future: with `StopIteration`, whoever awaits it may wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    made = RuntimeError(_MESSAGE)
    made.__cause__ = error
    return made
