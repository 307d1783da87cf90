"""Natural keys from forms: only forms that every framework reads alike give one."""

from __future__ import annotations

import pytest

from retrysafe import FOREVER, BodyKey, natural_key
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.errors import KeyInvalid
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.key_sources import FieldsKey, made_key
from retrysafe.http.request import Request
from tests.http.building import request

RULE = FingerprintRule()
TERMS = {"operation": "pay", "rule": RULE, "secret": b"0123456789abcdef"}
KIND = "multipart/form-data; boundary=b"
DISPOSITION = b'Content-Disposition: form-data; name="%b"'
ORDER = (DISPOSITION % b"order", b"5")
OTHER = DISPOSITION % b"x"


def form(*parts: tuple[bytes, bytes], kind: str = KIND) -> Request:
    body = b"".join(b"--b\r\n%b\r\n\r\n%b\r\n" % part for part in parts)
    return request(body + b"--b--\r\n", kind)


def beside(head: bytes, content: bytes = b"7") -> Request:
    """A form whose order is 5, and one more part, which may look like another order."""
    return form(ORDER, (head, content))


def named(parameters: bytes) -> Request:
    return beside(b"Content-Disposition: form-data; " + parameters)


def typed(content_type: bytes, content: bytes = b"7") -> Request:
    return beside(OTHER + b"\r\nContent-Type: " + content_type, content)


ODD = {
    **{
        f"boundary after {before!r}, before {after!r}": beside(
            OTHER, b"1" + before + b"--b" + after + DISPOSITION % b"order" + after * 2 + b"7"
        )
        for before in (b"", b"\n", b"\r", b"x")
        for after in (b"\n", b"\r", b"\r\n")
    },
    "early end in a value": beside(OTHER, b"1\n--b--\n"),
    "boundary in a head": named(b'name="x--b"'),
    **{
        f"head with {sign!r}": beside(b"X-A: 1" + sign + DISPOSITION % b"order" + b"\r\n" + OTHER)
        for sign in (b"\n", b"\r", b"\0", b"\x0b", b"\x0c", b"\x1c", b"\x85", b"\xc2\x85")
    },
    **{
        f"encoded by {coding}": form(
            (ORDER[0] + f"\r\nContent-Transfer-Encoding: {coding}".encode(), b"Nw==")
        )
        for coding in ("base64", "BASE64", "quoted-printable", "x-uuencode", "")
    },
    "packed": beside(OTHER + b"\r\nContent-Encoding: gzip"),
    "blank before a name": named(b'name=" order"'),
    "blank after a name": named(b'name="order "'),
    "tab after a name": named(b'name="order\t"'),
    "wide blank after a name": named('name="order\u00a0"'.encode()),
    "extended name": named(b"name=x; name*=utf-8''order"),
    "extended name alone": named(b"name*=utf-8''order"),
    "continued name": named(b"name=x; name*0=ord; name*1=er"),
    "escape in a name": named(b'name="o\\rder"'),
    "escape in a filename": named(b'name="x"; filename="a\\"; name=\\"order"'),
    "angle brackets": named(b"name=<order>"),
    "square bracket": named(b"name=order]"),
    "single quotes": named(b"name='order'"),
    "Latin-1 part": typed(b"text/plain; charset=iso-8859-1"),
    "Latin-1 part among more": typed(b"text/plain; charset=utf-8; charset*=''latin1"),
    "ASCII part that is none": typed(b"text/plain; charset=us-ascii", "é".encode()),
    "another disposition": beside(b'Content-Disposition: attachment; name="order"'),
    "preamble": request(b"--b--\r\n" + form(ORDER).body, KIND),
    "ASCII form": form(ORDER, kind=KIND + "; charset=us-ascii"),
    "second boundary": form(ORDER, kind=KIND + "; boundary*=utf-8''c"),
    "no boundary": form(ORDER, kind="multipart/form-data"),
}


@pytest.mark.parametrize("made", ODD.values(), ids=ODD)
def test_forms_that_frameworks_read_differently_give_no_key_from_a_field(made):
    """Else the key is of order 5, and a framework that reads the form differently runs order 7."""
    for source in (
        FieldsKey("/order", window=FOREVER),
        FieldsKey("/order:int", window=FOREVER),
        FieldsKey("/order:text", window=FOREVER),
        BodyKey(intent="/order"),
    ):
        with pytest.raises(KeyInvalid, match="send it as browsers do"):
            made_key(source, made, **TERMS)
    # Nothing else is refused: whole requests are compared as ever.
    assert request_fingerprints(made, RULE)
    assert made_key(BodyKey(), made, **TERMS)


