"""Canonical JSON: texts that mean the same are equal, all others differ."""

from __future__ import annotations

import inspect
import json
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrysafe.core.keys import canonical
from retrysafe.core.keys.canonical import (
    ABSENT,
    DEPTH_LIMIT,
    NotCanonical,
    Number,
    TooDeep,
    canonical_bytes,
    frame,
    parse,
)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(text: str | bytes) -> bytes:
    return canonical_bytes(parse(text.encode() if isinstance(text, str) else text))


def same(first: object, second: object) -> bool:
    """Equality that keeps True apart from 1, at any depth."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@pytest.mark.parametrize(
    "spellings",
    [
        ['{"a":1,"b":2}', '{"b":2,"a":1}', ' {\n"b" : 2 ,\t"a":1 } \r\n'],
        ['"é"', '"\\u00e9"', '"\\u00E9"'],
        ['"/"', '"\\/"'],
        ['"😀"', '"\\ud83d\\ude00"'],
        ["1", "1.0", "1.000", "10e-1", "1e0", "1E+0", "0.1e1", "100e-2"],
        ["0", "-0", "0.0", "-0.000", "0e5", "0e-999999"],
        ["1e400", "10e399", "1" + "0" * 400, "0.01e402"],
        ["-2.5", "-25e-1", "-0.25E1"],
        ["[1,2]", "[ 1 ,2.0 ]"],
    ],
)
def test_spellings_of_one_value_are_equal(spellings):
    assert len({read(text) for text in spellings}) == 1


@pytest.mark.parametrize(
    "texts",
    [
        ["1", "-1", "10", "1e1000", "1e1001", '"1"', "true", "[1]", "1.0000000000000000001"],
        ["9007199254740992", "9007199254740993"],  # Equal as floats.
        ["1" * 5000 + "1", "1" * 5000 + "2"],
        ["1e400", "1e401", "-1e400"],  # All infinite as floats.
        ["0.1", "0.10000000000000001"],
        ["null", "false", "0", '""', "[]", "{}", '"null"', "[null]", '{"":null}'],
        ["[[1],2]", "[1,[2]]", "[[1,2]]", "[1,2]"],
        ['{"a":{"b":1}}', '{"a":1,"b":1}', '["a","b",1]', '{"a":["b",1]}'],
        ['"e\\u0301"', '"\\u00e9"'],  # Look the same, and are not the same text.
        ['"\\ud800"', '"\\ud801"', '"?"'],
    ],
)
def test_different_values_differ(texts):
    assert len({read(text) for text in texts}) == len(texts)


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_the_way_of_writing_does_not_count(value, escaped, indent):
    """Escapes, white space and the order of names leave the canonical bytes as they are."""
    plain = json.dumps(value, sort_keys=True, ensure_ascii=False)
    other = json.dumps(value, ensure_ascii=escaped, indent=indent)
    assert read(plain) == read(other)


@given(JSON_VALUES, JSON_VALUES)
@example([[], []], [[[]]])
@example({"a": "b"}, ["a", "b"])
@example(1, True)
@example("n", None)
def test_bytes_are_equal_exactly_for_equal_values(first, second):
    assert (read(json.dumps(first)) == read(json.dumps(second))) == same(first, second)


@given(st.integers(), st.integers(-50, 50), st.integers(0, 30))
def test_numbers_are_compared_by_exact_value(digits, exponent, shift):
    """Moving zeros between digits and exponent changes nothing; one more in the value does."""
    spelled = Number(f"{digits}e{exponent}").text
    assert Number(f"{digits}{'0' * shift}e{exponent - shift}").text == spelled
    assert Number(f"{digits}.{'0' * shift}e{exponent}").text == spelled
    assert Number(f"{digits + 1}e{exponent}").text != spelled


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"a":2}}',
        b"\xff",
        b'"\xe9"',
        b"\xef\xbb\xbf{}",
        b"[1,]",
        b"01",
        b"1 2",
        b"'a'",
        b'"\x01"',
        b"1e" + b"9" * 5000,
        b"1" * 5000 + b" 2",
        b"[" + b"1" * 5000 + b",]",
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_what_has_no_single_meaning_has_no_canonical_form(text):
    """Whether it cannot be read, or be written: how deep Python reads depends on its version."""
    with pytest.raises(NotCanonical):
        canonical_bytes(parse(text))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_has_a_limit_of_its_own(opening, closing):
    """The limit is a number, and not what happens to be left of the caller's stack."""
    depth = canonical.DEPTH_LIMIT
    assert read(opening * depth + "1" + closing * depth)
    with pytest.raises(TooDeep, match="deeper than 200"):
        read(opening * (depth + 1) + "1" + closing * (depth + 1))


