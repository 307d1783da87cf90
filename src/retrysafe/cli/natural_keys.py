"""`retrysafe keys natural`: the key that domain values make, so that an operator can find it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final
from uuid import UUID

import typer

from retrysafe.cli import options, output
from retrysafe.cli.problems import usage
from retrysafe.core.keys.canonical import Part
from retrysafe.core.keys.key import natural_key

_FIELD: Final = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
# Longer ones are not numbers that anybody counts with, and Python refuses to read them.
_WHOLE_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,299})")
_BOOLEANS: Final = {"true": True, "false": False}


def _none(text: str) -> None:
    if text:
        raise ValueError(text)


# How a value is read that says its type; the type is part of the key, as it is in Python.
_TYPES: Final[dict[str, Callable[[str], Part]]] = {
    "text": str,
    "int": int,
    "bool": _BOOLEANS.__getitem__,
    "none": _none,
    "decimal": Decimal,
    "uuid": UUID,
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
}


@options.examples(
    "retrysafe keys natural pay_invoice invoice_id=42",
    "retrysafe keys natural pay_invoice invoice_id=text:42 region=eu",
    "retrysafe keys natural ship shipment 7",
)
def natural(
    context: typer.Context,
    operation: Annotated[
        str,
        typer.Argument(metavar="OPERATION", help="The operation's name.", show_default=False),
    ],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="VALUES",
            help="field=value for each parameter in key=; plain values for a key made of a tuple.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the natural key of an operation, as `once` and `natural_key` make it.

    The types of the values count. A whole number is read as one, anything else as text; say the
    type where that is wrong: text:42, decimal:9.50, uuid:…, date:2024-05-01, datetime:…, bool:true,
    none:. How each value was read is told on stderr. No store is asked.
    """
    parts: list[Part] = []
    fields: dict[str, Part] = {}
    for given in values or ():
        options.checked_text("a value", given)
        field = _FIELD.fullmatch(given)
        if field is None:
            parts.append(_read(given))
        elif field[1] in fields:
            raise usage(f"{field[1]} is given twice")
        else:
            fields[field[1]] = _read(field[2])
    key = natural_key(options.checked_text("OPERATION", operation), *parts, **fields)
    if options.is_json(context, as_json):
        output.write_json(
            {
                "key": key,
                "operation": operation,
                "parts": [_part_json(part) for part in parts],
                "fields": {name: _part_json(part) for name, part in fields.items()},
            }
        )
        return
    for name, part in [*(("a part", part) for part in parts), *fields.items()]:
        output.note(f"{name}: {_type_name(part)}" + ("" if part is None else f" {part!s}"))
    sys.stdout.write(output.safe(key) + "\n")


def _read(text: str) -> Part:
    """The value that is meant; raises a usage problem for one that its own type refuses."""
    kind, mark, rest = text.partition(":")
    if mark and kind in _TYPES:
        try:
            return _TYPES[kind](rest)
        except (ValueError, KeyError, InvalidOperation):
            raise usage(f"{rest or 'nothing'} is not of the type {kind}: {text}") from None
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else text


def _type_name(part: Part) -> str:
    # Every type in the table but text and none is named as its class is.
    return {"str": "text", "NoneType": "none", "UUID": "uuid", "Decimal": "decimal"}.get(
        type(part).__name__, type(part).__name__
    )


def _part_json(part: Part) -> dict[str, Any]:
    return {"type": _type_name(part), "value": None if part is None else str(part)}
