"""The bodies of Django's requests, which are gone once somebody has read the form from them."""

from __future__ import annotations

import uuid
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured, RequestDataTooBig
from django.http.request import RawPostDataException

from retrysafe.http.request import Request

_MULTIPART: Final = "multipart/form-data"


def body_of(request: Any, asked: Request, limit_bytes: int) -> bytes | None:
    """The whole body, which stays readable; None past the limit, Django's own included.

    A form with files that was read already, as by the check against forgery, is put together again
    from its fields and files. Raises `ImproperlyConfigured` when there is nothing to put together.
    """
    try:
        body: bytes = request.body
    except RequestDataTooBig:
        return None
    except RawPostDataException:
        body = _put_together(request, asked)
    return body if len(body) <= limit_bytes else None


def has_raw_body(request: Any) -> bool:
    """Whether the body is as it was sent, and not put together again."""
    return hasattr(request, "_body")


def _put_together(request: Any, asked: Request) -> bytes:
    # Django reads every other kind of form from the body itself, and keeps that.
    if request.content_type != _MULTIPART or not (request.POST or request.FILES):
        # With an empty body in its place, any two requests would count as the same one.
        raise ImproperlyConfigured(
            "the body was read before the protected view was reached, so it cannot be compared: "
            "add retrysafe.contrib.django.middleware.RetrysafeMiddleware to MIDDLEWARE, or put "
            "idempotent above what reads it"
        )
    boundary = uuid.uuid4().hex
    parts: list[bytes] = []
    for name, values in request.POST.lists():
        parts += [_part(boundary, name, value.encode()) for value in values]
    for name, files in request.FILES.lists():
        for file in files:
            file.seek(0)
            parts.append(_part(boundary, name, file.read(), file=file.name, kind=file.content_type))
            file.seek(0)
    asked.raw_headers = [
        (b"content-type", f"{_MULTIPART}; boundary={boundary}".encode()),
        *(line for line in asked.raw_headers if line[0] != b"content-type"),
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def _part(
    boundary: str, name: str, content: bytes, *, file: str | None = None, kind: str | None = None
) -> bytes:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(name)}"'
    if file is not None:
        head += f'; filename="{_quoted(file)}"'
    if kind is not None:
        head += f"\r\nContent-Type: {kind}"
    return head.encode() + b"\r\n\r\n" + content + b"\r\n"


def _quoted(name: str) -> str:
    """A name between quotes, written as browsers write it."""
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
