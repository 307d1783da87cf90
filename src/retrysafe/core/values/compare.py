"""Whether a value that was read back is the value that was written.

Owns the comparison, part by part and types included. Python's own would not do: NaN differs from
itself, `1` equals `True`, and a class may compare by identity, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from numbers import Number
from typing import Any, Final
from uuid import UUID

from retrysafe.core.keys.fingerprint import fingerprint_tree
from retrysafe.core.values.models import fields_of, is_msgspec, is_pydantic, uses_enum_values
from retrysafe.core.values.trees import NotStorable, sorted_json_bytes, type_name
from retrysafe.core.values.zones import zone_name

# Where, as it is written behind the name of the value, and what.
Difference = tuple[str, str]

# The values are not shown: they may be secrets.
_OTHER: Final = ("", "would come back as another value")
_OTHER_PARTS: Final = ("", "would come back with other parts")
_PLAIN: Final = frozenset({str, int, bool, bytes, type(None)})
# Not a number is not equal to itself, and -0.0 is equal to 0.0; their texts tell them apart.
_SPELLED: Final = frozenset({float, Decimal})
_SEQUENCES: Final = (list, tuple)
_SETS: Final = (set, frozenset)
# What drivers and test clocks derive from, and a field of a model gives back as it is declared.
_BASES: Final = frozenset({UUID, date, time, datetime, timedelta, str, bytes})


def difference(value: Any, back: Any, model: type | None = None) -> Difference | None:
    """The first part that is not the same in what was read back; None when all is.

    `model` is the model that the value is in: its fields say the types that it is read as, which
    need not be those of an equal value that was put there without validation.
    """
    kind = type(value)
    if type(back) is not kind:
        if model is not None and _is_equal_field(value, back, model):
            return None
        return "", f"is a {type_name(kind)} and would come back as a {type_name(type(back))}"
    if kind in _PLAIN:
        return None if value == back else _OTHER
    if kind in _SPELLED:
        return None if str(value) == str(back) else _OTHER
    fields = fields_of(value)
    if fields is not None:
        others = fields_of(back) or []
        names = [name for name, _ in fields]
        if names != [name for name, _ in others]:
            return _OTHER_PARTS
        # A dataclass is stored with the types of what it holds; outside a model none may change.
        around = kind if is_pydantic(value) or is_msgspec(value) else model
        items, other_items = [item for _, item in fields], [item for _, item in others]
        return _first(".{}", names, items, other_items, around)
    return _difference_of_items(value, back, model)


def _difference_of_items(value: Any, back: Any, model: type | None) -> Difference | None:
    if isinstance(value, dict):
        names = list(value)
        if len(value) != len(back) or _first("", names, names, back, model):
            return _OTHER_PARTS
        return _first("[{!r}]", names, value.values(), back.values(), model)
    if isinstance(value, _SETS):
        value, back = _paired(value, back)
    elif not isinstance(value, _SEQUENCES):
        return None if _is_equal(value, back) else _OTHER
    if len(value) != len(back):
        return _OTHER_PARTS
    return _first("[{}]", range(len(value)), value, back, model)


def _first(
    label: str,
    names: Iterable[Any],
    items: Iterable[Any],
    others: Iterable[Any],
    model: type | None,
) -> Difference | None:
    for name, item, other in zip(names, items, others, strict=True):
        found = difference(item, other, model)
        if found is not None:
            return label.format(name) + found[0], found[1]
    return None


def _is_equal_field(value: Any, back: Any, model: type) -> bool:
    """Whether a field of a model comes back equal, although its type is another one.

    Defaults and assigned values are not validated: a `float` may hold `0`, and a status its text.
    """
    if isinstance(back, Enum):
        return not isinstance(value, Enum) and difference(value, back.value, model) is None
    if isinstance(value, Enum):
        # Where a member is not declared, it is its text only for those who can compare it to one.
        is_text_alike = uses_enum_values(model) or _is_equal(value, back)
        return is_text_alike and difference(value.value, back, model) is None
    kind = type(back)
    if bool in (type(value), kind):
        return False
    if isinstance(value, Number) and isinstance(back, Number):
        return _is_equal(value, back)
    return kind in _BASES and isinstance(value, kind) and _is_equal(value, back)


def _paired(value: Set[Any], back: Set[Any]) -> tuple[list[Any], list[Any]]:
    """The members of two sets, those first that are to be compared with each other."""
    if _is_equal(value, back):
        found = {member: member for member in back}
        return list(value), [found[member] for member in value]
    # NaN, or a class that compares by identity.
    return sorted(value, key=_order), sorted(back, key=_order)


def _order(member: Any) -> str:
    """Brings sets that hold the same into one order; what a class prints may be its address."""
    try:
        return sorted_json_bytes(fingerprint_tree(member)).decode()
    except NotStorable:
        return repr(member)


def _is_equal(value: Any, back: Any) -> bool:
    try:
        if isinstance(value, datetime) and isinstance(back, datetime):
            return _is_same_moment(value, back)
        if isinstance(value, time) and isinstance(back, time):
            return zone_name(value.tzinfo) == zone_name(back.tzinfo) and value == back
        return bool(value == back)
    except Exception:
        return False  # What cannot be compared cannot be known to be the same.


def _is_same_moment(value: datetime, back: datetime) -> bool:
    """Whether two moments are one, in zones of the same name."""
    name = zone_name(value.tzinfo)
    if name != zone_name(back.tzinfo):
        return False
    if name is None:
        return value == back
    # By the wall: in the hour that a clock repeats, Python takes both for one.
    return _on_the_wall(value) == _on_the_wall(back)


def _on_the_wall(moment: datetime) -> tuple[Any, ...]:
    return (*moment.timetuple()[:6], moment.microsecond, moment.fold)
