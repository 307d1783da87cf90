"""Bodies and queries as they count: by what they say, where that is certain, else byte by byte.

Owns the reading of JSON, forms and multipart bodies for the comparison of requests. A retry may
order fields anew, escape them in another way or choose a new boundary, and is still the same
request. Whatever is odd counts as the bytes that it is, because refusing it is the application's
task. Only what is past a limit raises: clients choose these bodies, so everything here takes time
in proportion to their size and is bounded in number and depth.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from retrysafe.core.keys import canonical
from retrysafe.core.keys.canonical import frame
from retrysafe.errors import FingerprintImpossible
from retrysafe.http.request import Request

# Ten times what frameworks take unless they are configured otherwise: no honest form is refused.
FIELD_LIMIT: Final = 10_000
# A part's head names a field and a file; the limit is what common parsers have.
PART_HEAD_LIMIT_BYTES: Final = 8_192
# A media type with a boundary of 70 characters, many times over.
CONTENT_TYPE_LIMIT_BYTES: Final = 4_096

_JSON: Final = b"application/json"
_ENCODING: Final = b"content-encoding"
_FORM: Final = b"application/x-www-form-urlencoded"
_FORM_DATA: Final = b"multipart/form-data"
# Bodies are read as UTF-8, so one that says it is anything else is not read at all.
_KNOWN_CHARSETS: Final = frozenset({b"utf-8", b"utf8", b"us-ascii"})
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_PARAMETER: Final = re.compile(
    rb'[ \t]*+;[ \t]*+(?:(%b)=(?:"((?:[^"\\]|\\.)*)"|([^;" \t]++)))?[ \t]*+' % _TOKEN, re.DOTALL
)
_BOUNDARY: Final = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")
_DISPOSITION: Final = re.compile(rb"[ \t]*+(%b)" % _TOKEN)
_NAME: Final = re.compile(_TOKEN)
# How the bytes of a part travel: as they are. Any other encoding counts as it was sent.
_PLAIN_ENCODINGS: Final = frozenset({b"7bit", b"8bit", b"binary"})


class _Raw:
    """The type of `RAW`."""


# Marks a body that counts byte by byte; no value of a body is it.
RAW: Final = _Raw()


# A body as it counts: its media type, and the value that pointers lead into. The bare type of a
# value; for `RAW`, all that the headers say about type and encoding. Fields of forms are lists,
# because a name may be sent several times.
Content = tuple[bytes, Any]


def content_of(request: Request) -> Content:
    """What the request's body says; raises `FingerprintImpossible` past a limit.

    Read once, for the key and for the fingerprint: clients choose how dear a body is to read.
    """
    known, body = request.content, request.body
    if known is not None and known[0] is body:
        return known[1]
    content = _content_of(request)
    request.content = body, content
    return content


def _content_of(request: Request) -> Content:
    lines = request.lines_by_name()
    if lines is not None and lines.get(b"content-type") == _JSON and _ENCODING not in lines:
        # What nearly all requests to an API are.
        value = _json_of(request.body)
        return (_JSON if value is not RAW else _RAW_JSON), value
    types = [value.strip(b" \t") for value in request.header_lines(b"content-type")]
    encodings = [value.strip(b" \t").lower() for value in request.header_lines(_ENCODING)]
    # Compressed bodies count as they are: unpacking one would let a small request take a lot of
    # memory, before the application had a chance to refuse it.
    if len(types) == 1 and (not encodings or encodings == [b"identity"]):
        if len(types[0]) > CONTENT_TYPE_LIMIT_BYTES:
            raise _too_many(CONTENT_TYPE_LIMIT_BYTES, "bytes in Content-Type")
        media_type, mark, _ = types[0].partition(b";")
        parameters = _parameters(types[0], len(media_type)) if mark else _NO_PARAMETERS
        media_type = media_type.rstrip(b" \t").lower()
        if parameters is not None and _is_readable(parameters):
            value = _value_of(media_type, parameters, request.body)
            if value is not RAW:
                return media_type, value
    return frame(frame(*types), frame(*encodings)), RAW


_NO_PARAMETERS: Final[dict[bytes, bytes]] = {}
# It counts as it stands, with all that is said about it.
_RAW_JSON: Final = frame(frame(_JSON), frame())


def media_type_parameters(request: Request) -> list[bytes]:
    """The parameters of the media type, names and values in turn, in the order of their names.

    Without the boundary, which is another one with every retry. What cannot be read as parameters
    counts as it stands. Raises `FingerprintImpossible` past a limit.
    """
    types = [value.strip(b" \t") for value in request.header_lines(b"content-type")]
    if sum(map(len, types)) > CONTENT_TYPE_LIMIT_BYTES:
        raise _too_many(CONTENT_TYPE_LIMIT_BYTES, "bytes in Content-Type")
    if len(types) != 1:
        return types
    found = _parameters(types[0], len(types[0].partition(b";")[0]))
    if found is None:
        return types
    found.pop(b"boundary", None)
    return [item for name in sorted(found) for item in (name, found[name])]


def too_deep() -> FingerprintImpossible:
    """The refusal of a body that is nested deeper than it can be compared."""
    return _too_many(canonical.DEPTH_LIMIT, "levels of nesting in the body")


def _too_many(limit: int, of_what: str) -> FingerprintImpossible:
    return FingerprintImpossible(f"at most {limit:,} {of_what} are compared. Nothing was run")


def field_of(content: Content, tokens: tuple[str, ...]) -> Any:
    """The value that a pointer leads to, a form's field as text; `ABSENT` when there is not one.

    A field that was sent twice, is a file or is no text has no one value, either.
    """
    media_type, value = content
    if value is RAW:
        return canonical.ABSENT
    found = canonical.select(value, tokens)
    if media_type not in (_FORM, _FORM_DATA):
        return found
    if len(tokens) != 1 or found is canonical.ABSENT or len(found) != 1:
        return canonical.ABSENT
    (item,) = found
    if isinstance(item, list):
        headers, item = item
        if _is_file(headers):
            return canonical.ABSENT
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError:
        return canonical.ABSENT


def _is_readable(parameters: dict[bytes, bytes]) -> bool:
    return not parameters or parameters.get(b"charset", b"utf-8").lower() in _KNOWN_CHARSETS


def _value_of(media_type: bytes, parameters: dict[bytes, bytes], body: bytes) -> Any:
    if media_type == _JSON or media_type.endswith(b"+json"):
        return _json_of(body)
    if media_type == _FORM:
        return fields_of(body)
    if media_type.startswith(b"multipart/"):
        return _multipart(body, parameters.get(b"boundary", b""), media_type == _FORM_DATA)
    return RAW


def _json_of(body: bytes) -> Any:
    try:
        return canonical.parse(body)
    except canonical.TooDeep:
        # How deep a text can be read depends on the stack that is left: counted as bytes, it could
        # be another request the next time.
        raise too_deep() from None
    except canonical.NotCanonical:
        return RAW


def fields_of(text: bytes) -> dict[str, list[Any]]:
    """The fields of a form or a query, by name, each with its values in the order sent.

    The order of different names does not count, nor does how a character is escaped; `a` is the
    same as `a=`, as it is to every framework. Raises `FingerprintImpossible` for too many fields.
    """
    pieces = text.split(b"&", FIELD_LIMIT)
    if len(pieces) > FIELD_LIMIT:
        raise _too_many(FIELD_LIMIT, "fields of a form or a query")
    fields: dict[str, list[Any]] = {}
    for piece in pieces:
        if piece:
            name, _, value = piece.partition(b"=")
            fields.setdefault(_text(_unquoted(name)), []).append(_unquoted(value))
    return fields


# As numbers, which are found in bytes much faster than other bytes are.
_PLUS: Final = 0x2B
_PERCENT: Final = 0x25


def _unquoted(text: bytes) -> bytes:
    if _PLUS in text:
        text = text.replace(b"+", b" ")
    return unquote_to_bytes(text) if _PERCENT in text else text


def _text(name: bytes) -> str:
    # Different bytes stay different texts, even those that are no UTF-8.
    return name.decode("utf-8", "surrogateescape")


def _parameters(text: bytes, start: int) -> dict[bytes, bytes] | None:
    """The parameters from `start` to the end; None when anything else stands there."""
    found: dict[bytes, bytes] = {}
    while start < len(text):
        parameter = _PARAMETER.match(text, start)
        if parameter is None:
            return None
        start = parameter.end()
        if parameter[1] is None:
            continue  # A semicolon with nothing after it, which the syntax allows.
        name = parameter[1].lower()
        if name in found:
            return None
        # Backslashes stay: some clients escape with them, others mean a path on a disk.
        found[name] = parameter[3] if parameter[2] is None else parameter[2]
    return found


def _multipart(body: bytes, boundary: bytes, is_form: bool) -> Any:
    """The parts without their boundary: by field name for a form, else in their order."""
    delimiter = b"--" + boundary
    if _BOUNDARY.fullmatch(boundary) is None or not body.startswith(delimiter):
        return RAW
    segments = body[len(delimiter) :].split(b"\r\n" + delimiter, FIELD_LIMIT + 1)
    if len(segments) > FIELD_LIMIT + 1:
        raise _too_many(FIELD_LIMIT, "parts of a multipart body")
    # What the last delimiter ends with; a text after the end is allowed, and nobody sends one.
    if segments.pop() not in (b"--", b"--\r\n"):
        return RAW
    fields: dict[str, list[Any]] = {}
    parts: list[Any] = []
    for segment in segments:
        headers, content = _part(segment)
        if headers is None:
            return RAW
        if not is_form:
            parts.append([headers, _digest(content)])
            continue
        name = headers.pop("name", None)
        if name is None or headers.pop("disposition") != b"form-data":
            return RAW
        fields.setdefault(_text(name), []).append(
            # Files may be large, and are compared by a digest; fields can be part of a key.
            [headers, _digest(content) if _is_file(headers) else content] if headers else content
        )
    return fields if is_form else parts


def _part(segment: bytes) -> tuple[dict[str, bytes] | None, bytes]:
    """What the head of a part says, and the part's content; None for an odd head."""
    head, mark, content = segment.partition(b"\r\n\r\n")
    if not mark:
        return None, b""
    if len(head) > PART_HEAD_LIMIT_BYTES:
        raise _too_many(PART_HEAD_LIMIT_BYTES, "bytes in the head of a part")
    # A delimiter is followed by the end of its line; then comes the first line of the head.
    first, *lines = head.split(b"\r\n")
    if first:
        return None, b""
    headers: dict[str, bytes] = {}
    for line in lines:
        # Not by a pattern: one that takes blanks at the end of what it takes anyway tries every
        # length of them, and a line of blanks would take the square of its length.
        name, colon, text = line.partition(b":")
        if not colon or _NAME.fullmatch(name) is None:
            return None, b""
        if not _add_header(headers, name.lower(), text.strip(b" \t")):
            return None, b""
    return headers, content


def _add_header(headers: dict[str, bytes], name: bytes, value: bytes) -> bool:
    """Adds what a header says; False when that is odd."""
    if name == b"content-length" or (
        name == b"content-transfer-encoding" and value.lower() in _PLAIN_ENCODINGS
    ):
        return True
    if name != b"content-disposition":
        return _add(headers, "header " + name.decode("ascii"), value)
    kind = _DISPOSITION.match(value)
    parameters = None if kind is None else _parameters(value, kind.end())
    if kind is None or parameters is None:
        return False
    return _add(headers, "disposition", kind[1].lower()) and all(
        _add(headers, parameter.decode("ascii"), text) for parameter, text in parameters.items()
    )


def _add(headers: dict[str, bytes], name: str, value: bytes) -> bool:
    if name in headers:
        return False
    headers[name] = value
    return True


def _is_file(headers: dict[str, bytes]) -> bool:
    return "filename" in headers or "filename*" in headers


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
