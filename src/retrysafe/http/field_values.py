"""The values of natural keys: one value gives one key, however a request spells it.

Owns the types that a field can be declared with, and what a value is without one. Applications and
frameworks take `7`, `07`, `+7` and `"7"` for the same order; two keys for them would run it twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from math import isfinite
from pathlib import PurePath
from typing import Any, Final
from unicodedata import is_normalized
from uuid import UUID

from retrysafe.core.keys.canonical import ABSENT, Number, Part, utc_text
from retrysafe.errors import InvalidInput, KeyInvalid

# No name, address or id is longer. Normalizing a text takes the square of its length at worst.
TEXT_LIMIT_CHARACTERS: Final = 1_024
# More digits than any id has. Longer numbers are Decimals, however they were written: 1e999999999
# as an int would take all memory.
_DIGITS_LIMIT: Final = 40
_INT_LIMIT: Final = 10**_DIGITS_LIMIT
# Stands for a value that its endpoint refuses, as an endpoint for whole numbers refuses `x`.
NOT_TAKEN: Final = object()
_BOOLEANS: Final = {"true": True, "false": False}
# `float` and `Decimal` take these for a number, with a sign and in any letter case.
_NUMBER_WORDS: Final = re.compile(r"[+-]?(?:inf(?:inity)?|s?nan\d*+)", re.IGNORECASE)
# What pydantic and many forms take for one of these, in any letter case.
_BOOLEAN_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "t", "f", "y", "n"})

# What Python, pydantic and most databases read as a number; `\d` has the digits of all scripts.
# `Decimal` leaves out underscores before it looks, Django's forms `.0` with blanks in front, and
# pydantic zeros before a sign: 0-7 is -7 to it.
_NUMERIC: Final = re.compile(
    r"_*+[+-]?[\d_]*+(?:\s*+\.[\d_]*+)?(?:[eE][+-]?[\d_]++)?|[+-]?[0_]++[+-][\d_]++"
)
_DIGIT: Final = re.compile(r"\d")
# The one way to write a number that is taken as text: shortest, without an exponent.
_PLAIN_NUMBER: Final = re.compile(r"(?!-0\Z)-?(?:0|[1-9][0-9]*+)(?:\.[0-9]*[1-9])?")
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}")
_DECIMAL_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?")
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}", re.I)
# What `uuid.UUID` and its kin leave out before they look at the digits.
_UUID_MARKS: Final = re.compile(r"urn:|uuid:|[{}-]")
_UUID_CHARACTERS: Final = 32
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# Python takes any character between a date and a time. `20260131-01` is no instant to most, and a
# usual number of an invoice.
_INSTANT: Final = re.compile(
    r"\d{4}-?\d\d-?\d\d(?:[^\d-]\d\d|.\d\d:)|\d{4}-\d\d?-\d\d?[T\s]\s*+\d\d?:\d", re.I
)
_INSTANT_LIMIT_CHARACTERS: Final = 40
# A time of a day without an offset: those with one differ from day to day.
_CLOCK_TIME: Final = re.compile(r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?")
# Eight groups of four digits, or one of them an IPv4 address.
_ADDRESS_LIMIT_CHARACTERS: Final = 45
# Days of a month without its zeros, and of a week, with a time or without. `2026-001` is no day to
# any of the parsers that frameworks use, and a usual number of an invoice. Django's forms take
# 01/31/2026, Jan 31 2026 and 31 January, 2026, and digits of other scripts.
_MONTH: Final = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?"
    r"|sep(?:tember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)"
)
_OTHER_DATE: Final = re.compile(
    r"\d{4}-(?:\d-\d\d?|\d\d-\d)|\d{4}-?W\d\d(?:-?\d(?:\D\d\d.*+)?)?"
    r"|(?=.*[^\x00-\x7f])\d{4}-\d\d-\d\d"
    r"|\d\d?/\d\d?/\d\d(?:\d\d)?(?:\s.*+)?"
    rf"|(?:{_MONTH}\s++\d\d?|\d\d?\s++{_MONTH}),?\s++\d{{4}}",
    re.I,
)
# Times of day and lengths of time: 10:00, 10:00:00.0Z, 1 day, 10:00:00, and 3 days.
_TIME: Final = re.compile(
    r"[+-]?(?:\d++(?: ++| *+d(?:ays?)?+,? *+))?[+-]?T?\d*+(?::\d++){1,2}+(?:[.,]\d*+)?"
    r" ?(?:Z|[+\u2212-]\d\d(?::?\d\d){0,2}+)?"
    r"|[+-]?\d++ *+d(?:ays?)?,?",
    re.I,
)
# ISO 8601 writes an hour as PT1H, PT60M and P0DT1H.
_DURATION: Final = re.compile(
    r"[+-]?P(?=T?\d)(?:\d++(?:[.,]\d*+)?[YMWD])*+(?:T(?:\d++(?:[.,]\d*+)?[HMS])*+)?", re.I
)
# A network is written with its mask as well, and one of a single host without it.
_OTHER_NETWORK: Final = re.compile(r"\d++(?:\.\d++){3}/(?:32|0\d++|\d++(?:\.\d++){3})")
# The fewest that an IPv6 address without `::` has, when it ends as an IPv4 address does.
_IPV6_COLONS: Final = 6
# A float has no more digits that count; sign and exponent take the rest.
_FLOAT_LIMIT_CHARACTERS: Final = 24


def _whole(value: Any) -> int:
    if isinstance(value, Number):
        value = _of_number(value)
    elif isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        value = int(value)
    if type(value) is not int or abs(value) >= _INT_LIMIT:
        raise ValueError
    return value


def _decimal(value: Any) -> Decimal:
    if isinstance(value, Number):
        return Decimal(value.text)
    if isinstance(value, str) and _DECIMAL_NUMBER.fullmatch(value):
        return Decimal(value)
    raise ValueError


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else _BOOLEANS[_text(value)]


def _uuid(value: Any) -> str:
    if _UUID.fullmatch(_text(value)) is None:
        raise ValueError
    # As text, which it is without a type as well: declared later, it makes no other key.
    return str(UUID(value))


def _date(value: Any) -> date:
    if _DATE.fullmatch(_text(value)) is None:
        raise ValueError
    return date.fromisoformat(value)


def _instant(value: Any) -> datetime:
    if len(_text(value)) > _INSTANT_LIMIT_CHARACTERS:
        raise ValueError
    moment = datetime.fromisoformat(value)
    # Without its offset it is another instant in every time zone.
    if moment.tzinfo is None:
        raise ValueError
    return moment


def _clock_time(value: Any) -> str:
    if _CLOCK_TIME.fullmatch(_text(value)) is None:
        raise ValueError
    return time.fromisoformat(value).isoformat()


def _address(value: Any) -> str:
    if len(_text(value)) > _ADDRESS_LIMIT_CHARACTERS or "%" in value:
        raise ValueError  # A zone means something on its own host alone.
    return _address_text(ip_address(value))


def _address_text(address: IPv4Address | IPv6Address) -> str:
    """An address in its shortest form; an IPv4 address in the clothes of IPv6 is that address.

    Versions of Python differ in how they write those.
    """
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(address if mapped is None else mapped)


# The types that a field can be declared with: how each is read, and how clients are told of it.
TYPES: Final[dict[str, tuple[Callable[[Any], Part], str]]] = {
    "text": (_text, "a text of at least one character"),
    "int": (_whole, "a whole number of at most 40 digits, such as 7"),
    "decimal": (_decimal, "a number such as 9.50"),
    "uuid": (_uuid, "a UUID"),
    "date": (_date, "a date such as 2026-01-31"),
    "datetime": (_instant, "an instant with its offset, such as 2026-01-31T10:00:00Z"),
    "time": (_clock_time, "a time of day without an offset, such as 10:00 or 10:00:00"),
    "ip": (_address, "an IP address without a zone, such as 192.0.2.1 or 2001:db8::1"),
    "bool": (_boolean, "true or false"),
}


def declared_part(name: str, kind: str, value: Any) -> Part:
    """The value of a field with a declared type; raises `KeyInvalid` for what is none.

    Raises `InvalidInput` as `plain_part` does.
    """
    read, told = TYPES[kind]
    _require_exact(name, value)
    try:
        value = _as_sent(value)
        _require_plain(name, value)
        return read(value)
    except InvalidInput:
        raise  # It is a ValueError, too, and nothing that a client could mend.
    except (ValueError, KeyError, InvalidOperation):
        raise KeyInvalid(f"the key is made from {name}, which must be sent once, as {told}") from (
            None
        )


def plain_part(name: str, value: Any) -> Part:
    """The value of a field without one: a number or text.

    A number counts as one also where it is sent as text, as in a path or a form, and a boolean as 1
    or 0. Raises
    `KeyInvalid` for what can be written in several ways and is not written in the plainest, and
    `InvalidInput` for a value that a framework's converter made and nothing can be compared with.
    """
    if type(value) is int and -_INT_LIMIT < value < _INT_LIMIT:
        return value
    if type(value) is str and value:
        return _of_text(name, value)
    if value is NOT_TAKEN:
        raise KeyInvalid(f"the key is made from {name}, whose value this endpoint does not take")
    if isinstance(value, PurePath):
        # It has single slashes and no dots; its names are as they were sent.
        return _of_text(name, str(value))
    _require_exact(name, value)
    try:
        value = _as_sent(value)
        if isinstance(value, Number):
            return _of_number(value)
    except (ValueError, InvalidOperation):
        raise KeyInvalid(
            f"the key is made from {name}, whose value is out of range or has no one way to be "
            "written"
        ) from None
    # What a converter made of a text is written in one way.
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bool):
        # Endpoints with a number take `true` for 1, and those with a boolean take 1 for `true`.
        return int(value)
    _require_plain(name, value)
    raise KeyInvalid(
        f"the key is made from {name}, which must be sent once, as a text, a number or a boolean"
    )


def _require_exact(name: str, value: Any) -> None:
    """Raises `KeyInvalid` for a JSON number with a point or an exponent that a float rounds.

    Applications read it as a float: 7.00000000000000000001 is order 7 to them, which ran already.
    """
    if isinstance(value, Number) and not _is_float(value):
        raise KeyInvalid(
            f"the key is made from {name}, which must be sent once, with no more digits than a "
            "floating-point number keeps: leave out the rest, and send a whole number without "
            "point and exponent"
        )


def _is_float(number: Number) -> bool:
    """Whether applications that read it as a float have the same number, and no other one."""
    if len(number.text) > _FLOAT_LIMIT_CHARACTERS:
        return False
    read = float(number.text)
    if not isfinite(read):
        return False
    exact = Decimal(number.text)
    # A large float is written with fewer digits than the whole number has that it stands for.
    return exact == Decimal(repr(read)) and (not read.is_integer() or exact == Decimal(read))


def _require_plain(name: str, value: Any) -> None:
    """Raises `InvalidInput` for what a framework's converter made that is no plain value.

    Its text is of its own making, and may tell what changes while the operation runs.
    """
    if value is None or value is ABSENT or value is NOT_TAKEN:
        return
    if not isinstance(value, str | bool | Number | list | dict):
        raise InvalidInput(
            f"the key is made from {name}, which the framework gives as a "
            f"{type(value).__qualname__}: use a converter that gives text, a number, a UUID or a "
            "date, or take another field"
        )


def _as_sent(value: Any) -> Any:
    """What a framework's converter made of a value, as JSON would say it; else the value itself."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool | str):
        return value if isinstance(value, bool) else str(value)
    if isinstance(value, int):
        # Not by its digits: Python refuses to write out thousands of them.
        return Number(str(value if abs(value) < _INT_LIMIT else Decimal(value)))
    if isinstance(value, float | Decimal):
        exact = Decimal(repr(value)) if isinstance(value, float) else value
        if not exact.is_finite():
            raise ValueError
        return Number(str(exact))
    if isinstance(value, datetime):
        return utc_text(value)
    if isinstance(value, time) and value.tzinfo is not None:
        # Equal to what is the same time in another offset, and no text says both.
        raise ValueError
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, IPv4Address | IPv6Address):
        return _address_text(value)
    return str(value) if isinstance(value, UUID | PurePath | timedelta) else value


