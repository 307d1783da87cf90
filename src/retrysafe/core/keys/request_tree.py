"""What is asked for, as a tree that is hashed and never stored.

Owns how the values of a request count. A model counts by what it holds, as a dataclass does, and
not by what its library writes of it: two cards whose numbers print as the same mask are two
requests. Nothing here has to come back, so a secret counts by its value.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, Final
from uuid import UUID

from retrysafe.core.values.models import Fields, fields_of, is_msgspec, is_pydantic
from retrysafe.core.values.trees import Encoder, Walk, never_set, to_tree, type_name, typed


def asked_tree(request: object, path: str = "the request") -> Any:
    """The tree of a request; raises `NotStorable` naming the part that has no stable form."""
    return to_tree(request, path, walk=_ASKED)


class _Asked(Walk):
    """The walk through a request."""

    __slots__ = ()
    is_stored = False

    def encoder(self, value: Any) -> Encoder | None:
        """What makes a tree of the value; None when it has no stable form."""
        if is_pydantic(value):
            return _model
        if is_msgspec(value):
            return _struct
        return super().encoder(value) or _encoder_of_part(value)


_ASKED: Final = _Asked()


def _model(value: Any, path: str, depth: int, walk: Walk) -> Any:
    fields = fields_of(value) or []
    if getattr(value, "__pydantic_root_model__", False):
        # It stands for its one value, which has no name for clients either.
        return typed("pydantic", value, to_tree(fields[0][1], path, depth, walk), walk)
    return typed("pydantic", value, _named(fields, path, depth, walk), walk)


def _struct(value: Any, path: str, depth: int, walk: Walk) -> Any:
    config, unset = value.__struct_config__, sys.modules["msgspec"].UNSET
    # By the names that clients use: these are what pointers were written for.
    names = value.__struct_encode_fields__
    try:
        items = [item for _, item in fields_of(value) or []]
    except AttributeError as error:
        raise never_set(path, error) from error
    # The tag tells the structs of a union apart that have the same fields.
    tag: Fields = [] if config.tag is None else [(config.tag_field, config.tag)]
    if config.array_like:
        row = [*(tag and [config.tag]), *items]
        return typed("msgspec", value, to_tree(row, path, depth, walk), walk)
    held = [(name, item) for name, item in zip(names, items, strict=True) if item is not unset]
    return typed("msgspec", value, _named([*tag, *held], path, depth, walk), walk)


def _named(fields: Fields, path: str, depth: int, walk: Walk) -> Any:
    tree = {name: to_tree(item, f"{path}.{name}", depth, walk) for name, item in fields}
    if len(tree) == len(fields) and "$" not in tree:
        return tree
    # A client's extra may be called as a tag of ours, or as a field of the model is in Python.
    pairs = [[name, to_tree(item, f"{path}.{name}", depth, walk)] for name, item in fields]
    return {"$": "dict", "v": pairs}


def _encoder_of_part(value: Any) -> Encoder | None:
    """For what models hold beyond the values that have a stored form of their own."""
    kind = type(value)
    if _is_of("pydantic", ("SecretStr", "SecretBytes", "Secret"), value):
        return _as(lambda secret: secret.get_secret_value())
    if _is_of("msgspec", ("Raw",), value):
        return _as(bytes)
    if kind in _EXACT:
        return _as(_EXACT[kind])
    if kind.__module__ in _URL_MODULES or type_name(kind) == "fractions:Fraction":
        return _as(str)
    if type_name(kind) == "zoneinfo:ZoneInfo":
        # One that was read from a file without a name prints as its address.
        return _as(str) if value.key is not None else None
    for base, exact in _BASES:
        if isinstance(value, base):
            return _as(exact)
    return None


def _as(other: Callable[[Any], Any]) -> Encoder:
    return lambda value, path, depth, walk: to_tree(other(value), path, depth, walk)


def _is_of(package: str, names: tuple[str, ...], value: Any) -> bool:
    """Whether the value is of one of these classes, where the package is loaded and has them."""
    loaded = sys.modules.get(package)
    return isinstance(value, tuple(getattr(loaded, name, ()) for name in names))


# Exactly these: the text of a subclass could be a mask.
_EXACT: Final[dict[type, Callable[[Any], Any]]] = {
    **dict.fromkeys((bytearray, memoryview), bytes),
    **dict.fromkeys(
        (
            *(PurePosixPath, PureWindowsPath, PosixPath, WindowsPath),
            *(IPv4Address, IPv4Interface, IPv4Network),
            *(IPv6Address, IPv6Interface, IPv6Network),
        ),
        str,
    ),
    deque: list,
    complex: lambda value: (value.real, value.imag),
    re.Pattern: lambda value: (value.pattern, value.flags),
}
# Where pydantic, in this release or that, has the classes of its URLs.
_URL_MODULES: Final = frozenset({"pydantic.networks", "pydantic_core._pydantic_core"})

# Bound once: a test clock may put a class of its own in the place of `datetime`.
_combine, _day_of, _clock_of = datetime.combine, datetime.date, datetime.timetz
_day, _ordinal_of = date.fromordinal, date.toordinal
_ANY_DAY: Final = date(2000, 1, 1)

# Subclasses count as what they are made of, asked in a way that they cannot change.
_BASES: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (bytes, bytes.__bytes__),
    (dict, lambda value: dict(dict.items(value))),
    (list, list.copy),
    # Its number as the subclass has it: that of asyncpg keeps none where UUID does, and to look
    # there would crash the process.
    (UUID, lambda value: UUID(int=value.int)),
    (Decimal, Decimal),
    # Before dates, since each is one.
    (datetime, lambda value: _combine(_day_of(value), _clock_of(value))),
    (date, lambda value: _day(_ordinal_of(value))),
    (time, lambda value: _clock_of(_combine(_ANY_DAY, value))),
    (timedelta, timedelta.__pos__),
)
