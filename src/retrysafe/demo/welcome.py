"""The front page: the routes, and three lines to paste."""

from __future__ import annotations

from html import escape
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_PAGES: Final = (
    ("GET", "/idempotency-policy", "The policy, made from the rules that are in force."),
    ("GET", "/docs", "The description of this API, to try it out."),
)
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>retrysafe demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 1rem }}
pre {{ background: #8882; padding: 1em; overflow-x: auto }} td {{ padding: .2em 1em .2em 0 }}
</style>
</head>
<body>
<h1>retrysafe demo</h1>
<p>Every POST here may be sent twice and is carried out once. Paste these, in this order: the first
call, its replay, and another request under the same key.</p>
<pre>{lines}</pre>
<table>
{rows}
</table>
</body>
</html>
"""


def curl_lines(url: str) -> list[str]:
    """Three lines to paste: first call, replay, mismatch."""
    start = f"curl -i {url}/charges -H 'Authorization: Bearer me' -H 'Idempotency-Key: \"k1\"'"
    json = "-H 'Content-Type: application/json'"
    first = '{"amount":1000,"currency":"eur","customer":"c1"}'
    other = '{"amount":9999,"currency":"eur","customer":"c1"}'
    return [f"{start} {json} -d '{body}'" for body in (first, first, other)]


@router.get("/", response_class=HTMLResponse)
async def welcome(request: Request) -> str:
    """The front page."""
    base = str(request.base_url).rstrip("/")
    rows = "\n".join(
        f"<tr><td>{method}</td><td>{_linked(method, path)}</td><td>{escape(what)}</td></tr>"
        for method, path, what in (*_routes(request.app), *_PAGES)
    )
    return _PAGE.format(lines=escape("\n".join(curl_lines(base))), rows=rows)


def _linked(method: str, path: str) -> str:
    if method != "GET" or "{" in path:
        return escape(path)
    return f'<a href="{escape(path)}">{escape(path)}</a>'


def _routes(app: FastAPI) -> list[tuple[str, str, str]]:
    """Every route of the API, as its description has it."""
    return [
        (method.upper(), path, route["description"])
        for path, methods in app.openapi()["paths"].items()
        for method, route in methods.items()
    ]
