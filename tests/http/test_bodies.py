"""Bodies as they count: read where their meaning is certain, and bytes everywhere else."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.core.keys.canonical import ABSENT, Number
from retrysafe.errors import FingerprintImpossible
from retrysafe.http.bodies import (
    CONTENT_TYPE_LIMIT_BYTES,
    FIELD_LIMIT,
    PART_HEAD_LIMIT_BYTES,
    RAW,
    content_of,
    field_of,
    fields_of,
)
from tests.http.building import FORM, field, multipart, request

FILE = [("Content-Disposition", 'form-data; name="f"; filename="a.png"')]


def value(body: bytes, content_type: str | None) -> object:
    return content_of(request(body, content_type))[1]


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        " application/json\t",
        "application/json;charset=utf-8",
        'application/json ; charset="UTF-8"',
        "application/json; charset=us-ascii",
        "application/json;",
        "application/json; profile=x;",
        "application/merge-patch+json",
        "application/vnd.api+json; version=1",
    ],
)
def test_json_is_known_by_its_content_type(content_type):
    assert value(b'{"a": [1, null, "x"]}', content_type) == {"a": [1, None, "x"]}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", None),
        (b"{}", "text/plain"),
        (b"{}", "text/json"),
        (b"{}", "application/jsonp"),
        (b"{}", "application/json; charset=utf-16"),
        (b"{}", "application/json; charset"),
        (b"{}", "application/json; a=1; a=2"),
        (b"{}", 'application/json; a="1'),
        (b"{}", "application/json, application/json"),
        (b"{", "application/json"),
        (b"", "application/json"),
        (b'{"a":1,"a":1}', "application/json"),
        (b"\xff", "application/json"),
        (b"a=1", f"{FORM}; charset=latin-1"),
        (b"a=1", "text/plain"),
    ],
)
def test_what_is_not_certain_is_raw(body, content_type):
    assert value(body, content_type) is RAW


def test_a_body_with_two_content_types_is_raw():
    twice = request(b"{}", headers=((b"content-type", b"application/json"),))
    assert content_of(twice)[1] is RAW


@pytest.mark.parametrize(
    ("lines", "is_raw"),
    [
        ((), False),
        ((b"identity",), False),
        ((b" Identity ",), False),
        ((b"gzip",), True),
        ((b"identity, gzip",), True),
        ((b"identity", b"gzip"), True),
    ],
)
def test_a_compressed_body_is_not_unpacked(lines, is_raw):
    headers = tuple((b"content-encoding", line) for line in lines)
    body = gzip.compress(b"{}", mtime=0) if b"gzip" in b"".join(lines) else b"{}"
    assert (content_of(request(body, headers=headers))[1] is RAW) == is_raw


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (b"", {}),
        (b"&&", {}),
        (b"a=1&b=2&a=3", {"a": [b"1", b"3"], "b": [b"2"]}),
        (b"a", {"a": [b""]}),
        (b"=", {"": [b""]}),
        (b"a=b=c", {"a": [b"b=c"]}),
        (b"a+b=%20+%2B%26", {"a b": [b"  +&"]}),
        (b"a=%zz&b=%", {"a": [b"%zz"], "b": [b"%"]}),
        (b"a;b=1", {"a;b": [b"1"]}),
        (b"%C3%A9=\xc3\xa9", {"é": [b"\xc3\xa9"]}),
        (b"%ff=%fe", {"\udcff": [b"\xfe"]}),
    ],
)
def test_fields_are_read_as_browsers_write_them(text, fields):
    assert fields_of(text) == fields
    assert value(text, FORM) == fields


def test_a_form_with_too_many_fields_is_refused():
    """Reading is bounded: a megabyte of ampersands costs no more than looking for the limit."""
    assert len(fields_of(b"&".join(b"%d" % n for n in range(FIELD_LIMIT)))) == FIELD_LIMIT
    for text in (b"&".join(b"%d" % n for n in range(FIELD_LIMIT + 1)), b"&" * 1_000_000):
        with pytest.raises(FingerprintImpossible, match="10,000 fields"):
            fields_of(text)


def test_parts_are_found_by_name():
    made = content_of(
        multipart([field("a", b"1"), (FILE, b"\x89PNG\r\n--x"), field("a", b"two\r\nlines")])
    )[1]
    assert made["a"] == [b"1", b"two\r\nlines"]
    ((head, digest),) = made["f"]
    assert head == {"filename": b"a.png"}
    assert len(digest) == 32


def test_an_empty_form_is_a_form():
    assert content_of(multipart([]))[1] == {}
    assert content_of(multipart([], end=b""))[1] == {}


@pytest.mark.parametrize(
    "more",
    [
        [],
        [("Content-Length", "1")],
        [("Content-Transfer-Encoding", "8bit")],
        [("content-transfer-encoding", "BINARY")],
    ],
)
@pytest.mark.parametrize(
    "disposition",
    [
        'form-data; name="a"',
        "form-data; name=a",
        'Form-Data;  NAME="a"',
        ' form-data ; name="a" ;',
    ],
)
def test_the_way_a_part_is_written_does_not_count(more, disposition):
    made = multipart([([("CONTENT-disposition", disposition), *more], b"1")])
    assert content_of(made)[1] == {"a": [b"1"]}


def test_what_a_part_says_besides_its_name_counts():
    """Nothing that an application may look at is dropped."""
    heads = [
        [],
        [("Content-Type", "text/plain")],
        [("Content-Type", "text/html")],
        [("Content-Transfer-Encoding", "base64")],
        [("X-Other", "1")],
    ]
    dispositions = ["", '; filename="a"', '; filename="b"', "; filename*=UTF-8''a", "; other=1"]
    values = [
        content_of(
            multipart([([("Content-Disposition", 'form-data; name="n"' + more), *head], b"1")])
        )[1]
        for head in heads
        for more in dispositions
    ]
    assert all(first != second for n, first in enumerate(values) for second in values[n + 1 :])


def test_other_multipart_bodies_keep_the_order_of_their_parts():
    first = ([("Content-Type", "application/json")], b"{}")
    second = ([("Content-Type", "text/plain"), ("Content-ID", "<x>")], b"x")
    made = content_of(multipart([first, second], subtype="mixed"))[1]
    assert [head for head, _ in made] == [
        {"header content-type": b"application/json"},
        {"header content-type": b"text/plain", "header content-id": b"<x>"},
    ]
    assert made != content_of(multipart([second, first], subtype="mixed"))[1]


GOOD = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (GOOD, "multipart/form-data"),
        (GOOD, "multipart/form-data; boundary="),
        (GOOD, 'multipart/form-data; boundary=""'),
        (GOOD, "multipart/form-data; boundary=c"),
        (GOOD, "multipart/form-data; boundary=b; boundary=b"),
        (GOOD.replace(b"--b", b"--b "), 'multipart/form-data; boundary="b "'),
        (GOOD.replace(b"--b", b"--" + b"b" * 71), f"multipart/form-data; boundary={'b' * 71}"),
        (GOOD.replace(b"--b", b"--b*"), "multipart/form-data; boundary=b*"),
        (b"\r\n" + GOOD, "multipart/form-data; boundary=b"),
        (b"preamble\r\n" + GOOD, "multipart/form-data; boundary=b"),
        (GOOD + b"epilogue", "multipart/form-data; boundary=b"),
        (GOOD[:-4], "multipart/form-data; boundary=b"),
        (b"", "multipart/form-data; boundary=b"),
        (b"--b", "multipart/form-data; boundary=b"),
        (GOOD.replace(b"\r\n", b"\n"), "multipart/form-data; boundary=b"),
        (GOOD.replace(b"--b\r\n", b"--b \r\n", 1), "multipart/form-data; boundary=b"),
        (GOOD.replace(b"1", b"1\r\n--bc"), "multipart/form-data; boundary=b"),
        (GOOD.replace(b"form-data", b"attachment"), "multipart/form-data; boundary=b"),
        (GOOD.replace(b"name", b"nome"), "multipart/form-data; boundary=b"),
        (GOOD.replace(b' name="a"', b' name="a"; name="b"'), "multipart/form-data; boundary=b"),
        (GOOD.replace(b'"a"', b'"a'), "multipart/form-data; boundary=b"),
        (GOOD.replace(b"form-data", b'"form-data"'), "multipart/form-data; boundary=b"),
        (GOOD.replace(b'name="a"', b'name="a"; disposition=1'), "multipart/form-data; boundary=b"),
        (GOOD.replace(b'"a"', b'"a"\r\n folded: 1'), "multipart/form-data; boundary=b"),
        (GOOD.replace(b'"a"', b'"a"\r\nno colon'), "multipart/form-data; boundary=b"),
        (
            GOOD.replace(b'"a"', b'"a"\r\nContent-Type: x\r\nContent-Type: x'),
            "multipart/form-data; boundary=b",
        ),
        (GOOD.replace(b"\r\n\r\n", b"\r\n"), "multipart/form-data; boundary=b"),
        (GOOD.replace(b"\r\n\r\n1", b""), "multipart/form-data; boundary=b"),
        (b"--b\r\n\r\n1\r\n--b--", "multipart/form-data; boundary=b"),
    ],
)
def test_odd_multipart_bodies_are_raw(body, content_type):
    """A reading that another parser may not share is no reading."""
    assert value(GOOD, "multipart/form-data; boundary=b") == {"a": [b"1"]}
    assert value(body, content_type) is RAW


def test_the_number_of_parts_is_bounded():
    parts = [field(str(number), b"") for number in range(FIELD_LIMIT + 1)]
    assert len(content_of(multipart(parts[:-1]))[1]) == FIELD_LIMIT
    with pytest.raises(FingerprintImpossible, match="10,000 parts"):
        content_of(multipart(parts))


def test_the_head_of_a_part_is_bounded():
    """At the limit it is read, past it the request is refused."""
    name = b"a" * (PART_HEAD_LIMIT_BYTES - len(b'\r\nContent-Disposition: form-data; name=""'))
    kind = "multipart/form-data; boundary=b"
    assert value(GOOD.replace(b'"a"', b'"%b"' % name), kind) == {name.decode(): [b"1"]}
    with pytest.raises(FingerprintImpossible, match="8,192 bytes in the head"):
        value(GOOD.replace(b'"a"', b'"%ba"' % name), kind)


def test_the_content_type_is_bounded():
    """A type past its limit is refused; a boundary never needs that much."""
    with pytest.raises(FingerprintImpossible, match="Content-Type"):
        value(GOOD, "multipart/form-data; boundary=b" + ";" * CONTENT_TYPE_LIMIT_BYTES)


@given(
    st.binary(max_size=60),
    st.sampled_from(
        [FORM, "application/json", "multipart/form-data; boundary=b", "multipart/mixed; boundary=b"]
    ),
)
def test_no_body_is_an_error(body, content_type):
    """Refusing a bad body is the application's task; here it becomes a value or stays bytes."""
    for data in (body, GOOD.replace(b"1", body), GOOD.replace(b'"a"', body), b"--b" + body):
        content = content_of(request(data, content_type))
        assert content[1] is RAW or content[0] == content_type.partition(";")[0].encode()


