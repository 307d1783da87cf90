"""Framing: different lists of values never become the same bytes."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrysafe.core.keys.canonical import DIGEST_BYTES, digest, frame, frame_parts, part_bytes
from retrysafe.errors import FingerprintImpossible

PARTS = st.one_of(
    st.text(),
    st.binary(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.dates(),
    st.datetimes(),
    st.datetimes(timezones=st.just(UTC)),
    st.timedeltas(),
)


def identity(parts: list) -> list:
    """What makes a list of parts different from another: numbers count by value alone."""
    return [
        ("number", part) if isinstance(part, int | Decimal) else (type(part).__name__, repr(part))
        for part in parts
    ]


def test_every_supported_type_has_this_frozen_form():
    """The bytes are in stored keys, so a later release must make the same."""
    parts = (
        "a",
        b"a",
        1,
        True,
        None,
        Decimal("1.50"),
        UUID(int=7),
        date(2024, 2, 29),
        datetime(2024, 2, 29, 1, 2, 3, tzinfo=UTC),
        timedelta(days=1, microseconds=5),
    )
    assert frame_parts(*parts) == (
        b"2:sa2:ba2:i12:i11:n6:d15e-1"
        b"17:u\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x07"
        b"11:D2024-02-2926:t2024-02-29T01:02:03+00:006:T1,0,5"
    )


@given(st.lists(st.binary()), st.lists(st.binary()))
@example([b"a:b", b"c"], [b"a", b"b:c"])
@example([b""], [])
@example([b"", b""], [b""])
@example([b"1:a"], [b"a"])
def test_different_lists_of_bytes_have_different_frames(first, second):
    assert (frame(*first) == frame(*second)) == (first == second)


@given(st.lists(PARTS, max_size=4), st.lists(PARTS, max_size=4))
@example([1], ["1"])
@example([1], [True])
@example([0], [False])
@example([None], [])
@example([None], ["n"])
@example(["a"], [b"a"])
@example([1], [Decimal(1)])
@example([1], [Decimal("1.00")])
@example([-700], [Decimal("-7E+2")])
@example([True], [Decimal(1)])
@example([0], [Decimal("0E+5000")])
@example([1], [Decimal("1.5")])
@example([10**4299], [Decimal("1E+4299")])
@example([Decimal("1.0")], [Decimal("1.00")])
@example([Decimal("-0")], [Decimal("0")])
@example([date(2024, 1, 1)], [datetime(2024, 1, 1, tzinfo=UTC)])
@example([date(2024, 1, 1)], ["2024-01-01"])
@example([timedelta(1)], [timedelta(0, 1)])
@example([UUID(int=0)], [b"\x00" * 16])
def test_different_parts_have_different_frames(first, second):
    """No two lists that differ in a value meet, or in its type; numbers have one type."""
    assert (frame_parts(*first) == frame_parts(*second)) == (identity(first) == identity(second))


@given(st.lists(st.lists(PARTS, max_size=3), max_size=3))
def test_nested_frames_keep_their_borders(lists):
    """A part never slides from one inner list to its neighbour."""
    framed = frame(*(frame_parts(*parts) for parts in lists))
    flat = frame(frame_parts(*(part for parts in lists for part in parts)))
    assert (framed == flat) == (len(lists) == 1 or framed == b"" == flat)


def test_lone_surrogates_are_kept_apart():
    assert part_bytes("\ud800") != part_bytes("\ud801") != part_bytes("?")


@pytest.mark.parametrize("part", [1.0, float("nan"), [], {}, object(), bytearray(b"a"), {1}, 1j])
def test_values_without_a_stable_form_are_refused_by_type_name(part):
    """A float prints differently from what was meant; the caller must choose Decimal or text."""
    with pytest.raises(FingerprintImpossible, match=type(part).__name__):
        frame_parts("ok", part)


def test_integers_too_long_to_be_written_are_refused_with_what_to_do():
    """Python would raise an error about its own settings."""
    with pytest.raises(FingerprintImpossible, match="pass its bytes"):
        frame_parts(10**5000)


@given(st.binary(), st.binary())
def test_digests_have_one_length_and_follow_their_input(first, second):
    assert len(digest(first)) == DIGEST_BYTES == 16
    assert (digest(first) == digest(second)) == (first == second)
