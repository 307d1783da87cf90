"""Headers to the letter: the key as RFC 8941 defines strings, preferences, seconds to wait."""

from __future__ import annotations

import string
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retrysafe.errors import KeyInvalid
from retrysafe.http.headers import NO_PREFERENCE, Preference, parse_key, parse_prefer
from retrysafe.http.headers import retry_after_text as retry_after

PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
KEYS = st.text(PRINTABLE, min_size=1, max_size=255)
# Biased to what the syntax is made of, so that random lines come close to legal ones.
LINES = st.lists(
    st.sampled_from(
        [*'"\\;=,:?*. \t-_/ab01AB', '"', '"', "\\\\", '\\"', ";a", "=1", "é", "\x00", "\x7f"]
    ),
    max_size=14,
).map(lambda pieces: "".join(pieces).encode())
PARAMETERS = st.lists(
    st.sampled_from(
        [
            ";a",
            ";  a",
            ";*b-_.*=1",
            ";a=-999999999999999",
            ";a=123456789012.123",
            ";a=-0.5",
            ';a="x\\"\\\\;,"',
            ";a=*tok:/en!#$%&'*+-.^_`|~",
            ";a=:YWJj:",
            ";a=::",
            ";a=?0",
            ";a=?1",
        ]
    ),
    max_size=4,
).map("".join)


def quoted(key: str) -> str:
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


class NotLegal(Exception):
    """The reference parser refuses."""


class Reference:
    """Section 4.2 of RFC 8941, step by step and in its words; slow and simple."""

    def __init__(self, data: bytes) -> None:
        try:
            self.left = data.decode("ascii")
        except UnicodeDecodeError:
            raise NotLegal from None

    def key(self) -> str:
        self.left = self.left.lstrip(" ")
        if not self.left.startswith('"'):
            raise NotLegal
        value = self.string()
        self.parameters()
        self.left = self.left.lstrip(" ")
        if self.left:
            raise NotLegal
        return value

    def take(self) -> str:
        if not self.left:
            raise NotLegal
        first, self.left = self.left[0], self.left[1:]
        return first

    def string(self) -> str:
        self.take()
        output = ""
        while self.left:
            char = self.take()
            if char == "\\":
                following = self.take()
                if following not in '"\\':
                    raise NotLegal
                output += following
            elif char == '"':
                return output
            elif not " " <= char <= "~":
                raise NotLegal
            else:
                output += char
        raise NotLegal

    def parameters(self) -> None:
        while self.left.startswith(";"):
            self.take()
            self.left = self.left.lstrip(" ")
            if self.take() not in string.ascii_lowercase + "*":
                raise NotLegal
            while self.left and self.left[0] in string.ascii_lowercase + string.digits + "_-.*":
                self.take()
            if self.left.startswith("="):
                self.take()
                self.bare_item()

    def bare_item(self) -> None:
        first = self.left[:1]
        if first and first in "-" + string.digits:
            self.number()
        elif first == '"':
            self.string()
        elif first and first in string.ascii_letters + "*":
            while self.left and self.left[0] in (
                string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~:/"
            ):
                self.take()
        elif first == ":":
            self.take()
            content, colon, self.left = self.left.partition(":")
            if not colon or set(content) - set(string.ascii_letters + string.digits + "+/="):
                raise NotLegal
        elif first == "?":
            self.take()
            if self.take() not in "01":
                raise NotLegal
        else:
            raise NotLegal

    def number(self) -> None:
        if self.left.startswith("-"):
            self.take()
        if self.left[:1] not in tuple(string.digits):
            raise NotLegal
        text = ""
        while self.left and (
            self.left[0] in string.digits or (self.left[0] == "." and "." not in text)
        ):
            char = self.take()
            if char == "." and len(text) > 12:
                raise NotLegal
            text += char
            if len(text) > (16 if "." in text else 15):
                raise NotLegal
        if text.endswith(".") or ("." in text and len(text.partition(".")[2]) > 3):
            raise NotLegal


def reference(line: bytes) -> str | None:
    try:
        key = Reference(line).key()
    except NotLegal:
        return None
    return key if 1 <= len(key) <= 255 else None


def read(line: bytes, *, strict: bool) -> str | None:
    """The key, or None when the line is refused; any other exception fails the test."""
    try:
        return parse_key([line], strict=strict)
    except KeyInvalid:
        return None


