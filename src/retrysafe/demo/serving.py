"""A server for the demo: one process, on the loopback interface, until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn

from retrysafe.demo.app import make_app, prepare
from retrysafe.demo.telling import Telling

HOST: Final = "127.0.0.1"
# Enough for hundreds of clients that come at the same moment.
_BACKLOG: Final = 2048
# How long requests that are under way are waited for.
_GRACE_SECONDS: Final = 5


class PortTaken(Exception):
    """Nobody can listen there."""


def serve(
    url: str,
    port: int,
    ready: Callable[[str], None],
    tell: Callable[[str], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; tells `ready` the address once connections are taken.

    `tell` is given a line for every request. Raises `PortTaken`, and `StoreError` for a store that
    cannot be used.
    """
    with _listening(port) as listener:
        asyncio.run(prepare(url))
        app = make_app(url)
        config = uvicorn.Config(
            app if tell is None else Telling(app, tell),
            log_level="warning",
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        server = uvicorn.Server(config)
        with _stopped_by_signals(server):
            ready(f"http://{HOST}:{listener.getsockname()[1]}")
            server.run(sockets=[listener])


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """A socket that queues connections already, so that whoever is told of it may come at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # A restarted demo must not wait for the connections of the last one to be forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise PortTaken(_reason(port, error)) from error
        listener.listen(_BACKLOG)
        yield listener


def _reason(port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use: choose another with --port (make run PORT=8001), or stop what "
            "listens there"
        )
    if error.errno == errno.EACCES:
        return f"port {port} is for the system's own services: choose one from 1024 up with --port"
    return f"port {port} cannot be used: {error.strerror}"


@contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """A server that was told to stop has not failed.

    The server takes these signals itself, but only while it runs: one that comes just before must
    not be lost, and the ones that it raises again at its end must not look like a failure.
    """

    def stop(*_: object) -> None:
        server.should_exit = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, action in zip(numbers, before, strict=True):
            signal.signal(number, action)
