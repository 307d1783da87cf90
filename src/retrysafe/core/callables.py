"""What was given in the place of a function, in words for whoever gave it."""

from __future__ import annotations

from types import CoroutineType

from retrysafe.errors import InvalidInput


def shown_in_place(value: object) -> str:
    """The value by its type, never by its contents; a coroutine is closed.

    It will not be awaited any more, and Python would warn of it in words of its own.
    """
    if isinstance(value, CoroutineType):
        value.close()
    return f"a value of type {type(value).__name__!r}"


def require_function(value: object, instead: str) -> None:
    """Raises `InvalidInput` that says what to pass instead, unless it can be called."""
    if not callable(value):
        raise InvalidInput(f"{instead}; got {shown_in_place(value)}")
