"""Hostile bytes: requests that are dear, deep, wide or no text at all, on every server."""

from __future__ import annotations

from tests.http_cases.cases import Ask, Case, Ran, Refused, Replay, case, post

REUSED = Refused(problem="key-reused", key="k")
TOO_COMPLEX = Refused(problem="body-too-complex", says="compared. Nothing was run", key="k")
_MULTIPART = "multipart/form-data; boundary=b"
_FORM = "application/x-www-form-urlencoded"


def _parts(count: int, more: bytes = b"") -> bytes:
    part = b'--b\r\nContent-Disposition: form-data; name="a"%b\r\n\r\n1\r\n' % more
    return part * count + b"--b--\r\n"


def _form(body: bytes, content_type: str = _MULTIPART) -> Ask:
    return post(body=body, content_type=content_type)


def _refused(name: str, promise: str, ask: Ask) -> Case:
    """Refused with a clear answer; nothing ran, and the key is still free."""
    return case(name, f"{promise}; the key stays free", ask, TOO_COMPLEX, post(), Ran())


def _taken(name: str, promise: str, body: bytes, other: bytes, **more: str) -> Case:
    """Runs once, is replayed, and is told from a body that differs a little."""
    ask = post(body=body, **more)
    return case(name, promise, ask, Ran(), ask, Replay(), ask.but(body=other), REUSED)


def _filled(name: str, filler: bytes) -> Case:
    """A body of nearly a megabyte, whose parts are what a careless parser takes for ever with."""
    body = _parts(125, b"\r\nX-A: a" + filler * (7_000 // len(filler)) + b"x")
    return _taken(
        f"hostile-{name}",
        f"Parts with thousands of {name} in a header are read at once",
        body,
        body.replace(b"x\r\n\r\n1", b"y\r\n\r\n1", 1),
        content_type=_MULTIPART,
    )


CASES = (
    _filled("blanks", b" "),
    _filled("tabs", b"\t"),
    _filled("quotes", b'"'),
    _filled("semicolons", b";"),
    _filled("backslashes", b"\\"),
    _refused(
        "hostile-many-parts", "More parts than are compared are refused", _form(_parts(10_001))
    ),
    _refused(
        "hostile-many-fields",
        "More fields than are compared are refused",
        _form(b"a=1&" * 10_001, _FORM),
    ),
    _refused(
        "hostile-part-head",
        "A part whose head is too long is refused",
        _form(_parts(1, b"\r\nX-A: " + b"a" * 9_000)),
    ),
    _refused(
        "hostile-deep-json",
        "JSON that is nested too deep is refused",
        post(body=b"[" * 201 + b"]" * 201),
    ),
    _refused(
        "hostile-deeper-json",
        "JSON that is nested deeper than can be read is refused",
        post(body=b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    ),
    _taken(
        "hostile-wide-json",
        "A wide body is compared by what it says",
        b"[" + b"1," * 200_000 + b"1]",
        b"[" + b"1," * 200_000 + b"2]",
    ),
    _taken(
        "hostile-long-number",
        "A number of 20,000 digits counts to its last digit",
        b'{"amount":%b1}' % (b"9" * 20_000),
        b'{"amount":%b2}' % (b"9" * 20_000),
    ),
    _taken(
        "hostile-long-exponent",
        "A number with an exponent of 20,000 digits counts as it is written",
        b'{"amount":1e%b1}' % (b"9" * 20_000),
        b'{"amount":1e%b2}' % (b"9" * 20_000),
    ),
    _taken("hostile-nan", "NaN is no JSON, and counts as it is written", b"[NaN]", b"[NaN ]"),
    _taken(
        "hostile-infinity",
        "Infinity is no JSON, and counts as it is written",
        b"[-Infinity]",
        b"[Infinity]",
    ),
    _taken(
        "hostile-duplicate-names",
        "An object with one name twice counts as it is written",
        b'{"amount":1,"amount":2}',
        b'{"amount":2}',
    ),
    _taken(
        "hostile-lone-surrogate",
        "A lone surrogate is a character of its own",
        rb'{"name":"\ud800"}',
        rb'{"name":"\ud801"}',
    ),
    _taken(
        "hostile-byte-order-mark",
        "A byte order mark counts",
        b'\xef\xbb\xbf{"amount":1}',
        b'{"amount":1}',
    ),
    _taken(
        "hostile-no-utf-8",
        "A text that is no UTF-8 counts byte by byte",
        b'{"name":"\xff"}',
        b'{"name":"\xfe"}',
    ),
    case(
        "hostile-long-key",
        "A key in a header line that is too long is refused",
        post(key='"k";a="' + "a" * 4_096 + '"'),
        Refused(problem="key-invalid", says="4,096 bytes"),
    ),
    case(
        "hostile-long-preference",
        "A Prefer header that is too long is refused",
        post(headers=(("Prefer", "a=" + "b" * 4_096),)),
        Refused(problem="header-too-long", key="k"),
        *(post(), Ran()),
    ),
)
