"""The reference application in plain ASGI."""

from __future__ import annotations

from typing import Any

from retrysafe import AsyncIdempotency
from retrysafe.http import IdempotencyMiddleware
from tests.http_cases.acts import ACT_HEADER, PLAY_HEADER
from tests.http_cases.apps.performing import AsyncPerformance
from tests.http_cases.configuration import Mount

GREETING = "hello"


async def perform(scope: Any, receive: Any, send: Any) -> None:
    """Answers every method of every path as its act says."""
    if scope["type"] == "websocket":
        await _greet(receive, send)
        return
    assert scope["type"] == "http"
    body = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
    performance = await AsyncPerformance.begin(
        headers.get(ACT_HEADER), headers.get(PLAY_HEADER), scope["method"], body
    )
    reply = performance.reply
    await send(
        {
            "type": "http.response.start",
            "status": reply.status,
            "headers": [
                (name.lower().encode(), value.encode("latin-1")) for name, value in reply.headers
            ],
        }
    )
    async for chunk in performance.chunks():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _greet(receive: Any, send: Any) -> None:
    message = await receive()
    assert message["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": GREETING})
    await send({"type": "websocket.close"})


def make(mount: Mount) -> Any:
    """The application behind the middleware, as one mount has it."""
    idempotency = AsyncIdempotency(mount.store(), **mount.face_options())
    return IdempotencyMiddleware(perform, idempotency, **mount.middleware_options())
