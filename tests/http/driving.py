"""Drives ASGI and WSGI applications in process, with everything a test wants to see or to delay."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.http import IdempotencyMiddleware, WSGIIdempotencyMiddleware, bearer_token
from retrysafe.stores import MemoryStore

BODY = b'{"amount":1000,"currency":"eur"}'


@dataclass
class Reply:
    """A response as a client sees it."""

    status: int
    header_lines: list[tuple[str, str]]
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        return dict(self.header_lines)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The slug of a problem's type; fails for anything that is no problem."""
        assert self.headers["content-type"] == "application/problem+json"
        assert self.json["status"] == self.status
        return self.json["type"].partition("#")[2]

    @property
    def is_replay(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


def headers_of(
    key: str | None, caller: str | None = "alice", **more: str
) -> list[tuple[bytes, bytes]]:
    """The headers of a request; names with underscores for hyphens."""
    lines = {"content_type": "application/json"}
    if key is not None:
        lines["idempotency_key"] = key
    if caller is not None:
        lines["authorization"] = f"Bearer {caller}"
    return [
        (name.replace("_", "-").encode(), value.encode()) for name, value in (lines | more).items()
    ]


def http_scope(method: str, path: str, headers: list[tuple[bytes, bytes]], **more: Any) -> dict:
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    } | more


@dataclass
class Connection:
    """The server's side of one ASGI exchange: messages to give, messages that were sent."""

    messages: list[dict] = field(
        default_factory=lambda: [{"type": "http.request", "body": BODY, "more_body": False}]
    )
    sent: list[dict] = field(default_factory=list)
    # Raised by `send`, as servers do when the client has gone.
    send_error: Exception | None = None
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when the response was sent to its end.
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> dict:
        if self.messages:
            return self.messages.pop(0)
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.answered.set()

    @property
    def reply(self) -> Reply:
        start, *bodies = [m for m in self.sent if m["type"].startswith("http.response.")]
        assert start["type"] == "http.response.start"
        assert all(message["type"] == "http.response.body" for message in bodies)
        assert bodies
        assert not bodies[-1].get("more_body", False)
        return Reply(
            start["status"],
            [(name.decode(), value.decode()) for name, value in start["headers"]],
            b"".join(message.get("body", b"") for message in bodies),
        )


async def ask(
    app: Any,
    method: str = "POST",
    path: str = "/charges",
    *,
    key: str | None = '"k-1"',
    caller: str | None = "alice",
    body: bytes = BODY,
    scope: dict | None = None,
    **headers: str,
) -> Reply:
    """One exchange with an ASGI application."""
    connection = Connection([{"type": "http.request", "body": body, "more_body": False}])
    made = http_scope(method, path, headers_of(key, caller, **headers)) | (scope or {})
    await app(made, connection.receive, connection.send)
    return connection.reply


def ask_wsgi(
    app: Any,
    method: str = "POST",
    path: str = "/charges",
    *,
    key: str | None = '"k-1"',
    caller: str | None = "alice",
    body: bytes = BODY,
    environ: dict | None = None,
    **headers: str,
) -> Reply:
    """One exchange with a WSGI application."""
    path, _, query = path.partition("?")
    made: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path.encode().decode("latin-1"),
        "QUERY_STRING": query,
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.url_scheme": "http",
    }
    for name, value in headers_of(key, caller, **headers):
        upper = name.decode().upper().replace("-", "_")
        made[upper if upper == "CONTENT_TYPE" else f"HTTP_{upper}"] = value.decode()
    made |= environ or {}
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(status: str, lines: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if exc_info is not None and written:
            raise exc_info[1]
        started.append((status, lines))
        return written.append

    result = app(made, start_response)
    try:
        written.extend(result)
    finally:
        if hasattr(result, "close"):
            result.close()
    assert len(started) == 1
    status, lines = started[0]
    return Reply(
        int(status[:3]), [(name.lower(), value) for name, value in lines], b"".join(written)
    )


Answer = Callable[[bytes], tuple[int, list[tuple[str, str]], bytes]]


class Shop:
    """A small application for both worlds; counts what it carried out."""

    def __init__(self) -> None:
        self.runs: list[bytes] = []
        self.status = 201
        self.error: Exception | None = None
        self.headers = [
            ("Content-Type", "application/json"),
            ("Location", "/charges/1"),
            ("Set-Cookie", "session=1"),
            ("X-Request-Id", "r-1"),
            ("X-Total", "1000"),
        ]

    def answer(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        self.runs.append(body)
        if self.error is not None:
            raise self.error
        return self.status, self.headers, b'{"run": %d}' % len(self.runs)

    async def asgi(self, scope: dict, receive: Any, send: Any) -> None:
        message = await receive()
        status, headers, body = self.answer(message["body"])
        lines = [(name.lower().encode(), value.encode()) for name, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})

    def wsgi(self, environ: dict, start_response: Any) -> list[bytes]:
        status, headers, body = self.answer(environ["wsgi.input"].read())
        start_response(f"{status} Made", headers)
        return [body[:3], body[3:]]


class AsgiSubject:
    """The shop behind the ASGI middleware."""

    def __init__(self, runner: asyncio.Runner, store: Any, **options: Any) -> None:
        self.shop = Shop()
        self._runner = runner
        self.idem = AsyncIdempotency(store, **options.pop("face", {}))
        self.app = IdempotencyMiddleware(
            self.shop.asgi, self.idem, **{"caller": bearer_token, **options}
        )

    def ask(self, *args: Any, **options: Any) -> Reply:
        return self._runner.run(ask(self.app, *args, **options))

    def close(self) -> None:
        self._runner.run(self.idem.close())


class WsgiSubject:
    """The shop behind the WSGI middleware."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.shop = Shop()
        self.idem = Idempotency(store, **options.pop("face", {}))
        self.app = WSGIIdempotencyMiddleware(
            self.shop.wsgi, self.idem, **{"caller": bearer_token, **options}
        )

    def ask(self, *args: Any, **options: Any) -> Reply:
        return ask_wsgi(self.app, *args, **options)

    def close(self) -> None:
        self.idem.close()


def new_store() -> MemoryStore:
    return MemoryStore()


class SlowWSGI:
    """A WSGI application whose runs end when a test says so."""

    def __init__(self) -> None:
        self.runs = 0
        self.began = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, environ, start_response):
        self.runs += 1
        self.began.set()
        assert self.may_end.wait(30)
        start_response("201 Created", [("Content-Type", "application/json")])
        return [b"{}"]
