"""Strings that make a regular expression try: one for every repetition in it.

A witness of what stands before the repetition, a long run of characters for it, and an end that
does not fit. Two neighbours that take the same characters then try every split between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
# Blanks, tabs, quotes, semicolons, backslashes and what else the syntax of HTTP is made of.
PUMPS = (
    *(" ", "\t", '"', ";", "\\", ",", "=", "-", "/", ".", ":", "a", "A", "0", "&", "%", "<", "~"),
    *('\\"', '"a', ";a", " ;", '""', "; ", "a ", "a=", ":a", "-a", "<a", "$1"),
)
ENDS = ("", "\x00", "x", "/")


def attacks(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], Any]]:
    """Makers of strings of a size, as text or bytes, whatever the pattern takes."""
    source = pattern.pattern
    text = source.decode("latin-1") if isinstance(source, bytes) else source
    # The flag for text is not for bytes, and a parsed tree says nothing about either.
    tree = _parser.parse(text, pattern.flags & ~re.UNICODE)
    prefixes = {"", *_prefixes(list(tree), "")}
    for prefix, middle, pump, end in product(sorted(prefixes), ("", "a"), PUMPS, ENDS):

        def make(size: int, start: str = prefix + middle, pump: str = pump, end: str = end) -> Any:
            made = start + pump * (size // len(pump)) + end
            return made.encode("latin-1") if isinstance(source, bytes) else made

        yield make


def _prefixes(items: list[Any], before: str) -> Iterator[str]:
    """What can stand before each repetition of a sequence."""
    for operation, argument in items:
        if operation in _REPEATS:
            yield before
            yield from _prefixes(list(argument[2]), before)
        else:
            for inner in _inner(operation, argument):
                yield from _prefixes(list(inner), before)
        before += _witness(operation, argument)


def _inner(operation: Any, argument: Any) -> list[Any]:
    if operation is sre.SUBPATTERN:
        return [argument[3]]
    if operation is sre.BRANCH:
        return list(argument[1])
    if operation is sre.ATOMIC_GROUP:
        return [argument]
    return []


def _witness(operation: Any, argument: Any) -> str:
    """A short text that this part of a pattern takes."""
    if operation is sre.LITERAL:
        return chr(argument)
    if operation in _REPEATS:
        low, _, body = argument
        return "".join(_witness(*item) for item in body) * low
    if operation is sre.IN:
        return next((char for char in 'a0 \t;="\\-/<' if _is_in(char, argument)), "a")
    if operation in (sre.ANY, sre.NOT_LITERAL):
        return "a"
    inner = _inner(operation, argument)
    return "".join(_witness(*item) for item in inner[0]) if inner else ""


def _is_in(char: str, items: list[Any]) -> bool:
    is_negated = items[0][0] is sre.NEGATE
    is_found = any(
        (kind is sre.LITERAL and ord(char) == value)
        or (kind is sre.RANGE and value[0] <= ord(char) <= value[1])
        or (kind is sre.CATEGORY and _is_of(char, value))
        for kind, value in items
    )
    return is_found != is_negated


def _is_of(char: str, category: Any) -> bool:
    name = str(category)
    if "SPACE" in name:
        return char.isspace() != ("NOT" in name)
    if "DIGIT" in name:
        return char.isdigit() != ("NOT" in name)
    return (char.isalnum() or char == "_") != ("NOT" in name)
