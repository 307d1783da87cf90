"""Lists on their way to PostgreSQL through psycopg."""

from __future__ import annotations

import struct

import psycopg
import pytest

from retrysafe.stores.postgres.drivers.arrays import BytesArray, BytesArrayDumper, encoded


def test_texts_are_quoted():
    """Quotes, backslashes, commas, braces and the word NULL stay part of the text."""
    assert encoded([["a", 'b"c', "d\\e", "f,{g}", "NULL", ""]]) == [
        '{"a","b\\"c","d\\\\e","f,{g}","NULL",""}'
    ]


def test_numbers_and_empty_lists_are_literals():
    """Numbers are joined; an empty list is an empty array of whatever type is asked for."""
    assert encoded([[1, -2, 2_592_000_000], []]) == ["{1,-2,2592000000}", "{}"]


def test_what_is_no_list_is_left_alone():
    """Single values go to psycopg as they are."""
    assert encoded(["text", b"bytes", 7, None, True]) == ["text", b"bytes", 7, None, True]


def test_bytes_travel_in_the_binary_form():
    """One dimension, no NULLs, the items' type, their number, the first index; then the items."""
    (array,) = encoded([[b"ab", b""]])
    assert isinstance(array, BytesArray)
    sent = bytes(BytesArrayDumper(BytesArray).dump(array))
    assert sent == struct.pack("!iiiii", 1, 0, 17, 2, 1) + b"\0\0\0\2ab" + b"\0\0\0\0"


def test_nothing_is_not_an_empty_value():
    """None is NULL in every kind of list, and a list of nothing else is an array of NULLs."""
    texts, numbers, nothing, array = encoded(
        [[None, "NULL"], [None, 1], [None, None], [None, b"a"]]
    )
    assert (texts, numbers, nothing) == ('{NULL,"NULL"}', "{NULL,1}", "{NULL,NULL}")
    sent = bytes(BytesArrayDumper(BytesArray).dump(array))
    assert sent == struct.pack("!iiiii", 1, 1, 17, 2, 1) + b"\xff\xff\xff\xff" + b"\0\0\0\1a"


def test_a_nul_is_refused():
    """The literal would end at a NUL, and the server would read another text."""
    with pytest.raises(psycopg.DataError, match="NUL"):
        encoded([["fine", "a\x00b"]])
