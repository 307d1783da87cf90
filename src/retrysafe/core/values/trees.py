"""Python values as JSON trees that turn back into equal values of the same types.

Plain JSON stays plain. Everything else becomes an object whose `$` names its kind, so tuples come
back as tuples and Decimals as Decimals: the caller of a replay gets what the first caller got.
Types are never imported by their stored name; they are declared, or already loaded.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from typing import Any, Final
from uuid import UUID

from retrysafe.core.values import zones
from retrysafe.core.values.models import is_dataclass, is_msgspec, is_pydantic

# Deeper values are almost always cycles; the limit is well below the interpreter's own.
DEPTH_LIMIT: Final = 100


class NotStorable(Exception):
    """The value has no stored form; the message says which part and what to do."""


class NotReadable(Exception):
    """The stored form cannot be turned back here; the message says what is missing."""


_PLAIN_SCALARS: Final = frozenset({str, int, bool, type(None)})

_compact_text = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, ensure_ascii=False, check_circular=False
).encode
_escaped_text = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, ensure_ascii=True, check_circular=False
).encode
_sorted_text = json.JSONEncoder(
    separators=(",", ":"), allow_nan=False, sort_keys=True, check_circular=False
).encode


def json_bytes(tree: Any) -> bytes:
    """The compact UTF-8 JSON of a tree."""
    try:
        return _compact_text(tree).encode()
    except UnicodeEncodeError:
        # Lone surrogates exist in Python text and not in UTF-8; escaped they survive.
        return _escaped_text(tree).encode()


def sorted_json_bytes(tree: Any) -> bytes:
    """The JSON of a tree with sorted names, for comparing."""
    return _sorted_text(tree).encode()


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether the value is JSON as it stands and comes back equal, types included."""
    kind = type(value)
    if kind in _PLAIN_SCALARS:
        return True
    if kind is float:
        return math.isfinite(value)
    if depth >= DEPTH_LIMIT:
        raise NotStorable(f"the value is nested deeper than {DEPTH_LIMIT} levels, or in a circle")
    items = value
    if kind is dict:
        if "$" in value:
            return False
        for name in value:
            if type(name) is not str:
                return False
        items = value.values()
    elif kind is not list:
        return False
    for item in items:
        if type(item) not in _PLAIN_SCALARS and not is_plain(item, depth + 1):
            return False
    return True


def type_name(kind: type) -> str:
    """The name under which a type is stored."""
    return f"{kind.__module__}:{kind.__qualname__}"


class Walk:
    """How values of classes become trees: here, so that they can be read back.

    `met`, if given, is filled with these classes.
    """

    __slots__ = ("met",)

    # Whether what is met has to come back; a request is only hashed.
    is_stored = True

    def __init__(self, met: set[type] | None = None) -> None:
        self.met = met

    def encoder(self, value: Any) -> Encoder | None:
        """What makes a tree of the value; None when nothing does."""
        if isinstance(value, Flag):
            return _encode_flag
        if isinstance(value, Enum):
            return _encode_enum
        if is_pydantic(value):
            return _encode_pydantic
        if is_msgspec(value):
            return _encode_msgspec
        if is_dataclass(value):
            return _encode_dataclass
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return _encode_namedtuple
        return None


# Takes the value, where it is, how deep that is, and the walk for what is inside.
Encoder = Callable[[Any, str, int, Walk], Any]
_STORED: Final = Walk()


def to_tree(value: Any, path: str = "the value", depth: int = 0, walk: Walk = _STORED) -> Any:
    """The JSON tree of a value; raises `NotStorable` naming the part that has none."""
    if is_plain(value, depth):
        return value
    kind = type(value)
    encode = _ENCODERS.get(kind) or walk.encoder(value)
    if encode is None:
        raise NotStorable(
            f"{path} is a {type_name(kind)}, which has no stored form: use JSON values, bytes, "
            "dates, Decimals, UUIDs, enums, dataclasses, msgspec structs or pydantic models"
        )
    return encode(value, path, depth + 1, walk)


def _items(values: Iterable[Any], path: str, depth: int, walk: Walk) -> list[Any]:
    return [to_tree(item, f"{path}[{index}]", depth, walk) for index, item in enumerate(values)]


def _tagged(tag: str) -> Callable[[Callable[[Any], Any]], Encoder]:
    def wrap(text_of: Callable[[Any], Any]) -> Encoder:
        return lambda value, path, depth, walk: {"$": tag, "v": text_of(value)}

    return wrap


def _encode_dict(value: dict[Any, Any], path: str, depth: int, walk: Walk) -> Any:
    if "$" not in value and all(type(name) is str for name in value):
        return {
            name: to_tree(item, f"{path}[{name!r}]", depth, walk) for name, item in value.items()
        }
    pairs = [
        [
            to_tree(name, f"a key of {path}", depth, walk),
            to_tree(item, f"{path}[{name!r}]", depth, walk),
        ]
        for name, item in value.items()
    ]
    # A request takes the name of a subclass of `str` for the text that it is.
    if all(type(name) is str for name, _ in pairs):
        tree = dict(pairs)
        if len(tree) == len(pairs) and "$" not in tree:
            return tree
    return {"$": "dict", "v": pairs}


