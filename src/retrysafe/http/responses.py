"""Responses, and how much of one is stored.

Owns which headers outlive the first response, and the bytes in which a response is stored. Only
what is on the list is kept: a header nobody thought of must not reach a second client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from retrysafe.core.model import Payload
from retrysafe.core.values.trees import NotReadable, NotStorable
from retrysafe.errors import PolicyInvalid

FORM: Final = "http.1"
Header = tuple[bytes, bytes]

# What a client needs to understand and to find what was made. Content-Length is not here because
# it is told anew from the body.
STORED_HEADERS: Final = frozenset(
    {
        b"accept-patch",
        b"accept-post",
        b"allow",
        b"cache-control",
        b"content-disposition",
        b"content-encoding",
        b"content-language",
        b"content-location",
        b"content-type",
        b"deprecation",
        b"etag",
        b"expires",
        b"last-modified",
        b"link",
        b"location",
        b"retry-after",
        b"sunset",
        b"vary",
        b"warning",
        b"www-authenticate",
    }
)
# What belongs to one connection, one client or one trace; replaying it would be a lie or a leak.
NEVER_STORED: Final = frozenset(
    {
        b"set-cookie",
        b"set-cookie2",
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"age",
        b"via",
        b"alt-svc",
        b"server-timing",
        b"authorization",
        b"authentication-info",
        b"traceparent",
        b"tracestate",
        b"traceresponse",
        b"baggage",
        b"b3",
        b"uber-trace-id",
        b"x-amzn-trace-id",
        b"x-cloud-trace-context",
        b"x-request-id",
        b"x-correlation-id",
        b"request-id",
        b"correlation-id",
        b"idempotent-replayed",
        b"preference-applied",
    }
)
_NEVER_STORED_PREFIXES: Final = (b"x-b3-", b"x-datadog-", b"x-ot-span-")
# Such responses have no body, and a length would be wrong or forbidden.
_WITHOUT_BODY: Final = frozenset({204, 205, 304})
_STATUSES: Final = {b"%d" % status: status for status in range(200, 600)}
_STATUS_LINES: Final = {status: line for line, status in _STATUSES.items()}
# As numbers, which are found in bytes much faster than other bytes are.
_LF: Final = 0x0A
_CR: Final = 0x0D


@dataclass(slots=True)
class Response:
    """A whole response: what the application answered, or what is answered in its place."""

    status: int
    # Lower-case names, as in ASGI.
    headers: list[Header]
    body: bytes
    # Sent as it comes, so there are no bytes that could be stored.
    is_streamed: bool = False
    # Why this response is sent and not stored; empty for one that may be.
    doubt: str = ""
    # Whether no endpoint was found for the request; said only where it changes what is kept.
    is_unserved: bool = False


class ResponseCodec:
    """Stores status, body and the headers on the list; `extra` names more of them.

    Raises `PolicyInvalid` for extra headers that are never stored.
    """

    __slots__ = ("_stored", "extra")

    def __init__(self, extra: Iterable[str] = ()) -> None:
        if isinstance(extra, str):
            raise PolicyInvalid(f"headers takes a list of header names, got the text {extra!r}")
        try:
            names = frozenset(name.strip().lower().encode("ascii") for name in extra)
        except (AttributeError, UnicodeEncodeError):
            raise PolicyInvalid(f"headers takes a list of header names, got {extra!r}") from None
        for name in sorted(names):
            if name in NEVER_STORED or name.startswith(_NEVER_STORED_PREFIXES):
                raise PolicyInvalid(
                    f"the header {name.decode()} belongs to one client, one connection or one "
                    "trace: it is never stored and replayed"
                )
        self.extra = names
        self._stored = STORED_HEADERS | names

    def encode(self, value: Any) -> Payload:
        """The payload of a response, ours or a framework's; raises `NotStorable`."""
        response = value if type(value) is Response else response_of(value)
        if response.is_streamed:
            raise NotStorable("the response was streamed to its first caller")
        if response.doubt:
            raise NotStorable(response.doubt)
        stored = self._stored
        status = response.status
        lines = [_STATUS_LINES.get(status) or b"%d" % status]
        for name, content in response.headers:
            lowered = name.lower()
            # A line break cannot be in a header; a server would refuse it as well.
            if lowered in stored and _LF not in content and _CR not in content:
                lines += (lowered, content)
        return Payload(FORM, b"\n".join(lines), response.body)

    def decode(self, payload: Payload) -> Response:
        """The stored response; raises `NotReadable`."""
        if payload.form != FORM:
            raise NotReadable(
                f"the outcome is stored in the form {payload.form!r}, which is no response"
            )
        lines = iter(payload.head.split(b"\n"))
        status = _STATUSES.get(next(lines))
        try:
            headers = list(zip(lines, lines, strict=True))
        except ValueError:
            status = None
        if status is None:
            raise NotReadable("the stored response is damaged")
        body = payload.body
        if status not in _WITHOUT_BODY:
            headers.append((b"content-length", b"%d" % len(body)))
        return Response(status, headers, body)


NO_STORE: Final[Header] = (b"cache-control", b"no-store")
_ABOUT_CACHES: Final = frozenset({b"cache-control", b"vary"})


def uncached(headers: list[Header], told: list[Header]) -> list[Header]:
    """The headers of a stored response, for one caller: no cache may keep it for another one.

    `told` begins with what caches are told. The list of a response that says nothing to them, as
    nearly all do, is added to as it is.
    """
    for name, _ in headers:
        if name in _ABOUT_CACHES:
            return _merged(headers, told)
    headers += told
    return headers


def _merged(headers: list[Header], told: list[Header]) -> list[Header]:
    """The same where the response speaks to caches by itself: what it differs by still counts."""
    own = [value for name, value in headers if name == b"vary"]
    kept = [header for header in headers if header[0] not in _ABOUT_CACHES]
    varies = b", ".join((*own, *(value for name, value in told if name == b"vary")))
    if varies:
        kept.append((b"vary", varies))
    return kept + [header for header in told if header[0] != b"vary"]


def is_event_stream(headers: Iterable[Header]) -> bool:
    """Whether these are the headers of server-sent events, which have no end to wait for."""
    for name, value in headers:
        if len(name) == 12 and name.lower() == b"content-type":
            return value[:17].lower() == b"text/event-stream"
    return False


def response_of(value: Any) -> Response:
    """The response itself, or what a framework's response object says; raises `NotStorable`.

    Lets code inside a transaction complete its attempt with the response that it is about to
    return, whatever framework made it.
    """
    if type(value) is Response:
        return value
    status = getattr(value, "status_code", None)
    body = getattr(value, "body", None)
    if not isinstance(body, bytes | bytearray | memoryview):
        body = getattr(value, "content", None)  # Django's name for it.
    get_data = getattr(value, "get_data", None)  # Werkzeug's.
    if callable(get_data):
        body = get_data()
    if not isinstance(status, int) or not isinstance(body, bytes | bytearray | memoryview):
        raise NotStorable(
            f"the outcome of a protected request is a response, got {type(value).__name__}: pass "
            "the response that the request is answered with"
        )
    raw = getattr(value, "raw_headers", None)
    if raw is None:
        headers = getattr(value, "headers", None)
        raw = [] if headers is None else headers.items()
    return Response(status, [(_header(name), _header(text)) for name, text in raw], bytes(body))


def _header(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")
