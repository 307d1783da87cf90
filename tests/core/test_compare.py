"""What is read back is compared part by part, types included, and the first difference is named."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from asyncpg.pgproto import pgproto
from hypothesis import given

from retrysafe.core.values.codec import ValueCodec
from retrysafe.core.values.compare import difference
from tests.core.sample_types import Colour, Frozen, Level, Plain, Point, Right, Text, Word
from tests.core.test_values import VALUES, through

NAN = float("nan")


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    x: Any = None


class Struct(msgspec.Struct, eq=False):
    """Compares by identity."""

    x: Any


class Grumpy:
    """Cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise LookupError("not me")

    __hash__ = None


class Clock(datetime):
    """As the classes of test clocks and of other libraries of dates are."""


class Day(date):
    pass


class Hour(time):
    pass


class Span(timedelta):
    pass


class Octets(bytes):
    pass


class Status(Enum):
    NEW = "new"
    OPEN = 1.0


class Switch(Enum):
    ON = True


class TextStatus(StrEnum):
    NEW = "new"


class OtherStatus(StrEnum):
    NEW = "new"


class Valued(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(use_enum_values=True)
    x: Any = None


@dataclass(frozen=True, repr=False)
class Silent:
    """Prints as its address."""

    a: Any


@dataclass(frozen=True, repr=False, eq=False)
class Lone:
    """Prints as its address, and compares by identity."""

    a: Any


BERLIN = ZoneInfo("Europe/Berlin")
# At half past two the clock of Berlin is put back to two; this is the second time.
REPEATED = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN)
NOON = datetime(2024, 7, 1, 12, tzinfo=BERLIN)
REPEATED_ELSEWHERE = datetime(2024, 10, 27, 2, 30, tzinfo=timezone(timedelta(hours=1)))
TODAY = datetime(2024, 1, 1)  # noqa: DTZ001 — a wall clock, without a zone.
ID = "12345678-1234-5678-1234-567812345678"


@given(VALUES)
def test_what_comes_back_is_the_same(value):
    """Each value that has a stored form is itself after a round trip, NaN and all."""
    assert difference(value, through(value)) is None


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (NAN, float("nan")),
        (Decimal("sNaN"), Decimal("sNaN")),
        ([{"a": (NAN,)}], [{"a": (float("nan"),)}]),
        ({NAN, 1}, {1, float("nan")}),
        ({frozenset({8, 0}), frozenset({1})}, {frozenset({1}), frozenset({0, 8})}),
        (Struct(1), Struct(1)),
        (Model(x=Struct(NAN)), Model(x=Struct(NAN))),
        (Model(x=1, y=[2]), Model(x=1, y=[2])),
        (OrderedDict(a=1), OrderedDict(a=1)),
        (pydantic.SecretStr("a"), pydantic.SecretStr("a")),
        (
            datetime(2024, 1, 1, 12, tzinfo=UTC),
            datetime(2024, 1, 1, 14, tzinfo=timezone(timedelta(hours=2))),
        ),
        (datetime.min.replace(tzinfo=BERLIN), datetime.min.replace(tzinfo=BERLIN)),
        (REPEATED, REPEATED.replace(microsecond=0)),
        ({REPEATED, NAN}, {float("nan"), REPEATED.replace(microsecond=0)}),
        (time(2, tzinfo=BERLIN), time(2, tzinfo=BERLIN)),
        ({Silent(i) for i in range(9)}, {Silent(i) for i in range(9)}),
        ({Lone(i) for i in range(9)}, {Lone(i) for i in range(9)}),
        ({Silent(Lone("\ud800")), len}, {Silent(Lone("\ud800")), len}),
    ],
)
def test_equal_parts_are_the_same(value, back):
    """Also where Python's own comparison says no, or compares by identity."""
    assert difference(value, back) is None


