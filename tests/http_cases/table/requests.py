"""The same request or another one: method, path, query and body, under every kind of rule."""

from __future__ import annotations

import gzip

from tests.http_cases.acts import Act
from tests.http_cases.cases import (
    BODY,
    DJANGO_WSGI,
    FORM,
    FRAMEWORK,
    Begin,
    Finish,
    Ran,
    Refused,
    Release,
    Replay,
    case,
    post,
    send,
)

REUSED = Refused(problem="key-reused", key="k")


def _same(name: str, promise: str, first, second, **more):
    return case(f"same-{name}", promise, first, Ran(), second, Replay(), **more)


def _other(name: str, promise: str, first, second, **more):
    """Refused, nothing of the stored response is shown, and the first stays what it was."""
    return case(f"other-{name}", promise, first, Ran(), second, REUSED, first, Replay(), **more)


def _form(body: bytes):
    return post(body=body, content_type=FORM)


def _multipart(boundary: str, *parts: tuple[str, bytes], path: str = "/charges"):
    pieces = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n"
        % (boundary.encode(), head.encode(), content)
        for head, content in parts
    )
    return post(
        path,
        body=pieces + f"--{boundary}--\r\n".encode(),
        content_type=f"multipart/form-data; boundary={boundary}",
    )


_FILE = ('name="file"; filename="a.bin"', bytes(range(256)))
_FIELD = ('name="amount"', b"1000")

_EVERY_PATH = {FRAMEWORK: "each framework serves other spellings; see the attacks on rules"}

