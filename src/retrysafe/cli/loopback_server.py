"""A server in this process, on the loopback interface, until SIGINT or SIGTERM."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

# Enough for hundreds of clients that come at the same moment.
_BACKLOG: Final = 2048


class PortTaken(Exception):
    """The server cannot listen on this port."""


def serve_on(listener: socket.socket, app: Any, ready: Callable[[str], None]) -> None:
    """Serves until a signal; calls `ready` with the address when it takes connections."""
    config = uvicorn.Config(app, log_level="warning", backlog=_BACKLOG, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    with _stopped_by_signals(server):
        ready(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server.run(sockets=[listener])


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
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
