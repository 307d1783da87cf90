"""The time zone of a stored date or time.

Owns what a text in ISO form does not say: it has the offset of that moment, and neither the zone
that the offset comes from nor, in the hour that a clock repeats, which of the two it is. Without
its zone a moment is not even equal to itself in that hour, and a day later it is another one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime, time, timezone, tzinfo
from typing import Any, TypeVar

from retrysafe.core.values.models import fields_of, set_field

Moment = TypeVar("Moment", datetime, time)

# Where a moment is inside of a model, the name of its zone, and its fold.
Held = list[Any]


def zone_name(zone: tzinfo | None) -> str | None:
    """The name of a zone of `zoneinfo`; None for an offset, and for zones of other libraries."""
    loaded = sys.modules.get("zoneinfo")
    if loaded is None or not isinstance(zone, loaded.ZoneInfo):
        return None
    # None for one that was read from a file.
    name: str | None = getattr(zone, "key")  # noqa: B009 — of a class that is not imported here.
    return name


def notes_of(moment: datetime | time) -> dict[str, Any]:
    """What is written beside the text of a moment."""
    found: dict[str, Any] = {}
    name = zone_name(moment.tzinfo)
    if name is not None:
        found["z"] = name
    if moment.fold:
        found["f"] = 1
    return found


def is_offset_enough(moment: datetime | time) -> bool:
    """Whether what the text gives back is equal to the moment, which has no zone with a name."""
    zone = moment.tzinfo
    if zone is None or type(zone) is timezone:
        return True
    if isinstance(moment, time):
        return moment.utcoffset() is not None  # Else its zone would be forgotten.
    return moment == datetime.fromisoformat(moment.isoformat())


def read(kind: type[Moment], tree: dict[str, Any]) -> Moment:
    """The moment of a tree; raises `LookupError` for a zone that is not known here."""
    moment = kind.fromisoformat(tree["v"])
    fold, name = tree.get("f", 0), tree.get("z")
    if name is not None:
        return _in_zone(moment, name, fold)
    return moment.replace(fold=fold) if fold else moment


def _in_zone(moment: Moment, name: str, fold: int) -> Moment:
    # Imported here: most processes store no zones, and pay for the import at their start.
    from zoneinfo import ZoneInfo  # noqa: PLC0415

    zone = ZoneInfo(name)
    placed = moment.replace(tzinfo=zone, fold=fold)
    if isinstance(moment, datetime) and placed.utcoffset() != moment.utcoffset():
        # The rules of the zone were changed since. What happened then is the instant.
        return moment.astimezone(zone)
    return placed


# Models are written by their own libraries, which keep the offset alone.


def held_in(model: Any) -> list[Held]:
    """The moments in a model that have zones with names."""
    found: list[Held] = []
    if "zoneinfo" in sys.modules:
        _look(model, [], found)
    return found


def _look(value: Any, path: list[Any], found: list[Held]) -> None:
    if isinstance(value, datetime | time):
        name = zone_name(value.tzinfo)
        if name is not None:
            found.append([path, name, value.fold])
        return
    items: Iterable[tuple[Any, Any]] | None = fields_of(value)
    if isinstance(value, dict):
        items = [(name, item) for name, item in value.items() if type(name) is str]
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for name, item in items or ():
        _look(item, [*path, name], found)


def put_into(model: Any, held: Iterable[Held]) -> Any:
    """The model with the zones that were held in it; raises `LookupError` as `read` does."""
    for path, name, fold in held:
        model = _put(model, path, name, fold)
    return model


def _put(value: Any, path: list[Any], name: str, fold: int) -> Any:
    if not path:
        if isinstance(value, datetime):
            return _in_zone(value, name, fold)
        # Anything else is what the field is declared to be.
        return _in_zone(value, name, fold) if isinstance(value, time) else value
    place, rest = path[0], path[1:]
    if isinstance(value, tuple):
        items = [*value]
        items[place] = _put(items[place], rest, name, fold)
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, list | dict):
        value[place] = _put(value[place], rest, name, fold)
    else:
        held = dict(fields_of(value) or ())
        set_field(value, place, _put(held[place], rest, name, fold))
    return value
