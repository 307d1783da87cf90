"""The request as all parts of the HTTP layer see it, whatever server or framework it came by.

Owns the one shape that servers' scopes and environs are turned into. It reads nothing and judges
nothing; what a header or a body means is decided by the modules that use it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# Where a scope or environ says which request an attempt runs for: its method and its path. A second
# protection further in leaves that request alone, because its claim would find the key in flight.
# Another request that an application makes from a copy is none of it.
PROTECTED_NAME: Final = "retrysafe.protected"


_SLASHES: Final = re.compile("//+")


def served_path(path: str) -> str:
    """The path that a framework looks up: without a line feed at its end.

    Routes are regular expressions to many of them, where `$` matches before one as well:
    `/charges%0A` is served as `/charges`.
    """
    return path[:-1] if path[-1:] == "\n" else path


def plain_path(path: str) -> str:
    """The path as it counts: with single slashes, and none at its end."""
    path = served_path(path)
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path[:-1] if path[-1:] == "/" and path != "/" else path


@dataclass(slots=True)
class Request:
    """One request: its head, and its whole body once that has been read.

    Header names are lower-case, as in ASGI; a name may occur on several lines, in the order sent.
    """

    # In upper case: methods are case-sensitive, and many frameworks take them as if they were not.
    method: str
    # Decoded, with the prefix under which the application is mounted. Bytes that are no UTF-8 are
    # surrogates, so that two paths that differ in them stay two.
    path: str
    # The bytes after the question mark, without it, as sent.
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""
    # What the server or framework calls its request: the ASGI scope, the WSGI environ, Django's
    # HttpRequest. For callables of the application; nothing in this package looks inside.
    host: Any = None
    # What the matching rule's path pattern took from the path: {"id": "7"} for /charges/{id}.
    parameters: Mapping[str, str] = field(default_factory=dict)
    # Whether slashes at the end of the path, and double ones, tell two requests apart.
    has_exact_path: bool = False
    # What `lines_by_name` found, and the headers that it looked at.
    _lines: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)
    _looked_at: object = field(default=None, init=False, repr=False, compare=False)

    def lines_by_name(self) -> dict[bytes, bytes] | None:
        """The value of every line; None when a name has several, as very few requests have."""
        headers = self.headers
        if self._looked_at is not headers:
            lines = dict(headers)
            self._lines = lines if len(lines) == len(headers) else None
            self._looked_at = headers
        return self._lines

    def header(self, name: bytes) -> bytes | None:
        """The value of the first line with this lower-case name; None without one."""
        for line_name, value in self.headers:
            if line_name == name:
                return value
        return None

    def header_lines(self, name: bytes) -> list[bytes]:
        """The values of all lines with this lower-case name, in the order sent."""
        lines = self.lines_by_name()
        if lines is None:
            return [value for line_name, value in self.headers if line_name == name]
        value = lines.get(name)
        return [] if value is None else [value]
