"""The demo's server: one process on the loopback interface, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import uvicorn
from starlette.types import ASGIApp

from retrysafe.demo.app import make_app
from retrysafe.demo.ledger import create_tables, open_ledger

# Enough for hundreds of clients that come at the same moment.
_BACKLOG: Final = 2048


class PortTaken(Exception):
    """The server cannot listen on this port."""


def serve(
    url: str, port: int, ready: Callable[[str], None], log: Callable[[str], None] | None = None
) -> None:
    """Serves until SIGINT or SIGTERM; calls `ready` with the address when it takes connections.

    `log` gets a line for every request. Raises `PortTaken`, and `StoreError` for a store that
    cannot be used.
    """
    with _listening(port) as listener:
        asyncio.run(create_tables(url))
        app: Any = make_app(url, open_ledger(url))
        server = uvicorn.Server(
            uvicorn.Config(
                app if log is None else _logged(app, log),
                log_level="warning",
                backlog=_BACKLOG,
                timeout_graceful_shutdown=5,
            )
        )
        with _stopped_by_signals(server):
            ready(f"http://127.0.0.1:{listener.getsockname()[1]}")
            server.run(sockets=[listener])


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket that queues connections, so that clients may come before the server runs."""
    with socket.socket() as listener:
        # A restarted demo must not wait until the last one's connections are forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            reason = "in use" if error.errno == errno.EADDRINUSE else f"refused ({error.strerror})"
            raise PortTaken(
                f"port {port} is {reason}: choose another with --port (make run PORT=8001), or "
                "stop what listens there"
            ) from error
        listener.listen(_BACKLOG)
        yield listener


@contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Makes a signal a clean end, also just before the server runs and when it raises it again."""

    def stop(*_: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _logged(app: ASGIApp, log: Callable[[str], None]) -> ASGIApp:
    """The application, with a line for every response: method, path, status, replay."""

    async def logged(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                status = HTTPStatus(message["status"])
                is_replay = (b"idempotent-replayed", b"true") in message["headers"]
                # Quoted: a path must not send commands to the terminal.
                line = f"{scope['method']} {quote(scope['path'])}: {status} {status.phrase}"
                log(f"{line}, replayed" if is_replay else line)
            await send(message)

        await app(scope, receive, sent)

    return logged
