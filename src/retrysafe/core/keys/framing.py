"""Turns several values into one byte string that no other values can produce.

Owns the framing under key digests, fingerprints, natural keys and child keys. Joining parts with
a separator is ambiguous (`a:b` + `c` is `a` + `b:c`); every part here carries its type and its
length instead. Numbers and instants count by their value: `1.0` is `1`, and noon in Paris is eleven
in London.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Final
from uuid import UUID

from retrysafe.errors import FingerprintImpossible

Part = str | bytes | int | bool | None | Decimal | UUID | date | datetime | timedelta

# 16 bytes: with random inputs a collision is expected after 2**64 keys, and stores detect one.
DIGEST_BYTES = 16

# More digits than the exponent of any number has that means something. Python takes the square of
# their number in time to read them.
_EXPONENT_LIMIT_CHARACTERS: Final = 40
# Python writes out no int with more, unless a process lifts that.
_DIGITS_LIMIT: Final = 4_300

# A copy of a hash that has seen nothing takes less time than a new one with its size.
new_hashing: Final = blake2b(digest_size=DIGEST_BYTES).copy


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
        whole = None if number is None else number.whole(_DIGITS_LIMIT)
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
            raise FingerprintImpossible(
                "an integer with thousands of digits cannot be part of a key: pass its bytes, or a "
                "hash of them"
            ) from None
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
    hashing = new_hashing()
    hashing.update(data)
    return hashing.digest()
