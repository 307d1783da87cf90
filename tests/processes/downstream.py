"""Downstream services for the process tests: real processes, reached over HTTP.

Each one does what a good payment provider does: it runs a request once per key, answers a repeated
key with the first answer, and keeps count of both, so that a double effect shows.
"""

from __future__ import annotations

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_HEADER = "Idempotency-Key"
# What a checkout asks for, in order.
SERVICES = ("reserve", "charge", "receipt")


def serve(pipe: Any, name: str) -> None:
    """Serves until it is told to stop; the port is the first message."""
    lock = threading.Lock()
    answers: dict[str, str] = {}
    executions: list[str] = []
    requests: list[str] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            key = self.headers[KEY_HEADER]
            with lock:
                requests.append(key)
                if key not in answers:
                    executions.append(key)
                    answers[key] = f"{name} {len(executions)}"
                self._answer(answers[key])

        def do_GET(self) -> None:
            with lock:
                self._answer({"executions": executions, "requests": requests})

        def _answer(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        pipe.send(server.server_address[1])
        threading.Thread(target=server.serve_forever).start()
        pipe.recv()
        server.shutdown()


def post(port: int, key: str) -> str:
    """Asks the service to do its work under this key."""
    answer: str = _exchange(port, "POST", {KEY_HEADER: key})
    return answer


def seen(port: int) -> dict[str, list[str]]:
    """The keys that the service executed, and those of all requests, in order."""
    counts: dict[str, list[str]] = _exchange(port, "GET", {})
    return counts


def _exchange(port: int, method: str, headers: dict[str, str]) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, "/", b"{}" if method == "POST" else None, headers)
        response = connection.getresponse()
        assert response.status == 200
        return json.loads(response.read())
    finally:
        connection.close()
