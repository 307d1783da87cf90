"""Inputs that are made to be dear, by name: each for any number of bytes."""

from __future__ import annotations

from retrysafe.client.replies import problem_retryable, retry_after_seconds
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.http.asgi_io import paths_of
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.headers import length_of
from retrysafe.http.paths import PathPattern
from retrysafe.http.wsgi import request_of
from retrysafe.relay.signing import verify_webhook
from tests.http.building import FORM, request

RULE = FingerprintRule(exclude=("/sent_at",))
MULTIPART = "multipart/form-data; boundary=b"
# Blanks, tabs, quotes, semicolons, backslashes: alone, and as the pairs that parsers look for.
FILLERS = (
    b" ",
    b"\t",
    b'"',
    b";",
    b"\\",
    b'\\"',
    b'";',
    b"; ",
    b" \t",
    b"a",
    b",",
    b"=",
    b"%",
    b"\xff",
)


def mark(made):
    made.content = None  # A request that comes again is read again.
    return request_fingerprints(made, RULE)


def part(head):
    return b'--b\r\nContent-Disposition: form-data; name="a"%b\r\n\r\n1\r\n--b--\r\n' % head


def headers(filler):
    """Every header that is read, filled with this."""
    return {
        "quoted key": lambda n: [b'"' + (filler * n)[:n] + b'"'],
        "open key": lambda n: [b'"a' + (filler * n)[:n]],
        "key with parameters": lambda n: [b'"a"' + (b';a="' + filler + b'"') * (n // 6)],
        "bare key": lambda n: [(filler * n)[:n]],
    }


# Inputs by name, each made for a number of bytes, and the work that is done with them.
BODIES = {
    f"part head of {filler!r}, {name}": (
        lambda n, filler=filler, shape=shape: request(part(shape % (filler * n)[:n]), MULTIPART),
        700,
    )
    for filler in FILLERS
    for name, shape in {
        "a header": b"\r\nX-A: a%bx",
        "a parameter": b"; filename=%bx",
        "a quoted parameter": b'; filename="%b',
        "a closed parameter": b'; filename="%b"',
    }.items()
} | {
    "parts with blanks": (
        lambda n: request(
            part(b"\r\nX: a" + b" " * 500 + b"x")[: -len(b"--b--\r\n")] * (n // 560) + b"--b--\r\n",
            MULTIPART,
        ),
        56_000,
    ),
    "boundaries that nearly fit": (
        lambda n: request(b"--b\r\n\r\n" + b"\r\n--" * (n // 4), MULTIPART),
        50_000,
    ),
    "a boundary of hyphens": (
        lambda n: request(b"-" * n, "multipart/form-data; boundary=" + "-" * 70),
        50_000,
    ),
    "no end of the head": (
        lambda n: request(b"--b\r\n" + b"\r" * n + b"\r\n--b--", MULTIPART),
        50_000,
    ),
    "fields": (lambda n: request(b"a=1&" * (n // 4), FORM), 4_000),
    "fields of one name": (lambda n: request(b"&".join([b"a=%20+"] * (n // 7)), FORM), 7_000),
    "percents": (lambda n: request(b"a=" + b"%" * n, FORM), 5_000),
    "escapes": (lambda n: request(b"a=" + b"%41" * (n // 3), FORM), 9_000),
    "ampersands": (lambda n: request(b"&" * n, FORM), 1_000),
    "wide array": (lambda n: request(b"[" + b",".join([b"1"] * (n // 2)) + b"]"), 20_000),
    "wide object": (
        lambda n: request(b"{" + b",".join(b'"%d":1' % i for i in range(n // 9)) + b"}"),
        20_000,
    ),
    "long names": (
        lambda n: request(
            b"{" + b",".join(b'"%b%d":1' % (b"a" * 500, i) for i in range(n // 510)) + b"}"
        ),
        50_000,
    ),
    "one name over and over": (
        lambda n: request(b"{" + b",".join([b'"a":1'] * (n // 6)) + b"}"),
        20_000,
    ),
    "deep": (lambda n: request(b"[" * n + b"]" * n), 24),
    "deeper than Python reads": (lambda n: request(b"[" * n), 20_000),
    "deep objects": (lambda n: request(b'{"a":' * n + b"1" + b"}" * n), 24),
    "deep around a long text": (
        lambda n: request(b"[" * (n // 1_000) + b'"' + b"a" * n + b'"' + b"]" * (n // 1_000)),
        20_000,
    ),
    "a long integer": (lambda n: request(b"9" * n), 20_000),
    "long integers": (
        lambda n: request(b"[" + b",".join([b"9" * 4_000] * (n // 4_001)) + b"]"),
        40_010,
    ),
    "a long fraction": (lambda n: request(b"0." + b"0" * n + b"1"), 50_000),
    "a long exponent": (lambda n: request(b"1e" + b"9" * n), 500),
    "long exponents": (
        lambda n: request(b"[" + b",".join([b"1e" + b"9" * 3_000] * (n // 3_003)) + b"]"),
        30_030,
    ),
    "backslashes": (lambda n: request(b'"' + b"\\\\" * (n // 2) + b'"'), 50_000),
    "unicode escapes": (lambda n: request(b'"' + b"\\ud83d" * (n // 6) + b'"'), 50_000),
    "blanks around": (lambda n: request(b" " * n + b"1" + b" " * n), 50_000),
    "an open text": (lambda n: request(b'"' + b"a" * n), 50_000),
    "no JSON at all": (lambda n: request(b"[1," * (n // 3) + b"x"), 20_000),
    "query": (lambda n: request(query=b"a=%41&" * (n // 6)), 6_000),
    "many headers": (
        lambda n: request(b"{}", headers=tuple((b"x-%d" % i, b"1") for i in range(n))),
        500,
    ),
    "one header many times": (lambda n: request(b"{}", headers=((b"x", b"1"),) * n), 500),
    "content type twice": (lambda n: request(b"{}", headers=((b"content-type", b"a"),) * n), 500),
}


OTHERS = {
    "a path with two names in a segment": (
        lambda n: "/v1/" + "-" * n + "/",
        PathPattern("/v1/{a}-{b}").match,
    ),
    "a path with three names": (
        lambda n: "/v1/" + "-" * n + "/",
        PathPattern("/v1/{a}-{b}-{c}").match,
    ),
    "an open path": (lambda n: "/v1/" + "a" * n + "\n", PathPattern("/v1/{a}b*").match),
    "slashes": (lambda n: "/" * n, PathPattern("/v1/{a}/{b}").match),
    "a path that is no UTF-8": (
        lambda n: {"path": "/\ufffd" * n, "raw_path": b"/%ff" * n, "type": "http"},
        paths_of,
    ),
    "a length": (lambda n: "9" * n, length_of),
    "headers of WSGI": (
        lambda n: {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": "/",
            **{f"HTTP_X_{i}": "1" for i in range(n // 10)},
        },
        request_of,
    ),
    "Retry-After of digits": (
        lambda n: {"Retry-After": "9" * n},
        lambda told: retry_after_seconds(told, 0.0),
    ),
    "Retry-After of blanks": (
        lambda n: {"Retry-After": "Mon," + " " * n},
        lambda told: retry_after_seconds(told, 0.0),
    ),
    "Retry-After of words": (
        lambda n: {"Retry-After": "1 " * n, "Date": "(" * n},
        lambda told: retry_after_seconds(told, 0.0),
    ),
    "a Date of colons": (
        lambda n: {"Retry-After": "Mon, 01 Jan 2029 00:00:00 GMT", "Date": "1:" * n},
        lambda told: retry_after_seconds(told, 0.0),
    ),
    "a problem of a server": (
        lambda n: b"[" * n,
        lambda body: problem_retryable({"Content-Type": "application/json"}, body),
    ),
    "signatures of a webhook": (
        lambda n: {
            "webhook-id": "a",
            "webhook-timestamp": "1",
            "webhook-signature": "v1,a " * (n // 5),
        },
        lambda told: verify_webhook(told, b"", b"s" * 32, now_seconds=1.0),
    ),
}