PLAIN = {
    "browser": form(
        ORDER,
        (
            DISPOSITION % b"f" + b'; filename="a; b \xc3\xa9.png"\r\nContent-Type: image/png',
            b"\x89\r\n\n",
        ),
        (DISPOSITION % b"note", b"two\r\nlines -- and \xc3\xa9"),
        (DISPOSITION % "größe [0]".encode(), b""),
    ),
    "unquoted": form((b"Content-Disposition: form-data; name=order", b"5")),
    "with a type": form((ORDER[0] + b"\r\nContent-Type: text/plain; charset=UTF-8", b"5")),
    "ASCII": form((ORDER[0] + b'\r\nContent-Type: text/plain; charset="us-ascii"', b"5")),
    "with a length": form((b"Content-Length: 1\r\n" + ORDER[0], b"5")),
    "8bit": form((ORDER[0] + b"\r\nContent-Transfer-Encoding: 8bit", b"5")),
    "extended filename": form(
        ORDER, (OTHER + b"; filename=a; filename*=utf-8''%c3%a9.png", b"\x89PNG")
    ),
    "quoted boundary": form(ORDER, kind='multipart/form-data; charset=UTF-8; boundary="b"'),
}


@pytest.mark.parametrize("made", PLAIN.values(), ids=PLAIN)
def test_forms_as_browsers_and_libraries_send_them_give_the_key(made):
    assert made_key(FieldsKey("/order", window=FOREVER), made, **TERMS) == natural_key("pay", 5)
    assert made_key(BodyKey(intent="/order"), made, **TERMS) != made_key(BodyKey(), made, **TERMS)


def test_a_key_from_the_path_alone_takes_any_form():
    made = beside(OTHER, b"1\n--b\n")
    made.parameters = {"id": "5"}
    assert made_key(FieldsKey("{id}", window=FOREVER), made, **TERMS) == natural_key("pay", 5)


FORM = "application/x-www-form-urlencoded"
ODD_ENCODED = {
    "UTF-8 or Latin-1": "order=5&name=josé",
    "JSON object": '{"order":7,"x":"&order=5&y="}',
    "JSON behind blanks": '\r\n {"order":7,"x":"&order=5&y="}',
    "JSON behind a byte order mark": '\ufeff{"order":7,"x":"&order=5&y="}',
    "JSON list": "[7&order=5]",
    "XML": "<a x='&order=5&'><order>7</order></a>",
    "YAML": "order: 7\nx: y&order=5",
    "semicolon": "order=5;order=7",
    "line feed": "order=5\norder=7",
    "broken escape": "order=5&x=%u0037",
}


@pytest.mark.parametrize("body", ODD_ENCODED.values(), ids=ODD_ENCODED)
def test_encoded_forms_that_can_be_read_as_something_else_make_no_key(body):
    """Views read JSON whatever the type of the body says: order 7 would run for every order 5."""
    for source in (FieldsKey("/order", window=FOREVER), BodyKey(intent="/order")):
        with pytest.raises(KeyInvalid, match="percent-encode"):
            made_key(source, request(body.encode(), FORM), **TERMS)
    assert made_key(BodyKey(), request(body.encode(), FORM), **TERMS)


def test_an_encoded_form_in_another_charset_makes_no_key():
    """Django reads it in that one, where all names that are not ASCII are one."""
    with pytest.raises(KeyInvalid, match="percent-encode"):
        made_key(
            FieldsKey("/name", window=FOREVER),
            request(b"name=jos%C3%A9", FORM + "; charset=us-ascii"),
            **TERMS,
        )


@pytest.mark.parametrize(
    "body",
    [
        "order=5&name=jos%C3%A9+%22x%22",
        "order=5&a[b]=%7B&mail=a@b.c&at=10:00&x=~!*'()",
        "order=%35",
    ],
)
@pytest.mark.parametrize("kind", [FORM, FORM.title() + "; charset=UTF-8"])
def test_encoded_forms_as_browsers_and_libraries_send_them_give_the_key(body, kind):
    key = FieldsKey("/order", window=FOREVER)
    assert made_key(key, request(body.encode(), kind), **TERMS) == natural_key("pay", 5)
