"""`StopIteration` of an operation, which Python lets no coroutine raise.

Owns both ways: Python makes a `RuntimeError` of it, with the `StopIteration` as its cause, and a
policy judges the cause.
"""

from __future__ import annotations

from typing import Final, TypeVar

E = TypeVar("E", bound=BaseException)

# What Python says (PEP 479). Somebody's own RuntimeError says something else.
_MESSAGE: Final = "coroutine raised StopIteration"


def own_error(error: E) -> E | StopIteration:
    """What the operation raised, as its lists of exceptions know it."""
    cause = error.__cause__
    if isinstance(cause, StopIteration) and type(error) is RuntimeError:
        return cause if error.args == (_MESSAGE,) else error
    return error


def raisable(error: E) -> E | RuntimeError:
    """The exception for a future: with `StopIteration`, whoever awaits it may wait for ever."""
    if not isinstance(error, StopIteration):
        return error
    made = RuntimeError(_MESSAGE)
    made.__cause__ = error
    return made
