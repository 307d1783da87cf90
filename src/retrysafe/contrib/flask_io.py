"""Requests as Flask has them, and responses as it takes them.

Owns the reading of bodies, so that the view can read them again, and what a response of Flask's is
in ours and back. It decides nothing about either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import chain
from typing import Any, Final

from flask import Response as FlaskResponse
from flask import current_app, request

from retrysafe.contrib.views import written_path
from retrysafe.errors import InvalidInput
from retrysafe.http.held_response import Held
from retrysafe.http.paths import names_in
from retrysafe.http.plan import Plan
from retrysafe.http.request import Request
from retrysafe.http.responses import Header, Response
from retrysafe.http.wsgi import request_of

_BODY_NAME: Final = "retrysafe.body"
_READ_BYTES: Final = 64 * 1024


def is_held(native: FlaskResponse, plan: Plan) -> bool:
    """Whether the whole response is in memory; a stream past its limits goes on as it comes."""
    # Files are sent past Python otherwise, and could not be read here.
    native.direct_passthrough = False
    if not native.is_streamed:
        return True
    source: Any = native.response
    held, pieces = Held(plan), native.iter_encoded()
    is_whole = all(map(held.take, pieces))
    close = getattr(source, "close", None)
    if close is not None:
        # What takes its place has no close of its own.
        native.call_on_close(close)
    native.response = [bytes(held.body)] if is_whole else chain([bytes(held.body)], pieces)
    return is_whole


def outcome_of(value: Any) -> Response:
    """The response that a view means by what it returns; for completing inside a transaction."""
    if type(value) is Response:
        return value
    native = current_app.make_response(value)
    return Response(native.status_code, headers_of(native), body_of(native))


def headers_of(native: FlaskResponse) -> list[Header]:
    """The header lines of a response."""
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in native.headers.items()
    ]


def body_of(native: FlaskResponse) -> bytes:
    """The body of a response."""
    native.direct_passthrough = False
    return native.get_data()


def with_headers(native: FlaskResponse, headers: Iterable[Header]) -> FlaskResponse:
    """The response with these lines beside its own."""
    for name, value in headers:
        native.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    return native


def native_of(response: Response) -> FlaskResponse:
    """The response as Flask sends it."""
    native = current_app.response_class(response.body, response.status)
    # Flask would call a response without a type HTML.
    native.headers.clear()
    return with_headers(native, response.headers)


def converted(path: str, taken: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a rule's path has taken from the request's; as Flask converts it, where both are alike.

    The names of the two are their own: {id} may be the order to one and the shop to the other.
    """
    route, made = request.url_rule, request.view_args or {}
    own, theirs = path.split("/"), written_path("" if route is None else route.rule).split("/")
    if len(own) != len(theirs):
        return taken
    alike = (part for part, other in zip(own, theirs, strict=True) if part == other)
    names = {name for part in alike for name in names_in(part)}
    return {**taken, **{name: made[name] for name in names.intersection(made)}}


def unread_request() -> Request:
    """The request, with its body unread."""
    asked = request_of(request.environ)
    asked.host = _plain_request()
    return asked


def _plain_request() -> Any:
    """Flask's request itself, and not the proxy that means another one in every thread."""
    proxy: Any = request
    return proxy._get_current_object()  # noqa: SLF001 — the proxy's documented way in.


def kept_body(limit_bytes: int) -> bytes | None:
    """The whole body, which stays readable in every way that Flask has; None past the limit."""
    environ = request.environ
    if _BODY_NAME not in environ:
        environ[_BODY_NAME] = _read_body(limit_bytes)
    body: bytes | None = environ[_BODY_NAME]
    return body


def _read_body(limit_bytes: int) -> bytes | None:
    length = request.content_length
    if length is not None and length > limit_bytes:
        return None
    read: dict[str, Any] = _plain_request().__dict__
    cached: bytes | None = read.get("_cached_data")
    if cached:
        # Somebody has called `get_data`, which keeps what it reads.
        return cached if len(cached) <= limit_bytes else None
    if "stream" in read and length != 0:
        # With an empty body in its place, any two requests would count as the same one.
        raise InvalidInput(
            "the body was read before the view was reached, so it cannot be compared: use "
            "functools.wraps in the decorators above idempotent, and it is kept in time"
        )
    chunks: list[bytes] = []
    left = limit_bytes + 1
    while left > 0:
        chunk = request.stream.read(min(left, _READ_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    if left <= 0:
        return None
    body = b"".join(chunks)
    request.environ["wsgi.input"] = BytesIO(body)
    if length is None:
        # A length that was declared stays: it tells whether all of the body has arrived.
        request.environ["CONTENT_LENGTH"] = str(len(body))
    # Made anew, from the input that was just put there.
    read.pop("stream", None)
    return body