CASES = (
    _same(
        "path-slash-at-the-end",
        "A slash at the end of the path makes no other request",
        post("/charges/"),
        post(),
        without=_EVERY_PATH,
    ),
    _same(
        "path-double-slash",
        "A double slash in the path makes no other request",
        post("/charges/1//refunds"),
        post("/charges/1/refunds"),
        without=_EVERY_PATH,
    ),
    _same(
        "path-escaped-letter",
        "An escaped letter in the path makes no other request",
        post("/%63harges"),
        post(),
    ),
    _other("method", "The same key with another method is refused", post(), send("PUT")),
    _other("path", "The same key on another path is refused", post(), post("/charges/1")),
    _other(
        "path-parameter",
        "The same key on another resource of one route is refused",
        *(post("/charges/1/refunds"), post("/charges/2/refunds")),
    ),
    _other("route", "The same key on another route is refused", post(), post("/optional")),
    _other(
        "query-added", "A query that was not there is another request", post(), post("/charges?a=1")
    ),
    _other(
        "query-value",
        "Another value in the query is another request",
        post("/charges?a=1"),
        post("/charges?a=2"),
    ),
    _other(
        "query-repeated",
        "The order of one name's values in the query counts",
        *(post("/charges?a=1&a=2"), post("/charges?a=2&a=1")),
    ),
    _same(
        "query-order",
        "The order of different names in the query does not count",
        *(post("/charges?a=1&b=2"), post("/charges?b=2&a=1")),
    ),
    _same(
        "query-escapes",
        "How the query is escaped does not count",
        post("/charges?a=b+c"),
        post("/charges?a=%62%20c"),
    ),
    _same("query-empty", "An empty query is no query", post("/charges"), post("/charges?")),
    _other(
        "body",
        "Another body is another request",
        post(),
        post(body=b'{"amount":1001,"currency":"eur"}'),
    ),
    _other("body-missing", "No body is another request", post(), post(body=b"")),
    _other("body-added", "A body where there was none is another request", post(body=b""), post()),
    _same(
        "json-order",
        "The order of JSON members does not count",
        post(),
        post(body=b'{"currency":"eur","amount":1000}'),
    ),
    _same(
        "json-spaces",
        "Blanks in JSON do not count",
        post(),
        post(body=b' { "amount" : 1000 ,\n"currency":"eur"}\n'),
    ),
    _same(
        "json-escapes",
        "How JSON texts are escaped does not count",
        post(body=b'{"a":"\\u00e9/"}'),
        post(body='{"a":"\u00e9\\/"}'.encode()),
    ),
    _same(
        "json-numbers",
        "Equal numbers are equal however they are written",
        post(body=b'{"a":1000}'),
        post(body=b'{"a":1e3}'),
    ),
    _other(
        "json-array-order",
        "The order of a JSON array counts",
        post(body=b"[1,2]"),
        post(body=b"[2,1]"),
    ),
    _other(
        "json-type",
        "A number and its text are two values",
        post(body=b'{"a":1}'),
        post(body=b'{"a":"1"}'),
    ),
    _other(
        "json-null",
        "null and a missing member are two values",
        post(body=b'{"a":null}'),
        post(body=b"{}"),
    ),
    _other(
        "json-falsy", "false and 0 are two values", post(body=b'{"a":false}'), post(body=b'{"a":0}')
    ),
    _other(
        "json-big-number",
        "Numbers beyond a double are told apart",
        *(
            post(body=b'{"a":10000000000000000000000001}'),
            post(body=b'{"a":10000000000000000000000002}'),
        ),
    ),
    _same(
        "json-suffix",
        "Types with the suffix +json are JSON, too",
        post(body=b'{"a":1,"b":2}', content_type="application/vnd.api+json"),
        post(body=b'{"b":2,"a":1}', content_type="application/vnd.api+json"),
    ),
    _same(
        "json-charset",
        "A charset of UTF-8 does not count",
        post(),
        post(content_type="application/json; charset=utf-8"),
    ),
    _same(
        "json-broken", "A broken JSON body equals itself", post(body=b'{"a":'), post(body=b'{"a":')
    ),
    _other(
        "json-broken-otherwise",
        "Two broken JSON bodies are two requests",
        post(body=b'{"a":'),
        post(body=b'{"a" :'),
    ),
    _other(
        "json-doubled-name",
        "A body with a doubled name counts byte by byte",
        post(body=b'{"a":1,"a":2}'),
        post(body=b'{"a":2}'),
    ),
    _other(
        "content-type",
        "Another content type is another request",
        post(),
        post(content_type="text/plain"),
    ),
    _other(
        "content-type-missing", "No content type is another one", post(), post(content_type=None)
    ),
    _other(
        "content-encoding",
        "Another content encoding is another request",
        *(post(), post(headers=(("Content-Encoding", "gzip"),))),
    ),
    _same(
        "compressed",
        "A compressed body equals itself",
        post(body=gzip.compress(BODY, mtime=0), headers=(("Content-Encoding", "gzip"),)),
        post(body=gzip.compress(BODY, mtime=0), headers=(("Content-Encoding", "gzip"),)),
    ),
    _same(
        "headers",
        "Other headers do not count",
        post(),
        post(headers=(("X-Client", "2"), ("User-Agent", "other"), ("Accept", "text/html"))),
    ),
    _same(
        "form-order",
        "The order of different fields of a form does not count",
        _form(b"a=1&b=2"),
        _form(b"b=2&a=1"),
    ),
    _same(
        "form-escapes",
        "How a form is escaped does not count",
        _form(b"a=b+c&d=%2B"),
        _form(b"a=%62%20c&d=%2b"),
    ),
    _other(
        "form-value", "Another value in a form is another request", _form(b"a=1"), _form(b"a=2")
    ),
    _other(
        "form-repeated",
        "The order of one field's values counts",
        _form(b"a=1&a=2"),
        _form(b"a=2&a=1"),
    ),
    _same(
        "multipart-boundary",
        "A retried upload has another boundary and is the same",
        _multipart("one", _FILE, _FIELD),
        _multipart("two", _FILE, _FIELD),
    ),
    _same(
        "multipart-order",
        "The order of different parts does not count",
        _multipart("one", _FILE, _FIELD),
        _multipart("one", _FIELD, _FILE),
    ),
    _other(
        "multipart-content",
        "Another file is another request",
        _multipart("one", _FILE),
        _multipart("one", (_FILE[0], b"other")),
    ),
    _other(
        "multipart-filename",
        "Another file name is another request",
        _multipart("one", _FILE),
        _multipart("one", ('name="file"; filename="b.bin"', _FILE[1])),
    ),
    _other(
        "multipart-broken",
        "A broken multipart body counts byte by byte",
        _multipart("one", _FIELD),
        post(body=b"--one\r\nbroken", content_type="multipart/form-data; boundary=one"),
    ),
    _same(
        "binary",
        "A binary body equals itself",
        post(body=bytes(range(256)), content_type="application/octet-stream"),
        post(body=bytes(range(256)), content_type="application/octet-stream"),
    ),
    _other(
        "binary-one-byte",
        "One other byte is another request",
        post(body=b"\x00\xff", content_type="application/octet-stream"),
        post(body=b"\x00\xfe", content_type="application/octet-stream"),
    ),
    _other(
        "unicode-path-beyond-latin-1",
        "Two paths beyond Latin-1 are told apart",
        post("/charges/%E2%82%AC"),
        post("/charges/%E2%82%AD"),
    ),
    _same(
        "unicode-path",
        "A path in UTF-8 is the same however it is escaped",
        post("/charges/%C3%A9"),
        post("/charges/%c3%a9"),
    ),
    _other(
        "unicode-path",
        "Two paths in UTF-8 are told apart",
        post("/charges/%C3%A9"),
        post("/charges/%C3%A8"),
    ),
    _other(
        "path-in-no-utf-8",
        "Two paths are told apart by bytes that are no UTF-8, too",
        post("/charges/caf%E9"),
        post("/charges/caf%E8"),
        without=dict.fromkeys(
            DJANGO_WSGI, "Django escapes such bytes once more, which `instance` shows"
        ),
    ),
    _other(
        "path-replaced",
        "A replacement character in a path is not the byte that some servers replace by it",
        post("/charges/caf%E9"),
        post("/charges/caf%EF%BF%BD"),
    ),
    _same(
        "excluded",
        "Fields that a route leaves out do not count",
        *(
            post("/excluding", body=b'{"a":1,"sent_at":1,"meta":{"id":1,"x":2}}'),
            post("/excluding", body=b'{"a":1,"sent_at":2,"meta":{"id":3,"x":2}}'),
        ),
    ),
    _same(
        "excluded-missing",
        "A field that is left out may be missing",
        post("/excluding", body=b'{"a":1,"sent_at":1}'),
        post("/excluding", body=b'{"a":1}'),
    ),
    _other(
        "excluded-else",
        "Beside the fields that a route leaves out everything counts",
        *(
            post("/excluding", body=b'{"a":1,"meta":{"x":1}}'),
            post("/excluding", body=b'{"a":1,"meta":{"x":2}}'),
        ),
    ),
    _same(
        "excluded-form",
        "Fields of a form can be left out",
        post("/excluding", body=b"a=1&sent_at=1", content_type=FORM),
        post("/excluding", body=b"a=1&sent_at=2", content_type=FORM),
    ),
    _same(
        "excluded-multipart",
        "Fields of a multipart form can be left out",
        _multipart("one", _FIELD, ('name="sent_at"', b"1"), path="/excluding"),
        _multipart("two", _FIELD, ('name="sent_at"', b"2"), path="/excluding"),
    ),
    _same(
        "included",
        "Where a route names the fields that count, no others do",
        post("/including", body=b'{"amount":1,"currency":"eur","note":1}'),
        post("/including", body=b'{"amount":1,"currency":"eur"}'),
    ),
    _other(
        "included",
        "A field that a route names counts",
        post("/including", body=b'{"amount":1,"note":1}'),
        post("/including", body=b'{"amount":2,"note":1}'),
    ),
    _other(
        "header",
        "A header that a route names counts",
        post("/headed", headers=(("If-Match", '"1"'),)),
        post("/headed", headers=(("If-Match", '"2"'),)),
    ),
    _other(
        "header-missing",
        "A header that a route names counts by its absence, too",
        post("/headed", headers=(("X-Tenant", "t1"),)),
        post("/headed"),
    ),
    _same(
        "header-case",
        "The name of a header is the same in any letter case, and other headers do not count",
        post("/headed", headers=(("X-Tenant", "t1"), ("X-Trace", "1"))),
        post("/headed", headers=(("x-TENANT", "t1"), ("X-Trace", "2"))),
    ),
    _other(
        "media-type-parameter",
        "A parameter of the media type counts where a route says so",
        post("/headed", content_type="application/json; version=1"),
        post("/headed", content_type="application/json; version=2"),
    ),
    _same(
        "media-type-parameter",
        "Parameters of the media type count by name, however they are written",
        post("/headed", content_type="application/json; version=1; charset=utf-8"),
        post("/headed", content_type='application/json;charset="utf-8";Version=1'),
    ),
    _same(
        "media-type-boundary",
        "A new boundary is no other request, also where parameters count",
        _multipart("one", _FIELD, path="/headed"),
        _multipart("two", _FIELD, path="/headed"),
    ),
    _same(
        "query-excluded",
        "Fields of the query that a route leaves out do not count, nor does their absence",
        post("/headed?a=1&ts=1"),
        post("/headed?ts=2&ts=3&a=1"),
    ),
    _same(
        "query-excluded-only",
        "A query of nothing else is as good as none",
        post("/headed?ts=1"),
        post("/headed"),
    ),
    _other(
        "query-excluded",
        "Beside the fields of the query that a route leaves out all count",
        post("/headed?a=1&ts=1"),
        post("/headed?a=2&ts=1"),
    ),
    case(
        "other-while-running",
        "Another request is refused with 422 while the first one runs, not with 409",
        Begin("first", post()),
        *(post(body=b"{}"), REUSED, send("PUT"), REUSED, post("/charges?a=1"), REUSED),
        *(Release("first"), Finish("first"), Ran(), post(), Replay()),
    ),
    case(
        "other-while-running-waiting",
        "Another request is refused at once, even when it wants to wait",
        Begin("first", post()),
        *(post(body=b"{}", headers=(("Prefer", "wait=10"),)), REUSED),
        *(Release("first"), Finish("first"), Ran()),
    ),
    case(
        "other-after-failure",
        "A freed key still belongs to its request",
        *(post(act=Act(status=500)), Ran(status=500), post(body=b"{}"), REUSED),
        *(post(), Ran(attempt=2)),
    ),
    case(
        "other-after-decline",
        "Another request under the key of a stored decline is refused",
        *(post(act=Act(status=402)), Ran(status=402), post(body=b"{}"), REUSED, post(), Replay()),
    ),
)
