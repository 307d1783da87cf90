"""What is read back is compared part by part, types included, and the first difference is named."""

from __future__ import annotations

import re
from collections import OrderedDict
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given

from retrysafe.core.sameness import difference
from tests.core.sample_types import Colour, Frozen, Plain, Point
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
    ],
)
def test_the_first_difference_is_named(value, back, where, what):
    place, words = difference(value, back)
    assert place == where
    assert re.search(what, words)


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