@given(st.text(), st.integers(0, 80))
def test_no_content_type_is_an_error(text, cut):
    line = ("multipart/form-data; boundary=b; " + text)[cut:].encode("utf-8", "surrogatepass")
    made = request(GOOD, None, headers=((b"content-type", line),))
    assert content_of(made)[1] in (RAW, {"a": [b"1"]})


@pytest.mark.parametrize(
    ("made", "tokens", "found"),
    [
        (request(b'{"a":{"b":[1,2.5]}}'), ("a", "b", "0"), 1),
        (request(b'{"a":["x"]}'), ("a",), ["x"]),
        (request(b'{"a":null}'), ("a",), None),
        (request(b"{}"), ("a",), ABSENT),
        (request(b"{"), ("a",), ABSENT),
        (request(b"{", "text/plain"), (), ABSENT),
        (request(b"a=%C3%A9", FORM), ("a",), "é"),
        (request(b"a=1&a=1", FORM), ("a",), ABSENT),
        (request(b"b=1", FORM), ("a",), ABSENT),
        (request(b"a=1", FORM), ("a", "0"), ABSENT),
        (request(b"a=%ff", FORM), ("a",), ABSENT),
        (multipart([field("a", b"1")]), ("a",), "1"),
        (multipart([field("a", b"1", ("Content-Type", "text/plain"))]), ("a",), "1"),
        (multipart([(FILE, b"1")]), ("f",), ABSENT),
        (
            multipart([([("Content-Disposition", "form-data; name=f; filename*=x")], b"1")]),
            ("f",),
            ABSENT,
        ),
    ],
)
def test_one_field_is_found_where_it_has_one_value(made, tokens, found):
    assert field_of(content_of(made), tokens) == found


def test_a_fraction_is_exact():
    assert isinstance(field_of(content_of(request(b'{"a":0.1}')), ("a",)), Number)