@pytest.mark.parametrize(
    ("value", "back", "where", "what"),
    [
        (1, 2, "", "another value"),
        (1, True, "", "a builtins:int .* as a builtins:bool"),
        (0.0, -0.0, "", "another value"),
        (Decimal("1.0"), Decimal("1.00"), "", "another value"),
        ([1, [2, 3]], [1, [2, 4]], "[1][1]", "another value"),
        ([1], [1, 2], "", "other parts"),
        ((1,), [1], "", "tuple.*list"),
        ({"a": {"b": 1}}, {"a": {"b": "1"}}, "['a']['b']", "int.*str"),
        ({"a": 1}, {"b": 1}, "", "other parts"),
        ({1: 1}, {True: 1}, "", "other parts"),
        ({"a": 1}, {}, "", "other parts"),
        ({1, 2}, {1, 3}, "[1]", "another value"),
        ({1}, {Decimal(1)}, "[0]", "int.*Decimal"),
        (frozenset({1}), frozenset(), "", "other parts"),
        (Point(1, [2]), Point(1, [3]), "[1][0]", "another value"),
        (Plain(1, Frozen("a")), Plain(1, Frozen(b"a")), ".b.a", "str.*bytes"),
        (Model(x=1, y=2), Model(x=1, y=3), ".y", "another value"),
        (Model(x=1, y=2), Model(x=1), "", "other parts"),
        (Model(x=Plain(1)), Model(x=Frozen(1)), ".x", "Plain.*Frozen"),
        (Struct(1), Struct(2), ".x", "another value"),
        (Colour.RED, Colour.BLUE, "", "another value"),
        (pydantic.SecretStr("a"), pydantic.SecretStr("b"), "", "another value"),
        (object(), object(), "", "another value"),
        (Grumpy(), Grumpy(), "", "another value"),
        (REPEATED, REPEATED.replace(fold=0), "", "another value"),
        (REPEATED, REPEATED_ELSEWHERE, "", "another value"),
        (REPEATED, REPEATED_ELSEWHERE.replace(tzinfo=None), "", "another value"),
        (NOON, NOON.replace(tzinfo=timezone(timedelta(hours=2))), "", "another value"),
        (NOON, NOON.replace(tzinfo=ZoneInfo("Europe/Paris")), "", "another value"),
        (time(2, tzinfo=BERLIN), time(2), "", "another value"),
        (
            {Frozen(1, Lone(1))},
            {Frozen(1, Lone(2))},
            "[0].inner.a",
            "another value",
        ),
        ({1, len}, {1, max}, "[1]", "another value"),
    ],
)
def test_the_first_difference_is_named(value, back, where, what):
    place, words = difference(value, back)
    assert place == where
    assert re.search(what, words)


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (0, 0.0),
        (0, Decimal(0)),
        (Decimal("1.50"), 1.5),
        (complex(2), 2),
        ("new", Status.NEW),
        (Text("new"), Status.NEW),
        (1, Status.OPEN),
        (True, Switch.ON),
        (3, Right(3)),
        (TextStatus.NEW, "new"),
        (Level.LOW, 1),
        (Text("a"), "a"),
        (Octets(b"a"), b"a"),
        (pgproto.UUID(ID), UUID(ID)),
        (Clock(2024, 1, 1), TODAY),
        (Clock(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN), REPEATED),
        (Day(2024, 1, 1), date(2024, 1, 1)),
        (Hour(2), time(2)),
        (Span(2), timedelta(2)),
    ],
)
def test_a_field_may_come_back_equal_in_the_type_that_it_is_declared_with(value, back):
    """Nobody validated a default or what a driver gave, and only in models are types declared."""
    for model in (Model, Struct):
        assert difference(model(x=value), model(x=back)) is None
        assert difference(model(x=[{"a": value}]), model(x=[{"a": back}])) is None
        assert difference([model(x={value: 1})], [model(x={back: 1})]) is None
        assert difference(model(x=Plain(value)), model(x=Plain(back))) is None
        assert difference(model(x={value}), model(x={back})) is None
    for plain_value, plain_back in (
        (value, back),
        ([value], [back]),
        (Plain(value), Plain(back)),
        ({value}, {back}),
        ([Model(x=1), value], [Model(x=1), back]),
    ):
        assert difference(plain_value, plain_back) is not None


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (1, True),
        (True, 1),
        (True, 1.0),
        (1, 2.0),
        (10**30, 1e30),
        (Decimal("sNaN"), 1.0),
        ("1", 1),
        ("old", Status.NEW),
        (1, Switch.ON),
        (Word.YES, TextStatus.NEW),
        (Status.NEW, TextStatus.NEW),
        (OtherStatus.NEW, TextStatus.NEW),
        (Status.NEW, "new"),
        (Colour.BLUE, ["b", 2]),
        (Text("a"), "b"),
        ("a", Text("a")),
        (b"a", "a"),
        (bytearray(b"a"), b"a"),
        ((1,), [1]),
        (Point(1), (1, None)),
        (UUID(ID), ID),
        (pgproto.UUID(ID), UUID(int=1)),
        (Clock(2024, 1, 1), TODAY + timedelta(1)),
        (Clock(2024, 1, 1), datetime(2024, 1, 1, tzinfo=UTC)),
        (TODAY, date(2024, 1, 1)),
        (TODAY, "2024-01-01T00:00:00"),
        (OrderedDict(a=1), {"a": 1}),
        (None, ""),
    ],
)
def test_a_field_that_comes_back_different_is_reported(value, back):
    for model in (Model, Struct):
        place, words = difference(model(x=value), model(x=back))
        assert place == ".x"
        assert "would come back" in words


