"""Canonical bytes: equal for values that mean the same, different for all others.

Owns the framing under key digests, fingerprints, natural keys and child keys. Joining parts with
a separator is ambiguous (`a:b` + `c` is `a` + `b:c`); every part here carries its type and its
length instead. Numbers and instants count by their value: `1.0` is `1`, and noon in Paris is eleven
in London.

Owns as well the canonical form of a JSON text. Key order, white space, escapes and the spelling of
numbers (`1`, `1.0`, `10e-1`) do not count. Numbers are never turned into floats, so large amounts
and ids that differ in the last digit stay different. What has no single meaning (duplicate names,
NaN, broken JSON) has no canonical form.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from sys import get_int_max_str_digits
from typing import Any, Final
from uuid import UUID

from retrysafe.errors import FingerprintImpossible

Part = str | bytes | int | bool | None | Decimal | UUID | date | datetime | timedelta

# 16 bytes: with random inputs a collision is expected after 2**64 keys, and stores detect one.
DIGEST_BYTES = 16

# More digits than the exponent of any number has that means something. Python takes the square of
# their number in time to read them.
_EXPONENT_LIMIT_CHARACTERS: Final = 40
# What Python sets itself, unless a process lifts it: digits of an int take the square of their
# number in time.
_DIGITS_LIMIT: Final = 4_300


# A copy takes less than half the time of a new one with its size; each call makes two.
_new_hashing: Final = blake2b(digest_size=DIGEST_BYTES).copy


def frame(*parts: bytes) -> bytes:
    """Joins byte strings so that different lists never give the same result."""
    if len(parts) == 2:
        # The caller and the key, on every call: one format is cheaper than two and a join.
        first, second = parts
        return b"%d:%b%d:%b" % (len(first), first, len(second), second)
    return b"".join([b"%d:%b" % (len(part), part) for part in parts])


def part_bytes(part: Part) -> bytes:
    """The type-tagged bytes of one domain value; raises `FingerprintImpossible` for other types.

    The tag keeps `1` and `"1"` apart. What Python counts as equal is one value: a column gives
    `Decimal(1)` or `True` where other code has `1`, and invoice 1 must not be paid once for each.
    """
    if isinstance(part, Decimal):
        number = Number(str(part)) if part.is_finite() else None
        try:
            whole = None if number is None else number.whole(_DIGITS_LIMIT)
        except ValueError:
            # The process reads fewer digits; as another kind of value it would be a second key.
            raise _too_long() from None
        if whole is None:
            # By value: an amount is the same amount however many zeros it is written with.
            return b"d" + (str(part) if number is None else number.text).encode()
        part = whole
    if isinstance(part, str):
        return b"s" + part.encode("utf-8", "surrogatepass")
    if isinstance(part, int):
        try:
            return b"i%d" % part
        except ValueError:
            raise _too_long() from None
    if isinstance(part, bytes):
        return b"b" + part
    if part is None:
        return b"n"
    if isinstance(part, UUID):
        return b"u" + part.bytes
    # Before date, of which it is a subclass.
    if isinstance(part, datetime):
        return b"t" + utc_text(part).encode()
    if isinstance(part, date):
        return b"D" + part.isoformat().encode()
    if isinstance(part, timedelta):
        return b"T%d,%d,%d" % (part.days, part.seconds, part.microseconds)
    raise FingerprintImpossible(
        f"{type(part).__name__} cannot be part of a key: pass text, bytes, numbers (no floats), "
        "None, Decimal, UUID, dates or times"
    )


def _too_long() -> FingerprintImpossible:
    return FingerprintImpossible(
        "an integer with so many digits cannot be part of a key: pass its bytes, or a hash of them"
    )


class Number:
    """A JSON number by its exact decimal value: digits without trailing zeros, and an exponent.

    Raises `ValueError` for an exponent of more than some 40 digits.
    """

    __slots__ = ("text",)

    def __init__(self, lexeme: str) -> None:
        mantissa, _, exponent_text = lexeme.lower().partition("e")
        if len(exponent_text) > _EXPONENT_LIMIT_CHARACTERS:
            raise ValueError("the exponent of a number is too long")
        sign = "-" if mantissa.startswith("-") else ""
        whole, _, fraction = mantissa.lstrip("-").partition(".")
        digits = (whole + fraction).lstrip("0")
        stripped = digits.rstrip("0")
        if not stripped:
            self.text = "0"
            return
        exponent = int(exponent_text or "0") - len(fraction) + len(digits) - len(stripped)
        self.text = f"{sign}{stripped}e{exponent}"

    def whole(self, digits_limit: int) -> int | None:
        """The whole number that it is; None for a fraction, and past so many digits."""
        digits, _, exponent_text = self.text.partition("e")
        exponent = int(exponent_text or "0")
        if exponent < 0 or len(digits.lstrip("-")) + exponent > digits_limit:
            return None
        return int(digits + "0" * exponent)


def utc_text(moment: datetime) -> str:
    """An instant is the same instant in every time zone; a naive one is what it says."""
    if moment.tzinfo is not None:
        try:
            moment = moment.astimezone(UTC)
        except OverflowError:
            pass  # In UTC it lies before year 1 or after 9999; its own offset tells it apart.
    return moment.isoformat()


def frame_parts(*parts: Part) -> bytes:
    """Frames typed domain values."""
    return frame(*map(part_bytes, parts))


def digest(data: bytes) -> bytes:
    """The 16-byte digest that stores use as a row's identity."""
    hashing = _new_hashing()
    hashing.update(data)
    return hashing.digest()


