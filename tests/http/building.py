"""Requests for the tests of the HTTP layer."""

from __future__ import annotations

from retrysafe.http.request import Request

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


def request(
    body: bytes = b"",
    content_type: str | None = JSON,
    *,
    method: str = "POST",
    path: str = "/charges",
    query: bytes = b"",
    headers: tuple[tuple[bytes, bytes], ...] = (),
    parameters: dict[str, str] | None = None,
) -> Request:
    """A request with the content type in front of the other headers."""
    own = () if content_type is None else ((b"content-type", content_type.encode()),)
    return Request(
        method, path, query, (*own, *headers), body, host=None, parameters=parameters or {}
    )


def multipart(
    parts: list[tuple[list[tuple[str, str]], bytes]],
    boundary: str = "b0undary",
    *,
    subtype: str = "form-data",
    end: bytes = b"\r\n",
) -> Request:
    """A multipart request from the heads and contents of its parts."""
    pieces = [
        b"--%b\r\n%b\r\n%b\r\n"
        % (
            boundary.encode(),
            b"".join(f"{name}: {value}\r\n".encode() for name, value in head),
            content,
        )
        for head, content in parts
    ]
    body = b"".join(pieces) + b"--" + boundary.encode() + b"--" + end
    return request(body, f'multipart/{subtype}; boundary="{boundary}"')


def field(name: str, content: bytes, *more: tuple[str, str]) -> tuple[list[tuple[str, str]], bytes]:
    """A part of a form."""
    return [("Content-Disposition", f'form-data; name="{name}"'), *more], content
