"""Requests as they are stored with their claim, so that a worker can send them again.

Owns what is kept of a request, and its bytes. Only headers on the list are kept, and nothing that
proves who calls: a credential in the store would let anybody in who reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes, urlsplit

from retrysafe.core.model import Payload
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import ArgumentsNotStorable, PolicyInvalid
from retrysafe.http.header_names import HEADER_NAME, holds_credential
from retrysafe.http.request import Request
from retrysafe.http.responses import Header

FORM: Final = "http-request.1"
# What an application needs to read the body, to find its route and to choose its words.
ALWAYS_STORED: Final = frozenset(
    {
        b"accept",
        b"accept-language",
        b"content-encoding",
        b"content-language",
        b"content-type",
        b"host",
        b"idempotency-key",
    }
)
# What belongs to one connection or to one way of asking; the worker has its own.
_NEVER_STORED: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"keep-alive",
        b"prefer",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Kept as they are in a raw path: what RFC 3986 has in one, and the escapes themselves.
_PATH_CHARACTERS: Final = "/:@!$&'()*+,;=~-._"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumable:
    """What `Rule(resumable=…)` says beyond True; raises `PolicyInvalid`.

    `headers` are stored beside the usual ones. With `accepts`, the first request too is answered
    with 202 and the status URL, as soon as it is claimed.
    """

    headers: tuple[str, ...] = ()
    accepts: bool = False
    # All that is stored, in lower case.
    names: frozenset[bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.accepts, bool):
            raise PolicyInvalid(f"accepts is True or False, got {self.accepts!r}")
        given: object = self.headers
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise PolicyInvalid(f"headers takes a list of header names, got {given!r}")
        listed = tuple(given)
        object.__setattr__(self, "headers", listed)
        names = frozenset(map(_checked_name, listed))
        object.__setattr__(self, "names", ALWAYS_STORED | names)


def _checked_name(name: object) -> bytes:
    if not isinstance(name, str) or HEADER_NAME.fullmatch(name) is None:
        raise PolicyInvalid(f"a header's name consists of letters, digits and hyphens: {name!r}")
    lowered = name.lower().encode("ascii")
    if lowered in ALWAYS_STORED:
        return lowered
    if holds_credential(lowered):
        raise PolicyInvalid(
            f"{name} holds a credential, which is never stored with a request: leave it out, and "
            "have your authentication ask resumed_caller(request) who called"
        )
    if lowered in _NEVER_STORED:
        raise PolicyInvalid(
            f"{name} belongs to one connection, and is never stored with a request: leave it out"
        )
    return lowered


@dataclass(slots=True)
class StoredRequest:
    """A request as its worker sends it, whatever server it came by."""

    method: str
    # As it was asked for, with its escapes and with the path of the mount; without the query.
    raw_path: str
    # What the protection made of it, by which the request is known again at its route.
    seen_path: str
    query: bytes
    # Where the outermost application is mounted.
    root_path: str
    scheme: str
    # Not shown, as in a `Request`.
    headers: list[Header] = field(repr=False)
    body: bytes = field(repr=False)
    # Whether the key was made from the request, and not sent by the client.
    is_made: bool = False

    @property
    def path(self) -> bytes:
        """The path without its escapes."""
        return unquote_to_bytes(self.raw_path)

    @property
    def server(self) -> tuple[str, int]:
        """The name and the port in the `Host` header."""
        host = next((value for name, value in self.headers if name == b"host"), b"localhost")
        default = 443 if self.scheme == "https" else 80
        try:
            parts = urlsplit(f"//{host.decode('latin-1')}")
            return parts.hostname or "localhost", parts.port or default
        except ValueError:
            return "localhost", default


def place_of(host: Any) -> Mapping[str, Any]:
    """The ASGI scope or the WSGI environ behind what a server or a framework calls its request."""
    if isinstance(host, Request):
        host = host.host
    for name in ("scope", "environ", "META"):
        if isinstance(host, Mapping):
            break
        host = getattr(host, name, host)
    return host if isinstance(host, Mapping) else {}


def payload_of(
    request: Request, resumable: Resumable, prefix: str, limit_bytes: int, *, is_made: bool
) -> Payload:
    """The request as it is stored; raises `ArgumentsNotStorable` past the limit.

    `prefix` is where the application is mounted, as its adapter says.
    """
    place = place_of(request.host)
    if "wsgi.url_scheme" in place:
        scheme, root = place["wsgi.url_scheme"], prefix
        # Not from the environ, where Django has put text in place of bytes in disguise.
        raw_path = quote(request.path, _PATH_CHARACTERS, errors="surrogateescape")
    else:
        scheme, root = place.get("scheme", "http"), place.get("root_path", "")
        # Routers move `root_path` further down, and the worker begins at the top.
        root = place.get("app_root_path", root)
        sent: bytes = place.get("raw_path") or b""
        raw_path = sent.partition(b"?")[0].decode("latin-1") or quote(
            place.get("path", request.path), _PATH_CHARACTERS, errors="surrogateescape"
        )
    lines = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in request.raw_headers
        if name in resumable.names
    ]
    query = request.query.decode("latin-1")
    head = [request.method, raw_path, request.path, query, root, scheme, lines, is_made]
    payload = Payload(FORM, json.dumps(head).encode(), request.body)
    if payload.size_bytes > limit_bytes:
        raise ArgumentsNotStorable(
            f"The request has {payload.size_bytes:,} bytes with its path and its headers, and may "
            f"have at most {limit_bytes:,} here. Nothing was run."
        )
    return payload


def request_of(payload: Payload) -> StoredRequest:
    """The stored request; raises `NotReadable`."""
    if payload.form != FORM:
        raise NotReadable(f"they are stored in the form {payload.form!r}, which is no request")
    try:
        method, raw_path, seen, query, root, scheme, lines, is_made = json.loads(payload.head)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
        query = query.encode("latin-1")
    except (ValueError, AttributeError, TypeError):
        raise NotReadable("the stored request is damaged") from None
    return StoredRequest(
        method, raw_path, seen, query, root, scheme, headers, payload.body, is_made is True
    )