def _encode_sequence(tag: str) -> Encoder:
    return lambda value, path, depth, walk: {"$": tag, "v": _items(value, path, depth, walk)}


def _encode_set(tag: str) -> Encoder:
    # Sets have no order of their own; sorting their stored items makes equal sets equal texts.
    return lambda value, path, depth, walk: {
        "$": tag,
        "v": sorted(_items(value, path, depth, walk), key=sorted_json_bytes),
    }


def _encode_moment(tag: str) -> Encoder:
    def encode(value: datetime | time, path: str, depth: int, walk: Walk) -> Any:
        notes = zones.notes_of(value)
        if walk.is_stored and "z" not in notes and not zones.is_offset_enough(value):
            raise NotStorable(
                f"{path} is a {tag} whose time zone, a {type_name(type(value.tzinfo))}, has no "
                "stored form, and without it would not come back equal: use zoneinfo.ZoneInfo, or "
                "convert it to UTC"
            )
        return {"$": tag, "v": value.isoformat(), **notes}

    return encode


_ENCODERS: Final[dict[type, Encoder]] = {
    dict: _encode_dict,
    list: _items,
    tuple: _encode_sequence("tuple"),
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    float: _tagged("float")(repr),
    bytes: _tagged("bytes")(lambda value: base64.b64encode(value).decode()),
    Decimal: _tagged("decimal")(str),
    UUID: _tagged("uuid")(str),
    datetime: _encode_moment("datetime"),
    date: _tagged("date")(date.isoformat),
    time: _encode_moment("time"),
    timedelta: _tagged("timedelta")(lambda value: [value.days, value.seconds, value.microseconds]),
}


def typed(tag: str, value: Any, tree: Any, walk: Walk) -> Any:
    """The tree of a value of a class, with the name of that class."""
    kind = type(value)
    if walk.met is not None:
        walk.met.add(kind)
    return {"$": tag, "t": type_name(kind), "v": tree}


def _encode_flag(value: Flag, path: str, depth: int, walk: Walk) -> Any:
    # A combination of flags is no member, so it has no name to be found by.
    return typed("flag", value, value.value, walk)


def _encode_enum(value: Enum, path: str, depth: int, walk: Walk) -> Any:
    return typed("enum", value, value.name, walk)


def _encode_pydantic(value: Any, path: str, depth: int, walk: Walk) -> Any:
    tree = value.model_dump(mode="json", **PYDANTIC_OPTIONS)
    return _with_zones(typed("pydantic", value, tree, walk), value)


def _encode_msgspec(value: Any, path: str, depth: int, walk: Walk) -> Any:
    tree = sys.modules["msgspec"].to_builtins(value)
    return _with_zones(typed("msgspec", value, tree, walk), value)


def _with_zones(tree: dict[str, Any], model: Any) -> dict[str, Any]:
    held = zones.held_in(model)
    return {**tree, "z": held} if held else tree


def _encode_dataclass(value: Any, path: str, depth: int, walk: Walk) -> Any:
    names = [item.name for item in dataclasses.fields(value)]
    try:
        held = [getattr(value, name) for name in names]
    except AttributeError as error:
        raise never_set(path, error) from error
    tree = {
        name: to_tree(item, f"{path}.{name}", depth, walk)
        for name, item in zip(names, held, strict=True)
    }
    return typed("dataclass", value, tree, walk)


def never_set(path: str, error: AttributeError) -> NotStorable:
    """The refusal of a value that lacks one of its fields."""
    return NotStorable(f"a field of {path} was never set: {error}")


def _encode_namedtuple(value: Any, path: str, depth: int, walk: Walk) -> Any:
    return typed("namedtuple", value, _items(value, path, depth, walk), walk)


# Fields under their own names and no computed ones: aliases need not read what they write. Without
# warnings of values that do not fit their fields: whether they come back is looked at.
PYDANTIC_OPTIONS: Final[dict[str, Any]] = {
    "by_alias": False,
    "round_trip": True,
    "warnings": False,
}


class Types:
    """Finds a type by its stored name: among the declared ones first, then the loaded modules."""

    __slots__ = ("_declared",)

    def __init__(self, declared: Iterable[type] = ()) -> None:
        self._declared = {type_name(kind): kind for kind in declared}

    def find(self, name: str) -> type:
        """The type; raises `NotReadable` when this process does not know it."""
        found = self._declared.get(name)
        if found is not None:
            return found
        module_name, _, qualified = name.partition(":")
        place: Any = sys.modules.get(module_name)
        for part in qualified.split("."):
            place = getattr(place, part, None)
        if isinstance(place, type):
            return place
        raise NotReadable(
            f"the stored outcome is a {name}, which is not loaded here: annotate the operation's "
            "return type, or pass returns="
        )