@pytest.mark.parametrize(
    ("pointer", "tokens"),
    [
        ("", ()),
        ("/", ("",)),
        ("/a/b", ("a", "b")),
        ("/a~1b", ("a/b",)),
        ("/a~0b", ("a~b",)),
        ("/~01", ("~1",)),
        ("/~0~1", ("~/",)),
        ("//x/", ("", "x", "")),
        ("/0/é", ("0", "é")),
    ],
)
def test_pointers_are_read_as_rfc_6901_says(pointer, tokens):
    assert canonical.pointer_tokens(pointer) == tokens


@given(st.lists(st.text(), max_size=4))
def test_any_names_can_be_written_as_a_pointer(tokens):
    pointer = "".join("/" + token.replace("~", "~0").replace("/", "~1") for token in tokens)
    assert canonical.pointer_tokens(pointer) == tuple(tokens)


@pytest.mark.parametrize("pointer", ["a", "a/b", "~", "/~", "/~2", "/a~", "/~~01", "/~~1"])
def test_broken_pointers_are_refused(pointer):
    with pytest.raises(ValueError, match="JSON Pointer"):
        canonical.pointer_tokens(pointer)


DOCUMENT = {"a": [{"b": None}, "x"], "": 1, "0": 2, "a/b": 3}


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ((), DOCUMENT),
        (("a", "0", "b"), None),
        (("a", "1"), "x"),
        (("",), 1),
        (("0",), 2),
        (("a/b",), 3),
        (("a", "2"), ABSENT),
        (("a", "-"), ABSENT),
        (("a", "01"), ABSENT),
        (("a", "-1"), ABSENT),
        (("a", "\u0660"), ABSENT),
        (("a", "9" * 13), ABSENT),
        (("a", "b"), ABSENT),
        (("a", "1", "x"), ABSENT),
        (("a", "0", "b", "c"), ABSENT),
        (("missing",), ABSENT),
    ],
)
def test_select_finds_exactly_what_the_pointer_names(tokens, found):
    """Null is a value that is there; what is not there is ABSENT."""
    assert canonical.select(DOCUMENT, tokens) == found


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        (("a",), {"": 1, "0": 2, "a/b": 3}),
        (("a", "0", "b"), {"a": [{}, "x"], "": 1, "0": 2, "a/b": 3}),
        (("a", "0"), {"a": [ABSENT, "x"], "": 1, "0": 2, "a/b": 3}),
        (("missing",), DOCUMENT),
        (("a", "5"), DOCUMENT),
        (("a", "x"), DOCUMENT),
        (("0", "deeper"), DOCUMENT),
        ((), ABSENT),
    ],
)
def test_without_removes_exactly_what_the_pointer_names(tokens, left):
    """Names vanish, places in lists stay, and the document itself is not touched."""
    before = json.dumps(DOCUMENT)
    assert canonical.without(DOCUMENT, tokens) == left
    assert json.dumps(DOCUMENT) == before


def test_absent_has_bytes_of_its_own():
    assert len({canonical_bytes(value) for value in (ABSENT, None, "", "-", [], {})}) == 6


@given(st.binary(), st.binary())
def test_bytes_differ_from_each_other_and_from_text(first, second):
    """Contents of forms are bytes, and may be no text at all."""
    assert (canonical_bytes([first]) == canonical_bytes([second])) == (first == second)
    assert canonical_bytes(first) != canonical_bytes(first.decode("latin-1"))


LARGE = {
    size: {"n" * size: "x" * size, "list": ["x" * size], "object": {"é" * size: "é" * size}}
    for size in (9, 10, 99, 100, 999, 1_000, 100_000)
}


@given(JSON_VALUES)
@example([LARGE[size] for size in LARGE])
def test_the_frames_are_those_of_every_other_digest(value):
    """The writing into one list is for speed alone: `frame` gives the same bytes."""

    def framed(item: object) -> bytes:
        if isinstance(item, list):
            return b"[" + frame(*map(framed, item))
        if isinstance(item, dict):
            pairs = ((name.encode("utf-8", "surrogatepass"), item[name]) for name in sorted(item))
            return b"{" + frame(*(part for name, inner in pairs for part in (name, framed(inner))))
        if type(item) is int:
            return b"#" + Number(str(item)).text.encode()
        return canonical_bytes(item)

    assert canonical_bytes(value) == framed(value)


class _Name(str):
    """A name that formats as something else than it is, as members of an enum do."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "Name.AMOUNT"


def test_a_name_counts_by_its_text():
    assert canonical_bytes({_Name("amount"): 1}) == canonical_bytes({"amount": 1})


def test_a_stack_that_is_nearly_full_is_told_as_too_deep():
    """Writing takes one frame a level: without room for them the text is refused, with no error
    that means something else to the caller."""

    def below(frames: int) -> bytes:
        return canonical_bytes(value) if frames == 0 else below(frames - 1)

    value: object = []
    for _ in range(DEPTH_LIMIT - 1):
        value = [value]
    assert below(1) == canonical_bytes(value)
    room = sys.getrecursionlimit() - len(inspect.stack())
    with pytest.raises(TooDeep):
        below(room - DEPTH_LIMIT // 2)
