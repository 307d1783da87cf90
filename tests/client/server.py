"""A real server on loopback that follows the draft, and misbehaves on cue.

It keeps one outcome per key, so that its ledger shows every effect that really happened. What it
does with each request can be scripted: refuse it, drop the connection before or after the effect,
break the answer in its middle, never answer.
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


@dataclass(frozen=True)
class Answer:
    """An answer that is given instead of the server's own; no effect happens."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_chunked: bool = False


def problem(status: int, *, retryable: object, compressed: bool = False, **headers) -> Answer:
    body = json.dumps({"title": "refused", "status": status, "retryable": retryable}).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    sent["Content-Type"] = "application/problem+json; charset=utf-8"
    if compressed:
        sent["Content-Encoding"] = "gzip"
        body = gzip.compress(body)
    return Answer(status, sent, body)


class Drop:
    """The connection is closed without an answer."""

    def __init__(self, *, after_effect: bool) -> None:
        self.after_effect = after_effect


class CutBody:
    """The effect happens, and the answer breaks off after its first bytes."""


class Stall:
    """The effect happens, and no answer comes until the client hangs up."""


Cue = Answer | Drop | CutBody | Stall | Callable[["_Exchange"], None]


class ScriptedServer:
    """Serves `url`; the cues are used up one per request, then it behaves."""

    def __init__(self) -> None:
        self.cues: list[Cue] = []
        self.always: Cue | None = None
        self.seen: list[Seen] = []
        # One entry for every effect: the path and the body.
        self.effects: list[tuple[str, bytes]] = []
        self.outcomes: dict[str, tuple[tuple[str, str, bytes], int, bytes]] = {}
        self.lock = threading.Lock()
        server = self

        class Exchange(_Exchange):
            scripted = server

        self._http = _Threaded(("127.0.0.1", 0), Exchange)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._http.hang_up()
        # Joins the threads of the connections.
        self._http.server_close()

    def script(self, *cues: Cue) -> None:
        self.cues += cues

    @property
    def keys(self) -> list[str | None]:
        return [seen.key for seen in self.seen]


class _Threaded(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True

    def __init__(self, *arguments) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request, client_address) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Ends idle connections that a client keeps open, so that their threads end."""
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It ended by itself in the meantime.

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up is part of the script."""


class _Exchange(BaseHTTPRequestHandler):
    scripted: ScriptedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *arguments) -> None:  # noqa: A002 — the base class names it.
        """Tests print nothing."""

    def _serve(self) -> None:
        seen = Seen(
            self.command,
            self.path,
            {name.lower(): value for name, value in self.headers.items()},
            self._body(),
        )
        server = self.scripted
        with server.lock:
            server.seen.append(seen)
            cue = server.cues.pop(0) if server.cues else server.always
        if isinstance(cue, Answer):
            self.answer(cue.status, cue.headers, cue.body, is_chunked=cue.is_chunked)
        elif isinstance(cue, Drop):
            if cue.after_effect:
                self._outcome(seen)
            self.close_connection = True
        elif isinstance(cue, CutBody):
            status, body, _ = self._outcome(seen)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif isinstance(cue, Stall):
            self._outcome(seen)
            # Returns when the client hangs up.
            self.connection.recv(1)
            self.close_connection = True
        elif cue is not None:
            cue(self)
        else:
            status, body, is_replay = self._outcome(seen)
            self.answer(status, {"Idempotent-Replayed": "true"} if is_replay else {}, body)

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = do_DELETE = _serve  # noqa: N815 — the base class looks for these.

    def _outcome(self, seen: Seen) -> tuple[int, bytes, bool]:
        """The effect, once per key; another request with a known key is refused."""
        server = self.scripted
        request = (seen.method, seen.path, seen.body)
        with server.lock:
            if seen.key in server.outcomes:
                first, status, body = server.outcomes[seen.key]
                return (status, body, True) if first == request else (422, b"", False)
            if seen.method not in ("GET", "HEAD"):
                server.effects.append((seen.path, seen.body))
            status, body = 201, b'{"number": %d}' % len(server.effects)
            if seen.key is not None:
                server.outcomes[seen.key] = (request, status, body)
            return status, body, False

    def answer(self, status, headers, body, *, is_chunked=False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.chunk(body)
            self.chunk(b"")
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body
