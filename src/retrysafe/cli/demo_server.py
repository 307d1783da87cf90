"""The demo's server: one process on the loopback interface, until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp

from retrysafe.cli.loopback_server import listening, serve_on
from retrysafe.demo.app import make_app
from retrysafe.demo.ledger import create_tables, open_ledger
from retrysafe.demo.playground import noting_restarts, restarting_by


def serve(
    url: str,
    port: int,
    ready: Callable[[str], None],
    log: Callable[[str], None] | None = None,
    dashboard_token: str | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM; calls `ready` with the address when it takes connections.

    `log` gets a line for every request. Raises `PortTaken`, and `StoreError` for a store that
    cannot be used.
    """
    with listening(port) as listener:
        asyncio.run(create_tables(url))
        restarting_by(_command(url, listener.getsockname()[1], dashboard_token))
        app: Any = noting_restarts(make_app(url, open_ledger(url), dashboard_token))
        serve_on(listener, app if log is None else _logged(app, log), ready)


def _command(url: str, port: int, dashboard_token: str | None) -> list[str]:
    """What serves the same demo on the same port."""
    start = [sys.executable, "-m", "retrysafe", "demo", "--port", str(port), "--store", url]
    return start if dashboard_token is None else [*start, "--dashboard-token", dashboard_token]


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
