"""Requests that no ordinary client sends, written byte by byte over HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11


@dataclass(frozen=True)
class Answer:
    """A response as it came over the wire, body undecoded."""

    status: int
    header_lines: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for line, value in self.header_lines if line == name), None)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Told:
    """A request as it goes over the wire."""

    url: str
    method: str
    path: str
    lines: list[tuple[bytes, bytes]]
    body: bytes
    pieces: int = 0

    def head(self, *more: tuple[bytes, bytes]) -> bytes:
        """The head of HTTP/1.1."""
        host = urlsplit(self.url).netloc.encode()
        framing = (
            (b"transfer-encoding", b"chunked")
            if self.pieces
            else (b"content-length", b"%d" % len(self.body))
        )
        lines = [(b"host", host), *self.lines, framing, *more]
        start = f"{self.method} {self.path} HTTP/1.1\r\n".encode()
        return start + b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n"


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def cut_off(told: Told) -> None:
    """Sends half of the body and no more; returns when the server has noticed."""
    reader, writer = await _connect(told.url)
    half = told.body[: len(told.body) // 2]
    if told.pieces:
        half = b"%x\r\n%b\r\n" % (len(half), half)
    writer.write(told.head() + half)
    await writer.drain()
    writer.write_eof()
    # Whatever the server says to nobody, it has closed the connection afterwards.
    try:
        await reader.read()
    except ConnectionError:
        pass
    writer.close()


async def ask_with_continue(told: Told) -> Answer:
    """Asks for 100 first, and sends the body only after it; the server may answer at once."""
    reader, writer = await _connect(told.url)
    try:
        writer.write(told.head((b"expect", b"100-continue"), (b"connection", b"close")))
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            writer.write(told.body)
            await writer.drain()
            head = b""
        return _parsed(told.method, head + await reader.read())
    finally:
        writer.close()


def _parsed(method: str, data: bytes) -> Answer:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method=method, target="/", headers=[("host", "h")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    parser.receive_data(b"")
    response = parser.next_event()
    while isinstance(response, h11.InformationalResponse):
        response = parser.next_event()
    assert isinstance(response, h11.Response), response
    body = b""
    while isinstance(event := parser.next_event(), h11.Data):
        body += event.data
    lines = [(name.decode().lower(), value.decode("latin-1")) for name, value in response.headers]
    return Answer(response.status_code, lines, body)


async def read_greeting(url: str, path: str) -> None:
    """Opens a websocket; the first message from the server is the greeting."""
    reader, writer = await _connect(url)
    try:
        writer.write(
            b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            % (path.encode(), urlsplit(url).netloc.encode())
        )
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101"), head
        # One unmasked text frame of five bytes.
        assert await reader.readexactly(7) == b"\x81\x05hello"
    finally:
        writer.close()
