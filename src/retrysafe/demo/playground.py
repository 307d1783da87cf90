"""The demo's front page: every promise of retrysafe as a button.

The page sends the calls of the API like any other client. Only a crash is special: it asks the demo
to start again by itself, because there is nobody at the terminal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from html import escape
from importlib.resources import files
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response

# The header of a request whose crash is to be followed by a new start.
RESTART: Final = b"x-restart-after-crash"
_is_restarting: ContextVar[bool] = ContextVar("_is_restarting", default=False)
# What begins again in the place of this process; set by whoever serves the demo.
_command: list[str] = []
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
_TYPES: Final = {"playground.js": "text/javascript", "playground.css": "text/css"}

CHARGE: Final = '{"amount":1000,"currency":"eur","customer":"c1"}'
ORDER: Final = '{"item":"widget","quantity":1,"customer":"c1"}'
CHECKOUT: Final = '{"customer":"c1","items":["widget","gadget"]}'
CALLS: Final = (
    ("Charge a customer; optional: delay_ms, outcome", "charges", CHARGE),
    ("Send the same again: a replay", "charges", CHARGE),
    ("Send another charge with the same key: 422", "charges", CHARGE.replace("1000", "9999")),
    ("Place an order; optional: delay_ms, outcome (ok, decline, error, crash)", "orders", ORDER),
    (
        "Check out; optional: delay_ms, crash_after (reserve, charge, receipt)",
        "checkouts",
        CHECKOUT,
    ),
    ("See what was really executed; also at /charges, /orders and /checkouts", "effects", ""),
    ("Read the policy, which is generated from the rules", "idempotency-policy", ""),
    ("Read the OpenAPI document", "openapi.json", ""),
    ("Look at the dashboard, in a browser", "retrysafe/", ""),
)


def curl_lines(url: str) -> list[tuple[str, str]]:
    """Every call: what it does, and the line to paste."""
    start = "curl -i -H 'Authorization: Bearer me' -H 'Content-Type: application/json'"
    return [
        (text, f"{start} -H 'Idempotency-Key: \"{path}-1\"' -d '{body}' {url}/{path}")
        if body
        else (text, f"curl {url}/{path}")
        for text, path, body in CALLS
    ]


def add_playground(app: FastAPI) -> None:
    """Adds the front page and its files."""

    async def front_page(request: Request) -> HTMLResponse:
        calls = "\n".join(
            f"<p>{escape(text)}</p><pre>{escape(line)}</pre>"
            for text, line in curl_lines(str(request.base_url).rstrip("/"))
        )
        page = _read("playground.html").decode().replace("<!-- calls -->", calls)
        return HTMLResponse(page, headers={"content-security-policy": _POLICY})

    async def static(name: str) -> Response:
        if name not in _TYPES:
            return Response(status_code=404)
        return Response(_read(name), media_type=_TYPES[name])

    app.add_api_route("/", front_page, include_in_schema=False)
    app.add_api_route("/static/{name}", static, include_in_schema=False)


def _read(name: str) -> bytes:
    return files("retrysafe.demo").joinpath("static", name).read_bytes()


def restarting_by(command: list[str]) -> None:
    """Says what starts this demo again."""
    _command[:] = command


def noting_restarts(app: Any) -> Callable[..., Any]:
    """The application; `restart_if_asked` knows what the request under way has asked for."""

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        _is_restarting.set(any(name == RESTART for name, _ in scope.get("headers", ())))
        await app(scope, receive, send)

    return noting


def restart_if_asked() -> None:
    """Begins again in the place of this process, as abruptly as it would have ended."""
    if _is_restarting.get() and _command:
        # No clean-up runs, and every file and socket is closed by the kernel.
        os.execv(_command[0], _command)  # noqa: S606 — the command that started this process.
