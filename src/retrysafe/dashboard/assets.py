"""The files that pages load: all of them are in the package, none comes from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from retrysafe.dashboard.web import Request, Response

# By name, so that no path of a request ever reaches the file system.
_TYPES: Final = {
    "htmx.min.js": "text/javascript; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def static(request: Request) -> Response:
    """One of the files."""
    name = request.path.removeprefix("/static/")
    if name not in _TYPES:
        return Response(404, b"There is no such file.", "text/plain")
    return Response(200, _read(name), _TYPES[name], {"cache-control": "max-age=3600"})


@cache
def _read(name: str) -> bytes:
    return files("retrysafe.dashboard").joinpath("static", name).read_bytes()
