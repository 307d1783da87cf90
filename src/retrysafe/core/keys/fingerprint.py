"""Fingerprints: when two requests are the same request.

Owns the rule (which fields count), its version, and the framing of what is hashed. Two requests
are compared only under one rule, so a rule that changes must get a new version; the earlier rules
stay known for as long as their records live.

Owns as well how Python values count: as a tree that is hashed and never stored. A model counts by
what it holds, as a dataclass does, and not by what its library writes of it: two cards whose
numbers print as the same mask are two requests. Nothing here has to come back, so a secret counts
by its value.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
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

from retrysafe.core.keys import canonical
from retrysafe.core.keys.canonical import digest, frame
from retrysafe.core.model import Fingerprint
from retrysafe.core.values.models import Fields, fields_of, is_msgspec, is_pydantic
from retrysafe.core.values.trees import (
    Encoder,
    NotStorable,
    Walk,
    never_set,
    to_tree,
    type_name,
    typed,
)
from retrysafe.errors import FingerprintImpossible, PolicyInvalid

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Headers whose part in a fingerprint is decided elsewhere.
_COUNTED_APART: Final = frozenset({"content-type", "idempotency-key"})


@lru_cache(maxsize=512)
def _framed_start(parts: tuple[bytes, ...]) -> bytes:
    """What all fingerprints of one operation start with; a program has few operations."""
    return frame(b"fingerprint 1", frame(*parts))


def _framed(parts: tuple[bytes, ...], counting: bytes) -> bytes:
    return digest(b"%b%d:%b" % (_framed_start(parts), len(counting), counting))


@dataclass(frozen=True, slots=True)
class FingerprintRule:
    """Which parts of a request count; raises `PolicyInvalid` for broken pointers or versions.

    `include` names the only fields that count, `exclude` the fields that do not, both as JSON
    Pointers. They apply to bodies that are JSON and, over HTTP, to the fields of forms by `/name`;
    any other body counts byte by byte. Change `version` with every change of the rule, and list
    the rules that it replaces in `previous`.

    The others are for requests over HTTP alone. `headers` names headers that count, such as
    `If-Match`; `exclude_query` names fields of the query that do not; `media_type_parameters` has
    the parameters of `Content-Type` count, but for a boundary.
    """

    version: int = 1
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    previous: tuple[FingerprintRule, ...] = ()
    headers: tuple[str, ...] = ()
    exclude_query: tuple[str, ...] = ()
    media_type_parameters: bool = False
    # The headers by their lower-case names, in one order.
    header_names: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    # Whether any option is about the head of an HTTP request.
    reads_head: bool = field(init=False, repr=False, compare=False)
    _included: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    _excluded: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # 32,767 is what the smallest integer column of the stores can hold.
        if type(self.version) is not int or not 1 <= self.version <= 32_767:
            raise PolicyInvalid(
                f"a rule's version is a whole number from 1 to 32,767, got {self.version!r}"
            )
        for name in ("include", "exclude"):
            pointers = getattr(self, name)
            if isinstance(pointers, str):
                raise PolicyInvalid(
                    f"{name} takes a list of JSON Pointers, got the text {pointers!r}"
                )
            try:
                tokens = tuple(canonical.pointer_tokens(pointer) for pointer in sorted(pointers))
            except (ValueError, TypeError, AttributeError) as error:
                raise PolicyInvalid(f"{name} takes a list of JSON Pointers: {error}") from None
            object.__setattr__(self, f"_{name}d", tokens)
        self._check_head()
        if not isinstance(self.previous, tuple | list) or not all(
            isinstance(rule, FingerprintRule) for rule in self.previous
        ):
            raise PolicyInvalid(f"previous takes a list of rules, got {self.previous!r}")
        versions = [self.version, *(rule.version for rule in self.previous)]
        if len(set(versions)) != len(versions):
            raise PolicyInvalid(f"every rule needs its own version, got {versions}")

    def _check_head(self) -> None:
        for name in ("headers", "exclude_query"):
            given = getattr(self, name)
            if not isinstance(given, tuple | list) or not all(
                isinstance(item, str) for item in given
            ):
                raise PolicyInvalid(f"{name} takes a list of names, got {given!r}")
        for header in self.headers:
            if _HEADER_NAME.fullmatch(header) is None:
                raise PolicyInvalid(f"no header has the name {header!r}: write If-Match, say")
            if header.lower() in _COUNTED_APART:
                raise PolicyInvalid(
                    f"{header} counts as it must: its parameters with media_type_parameters=True"
                    if header.lower() == "content-type"
                    else f"{header} cannot be compared under itself: it is the key"
                )
        if type(self.media_type_parameters) is not bool:
            raise PolicyInvalid(
                f"media_type_parameters is True or False, got {self.media_type_parameters!r}"
            )
        names = tuple(sorted({header.lower().encode("ascii") for header in self.headers}))
        object.__setattr__(self, "header_names", names)
        reads_head = bool(names or self.exclude_query or self.media_type_parameters)
        object.__setattr__(self, "reads_head", reads_head)

    def fingerprints(self, *parts: bytes, body: bytes) -> tuple[Fingerprint, ...]:
        """The request's fingerprint under this rule, then under each earlier one."""
        own = Fingerprint(self.version, self._digest(parts, body))
        if not self.previous:
            return (own,)
        return (own, *(rule.fingerprints(*parts, body=body)[0] for rule in self.previous))

    def fingerprints_of_value(self, name: str, request: object) -> tuple[Fingerprint, ...]:
        """The same for an operation's request of Python values; no text is parsed for it.

        Raises `FingerprintImpossible`.
        """
        try:
            tree = to_tree(request, "the request", walk=_REQUEST)
        except (NotStorable, RecursionError) as error:
            raise FingerprintImpossible(
                f"two requests can only be told apart by values with a stable form: {error}. Leave "
                "it out with ignore=…, or pass request=… with what identifies the request"
            ) from None
        # A request that is its own tree has nothing in it that counts as something else.
        value = tree if tree is request else canonical.of_tree(tree)
        found: list[Fingerprint] = []
        try:
            for rule in (self, *self.previous):
                counting = rule.counting_bytes(value)
                found.append(Fingerprint(rule.version, _framed((name.encode(),), counting)))
        except ValueError as error:
            raise FingerprintImpossible(
                f"the request has no canonical form: {error}. Leave it out with ignore=…, or pass "
                "request=… with what identifies the request"
            ) from None
        return tuple(found)

    def _digest(self, parts: tuple[bytes, ...], body: bytes) -> bytes:
        """The bytes that count; the first one says how they were made, so no two ways meet."""
        try:
            counting = self.counting_bytes(canonical.parse(body))
        except (canonical.NotCanonical, RecursionError):
            counting = b"r" + body
        return _framed(parts, counting)

    def counting_bytes(self, value: Any) -> bytes:
        """The parts of a parsed value that count; raises `NotCanonical` when it is too deep."""
        for tokens in self._excluded:
            value = canonical.without(value, tokens)
        if not self._included:
            return b"j" + canonical.canonical_bytes(value)
        chosen = (canonical.select(value, tokens) for tokens in self._included)
        return b"i" + frame(*map(canonical.canonical_bytes, chosen))


# How the values of a request count.


def fingerprint_tree(request: object, path: str = "the request") -> Any:
    """The tree of a request; raises `NotStorable` naming the part that has no stable form."""
    return to_tree(request, path, walk=_REQUEST)


class _RequestWalk(Walk):
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


_REQUEST: Final = _RequestWalk()


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
