"""Values that are equal make equal keys and equal requests, whatever way they are written."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest

from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import natural_key

NOON = datetime(2024, 2, 29, 12, 0, tzinfo=UTC)
NOON_ELSEWHERE = NOON.astimezone(timezone(timedelta(hours=2)))


@dataclass
class Order:
    customer: str
    sent_at: str


Pair = namedtuple("Pair", "left right")


class Struct(msgspec.Struct):
    x: Any


class Model(pydantic.BaseModel):
    x: Any


def mark(value: object, rule: FingerprintRule | None = None) -> bytes:
    return (rule or FingerprintRule()).fingerprints_of_value("pay", value)[0].digest


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Decimal("10.0"), Decimal("10.00")),
        (NOON, NOON_ELSEWHERE),
    ],
)
def test_equal_values_give_one_natural_key(first, second):
    assert natural_key("pay", amount=first) == natural_key("pay", amount=second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Decimal("10.0"), Decimal("10.00")),
        (5, 5.0),
        (5, Decimal("5.00")),
        (NOON, NOON_ELSEWHERE),
        ({1: "a", 2: "b"}, {2: "b", 1: "a"}),
        ({"a": 1, "b": (2, 3)}, {"b": (2, 3), "a": 1}),
        ({1, 2, 3}, {3, 2, 1}),
    ],
)
def test_equal_values_are_one_request(first, second):
    assert mark([first]) == mark([second])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Decimal("10.0"), Decimal("10.1")),
        (Decimal("Infinity"), Decimal("-Infinity")),
        (NOON, NOON.replace(tzinfo=None)),
        ((1, 2), [1, 2]),
        (1, True),
        (1, "1"),
        ({1: "a"}, {"1": "a"}),
        (12345678901234567890, 12345678901234567891),
    ],
)
def test_different_values_are_different_requests(first, second):
    assert mark([first]) != mark([second])


@pytest.mark.parametrize(
    "edge",
    [
        datetime.min.replace(tzinfo=timezone(timedelta(hours=2))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-2))),
    ],
)
def test_instants_at_the_ends_of_the_calendar_count(edge):
    """`datetime.min` is a usual mark for "never"; in UTC it would be before year 1."""
    other = edge.replace(tzinfo=UTC)
    assert mark([edge]) == mark([edge]) != mark([other])
    assert (
        natural_key("pay", at=edge) == natural_key("pay", at=edge) != natural_key("pay", at=other)
    )


def test_pointers_reach_the_fields_of_typed_values():
    """A field that does not count does not count in a dataclass either."""
    rule = FingerprintRule(exclude=("/order/sent_at",))
    first, second = Order("c1", "noon"), Order("c1", "one")
    assert mark({"order": first}, rule) == mark({"order": second}, rule)
    assert mark({"order": first}) != mark({"order": second})
    pointer = FingerprintRule(include=("/pair/0",))
    assert mark({"pair": Pair(1, 2)}, pointer) == mark({"pair": Pair(1, 3)}, pointer)


def test_a_rule_without_fields_and_one_with_fields_read_values_alike():
    """So a later rule can leave a new field out and still match the records of the plain rule."""
    plain = FingerprintRule(version=1)
    later = FingerprintRule(version=2, previous=(FingerprintRule(version=1, exclude=("/new",)),))
    old = plain.fingerprints_of_value("pay", {"amount": 5})[0]
    _, earlier = later.fingerprints_of_value("pay", {"amount": 5, "new": "x"})
    assert earlier == old


@pytest.mark.parametrize("kind", [Struct, Model])
def test_fields_of_models_may_hold_anything_that_their_library_writes(kind):
    """A client's `$` is no tag of ours, and names that are no text are names all the same."""
    values = [
        {"$": 1},
        {"$": 2},
        {"$": "decimal", "v": "none"},
        {"$": "dataclass", "v": 5},
        5,
        5.5,
        (1, 2),
        (2, 1),
        {1: "a", 2: "b"},
        {1: "b", 2: "a"},
        {"a": None},
    ]
    marks = [mark(kind(x=value)) for value in values]
    assert len(set(marks)) == len(values)
    assert mark(kind(x={2: "b", 1: "a"})) == mark(kind(x={1: "a", 2: "b"}))
    assert mark(kind(x=[1, 2.0])) == mark(kind(x=[1, 2]))