def test_members_of_sets_are_compared_with_those_that_they_equal():
    """Whatever order their stored forms have."""
    value, back = {2, Decimal("0.5")}, {Decimal(2), Decimal("0.5")}
    assert difference(Model(x=value), Model(x=back)) is None
    assert difference(Model(x={1, "a"}), Model(x={True, "a"})) is not None


def test_enums_come_back_as_their_values_where_a_model_says_so():
    """Elsewhere a member is no text: `Status.NEW == "new"` is false."""
    assert difference(Valued(x=Status.NEW), Valued(x="new")) is None
    assert difference(Valued(x=[Status.NEW]), Valued(x=["new"])) is None
    assert difference(Valued(x=Status.NEW), Valued(x="old")) == (
        ".x",
        f"is a {__name__}:Status and would come back as a builtins:str",
    )
    assert difference(Valued(x=Model(x=Status.NEW)), Valued(x=Model(x="new"))) is not None


class Ordinary(pydantic.BaseModel):
    """What people write, and pydantic takes as it is."""

    amount: float = 0
    price: Decimal = 0
    status: Status = "new"
    id: UUID = UUID(ID)
    at: datetime = REPEATED
    tags: frozenset[float] = frozenset({2, 10, 1.5})


class OrdinaryStruct(msgspec.Struct):
    amount: float = 0
    price: Decimal = 0
    id: UUID | None = None
    at: datetime = REPEATED


@pytest.mark.parametrize(
    "value",
    [
        Ordinary(),
        Ordinary(id=pgproto.UUID(ID), at=Clock(2024, 1, 1, tzinfo=UTC)),
        Ordinary.model_construct(amount=5),
        OrdinaryStruct(5),
        OrdinaryStruct(id=pgproto.UUID(ID)),
        Plain(REPEATED, {Silent(i) for i in range(9)}),
    ],
)
def test_ordinary_models_are_stored(value):
    """Each of them comes back; none is withheld."""
    codec = ValueCodec((type(value), Silent))
    for outcome in (value, {"order": [value]}):
        back = codec.decode(codec.encode(outcome))
        assert difference(outcome, back) is None


def test_a_difference_shows_no_values():
    """It is logged and stored, and may be about a secret."""
    for found in (
        difference(pydantic.SecretStr("4111"), pydantic.SecretStr("4222")),
        difference(Model(x="4111"), Model(x="4222")),
        difference(Model(x="4111"), Model(x=4222)),
    ):
        assert found is not None
        assert "4111" not in str(found)
        assert "4222" not in str(found)