@given(KEYS, PARAMETERS, st.text(" ", max_size=3), st.text(" ", max_size=3), st.booleans())
def test_every_legal_string_is_read_back(key, parameters, before, after, strict):
    """Whatever may be sent as a string arrives, with any parameters and spaces around it."""
    line = f"{before}{quoted(key)}{parameters}{after}".encode()
    assert reference(line) == key
    assert parse_key([line], strict=strict) == key


@given(LINES)
@example(b'"a";a=1.')
@example(b'"a";a=1234567890123.1')
@example(b'"a";a=123456789012.1234')
@example(b'"a";a=1234567890123456')
@example(b'"a";a=-')
@example(b'"a" ;a')
@example(b'"a";;a')
@example(b'"a";A')
@example(b'"a";a=')
@example(b'"a"; ')
def test_strict_reading_is_that_of_the_specification(line):
    """No line is taken that RFC 8941 refuses, and none refused that it takes."""
    assert read(line, strict=True) == reference(line)


@given(st.binary(max_size=40) | LINES)
def test_lenient_reading_takes_all_that_strict_reading_takes(line):
    """The same key, or, for a line without quotes, the line itself; never anything else."""
    strict, lenient = read(line, strict=True), read(line, strict=False)
    if strict is not None:
        assert lenient == strict
    elif lenient is not None:
        trimmed = line.strip(b" \t")
        if trimmed.startswith(b'"'):
            assert lenient == reference(trimmed)  # Only the tabs around it were wrong.
        else:
            assert lenient.encode() == trimmed
            assert not set(lenient) & set('", ;\t')


@given(st.lists(st.binary(max_size=20), max_size=4), st.booleans())
def test_any_number_of_lines_is_read_or_refused(lines, strict):
    """Whatever arrives, the answer is a key or `KeyInvalid`; one line is needed for a key."""
    try:
        key = parse_key(lines, strict=strict)
    except KeyInvalid:
        return
    assert len(lines) == 1
    assert 1 <= len(key) <= 255
    assert key.isascii()
    assert key.isprintable()


