"""Requests as an ASGI server gives them, and responses as it takes them.

Owns the messages: what the scope says of a request, how a body is read, how a response is sent. It
decides nothing about either.
"""

from __future__ import annotations

import logging
from typing import Final
from urllib.parse import unquote_to_bytes

from retrysafe.errors import InvalidInput
from retrysafe.http.asgi_run import Receive, Scope, Send
from retrysafe.http.request import PROTECTED_NAME, Request
from retrysafe.http.responses import Response
from retrysafe.runtime.checks import running_loop

_logger = logging.getLogger("retrysafe")

# What servers put into a path in place of bytes that are no UTF-8.
_REPLACED: Final = "\ufffd"


def is_below(path: str, root: str) -> bool:
    """Whether the path has the mount in front; `/payments` does not lie below `/pay`."""
    root = root.rstrip("/")
    return path == root or path.startswith(f"{root}/")


def exact_path(scope: Scope, path: str) -> str:
    """The path with the bytes that a server has replaced because they are no UTF-8.

    Replaced, two paths would count as one request. A server that does not give the raw path keeps
    the two apart from nobody: the application sees one path as well.
    """
    raw: bytes | None = scope.get("raw_path")
    if _REPLACED not in path or not raw:
        return path
    return unquote_to_bytes(raw.partition(b"?")[0]).decode("utf-8", "surrogateescape")


def paths_of(scope: Scope) -> tuple[str, str]:
    """The path inside the application, and the path with its mount in front."""
    path: str = scope["path"]
    if _REPLACED in path:
        path = exact_path(scope, path)
    root: str = scope.get("root_path", "")
    if not root:
        return path, path
    mount = root.rstrip("/")
    if is_below(path, root):
        return path[len(mount) :], path
    # Some frameworks leave the mount out of the path. Two mounts are two places all the same.
    return path, mount + path


def request_of(scope: Scope) -> Request:
    """The request of a scope, with its body unread."""
    return Request(
        scope["method"].upper(),
        paths_of(scope)[1],
        scope.get("query_string", b""),
        scope["headers"],
        b"",
        scope,
    )


def is_protected(scope: Scope) -> bool:
    """Whether somebody further out protects this very request."""
    request = request_of(scope)
    protected: tuple[str, str] = scope[PROTECTED_NAME]
    return protected == (request.method, request.path)


def prefix_of(scope: Scope) -> str:
    """Where the application is mounted, behind a proxy or in another application."""
    prefix: str = scope.get("root_path", "")
    return prefix


def app_prefix_of(scope: Scope) -> str:
    """Where the outermost application is mounted; its routers move `root_path` further down."""
    prefix: str = scope["app_root_path"] if "app_root_path" in scope else prefix_of(scope)
    return prefix


async def is_refused(receive: Receive, send: Send) -> bool:
    """Whether this server cannot run the layer; its start is refused then, in words that help.

    Not by an exception: to most servers that means an application without a lifespan, and every
    protected request would fail instead.
    """
    try:
        running_loop()
    except InvalidInput as error:
        _logger.error("%s", error)  # noqa: TRY400 — the message says it all.
        await receive()
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        return True
    return False


# Bodies past the limit: read to their end, or with more of them to come.
TOO_LARGE: Final = object()
_TOO_LARGE_ALREADY: Final = object()


async def read_body(receive: Receive, limit_bytes: int) -> bytes | object | None:
    """The whole body; None when the client left, one of two marks past the limit."""
    message = await receive()
    if message["type"] != "http.request":
        return None
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        return body if len(body) <= limit_bytes else TOO_LARGE
    chunks = [body]
    size = len(body)
    while size <= limit_bytes:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks) if size <= limit_bytes else TOO_LARGE
    return _TOO_LARGE_ALREADY


async def send_response(send: Send, response: Response) -> None:
    """Sends a whole response."""
    await send(
        {"type": "http.response.start", "status": response.status, "headers": response.headers}
    )
    await send({"type": "http.response.body", "body": response.body})


# What is on its way when a client is refused by its head; a longer body is not waited for.
_DROPPED_LIMIT_BYTES: Final = 64 * 1024


async def send_early(
    send: Send,
    receive: Receive,
    response: Response,
    request: Request,
    *,
    is_body_read: bool = False,
) -> None:
    """Answers at once, and ends the answer when the body has arrived.

    An answer that ends before its request makes servers close the connection, and with HTTP/2 all
    other requests on it; a client may then not even get the answer.
    """
    if is_body_read or request.header(b"expect") is not None:
        # Who waits for leave to send the body is never going to.
        await send_response(send, response)
        return
    await send(
        {"type": "http.response.start", "status": response.status, "headers": response.headers}
    )
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    left = _DROPPED_LIMIT_BYTES
    while left > 0:
        message = await receive()
        if message["type"] != "http.request":
            return
        if not message.get("more_body", False):
            break
        left -= len(message.get("body", b""))
    await send({"type": "http.response.body", "body": b""})
