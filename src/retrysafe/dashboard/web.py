"""Requests and responses of the dashboard, and its two doors: ASGI and WSGI.

The pages know no framework. Whoever mounts them passes a request in and sends the response.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl

# A form of the dashboard has a few short fields.
BODY_LIMIT_BYTES: Final = 64 * 1024
_FIELD_LIMIT: Final = 50
# Pages that are made at the same time; the others wait. Each may hold a connection to the database.
PAGES_AT_A_TIME: Final = 4

Environ = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]


@dataclass(slots=True)
class Request:
    """What a page may ask of a request."""

    method: str
    # Below the mount, beginning with a slash.
    path: str
    # Where the dashboard is mounted, without a slash at the end.
    root: str = ""
    query: str = ""
    # Names are in lower case.
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_https: bool = False
    # The address that the connection comes from.
    client: str = ""
    # The scope or the environ, for `authorize`.
    raw: Any = None

    def values(self) -> dict[str, str]:
        """The fields of the query; of one that comes twice, the last."""
        return _fields(self.query)

    def form(self) -> dict[str, str]:
        """The fields of the form that was sent."""
        try:
            return _fields(self.body.decode())
        except UnicodeDecodeError:
            raise BadRequest("the form is not text in UTF-8") from None

    def cookie(self, name: str) -> str:
        """A cookie's value, or the empty text."""
        for part in self.headers.get("cookie", "").split(";"):
            found, _, value = part.strip().partition("=")
            if found == name:
                return value
        return ""


@dataclass(slots=True)
class Response:
    """What is sent back."""

    status: int
    body: bytes = b""
    media_type: str = "text/html; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)

    def all_headers(self) -> list[tuple[str, str]]:
        """Those that are sent."""
        fixed = {"content-type": self.media_type, "content-length": str(len(self.body))}
        return [*(fixed | self.headers).items()]


class BadRequest(Exception):
    """A request that no page of the dashboard sends; the text says what is wrong."""


def _fields(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, max_num_fields=_FIELD_LIMIT, errors="strict"
        )
    except ValueError:  # Too many, or not UTF-8.
        raise BadRequest("the fields cannot be read") from None
    if any("\x00" in text for pair in pairs for text in pair):
        # No key has it, and PostgreSQL cannot compare with it.
        raise BadRequest("the fields cannot be read")
    return dict(pairs)


Respond = Callable[[Request], Response]


class AsgiDoor:
    """The dashboard as an ASGI application. Pages block, so they are made in threads."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._rooms: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answers one request; takes part in the lifespan of its server."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            # A web socket: the dashboard has none.
            await send({"type": "websocket.close", "code": 1000})
            return
        body = await _body(receive)
        if body is None:
            response = Response(413, b"The request is too large.", "text/plain")
        else:
            async with self._room():
                response = await asyncio.to_thread(self._respond, _of_scope(scope, body))
        headers = [(name.encode(), value.encode()) for name, value in response.all_headers()]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else response.body
        await send({"type": "http.response.body", "body": body})

    def _room(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._rooms:
            self._rooms = {loop: asyncio.Semaphore(PAGES_AT_A_TIME)}
        return self._rooms[loop]


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _body(receive: Callable[[], Awaitable[Any]]) -> bytes | None:
    """The whole body; None when it is over the limit."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_LIMIT_BYTES:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _of_scope(scope: Scope, body: bytes) -> Request:
    root: str = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    # Servers and frameworks disagree on whether the path includes the mount.
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        text = name.decode("latin-1").lower()
        # The first one counts: a second `Host` behind it changes nothing.
        headers.setdefault(text, value.decode("latin-1"))
    client = scope.get("client")
    return Request(
        method=scope["method"],
        path=path or "/",
        root=root,
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=headers,
        body=body,
        is_https=scope.get("scheme") == "https",
        client=client[0] if client else "",
        raw=scope,
    )


class WsgiDoor:
    """The dashboard as a WSGI application."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond

    def __call__(self, environ: Environ, start_response: Any) -> Iterable[bytes]:
        """Answers one request."""
        response = self.answer(environ)
        status = HTTPStatus(response.status)
        start_response(f"{status.value} {status.phrase}", response.all_headers())
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else response.body]

    def answer(self, environ: Environ) -> Response:
        """The response to a request of this environ."""
        try:
            size = int(environ.get("CONTENT_LENGTH") or 0)
        except ValueError:
            size = 0
        if size > BODY_LIMIT_BYTES:
            return Response(413, b"The request is too large.", "text/plain")
        stream = environ.get("wsgi.input") or io.BytesIO()
        body = stream.read(size) if size > 0 else b""
        return self._respond(_of_environ(environ, body))


def _of_environ(environ: Environ, body: bytes) -> Request:
    headers = {
        name[5:].replace("_", "-").lower(): str(value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    return Request(
        method=environ["REQUEST_METHOD"],
        path=environ.get("PATH_INFO") or "/",
        root=environ.get("SCRIPT_NAME", "").rstrip("/"),
        query=environ.get("QUERY_STRING", ""),
        headers=headers,
        body=body,
        is_https=environ.get("wsgi.url_scheme") == "https",
        client=environ.get("REMOTE_ADDR", ""),
        raw=environ,
    )
