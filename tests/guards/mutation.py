"""Removes one guard from the running code, and puts it back.

A mutation replaces the code of a function in place, so that it takes effect wherever the function
was imported. It fails loudly when the text that it removes is not there exactly once: a guard
that was rewritten needs its mutation rewritten too.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class GuardMoved(AssertionError):
    """The code that a mutation wants to change is not there."""


class Mutation(Protocol):
    """A change of the running code that can be taken back."""

    @property
    def where(self) -> str:
        """The place in the source that holds the guard."""

    def removed(self) -> Any:
        """A context in which the guard is gone."""


def _where(module_name: str, name: str) -> str:
    return f"`{module_name.removeprefix('retrysafe.').replace('.', '/')}.py`, `{name}`"


def _replaced(text: str, old: str, new: str, where: str) -> str:
    if text.count(old) != 1:
        raise GuardMoved(f"{where} holds {text.count(old)} times, not once: {old!r}")
    return text.replace(old, new)


@dataclass(frozen=True)
class InCode:
    """Another text in the source of one function."""

    function: Callable[..., Any]
    old: str
    new: str
    # A guard that takes two places of the function to remove.
    also: tuple[str, str] | None = None

    @property
    def where(self) -> str:
        """The function."""
        return _where(self.function.__module__, self.function.__qualname__)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Swaps the code object, which every reference to the function shares."""
        function = self.function
        source = textwrap.dedent(inspect.getsource(function))
        changed = _replaced(source, self.old, self.new, self.where)
        if self.also is not None:
            changed = _replaced(changed, *self.also, self.where)
        code = compile(
            f"from __future__ import annotations\n{changed}", f"<{self.where}, changed>", "exec"
        )
        scratch = dict(function.__globals__)
        exec(code, scratch)
        original = function.__code__
        function.__code__ = scratch[function.__name__].__code__
        try:
            yield
        finally:
            function.__code__ = original


@dataclass(frozen=True)
class InEntry:
    """Another value for one entry of a table."""

    table: MutableMapping[Any, Any]
    key: Any
    value: Any
    where: str

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Swaps the entry."""
        original = self.table[self.key]
        if original == self.value:
            raise GuardMoved(f"{self.where} holds {self.value!r} already")
        self.table[self.key] = self.value
        try:
            yield
        finally:
            self.table[self.key] = original


@dataclass(frozen=True)
class InStatement:
    """Another text in one SQL statement."""

    statements: MutableMapping[str, str]
    name: str
    old: str
    new: str
    where: str

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Swaps the statement."""
        original = self.statements[self.name]
        self.statements[self.name] = _replaced(original, self.old, self.new, self.where)
        try:
            yield
        finally:
            self.statements[self.name] = original
