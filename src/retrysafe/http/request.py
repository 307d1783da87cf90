"""The request as all parts of the HTTP layer see it, whatever server or framework it came by.

Owns the one shape that servers' scopes and environs are turned into. It reads nothing and judges
nothing; what a header or a body means is decided by the modules that use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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


class Headers(Mapping[str, str]):
    """The headers of a request as text; names count in any letter case.

    `headers["X-Account"]`, `headers.get("x-account")`. The values of a name that was sent on
    several lines are joined with a comma and a blank, as HTTP joins them.
    """

    __slots__ = ("_lines",)

    def __init__(self, lines: Sequence[tuple[bytes, bytes]]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> str:
        values = self.lines(name)
        if not values:
            raise KeyError(name)
        return ", ".join(values)

    def lines(self, name: str) -> list[str]:
        """The value of every line with this name, in the order sent."""
        wanted = name.lower().encode("latin-1", "replace")
        return [value.decode("latin-1") for line, value in self._lines if line == wanted]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(line.decode("latin-1") for line, _ in self._lines))

    def __len__(self) -> int:
        return len({line for line, _ in self._lines})

    def __repr__(self) -> str:
        # The values are left out: one of them may be a credential, and this ends up in logs.
        return f"Headers({', '.join(self)})"


@dataclass(slots=True)
class Request:
    """One request: its head, and its whole body once that has been read.

    `headers` is a mapping of text. The lines as they were sent are `raw_headers`: names are
    lower-case, as in ASGI, and a name may occur on several lines.
    """

    # In upper case: methods are case-sensitive, and many frameworks take them as if they were not.
    method: str
    # Decoded, with the prefix under which the application is mounted. Bytes that are no UTF-8 are
    # surrogates, so that two paths that differ in them stay two.
    path: str
    # The bytes after the question mark, without it, as sent.
    query: bytes
    # Not shown: among them are credentials.
    raw_headers: Sequence[tuple[bytes, bytes]] = field(repr=False)
    # Not shown, either: a log is no place for it.
    body: bytes = field(default=b"", repr=False)
    # What the server or framework calls its request: the ASGI scope, the WSGI environ, Django's
    # HttpRequest. For callables of the application; nothing in this package looks inside.
    host: Any = field(default=None, repr=False)
    # What was taken from the path: {"id": "7"} by a rule's pattern, {"id": 7} where the framework
    # has converted it.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    # Whether slashes at the end of the path, and double ones, tell two requests apart.
    has_exact_path: bool = False
    # What the body was found to say, by `bodies.content_of`, and the body that this is of.
    content: tuple[bytes, tuple[bytes, Any]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    # What `lines_by_name` found, and the lines that it looked at.
    _lines: dict[bytes, bytes] | None = field(default=None, init=False, repr=False, compare=False)
    _looked_at: object = field(default=None, init=False, repr=False, compare=False)

    @property
    def headers(self) -> Headers:
        """The headers as text, by name in any letter case."""
        return Headers(self.raw_headers)

    def lines_by_name(self) -> dict[bytes, bytes] | None:
        """The value of every line; None when a name has several, as very few requests have."""
        sent = self.raw_headers
        if self._looked_at is not sent:
            lines = dict(sent)
            self._lines = lines if len(lines) == len(sent) else None
            self._looked_at = sent
        return self._lines

    def header(self, name: bytes) -> bytes | None:
        """The value of the first line with this lower-case name; None without one."""
        for line_name, value in self.raw_headers:
            if line_name == name:
                return value
        return None

    def header_lines(self, name: bytes) -> list[bytes]:
        """The values of all lines with this lower-case name, in the order sent."""
        lines = self.lines_by_name()
        if lines is None:
            return [value for line_name, value in self.raw_headers if line_name == name]
        value = lines.get(name)
        return [] if value is None else [value]