def from_tree(tree: Any, types: Types) -> Any:
    """The value of a tree; raises `NotReadable` when a type is unknown or has changed."""
    if isinstance(tree, list):
        return [from_tree(item, types) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = tree.get("$")
    if tag is None:
        return {name: from_tree(item, types) for name, item in tree.items()}
    decode = _DECODERS.get(tag)
    if decode is None:
        raise NotReadable(f"the stored outcome holds a {tag!r}, which this release does not know")
    return decode(tree, types)


def _read_enum(tree: Any, types: Types) -> Any:
    kind: Any = types.find(tree["t"])
    try:
        made = kind(tree["v"]) if tree["$"] == "flag" else kind[tree["v"]]
        # Early releases of Python 3.11 drop the bits of a flag that they do not know.
        is_whole = tree["$"] != "flag" or made.value == tree["v"]
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise NotReadable(f"{tree['t']} has no member {tree['v']!r} any more")
    return made


def read_dataclass(kind: type, tree: dict[str, Any], types: Types) -> Any:
    """The dataclass with these fields; raises `NotReadable` when its fields have changed."""
    if not dataclasses.is_dataclass(kind):
        raise NotReadable(f"{type_name(kind)} is not a dataclass any more")
    values = {name: from_tree(item, types) for name, item in tree.items()}
    known = {item.name: item for item in dataclasses.fields(kind)}
    try:
        made = kind(**{name: item for name, item in values.items() if known[name].init})
    except (KeyError, TypeError, ValueError) as error:
        raise NotReadable(f"the fields of {type_name(kind)} have changed: {error}") from None
    for name, item in values.items():
        # Also those that __init__ took: __post_init__ may have changed them a second time.
        object.__setattr__(made, name, item)
    return made


def _read_namedtuple(tree: Any, types: Types) -> Any:
    kind: Any = types.find(tree["t"])
    try:
        return kind._make(from_tree(item, types) for item in tree["v"])
    except (AttributeError, TypeError) as error:
        raise NotReadable(f"the fields of {tree['t']} have changed: {error}") from None


def read_pydantic(kind: Any, body: bytes) -> Any:
    """The pydantic model of a JSON text; raises `NotReadable` when it no longer validates."""
    try:
        try:
            return kind.model_validate_json(body, by_alias=False, by_name=True)
        except TypeError:
            return kind.model_validate_json(body)  # Before 2.11 a model itself chose the names.
    except (ValueError, AttributeError) as error:
        raise NotReadable(
            f"{type_name(kind)} no longer fits what was stored: {_without_values(error)}"
        ) from None


def _without_values(error: Exception) -> str:
    """What pydantic says, without the values that it says it about: this is logged."""
    found = getattr(error, "errors", None)
    if found is None:
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in found())


def read_msgspec(kind: Any, body: bytes) -> Any:
    """The msgspec struct of a JSON text; raises `NotReadable` when it no longer validates."""
    msgspec = sys.modules.get("msgspec")
    if msgspec is None:
        raise NotReadable(f"{type_name(kind)} needs msgspec, which is not loaded here")
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, TypeError) as error:
        raise NotReadable(f"{type_name(kind)} no longer fits what was stored: {error}") from None


def _read_model(read: Callable[[Any, bytes], Any], tree: Any, types: Types) -> Any:
    made = read(types.find(tree["t"]), json_bytes(tree["v"]))
    return _read_zoned(zones.put_into, made, tree["z"]) if "z" in tree else made


def _read_zoned(read: Callable[[Any, Any], Any], held: Any, stored: Any) -> Any:
    try:
        return read(held, stored)
    except LookupError as error:
        raise NotReadable(
            f"a stored time zone is not known here ({error.args[0]}): install tzdata"
        ) from error


_DECODERS: Final[dict[str, Callable[[Any, Types], Any]]] = {
    "dict": lambda tree, types: {
        from_tree(name, types): from_tree(item, types) for name, item in tree["v"]
    },
    "tuple": lambda tree, types: tuple(from_tree(tree["v"], types)),
    "set": lambda tree, types: set(from_tree(tree["v"], types)),
    "frozenset": lambda tree, types: frozenset(from_tree(tree["v"], types)),
    "float": lambda tree, types: float(tree["v"]),
    "bytes": lambda tree, types: base64.b64decode(tree["v"]),
    "decimal": lambda tree, types: Decimal(tree["v"]),
    "uuid": lambda tree, types: UUID(tree["v"]),
    "datetime": lambda tree, types: _read_zoned(zones.read, datetime, tree),
    "date": lambda tree, types: date.fromisoformat(tree["v"]),
    "time": lambda tree, types: _read_zoned(zones.read, time, tree),
    "timedelta": lambda tree, types: timedelta(*tree["v"]),
    "enum": _read_enum,
    "flag": _read_enum,
    "dataclass": lambda tree, types: read_dataclass(types.find(tree["t"]), tree["v"], types),
    "namedtuple": _read_namedtuple,
    "pydantic": lambda tree, types: _read_model(read_pydantic, tree, types),
    "msgspec": lambda tree, types: _read_model(read_msgspec, tree, types),
}