@pytest.mark.parametrize(
    "key",
    [
        "8e03978e-40d5-43dd-bc93-6894a57f9324",
        "KG5LxwFBepaKHyUD",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "order_42",
        "a+b/c==",
        "user:42/charge.1~x@y",
        "{'json'}",
        "k",
        "k" * 255,
    ],
)
def test_clients_that_send_no_quotes_are_understood_unless_strict(key):
    """With or without quotes it is the same key, as a client library's update may add them."""
    assert parse_key([key.encode()], strict=False) == key
    assert parse_key([f"\t{key} ".encode()], strict=False) == key
    assert parse_key([f'"{key}"'.encode()], strict=False) == key
    with pytest.raises(KeyInvalid, match="double quotes"):
        parse_key([key.encode()], strict=True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b'""', "1 to 255 characters, got 0"),
        (b'"' + b"k" * 256 + b'"', "1 to 255 characters, got 256"),
        (b'"a', "closing quote is missing"),
        (b'"a\\"', "closing quote is missing"),
        (b'"a\\n"', "backslash"),
        (b'"a","b"', "got a list"),
        (b'"a" , "a"', "got a list"),
        (b'"a"x', "not a list of parameters"),
        (b'"a" ;b', "not a list of parameters"),
        (b'"a";b=', "not a list of parameters"),
        (b'"a";b=@1659578233', "not a list of parameters"),
        (b'"a";b=%"x"', "not a list of parameters"),
        (b'"\xc3\xa9"', "printable ASCII"),
        (b'"a\x00"', "printable ASCII"),
        (b'"a\tb"', "printable ASCII"),
        (b'"a\x7f"', "printable ASCII"),
        (b'"."', "cannot stand in a URL"),
        (b'".."', "cannot stand in a URL"),
        (b'"..";a=1', "cannot stand in a URL"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_broken_keys_are_refused_with_what_is_wrong(line, words, strict):
    with pytest.raises(KeyInvalid, match=words):
        parse_key([line], strict=strict)


@pytest.mark.parametrize("line", [b".", b"..", b" .. "])
def test_dots_are_no_key_without_quotes_either(line):
    """At the status URL a client or a proxy would take them out of the path."""
    with pytest.raises(KeyInvalid, match="cannot stand in a URL"):
        parse_key([line], strict=False)
    assert parse_key([line.strip() + b"a"], strict=False)


@pytest.mark.parametrize("line", [b"a,b", b"a b", b"a;b=1", b'a"b', b"a, a", b"abc;"])
def test_without_quotes_nothing_may_look_like_more_than_one_key(line):
    with pytest.raises(KeyInvalid, match="without quotes"):
        parse_key([line], strict=False)


@pytest.mark.parametrize("line", [b'\t"a"', b'"a"\t', b'"a";\ta'])
def test_tabs_are_no_spaces_in_a_structured_field(line):
    with pytest.raises(KeyInvalid, match="printable ASCII"):
        parse_key([line], strict=True)


@pytest.mark.parametrize("lines", [[], [b'"a"', b'"a"'], [b'"a"', b'"b"'], [b"", b'"a"']])
@pytest.mark.parametrize("strict", [True, False])
def test_several_lines_are_refused_even_when_they_are_equal(lines, strict):
    with pytest.raises(KeyInvalid, match=f"got {len(lines)} lines"):
        parse_key(lines, strict=strict)


def test_a_key_that_is_too_long_is_shown_up_to_the_limit():
    with pytest.raises(KeyInvalid) as caught:
        parse_key([b"k" * 300], strict=False)
    assert caught.value.key == "k" * 255


def test_escapes_do_not_count_against_the_limit():
    assert parse_key([b'"' + b'\\"' * 255 + b'"'], strict=True) == '"' * 255


@pytest.mark.parametrize(
    ("lines", "asked"),
    [
        ([], NO_PREFERENCE),
        ([b""], NO_PREFERENCE),
        ([b"wait=10"], (10.0, False)),
        ([b"respond-async"], (None, True)),
        ([b"respond-async, wait=10"], (10.0, True)),
        ([b"respond-async", b"wait=10"], (10.0, True)),
        ([b"Wait = 7 ,Respond-Async"], (7.0, True)),
        ([b'wait="7"'], (7.0, False)),
        ([b'wait="\\7"'], (7.0, False)),
        ([b"wait=0"], (0.0, False)),
        ([b"wait=5, wait=6", b"wait=7"], (5.0, False)),
        ([b"wait=five, wait=6"], (None, False)),
        ([b"wait, wait=6"], (None, False)),
        ([b"wait=-1"], (None, False)),
        ([b"wait=1.5"], (None, False)),
        ([b"wait=+1"], (None, False)),
        ([b"wait=1_0"], (None, False)),
        ([b"wait=\xb2"], (None, False)),
        ([b"wait=99999999999999999999"], (2.0**31, False)),
        ([b"wait=" + b"9" * 60_000], (2.0**31, False)),
        ([b'respond-async=""'], (None, True)),
        ([b"respond-async="], (None, True)),
        ([b"respond-async=no"], (None, False)),
        ([b"respond-async; a=1; b"], (None, True)),
        ([b'wait=3;x="a, wait=4"'], (3.0, False)),
        ([b'x="a, wait=4", wait=3'], (3.0, False)),
        ([b'x="a\\", wait=4", wait=3'], (3.0, False)),
        ([b'x="never closed, wait=4'], (None, False)),
        ([b'x="never closed, wait=4', b"wait=5"], (5.0, False)),
        ([b",, wait=3 ,,"], (3.0, False)),
        ([b"wait=3 4, respond-async"], (None, True)),
        ([b"return=minimal"], (None, False)),
        ([b"waiting=3"], (None, False)),
    ],
)
def test_preferences_are_read_as_rfc_7240_says(lines, asked):
    """The first of its name counts, and what cannot be understood is not asked for."""
    assert parse_prefer(lines) == Preference(*asked)


@given(st.lists(st.binary(max_size=30) | LINES, max_size=3))
def test_no_preference_is_an_error(lines):
    asked = parse_prefer(lines)
    assert asked.wait_seconds is None or 0 <= asked.wait_seconds <= 2.0**31


@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_preferences_that_are_sent_are_read(seconds, in_quotes, is_async):
    wait = f'wait="{seconds}"' if in_quotes else f"wait={seconds}"
    line = f"return=minimal, {wait}" + (", respond-async" if is_async else "")
    assert parse_prefer([line.encode()]) == (float(seconds), is_async)


@pytest.mark.parametrize(
    ("remaining", "text"),
    [
        (timedelta(0), b"1"),
        (timedelta(seconds=-5), b"1"),
        (timedelta(milliseconds=1), b"1"),
        (timedelta(seconds=1), b"1"),
        (timedelta(seconds=1, microseconds=1), b"2"),
        (timedelta(seconds=29, milliseconds=999), b"30"),
        (timedelta(days=1), b"86400"),
    ],
)
def test_retry_after_is_never_too_early(remaining, text):
    """Whole seconds, rounded up: a client that obeys does not come before the time."""
    assert retry_after(remaining) == text
