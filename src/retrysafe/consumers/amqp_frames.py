"""Frames of AMQP that a library cannot read, made readable.

A publisher chooses bytes that no library decodes: a message id that is not UTF-8, a time stamp
beyond the calendar, thousands of nested tables. The library that meets them loses its connection,
and meets them again on the next one: nobody gets past that message. Owns the few bytes of AMQP
0-9-1 that it takes to put a readable frame in their place. It must not know a library.
"""

from __future__ import annotations

import struct
from typing import Final

METHOD: Final = 1
HEADER: Final = 2
# Type, channel and size of the payload; behind the payload is one byte.
HEAD: Final = struct.Struct(">BHI")
_END: Final = b"\xce"
# Class and method: a message is delivered.
DELIVER: Final = struct.pack(">HH", 60, 60)
# Class, weight and size of the body; the flags of the properties follow.
_CONTENT: Final = struct.Struct(">HHQ")
_HAS_HEADERS: Final = struct.pack(">H", 1 << 13)
_SIZE: Final = struct.Struct(">I")
# What says that properties could not be read, why, and what they were.
UNREADABLE: Final = "retrysafe-unreadable"
_PROPERTIES: Final = "retrysafe-properties"
_REASON_LIMIT_CHARACTERS: Final = 300


def mended(frame: bytes, error: Exception) -> bytes:
    """The frame without what cannot be read; raises `error` for one that no publisher writes."""
    kind, channel, _ = HEAD.unpack_from(frame)
    payload = frame[HEAD.size : -1]
    if frame[-1:] != _END:
        raise error
    if kind == HEADER and len(payload) > _CONTENT.size:
        payload = _without_properties(payload, error)
    elif kind == METHOD and payload.startswith(DELIVER):
        payload = _without_route(payload)
    else:
        raise error
    return HEAD.pack(kind, channel, len(payload)) + payload + _END


def _without_properties(payload: bytes, error: Exception) -> bytes:
    """The size of the body, and two headers instead of all properties."""
    reason = f"{type(error).__name__}: {error}"[:_REASON_LIMIT_CHARACTERS]
    table = _field(UNREADABLE, b"S", reason.encode(errors="backslashreplace"))
    table += _field(_PROPERTIES, b"x", payload[_CONTENT.size :])
    return payload[: _CONTENT.size] + _HAS_HEADERS + _SIZE.pack(len(table)) + table


def _field(name: str, kind: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name.encode() + kind + _SIZE.pack(len(value)) + value


def _without_route(payload: bytes) -> bytes:
    """A delivery without its exchange and routing key, which nobody needs here."""
    tag_end = len(DELIVER) + 1 + payload[len(DELIVER)]
    # The consumer's tag, the number of the delivery, and whether it comes again.
    return payload[: tag_end + 8 + 1] + b"\x00\x00"
