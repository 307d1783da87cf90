"""Whether a value that was read back is the value that was written.

Owns the comparison, part by part and types included. Python's own would not do: NaN differs from
itself, `1` equals `True`, and a class may compare by identity, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

from retrysafe.core.models import fields_of
from retrysafe.core.values import type_name

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


def difference(value: Any, back: Any) -> Difference | None:
    """The first part that is not the same in what was read back; None when all is."""
    kind = type(value)
    if type(back) is not kind:
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
        return _first(".{}", names, [item for _, item in fields], [item for _, item in others])
    return _difference_of_items(value, back)


def _difference_of_items(value: Any, back: Any) -> Difference | None:
    if isinstance(value, dict):
        names = list(value)
        if len(value) != len(back) or _first("", names, names, back):
            return _OTHER_PARTS
        return _first("[{!r}]", names, value.values(), back.values())
    if isinstance(value, _SETS):
        value, back = sorted(value, key=_order), sorted(back, key=_order)
    elif not isinstance(value, _SEQUENCES):
        return None if _is_equal(value, back) else _OTHER
    if len(value) != len(back):
        return _OTHER_PARTS
    return _first("[{}]", range(len(value)), value, back)


def _first(
    label: str, names: Iterable[Any], items: Iterable[Any], others: Iterable[Any]
) -> Difference | None:
    for name, item, other in zip(names, items, others, strict=True):
        kind = type(item)
        # Most parts are plain; a call less for each of them counts.
        if kind in _PLAIN and type(other) is kind and item == other:
            continue
        found = difference(item, other)
        if found is not None:
            return label.format(name) + found[0], found[1]
    return None


def _order(member: Any) -> str:
    """Brings equal sets into one order, also sets of sets, which print as they happen to be."""
    if isinstance(member, frozenset):
        return "".join(sorted(map(_order, member)))
    return repr(member)


def _is_equal(value: Any, back: Any) -> bool:
    try:
        return bool(value == back)
    except Exception:
        return False  # What cannot be compared cannot be known to be the same.
