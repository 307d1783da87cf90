"""The codec of an operation's outcome knows the classes that the operation says it returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest

from retrysafe.core.values.codec import codec_for, codec_of, codec_of_step


def local_class() -> type:
    """A class that is found by nobody who is not told of it."""

    @dataclass
    class Receipt:
        amount: int

    return Receipt


Receipt = local_class()
VALUE = [Receipt(5)]


def annotated(amount):
    return [Receipt(amount)]


annotated.__annotations__["return"] = list[Receipt]


def unresolved() -> Missing:  # noqa: F821 — that nobody can resolve it is the point.
    pass


def nothing() -> None:
    pass


def comes_back(codec) -> bool:
    """Whether a value of the class is the same after it was stored."""
    try:
        return codec.decode(codec.encode(VALUE)) == VALUE
    except Exception:
        return False


@pytest.mark.parametrize(
    "codec",
    [
        codec_for(annotated, None),
        codec_for(lambda: None, Receipt),
        codec_of((Receipt,)),
        codec_of(list[Receipt]),
        codec_of_step(partial(partial(annotated), 5), None),
    ],
    ids=["annotated", "declared", "several", "within another", "partial"],
)
def test_a_named_class_comes_back(codec):
    assert comes_back(codec)


def test_a_class_that_nobody_names_is_not_rebuilt():
    """An annotation that cannot be resolved here is only a missing hint."""
    for operation in (lambda: None, unresolved, nothing):
        assert not comes_back(codec_for(operation, None))
    assert not comes_back(codec_of(None))
