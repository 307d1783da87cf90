"""Models of other libraries: which values are some, and what they hold.

Owns the look into pydantic models and msgspec structs, without importing either: who has not
loaded a library has no model of it. What a model *prints* is not what it holds: pydantic masks
secrets, leaves excluded fields out and cuts a subclass down to the declared class.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Final

Fields = list[tuple[str, Any]]

# Asked first: three libraries need not be asked about each list.
_WITHOUT_FIELDS: Final = frozenset({list, tuple, dict, set, frozenset})


def is_pydantic(value: Any) -> bool:
    """Whether the value is a pydantic model."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(value, pydantic.BaseModel)


def is_msgspec(value: Any) -> bool:
    """Whether the value is a msgspec struct."""
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and isinstance(value, msgspec.Struct)


def is_dataclass(value: Any) -> bool:
    """Whether the value is a dataclass, and not the class itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> Fields | None:
    """What a model or dataclass holds, by the names of its fields; None for other values.

    A list, because an extra of a pydantic model may have the name of an aliased field.
    """
    if type(value) in _WITHOUT_FIELDS:
        return None
    if is_pydantic(value):
        held = vars(value)
        # Not all of `held`: cached properties are kept there as well. And a model that was made
        # without validation need not have all of its fields.
        own = [(name, held[name]) for name in type(value).model_fields if name in held]
        return [*own, *(getattr(value, "__pydantic_extra__", None) or {}).items()]
    if is_msgspec(value):
        return [(name, getattr(value, name)) for name in value.__struct_fields__]
    if is_dataclass(value):
        return [(item.name, getattr(value, item.name)) for item in dataclasses.fields(value)]
    return None


def set_field(model: Any, name: str, item: Any) -> None:
    """Changes a field of a model or dataclass that was just made, also of a frozen one."""
    if is_pydantic(model):
        is_own = name in type(model).model_fields
        (vars(model) if is_own else model.__pydantic_extra__)[name] = item
    elif is_msgspec(model):
        sys.modules["msgspec"].structs.force_setattr(model, name, item)
    else:
        object.__setattr__(model, name, item)


def uses_enum_values(model: type) -> bool:
    """Whether fields of the model are declared to hold the values of enums, and not the members."""
    config = getattr(model, "model_config", None)
    return isinstance(config, dict) and bool(config.get("use_enum_values"))
