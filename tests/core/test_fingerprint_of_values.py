"""Models count by what they hold, whatever their library shows of it."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from ipaddress import IPv4Address, IPv6Network
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from asyncpg.pgproto import pgproto

from retrysafe.core.keys.fingerprint import FingerprintRule, fingerprint_tree
from retrysafe.core.values.trees import NotStorable
from tests.core.sample_types import Colour, Frozen, Number, Plain, Text, Word

NOON = datetime(2024, 2, 29, 12, 0, tzinfo=UTC)
PLAIN_RULE = FingerprintRule()


class Card(pydantic.BaseModel):
    number: pydantic.SecretStr
    code: pydantic.SecretBytes = pydantic.SecretBytes(b"1")
    pin: pydantic.Secret[int] = pydantic.Secret[int](1)
    note: str = pydantic.Field(default="", exclude=True)


class Base(pydantic.BaseModel):
    a: int


class Sub(Base):
    b: int


class Order(pydantic.BaseModel):
    item: Base


class Masked(pydantic.BaseModel):
    """A model that masks its field by code of its own."""

    number: str

    @pydantic.field_serializer("number")
    def mask(self, number: str) -> str:
        return "*" * len(number)


class Open(pydantic.BaseModel):
    """Takes unknown fields, also one that is called as its own field is in Python."""

    model_config = pydantic.ConfigDict(extra="allow")
    a: int = pydantic.Field(alias="A")

    @cached_property
    def doubled(self) -> int:
        return self.a * 2


class Root(pydantic.RootModel[list[int]]):
    pass


class Holder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    x: Any


class Link(pydantic.BaseModel):
    url: pydantic.HttpUrl


class Dsn(pydantic.PostgresDsn):
    """A URL whose text hides a part of it."""

    def __str__(self) -> str:
        return "postgresql://…"


@dataclass
class Payment:
    card: pydantic.SecretStr


class Whispered(str):
    """A text that prints as a mask."""

    __slots__ = ()

    def __str__(self) -> str:
        return "***"


def masked(base: type) -> type:
    """A subclass that shows nothing of what it holds."""
    hide = {
        name: lambda self, *args, **kwargs: "***"
        for name in ("__str__", "__repr__", "__format__", "isoformat", "items", "keys", "copy")
    }
    empty = {"__iter__": lambda self: iter(()), "__reversed__": lambda self: iter(())}
    return type(f"Masked{base.__name__}", (base,), hide | empty)


# The smallest file of a time zone: one kind of time, and no changes.
ZONE = (
    (b"TZif" + bytes(16) + bytes.fromhex("00000000 00000000 00000000 00000000 00000001 00000004"))
    + bytes.fromhex("00000000 00 00")
    + b"UTC\0"
)
ID = "12345678-1234-5678-1234-567812345678"
TWO = timezone(timedelta(hours=2))
SAMPLES = [
    (str, ("a",), ("b",)),
    (int, (1,), (2,)),
    (float, (1.5,), (2.5,)),
    (bytes, (b"a",), (b"b",)),
    (dict, ({"a": [1]},), ({"a": [2]},)),
    (list, ([1, 2],), ([2, 1],)),
    (UUID, (ID,), (ID.replace("8", "9"),)),
    (Decimal, ("1.50",), ("1.51",)),
    (datetime, (2024, 1, 1, 2, 3, 4, 5, TWO), (2024, 1, 1, 2, 3, 4, 6, TWO)),
    (datetime, (2024, 1, 1), (2024, 1, 2)),
    (date, (2024, 1, 1), (2024, 1, 2)),
    (time, (1, 2, 3, 4, TWO), (1, 2, 3, 5, TWO)),
    (time, (1, 2), (1, 3)),
    (timedelta, (1, 2, 3), (1, 2, 4)),
]


class StructBase(msgspec.Struct):
    a: int


class StructSub(StructBase):
    b: int


class StructOrder(msgspec.Struct):
    item: StructBase


class Renamed(msgspec.Struct, rename="camel"):
    sent_at: Any
    amount: int = 1


class Sparing(msgspec.Struct, omit_defaults=True):
    a: int = 1
    b: int = 2


class Cat(msgspec.Struct, tag=True):
    name: str


class Dog(msgspec.Struct, tag=True):
    name: str


class Row(msgspec.Struct, array_like=True):
    a: Any
    b: Any = None


class TaggedRow(msgspec.Struct, array_like=True, tag="t"):
    a: Any


class Changes(msgspec.Struct):
    name: str | msgspec.UnsetType | None = msgspec.UNSET


class Unparsed(msgspec.Struct):
    body: msgspec.Raw


def mark(value: object, rule: FingerprintRule = PLAIN_RULE) -> bytes:
    return rule.fingerprints_of_value("pay", value)[0].digest


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Card(number="4111"), Card(number="4222")),
        (Card(number="4", code=b"1"), Card(number="4", code=b"2")),
        (Card(number="4", pin=1), Card(number="4", pin=2)),
        (Card(number="4", note="a"), Card(number="4", note="b")),
        (Order(item=Sub(a=1, b=1)), Order(item=Sub(a=1, b=2))),
        (Order(item=Base(a=1)), Order(item=Sub(a=1, b=2))),
        (Masked(number="4111"), Masked(number="4222")),
        (Open(A=1, z=NOON), Open(A=1, z=NOON.isoformat())),
        (Open(A=1, a=2), Open(A=1, a=3)),
        (Open(A=1, a=2), Open(A=5, a=2)),
        (Open(A=1, a=2), Open(A=1)),
        (Open(**{"A": 1, "$": 2}), Open(**{"A": 1, "$": 3})),
        (Root([1, 2]), Root([2, 1])),
        (Holder(x=b"YQ=="), Holder(x=b"YR==")),
        (Holder(x=b"a"), Holder(x="a")),
        (Holder(x=float("nan")), Holder(x=float("inf"))),
        (Holder(x={"deep": [Card(number="1")]}), Holder(x={"deep": [Card(number="2")]})),
        (Link(url="https://a:pw1@example.org/"), Link(url="https://a:pw2@example.org/")),
        (pydantic.SecretStr("a"), pydantic.SecretStr("b")),
        (Payment(pydantic.SecretStr("a")), Payment(pydantic.SecretStr("b"))),
        (Whispered("a"), Whispered("b")),
        (StructOrder(StructSub(1, 1)), StructOrder(StructSub(1, 2))),
        (Renamed((1, NOON)), Renamed((1, NOON.isoformat()))),
        (Sparing(a=1), Sparing(a=3)),
        (Cat("Tom"), Dog("Tom")),
        (Row(1, 2), Row(2, 1)),
        (TaggedRow(1), Row(1)),
        (Changes(), Changes(None)),
        (Unparsed(msgspec.Raw(b'{"a":1}')), Unparsed(msgspec.Raw(b'{"a":2}'))),
        (Renamed(Card(number="1")), Renamed(Card(number="2"))),
        (Holder(x=Row(Card(number="1"))), Holder(x=Row(Card(number="2")))),
        (Holder(x=deque([pydantic.SecretStr("a")])), Holder(x=deque([pydantic.SecretStr("b")]))),
    ],
)
def test_models_that_hold_different_values_are_different_requests(first, second):
    """Masks, exclusions and cuts are for those who read; a retry must ask for the same thing."""
    assert mark(first) != mark(second)
    assert mark([first]) != mark([second])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Card(number="4111", note="a"), Card(number="4111", note="a")),
        (Order(item=Sub(a=1, b=1)), Order(item=Sub(a=1, b=1))),
        (Open(A=1, x=2, y=3), Open(A=1, y=3, x=2)),
        (Open(A=1, a=2), Open(a=2, A=1)),
        (Holder(x=Decimal("1.0")), Holder(x=Decimal("1.00"))),
        (Holder(x=NOON), Holder(x=NOON.astimezone(timezone(timedelta(hours=2))))),
        (Holder(x={1: 2, 3: 4}), Holder(x={3: 4, 1: 2})),
        (StructOrder(StructSub(1, 1)), StructOrder(StructSub(1, 1))),
        (Changes(), Changes(msgspec.UNSET)),
        (Unparsed(msgspec.Raw(b"1")), Unparsed(msgspec.Raw(b"1"))),
    ],
)
def test_models_that_hold_equal_values_are_one_request(first, second):
    assert mark(first) == mark(second)


def test_what_a_model_has_worked_out_does_not_count():
    """A cached property is no field: a model that was looked at is still the same request."""
    fresh, used = Open(A=2), Open(A=2)
    assert used.doubled == 4
    assert mark(used) == mark(fresh)


@pytest.mark.parametrize(
    ("model", "plain"),
    [
        (Base(a=1), {"a": 1}),
        (Order(item=Sub(a=1, b=2)), {"item": {"a": 1, "b": 2}}),
        (Open(A=1, z="y"), {"a": 1, "z": "y"}),
        (Root([1, 2]), [1, 2]),
        (Holder.model_construct(), {}),
        (Link(url="https://example.org/a"), {"url": "https://example.org/a"}),
        (StructSub(1, 2), {"a": 1, "b": 2}),
        (Renamed("noon"), {"sentAt": "noon", "amount": 1}),
        (Cat("Tom"), {"type": "Cat", "name": "Tom"}),
        (Row(1, "b"), [1, "b"]),
        (TaggedRow(1), ["t", 1]),
        (Changes(), {}),
        (Sparing(), {"a": 1, "b": 2}),
    ],
)
def test_fields_count_under_the_names_that_clients_know(model, plain):
    """So that pointers reach them, and a dictionary may become a model between two deploys."""
    assert mark(model) == mark(plain)


def test_pointers_reach_into_models():
    rule = FingerprintRule(exclude=("/order/sentAt", "/card/number"))
    first = {"order": Renamed("noon"), "card": Card(number="4111")}
    second = {"order": Renamed("one"), "card": Card(number="4222")}
    assert mark(first, rule) == mark(second, rule)
    assert mark(first) != mark(second)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Text("a"), "a"),
        (Whispered("a"), "a"),
        (Number(5), 5),
        (type("Real", (float,), {})(2.5), 2.5),
        (type("Octets", (bytes,), {})(b"a"), b"a"),
        (bytearray(b"a"), b"a"),
        (memoryview(b"a"), b"a"),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (deque([1, 2]), [1, 2]),
        (PurePosixPath("/a/b"), "/a/b"),
        (IPv4Address("10.0.0.1"), "10.0.0.1"),
        (IPv6Network("::/64"), "::/64"),
        (pydantic.SecretBytes(b"a"), b"a"),
        (pydantic.SecretStr("a"), "a"),
        (pgproto.UUID(ID), UUID(ID)),
        (ZoneInfo("Europe/Berlin"), "Europe/Berlin"),
        (Fraction(1, 3), "1/3"),
        (complex(1, 2.5), (1, 2.5)),
        (re.compile("a", re.DOTALL), ("a", int(re.DOTALL | re.UNICODE))),
        ({Text("a"): {Whispered("b"): 1}}, {"a": {"b": 1}}),
        ({Whispered("$"): 1}, {"$": 1}),
        ({Text("a"): 1, 2: 3}, {"a": 1, 2: 3}),
    ],
)
def test_what_only_models_hold_counts_as_what_it_is_made_of(value, plain):
    assert mark(Holder(x=value)) == mark(Holder(x=plain))


@pytest.mark.parametrize(("base", "args", "others"), SAMPLES)
def test_subclasses_count_as_what_they_are_made_of(base, args, others):
    """Whatever they print, and whatever they show to those who walk through them."""
    kind = masked(base)
    for wrap in (
        lambda value: Holder(x=value),
        lambda value: Renamed([value]),
        lambda value: value,
    ):
        assert mark(wrap(kind(*args))) == mark(wrap(base(*args)))
        assert mark(wrap(kind(*args))) != mark(wrap(kind(*others)))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (re.compile("a"), re.compile("b")),
        (re.compile("a"), re.compile("a", re.IGNORECASE)),
        (re.compile("a"), re.compile(b"a")),
        (ZoneInfo("Europe/Berlin"), ZoneInfo("Europe/Paris")),
        (Fraction(1, 3), Fraction(2, 3)),
        (complex(1, 2), complex(2, 1)),
        ({Colour.RED: 1}, {"r": 1}),
        ({Word.YES: 1}, {"yes": 1}),
        ((1, 2), [1, 2]),
    ],
)
def test_different_parts_are_different_requests(first, second):
    assert mark(Holder(x=first)) != mark(Holder(x=second))


def test_names_that_are_one_text_do_not_hide_each_other():
    """A class may say that it is not equal to its text; then both names are there, and count."""
    loner = type("Loner", (str,), {"__eq__": object.__eq__, "__hash__": object.__hash__})
    marks = {
        mark({loner("a"): 1, "a": 2}),
        mark({loner("a"): 3, "a": 2}),
        mark({loner("a"): 1, "a": 3}),
        mark({"a": 2}),
    }
    assert len(marks) == 4
    assert mark({loner("$"): 1}) == mark({"$": 1})


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (Holder(x=object()), r"the request\.x is a builtins:object"),
        (Holder(x=[Dsn("postgresql://u:p@h/db")]), r"the request\.x\[0\] is a .*:Dsn"),
        (Open(A=1, z=object()), r"the request\.z is"),
        (Renamed(object()), r"the request\.sentAt is"),
        (Row(1, object()), r"the request\[1\] is"),
        (Row(msgspec.UNSET), r"the request\[0\] is a msgspec.*:UnsetType"),
        (Plain(Holder(x=len)), r"the request\.a\.x is"),
        (
            Holder(x=ZoneInfo.from_file(io.BytesIO(ZONE))),
            r"the request\.x is a zoneinfo:ZoneInfo",
        ),
    ],
)
def test_what_has_no_stable_form_is_named(value, where):
    """Rather refused than taken for the same as another one."""
    with pytest.raises(NotStorable, match=where):
        fingerprint_tree(value)


def test_models_in_a_circle_are_refused():
    circle = Holder(x=None)
    circle.x = [circle]
    with pytest.raises(NotStorable, match="in a circle"):
        fingerprint_tree(circle)


def test_dataclasses_and_enums_count_as_before():
    assert mark(Frozen(1, (Colour.RED,))) == mark(Frozen(1, (Colour.RED,)))
    assert mark(Frozen(1, (Colour.RED,))) != mark(Frozen(1, (Colour.BLUE,)))


def test_secrets_are_known_only_with_their_library(monkeypatch):
    secret = pydantic.SecretStr("a")
    monkeypatch.delitem(sys.modules, "pydantic")
    with pytest.raises(NotStorable, match="SecretStr"):
        fingerprint_tree(secret)
    assert "pydantic" not in sys.modules


@dataclass
class Late:
    first: int
    second: int = field(init=False)


@dataclass(slots=True)
class LateSlots:
    first: int
    second: int = field(init=False)


class LateStruct(msgspec.Struct):
    first: int
    second: int


@pytest.mark.parametrize("kind", [Late, LateSlots, LateStruct])
def test_a_field_that_was_never_set_is_told_with_its_place(kind):
    """What such a request asks for is not known, and the caller hears which field it is."""
    value = kind(1, 2) if kind is LateStruct else kind(1)
    if kind is LateStruct:
        del value.second
    with pytest.raises(NotStorable, match=r"a field of the request\[0\] was never set: .*second"):
        fingerprint_tree([value])
    value.second = 2
    assert fingerprint_tree([value])[0]["v"] == {"first": 1, "second": 2}
