"""Values of natural keys: one value, one key; what could be a second spelling of it is refused."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from pathlib import PurePosixPath
from uuid import UUID

import pytest

from retrysafe.core.keys.canonical import Number, part_bytes
from retrysafe.errors import InvalidInput, KeyInvalid
from retrysafe.http.field_values import (
    NOT_TAKEN,
    TEXT_LIMIT_CHARACTERS,
    TYPES,
    declared_part,
    plain_part,
)
from tests.attacks.growth import LIMIT, growth

TEN = datetime(2026, 1, 31, 10, tzinfo=UTC)
SOME_UUID = "0189f7ea-aba0-7c33-ab1f-7fc6ca9b5e2a"


class Size(Enum):
    SMALL = "s"
    SEVEN = 7


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("c1", "c1"),
        ("7", 7),
        ("0", 0),
        ("-7", -7),
        ("7.5", Decimal("7.5")),
        ("true", 1),
        (True, 1),
        (False, 0),
        (timedelta(days=1), "1 day, 0:00:00"),
        (Number("7.0"), 7),
        (7, 7),
        (10**40, Decimal(10**40)),
        (7.0, 7),
        (7.5, Decimal("7.5")),
        (Decimal("7.50"), Decimal("7.5")),
        (Decimal("7.00"), 7),
        (UUID(SOME_UUID), SOME_UUID),
        (SOME_UUID, SOME_UUID),
        (date(2026, 1, 31), "2026-01-31"),
        ("2026-01-31", "2026-01-31"),
        (time(10, 0), "10:00:00"),
        (TEN.astimezone(timezone(timedelta(hours=1))), "2026-01-31T10:00:00+00:00"),
        (PurePosixPath("a/b"), "a/b"),
        (PurePosixPath("7"), 7),
        (Size.SMALL, "s"),
        (Size.SEVEN, 7),
        ("1.2.3", "1.2.3"),
        ("192.168.0.1", "192.168.0.1"),
        ("2026-01", "2026-01"),
        ("2026-031", "2026-031"),
        ("a b", "a b"),
        ("\u00e9", "\u00e9"),
        ("c-07", "c-07"),
        ("9007199254740993", 2**53 + 1),
        ("20260131", 20260131),
        ("20260131-01", "20260131-01"),
        ("2026-0131", "2026-0131"),
        ("PT", "PT"),
        ("P1", "P1"),
        ("P-1H", "P-1H"),
        ("d5", "d5"),
        ("5dx", "5dx"),
        ("a:1", "a:1"),
        ("ab:cd:12", "ab:cd:12"),
        ("1:2:3:4", "1:2:3:4"),
        ("::1", "::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("x::1", "x::1"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("2026-01-31001", "2026-01-31001"),
        ("1/31", "1/31"),
        ("31 June Street 2026", "31 June Street 2026"),
        ("May", "May"),
        ("10-7", "10-7"),
        ("_", "_"),
        ("-", "-"),
        ("e", "e"),
        ("x" * TEXT_LIMIT_CHARACTERS, "x" * TEXT_LIMIT_CHARACTERS),
    ],
)  # fmt: skip
def test_a_value_without_a_type_is_a_number_or_a_text(value, part):
    """Whichever way it came: as JSON, as text, or converted by a framework."""
    made = plain_part("/a", value)
    assert (type(made), made) == (type(part), part)


@pytest.mark.parametrize(
    "text",
    ["07", "00", "+7", "-0", " 7", "7 ", "7\n", "\u30007", "7.0", "7.50", "7.", ".5", "1e3", "1E3",
     "7e-1", "1_000", "\uff17", "\u0667", "True", "FALSE",
     "yes", "NO", "on", "Off", "t", "F", "y", "n",
     "+" + SOME_UUID.replace("-", "")[1:], "0x" + SOME_UUID.replace("-", "")[2:],
     SOME_UUID.replace("9", "_"), "{ " + SOME_UUID[1:] + "}", " c1", "c1\t", "e\u0301",
     SOME_UUID.upper(), SOME_UUID.replace("-", ""), f"{{{SOME_UUID}}}", f"urn:uuid:{SOME_UUID}",
     "1" * 32, "2026-01-31T10:00:00Z", "2026-01-31 10:00", "20260131T100000",
     "2026-01-31x10:00", "2026-01-31-10:00", "2026-1-31", "2026-01-1", "2026-W05",
     "2026-W05-6", "2026W056", "2026w05", "2026-W05-6T10:00", "10:00", "9:00", "T10:00", "10:00:00",
     "10:00:00.000", "10:00:00,5", "10:00Z", "12:00+02:00", "12:00-0200", "12:00\u221202:00",
     "90:00", "-01:00:00", "1 day, 10:00:00", "-1 days, 23:00:00", "1 10:00:00", "1d10:00",
     "1 day", "2 days", "1 d", "5d", "05D", "+5d", "PT1H", "PT60M", "P0DT1H", "-P1D",
     "P1.5D", "pt0,5h", "P1W", "P1DT", "1d,", "1 d,", "1d:00:00", ":00:00", "24D:00:00",
     "0-7", "00-7", "0+7", "_-7", "_7", "7 .0", "7\t.", "\u0667026-01-31", "2026-0\u0667-31",
     "01/31/2026", "1/31/26", "1/31/2026 10:00", "Jan 31 2026", "january 31, 2026",
     "31 Jan 2026", "31 January, 2026", "2026-1-31 10:00", "2026-01-31 0:00", "2026-01-31110:00",
     "1.2.3.4/32", "10.0.0.0/255.0.0.0", "10.0.0.0/08", "fe80::1%eth0", "fe80::1%1/64",
     "\uff11\uff10:00", "0::1", "0:0:0:0:0:0:0:1", "::0:1", "2001:DB8::1", "2001:db8::0:1",
     "::ffff:1.2.3.4", "::ffff:102:304", "::1/128", "0:0:0:0:0:0:1.2.3.4",
     "x" * (TEXT_LIMIT_CHARACTERS + 1)],
)  # fmt: skip
def test_a_text_that_can_be_another_spelling_is_refused(text):
    """Nobody knows what the application makes of it: order 7, perhaps, which ran already."""
    with pytest.raises(KeyInvalid, match=r"the key is made from \{id\}"):
        plain_part("{id}", text)
    assert declared_part("{id}", "text", text) == text


def test_a_type_that_is_declared_later_may_keep_the_key():
    """Of numbers, booleans and a UUID, which are the same without one."""
    kinds = (
        *(
            ("int", "7"),
            ("decimal", "7"),
            ("decimal", "7.5"),
            ("bool", "true"),
            ("uuid", SOME_UUID),
        ),
        ("ip", "2001:db8::1"),
    )
    for kind, text in kinds:
        assert part_bytes(declared_part("/a", kind, text)) == part_bytes(plain_part("/a", text))


@pytest.mark.parametrize("text", ["7.00000000000000000001", "9007199254740993.5"])
def test_a_text_with_more_digits_than_a_float_keeps_is_refused(text):
    with pytest.raises(KeyInvalid, match="a floating-point number keeps"):
        plain_part("{id}", text)
    assert declared_part("{id}", "decimal", text) == Decimal(text)


def test_the_refusal_says_what_to_send_and_what_to_declare():
    with pytest.raises(KeyInvalid, match=r"7 and not 07.*as in \{id:text\}"):
        plain_part("{id}", "07")
    with pytest.raises(KeyInvalid, match="as in /a/b:text"):
        plain_part("/a/b", "07")


@pytest.mark.parametrize("value", [None, "", [], {}, NOT_TAKEN, float("nan"), Decimal("Infinity")])
def test_what_is_no_value_is_refused(value):
    with pytest.raises(KeyInvalid, match="/a"):
        plain_part("/a", value)


class Loaded:
    """What a converter may load from a database; its text changes with it."""

    def __str__(self):
        return "order 7, open"


@pytest.mark.parametrize("value", [Loaded(), b"7", object()])
def test_what_a_converter_made_and_is_no_plain_value_is_a_mistake_of_the_server(value):
    """Its text may change while the operation runs, or with every process."""
    with pytest.raises(InvalidInput, match=f"gives as a {type(value).__qualname__}: use"):
        plain_part("{id}", value)
    for kind in TYPES:
        with pytest.raises(InvalidInput, match="use a converter"):
            declared_part("{id}", kind, value)


@pytest.mark.parametrize(
    ("kind", "values", "part"),
    [
        ("text", ["07"], "07"),
        ("text", [UUID(SOME_UUID)], SOME_UUID),
        ("int", ["7", "07", "+7", 7, Number("7.0"), 7.0, Decimal(7), Size.SEVEN], 7),
        ("int", ["-0", "0", Number("-0.0")], 0),
        ("decimal", ["9.5", "9.50", "09.5", 9.5, Number("9.50"), Decimal("9.5")], Decimal("9.5")),
        ("uuid", [SOME_UUID, SOME_UUID.upper(), SOME_UUID.replace("-", ""), UUID(SOME_UUID)],
         SOME_UUID),
        ("date", ["2026-01-31", date(2026, 1, 31)], date(2026, 1, 31)),
        ("datetime", ["2026-01-31T10:00:00Z", "2026-01-31 11:00+01:00", "20260131T100000Z", TEN],
         TEN),
        ("time", ["10:00", "10:00:00", "10:00:00.0", "10:00:00.000000", time(10)], "10:00:00"),
        ("time", ["23:59:59.5", "23:59:59.500"], "23:59:59.500000"),
        ("ip", ["192.0.2.1", "::ffff:192.0.2.1", "::FFFF:c000:201", IPv4Address("192.0.2.1")],
         "192.0.2.1"),
        ("ip", ["2001:db8::1", "2001:0DB8:0::1", "2001:db8:0:0:0:0:0:1",
                IPv6Address("2001:db8::1")], "2001:db8::1"),
        ("bool", [True, "true"], True),
        ("bool", [False, "false"], False),
    ],
)  # fmt: skip
def test_a_declared_type_makes_one_value_of_all_its_spellings(kind, values, part):
    for value in values:
        made = declared_part("/a", kind, value)
        assert (type(made), made) == (type(part), part)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("text", ["", None, 7, True, []]),
        ("int", ["", "x", " 7", "7.0", "1e3", "1_0", "\uff17", 7.5, Number("7.5"), True, None,
                 "9" * 41, 10**40, Number("1e999999999"), NOT_TAKEN]),
        ("decimal", ["", "x", "1e3", ".5", "5.", " 5", True, float("inf"), "9" * 41]),
        ("uuid", ["", "x", 7, f"{{{SOME_UUID}}}", SOME_UUID[:-1], None]),
        ("date", ["", "20260131", "2026-02-30", "2026-W05-6", 7, "2026-01-31T10:00:00Z"]),
        ("datetime", ["", "2026-01-31", "2026-01-31T10:00:00", "x" * 41, 7]),
        ("time", ["", "10", "1000", 1000, "9:00", "24:00", "10:60", "10:00Z", "10:00+00:00",
                  "T10:00", "10:00:00,5", "\uff11\uff10:00", "10:00:00.1234567",
                  time(10, tzinfo=UTC), None]),
        ("ip", ["", "x", 3221225985, "3221225985", "192.0.2.01", "192.0.2.1/32", "fe80::1%eth0",
                "192.0.2", "\uff11.2.3.4", " 192.0.2.1", "1:" * 40, None]),
        ("bool", ["", "True", "1", 1, 0, None]),
    ],
)  # fmt: skip
def test_a_declared_type_refuses_everything_else(kind, values):
    for value in values:
        with pytest.raises(KeyInvalid, match="the key is made from /a, which must be sent once"):
            declared_part("/a", kind, value)


@pytest.mark.parametrize("kind", [None, *TYPES])
@pytest.mark.parametrize(
    "filler",
    [
        "7",
        "_",
        " ",
        "-",
        "e",
        "\u0301",
        ".",
        "0-",
        "7.",
        "\u0344",
        ":",
        "7:",
        "1 ",
        "P1D",
        "2026-W05-6 10",
    ],
)
def test_the_time_for_a_value_grows_in_proportion_to_it(filler, kind):
    """Clients choose these texts; one that took the square of its length would hold the loop."""

    def work(text):
        plain_part("/a", text) if kind is None else declared_part("/a", kind, text)

    assert growth(lambda n: (filler * n)[:n] + "x", work, 8_000) < LIMIT


@pytest.mark.parametrize("text", ["inf", "Infinity", "INF", "+inf", "-Infinity", "nan", "NaN"])
def test_words_that_are_numbers_are_refused_without_a_type(text):
    """`float` takes many spellings of each, and every one of them would be another key."""
    with pytest.raises(KeyInvalid, match="several ways"):
        plain_part("/x", text)


@pytest.mark.parametrize("offset", [UTC, timezone(timedelta(hours=2))])
def test_a_time_that_a_framework_has_read_with_an_offset_is_refused(offset):
    """10:00Z and 12:00+02:00 are equal, and would be two keys."""
    with pytest.raises(KeyInvalid, match="no one way"):
        plain_part("{at}", time(10, tzinfo=offset))