# JSON texts.


class NotCanonical(Exception):
    """The text has no single meaning as JSON."""


class TooDeep(NotCanonical):
    """The text is nested too deep to be compared."""


class _Absent:
    """Marks a pointer that leads nowhere; different from null."""


ABSENT: Final = _Absent()


def parse(text: bytes) -> Any:
    """The value of a JSON text with exact numbers; raises `NotCanonical` or `TooDeep` for none.

    Whole numbers are ints, unless they are longer than Python reads; all others are `Number`s.
    """
    try:
        stripped = text.decode("utf-8").strip(" \t\n\r")
        try:
            # A process may have lifted Python's own limit; the time that the digits of an integer
            # take grows with the square of their number.
            is_limited = 0 < get_int_max_str_digits() <= _DIGITS_LIMIT
            value, end = (_decode if is_limited else _decode_long)(stripped)
        except json.JSONDecodeError:
            raise
        except ValueError:
            value, end = _decode_long(stripped)
    except RecursionError as error:
        raise TooDeep(str(error)) from None
    except ValueError as error:
        raise NotCanonical(str(error)) from None
    if end != len(stripped):
        raise NotCanonical("the text goes on after the value")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NotCanonical("a name occurs twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise NotCanonical(f"{name} is not JSON")


# Made once: a decoder is dear to make and cheap to use.
_decode = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=Number, parse_constant=_no_constant
).raw_decode
# Python reads so many under every limit that a process may set.
_DIGITS_ALWAYS_READ: Final = 640


def _whole(digits: str) -> int | Number:
    return int(digits) if len(digits) <= _DIGITS_ALWAYS_READ else Number(digits)


# For texts with longer numbers, which stay as they are written.
_decode_long = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_whole,
    parse_float=Number,
    parse_constant=_no_constant,
).raw_decode


# Without a limit of its own, how deep a text may be nested would depend on how deep the caller's
# stack is, and a retry that comes in by another path would count as a different request. Twice
# the depth of a stored value, because a tagged value takes two levels.
DEPTH_LIMIT: Final = 200


def of_tree(tree: Any) -> Any:
    """A JSON tree of Python values as it counts: equal for values that are equal.

    The spelling of Decimals, the time zone of an instant, the order of a dictionary and the name of
    a class do not count. A tree without tags counts as it stands.
    """
    kind = type(tree)
    if kind is list:
        return [of_tree(item) for item in tree]
    if kind is not dict:
        return tree
    tag = tree.get("$")
    if tag is None:
        return {name: of_tree(item) for name, item in tree.items()}
    return _of_tagged(tag, tree["v"])


def _of_tagged(tag: str, value: Any) -> Any:
    if tag in _TYPED_TAGS:
        return of_tree(value)
    if tag == "decimal" and Decimal(value).is_finite():
        return Number(value)
    if tag == "datetime":
        return {"$": tag, "v": utc_text(datetime.fromisoformat(value))}
    inner = of_tree(value)
    return {"$": tag, "v": sorted(inner, key=canonical_bytes) if tag in _UNORDERED_TAGS else inner}


