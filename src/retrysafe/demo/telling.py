"""One line for every request, for whoever watches the demo in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_REPLAYED: Final = (b"idempotent-replayed", b"true")


class Telling:
    """An application whose answers are told as they begin: method, path, status, replay."""

    def __init__(self, app: ASGIApp, tell: Callable[[str], None]) -> None:
        self._app = app
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._tell(_line(scope, message))
            await send(message)

        await self._app(scope, receive, told)


def _line(scope: Scope, start: Any) -> str:
    # Quoted: what a client sends must not command the terminal.
    path = quote(scope["path"])
    status = HTTPStatus(start["status"])
    mark = ", replayed" if _REPLAYED in start["headers"] else ""
    return f"{scope['method']} {path}: {status.value} {status.phrase}{mark}"
