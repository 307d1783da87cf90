"""Lists as PostgreSQL arrays for psycopg, which by itself spends more on them than on the query.

Owns the encoding of lists of one type, as the store's statements take them. Numbers and texts
travel as array literals, which are joined in C; bytes travel in the binary form, which needs no
escapes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

_BYTEA_OID: Final = 17
_BYTEA_ARRAY_OID: Final = 1001
# One dimension, whether there are NULLs, the type of the items, their number, and the first index.
_ARRAY_HEAD: Final = struct.Struct("!iiiii")
_LENGTH: Final = struct.Struct("!i").pack
_NULL: Final = _LENGTH(-1)


class BytesArray:
    """A list of bytes on its way to the server."""

    __slots__ = ("items",)

    def __init__(self, items: list[bytes | None]) -> None:
        self.items = items


class BytesArrayDumper(Dumper):
    """The binary form of `bytea[]`."""

    format = Format.BINARY
    oid = _BYTEA_ARRAY_OID

    def dump(self, obj: BytesArray) -> Buffer:
        """The array's header, then every item after its length."""
        has_nulls = None in obj.items
        parts = [_ARRAY_HEAD.pack(1, has_nulls, _BYTEA_OID, len(obj.items), 1)]
        for item in obj.items:
            if item is None:
                parts.append(_NULL)
            else:
                parts.append(_LENGTH(len(item)))
                parts.append(item)
        return b"".join(parts)


def encoded(params: Sequence[Any]) -> list[Any]:
    """The parameters with their lists in a form that is cheap to send."""
    return [_array(param) if type(param) is list else param for param in params]


def _array(items: list[Any]) -> Any:
    known = next((item for item in items if item is not None), None)
    if isinstance(known, bytes):
        return BytesArray(items)
    if isinstance(known, str):
        text = ",".join([_quoted(item) for item in items])
        if "\x00" in text:
            # The literal would end there, and the server would see another text.
            raise psycopg.DataError("PostgreSQL text cannot contain the NUL character")
        return f"{{{text}}}"
    return f"{{{','.join(['NULL' if item is None else str(item) for item in items])}}}"


def _quoted(text: str | None) -> str:
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