# Values of classes count by their fields, so that pointers reach them and a class may be renamed.
_TYPED_TAGS: Final = frozenset({"dataclass", "namedtuple", "pydantic", "msgspec"})
_UNORDERED_TAGS: Final = frozenset({"dict", "set", "frozenset"})


def canonical_bytes(value: Any) -> bytes:
    """The framed, type-tagged bytes of a parsed value; raises `TooDeep`.

    Raises `ValueError` for integers too long to be written out; `parse` gives none of those.
    """
    pieces: list[str] = []
    try:
        _write(value, pieces, 0)
    except RecursionError as error:
        # The caller's own stack was nearly full, which must not be the client's 500.
        raise TooDeep(str(error)) from None
    return "".join(pieces).encode("latin-1")


def _write(value: Any, pieces: list[str], depth: int) -> int:
    """Adds the bytes as text with one character for each byte; returns how many.

    All pieces go into one list: joined level by level, a long text that is nested deep would be
    copied once for every level.
    """
    kind = type(value)
    if kind is not list and kind is not dict:
        text = _plain(value, kind)
        pieces.append(text)
        return len(text)
    if depth >= DEPTH_LIMIT:
        raise TooDeep(f"the text is nested deeper than {DEPTH_LIMIT} levels")
    pieces.append("[" if kind is list else "{")
    size = 1
    for part in value if kind is list else sorted(value):
        item = part
        if kind is dict:
            item, label = value[part], part if part.isascii() else _byte_text(part)
            mark = f"{len(label)}:"
            pieces += (mark, label)
            size += len(mark) + len(label)
        # Its size stands before it, as `frame` has it, and is known after it.
        place = len(pieces)
        pieces.append("")
        item_size = _write(item, pieces, depth + 1)
        pieces[place] = mark = f"{item_size}:"
        size += len(mark) + item_size
    return size


def _byte_text(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("latin-1")


def _plain(value: Any, kind: type) -> str:
    """A text, a number, bytes or a constant."""
    if kind is str:
        return "s" + (value if value.isascii() else _byte_text(value))
    if kind is int:
        digits = str(value)
        stripped = digits.rstrip("0")
        return f"#{stripped}e{len(digits) - len(stripped)}" if stripped else "#0"
    if kind is float:
        value = Number(repr(value))
    if isinstance(value, Number):
        return "#" + value.text
    if isinstance(value, bytes):
        return "b" + value.decode("latin-1")
    return _CONSTANTS[value]


_CONSTANTS: Final = {None: "n", True: "t", False: "f", ABSENT: "-"}


_BARE_TILDE: Final = re.compile("~(?![01])")


def pointer_tokens(pointer: str) -> tuple[str, ...]:
    """The steps of a JSON Pointer (RFC 6901); raises `ValueError` when it is none."""
    if pointer == "":
        return ()
    if not pointer.startswith("/"):
        raise ValueError(f"a JSON Pointer starts with '/', got {pointer!r}")
    if _BARE_TILDE.search(pointer):
        raise ValueError(f"'~' in a JSON Pointer is written ~0, and '/' is ~1: {pointer!r}")
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer[1:].split("/"))


def select(value: Any, tokens: tuple[str, ...]) -> Any:
    """The part of the value that the pointer leads to, or `ABSENT`."""
    for token in tokens:
        if isinstance(value, dict) and token in value:
            value = value[token]
        elif isinstance(value, list) and _is_index(token) and int(token) < len(value):
            value = value[int(token)]
        else:
            return ABSENT
    return value


def without(value: Any, tokens: tuple[str, ...]) -> Any:
    """The value without the part that the pointer leads to; the input is not changed."""
    if not tokens:
        return ABSENT
    head, rest = tokens[0], tokens[1:]
    if isinstance(value, dict) and head in value:
        copy: Any = dict(value)
        place: Any = head
    elif isinstance(value, list) and _is_index(head) and int(head) < len(value):
        copy, place = list(value), int(head)
    else:
        return value
    copy[place] = without(copy[place], rest)
    if not rest and isinstance(copy, dict):
        # An excluded field must look the same whether it was sent or not. List items keep their
        # place as ABSENT, so that leaving out /0 does not move what /1 means.
        del copy[place]
    return copy


def _is_index(token: str) -> bool:
    # Twelve digits are more than any list has; int() of a huge text would be slow.
    return (
        token.isascii()
        and token.isdigit()
        and len(token) <= 12
        and (token == "0" or not token.startswith("0"))
    )