def _of_number(number: Number) -> Part:
    whole = number.whole(_DIGITS_LIMIT)
    return Decimal(number.text) if whole is None else whole


def _of_text(name: str, text: str) -> Part:
    if len(text) > TEXT_LIMIT_CHARACTERS:
        raise KeyInvalid(
            f"the key is made from {name}, which may have at most {TEXT_LIMIT_CHARACTERS:,} "
            "characters"
        )
    # So many digits may be a UUID without its hyphens.
    if len(text) != _UUID_CHARACTERS and _PLAIN_NUMBER.fullmatch(text):
        number = Number(text)
        if "." in text:
            _require_exact(name, number)
        return _of_number(number)
    if text in _BOOLEANS:
        return int(_BOOLEANS[text])
    if _has_other_spellings(text):
        raise KeyInvalid(
            f"the key is made from {name}, whose value can be written in several ways: send it in "
            "the plainest, such as 7 and not 07, +7 or 7.0, true and not yes, a UUID in lower case "
            "with hyphens, a date such as 2026-01-31, a text without blanks around it. Times and "
            "durations have no plainest. An API that means any text declares it, as in "
            f"{_with_type(name)}"
        )
    return text


def _has_other_spellings(text: str) -> bool:
    """Whether it looks like something that applications take in other spellings as well."""
    if text != text.strip() or not is_normalized("NFC", text):
        return True
    if _DIGIT.search(text) is not None and _NUMERIC.fullmatch(text):
        return True
    if text.lower() in _BOOLEAN_WORDS or _NUMBER_WORDS.fullmatch(text):
        return True
    if _INSTANT.match(text):
        return True  # Z and +00:00 are one offset, and every second has many fractions.
    if any(shape.fullmatch(text) for shape in (_OTHER_DATE, _TIME, _DURATION)):
        return True
    if _is_long_address(text):
        return True
    digits = _UUID_MARKS.sub("", text.lower())
    if len(digits) != _UUID_CHARACTERS:
        return False
    try:
        # As `uuid.UUID` reads them: also with a plus sign, with 0x or with underscores.
        return text != str(UUID(int=int(digits, 16)))
    except ValueError:
        return False


def _is_long_address(text: str) -> bool:
    """Whether it is an IPv6 address in another form than the shortest, with a prefix or a zone.

    Of IPv4 only networks have several forms.
    """
    if _OTHER_NETWORK.fullmatch(text):
        return True
    if "::" not in text and text.count(":") < _IPV6_COLONS:
        return False
    plain, slash, _ = text.partition("/")
    plain, zone, _ = plain.partition("%")
    try:
        address = IPv6Address(plain)
    except ValueError:
        return False
    # Versions of Python differ in how they write the mapped ones.
    return bool(slash or zone) or address.ipv4_mapped is not None or str(address) != text


def _with_type(name: str) -> str:
    return f"{name[:-1]}:text}}" if name.endswith("}") else f"{name}:text"
