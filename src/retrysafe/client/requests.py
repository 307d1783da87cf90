"""An adapter for requests: mount it on a session, and its requests are sent with a key."""

from __future__ import annotations

import io
import random as system_random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final
from urllib.parse import urlsplit

from retrysafe.client.budget import RetryBudget
from retrysafe.client.faults import is_certificate_refused
from retrysafe.client.flow import TRIES_EXTENSION, ClientSettings, Reply, Sending, Timing, deliver
from retrysafe.client.intents import KEY_HEADER
from retrysafe.client.replies import problem_body
from retrysafe.client.request_keys import (
    PREFER_HEADER,
    begin,
    is_read_at_once,
    prefer_of,
    takes_key,
)
from retrysafe.client.retry_policy import RetryPolicy
from retrysafe.client.timing import ThreadTiming
from retrysafe.runtime.drive import run_sync

try:
    import requests
    import urllib3
    from requests.adapters import HTTPAdapter
    from requests.utils import rewind_body
except ModuleNotFoundError as error:
    if error.name != "requests":
        raise
    raise ModuleNotFoundError(
        "retrysafe.client.requests needs requests: install retrysafe with its extra requests, from "
        "a clone with pip install '/path/to/clone[requests]'",
        name=error.name,
    ) from error

__all__ = ["RetryAdapter"]

# A response that breaks off in its middle is a ChunkedEncodingError, whatever its encoding.
_TRANSIENT: Final = (
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
)
_CHUNK_BYTES: Final = 64 * 1024


class RetryAdapter(HTTPAdapter):
    """Sends requests with a key, and again with the same key while that can help."""

    def __init__(
        self,
        *,
        policy: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        timing: Timing | None = None,
        random: Callable[[], float] = system_random.random,
        **options: Any,
    ) -> None:
        """`options` are those of `HTTPAdapter`, such as `pool_maxsize`.

        `budget` may be shared by several adapters. `timing` and `random` are for tests.
        """
        super().__init__(**options)
        self._settings = ClientSettings(policy, budget, timing or ThreadTiming(), random)

    def __getstate__(self) -> dict[str, Any]:
        # Sessions can be pickled, and what comes back must still retry.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**state, "_settings": self._settings}

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """The response to keep; raises what the last try raised when there is none."""
        options = (stream, timeout, verify, cert, proxies)
        settings = self._settings
        delivery = _begun(settings, request)
        if delivery is None:
            return super().send(request, *options)
        if not _is_replayable(request):
            limit_bytes = settings.policy.request_buffer_bytes
            delivery.is_repeatable = bool(limit_bytes) and _buffer(request, limit_bytes)
        wire = _Wire(super().send, request, options, settings, delivery)
        response = run_sync(deliver(wire, delivery, settings.timing))
        setattr(response, TRIES_EXTENSION, delivery.report())
        return response


def _begun(settings: ClientSettings, request: requests.PreparedRequest) -> Sending | None:
    """The request's delivery, with the key on the request.

    The key stays on the request object: a redirect that keeps the method keeps the key, and so
    does a caller who sends the same object again.
    """
    method = (request.method or "").upper()
    headers = request.headers
    header = _text(headers.get(KEY_HEADER))
    if header is not None and not takes_key(method):
        del headers[KEY_HEADER]
    delivery = begin(
        settings, method=method, path=urlsplit(request.url or "").path or "/", header=header
    )
    if header is None and delivery is not None and delivery.key is not None:
        headers[KEY_HEADER] = delivery.key
    prefer = prefer_of(settings, delivery, headers.get(PREFER_HEADER))
    if prefer is not None:
        headers[PREFER_HEADER] = prefer
    return delivery


def _text(value: str | bytes | None) -> str | None:
    return value.decode("latin-1") if isinstance(value, bytes) else value


class _Wire:
    __slots__ = (
        "_delivery",
        "_monotonic",
        "_options",
        "_request",
        "_response_limit_bytes",
        "_send",
        "_was_sent",
    )

    def __init__(
        self,
        send: Callable[..., requests.Response],
        request: requests.PreparedRequest,
        options: tuple[Any, ...],
        settings: ClientSettings,
        delivery: Sending,
    ) -> None:
        self._send = send
        self._request = request
        self._options = options
        self._response_limit_bytes = settings.policy.response_buffer_bytes
        self._monotonic = settings.timing.monotonic
        self._delivery = delivery
        self._was_sent = False

    async def send(self) -> Reply[requests.Response]:
        """Sends once; blocks."""
        if self._was_sent and not _is_plain(self._request.body):
            rewind_body(self._request)
        self._was_sent = True
        response = self._send(self._request, *self._options)
        try:
            if response.status_code < 200:
                # An early hint, which http.client takes for the answer. The answer itself is still
                # on its way, and must not be taken for that of the connection's next request.
                raise requests.exceptions.ConnectionError(
                    f"the server sent {response.status_code}, and no answer"
                )
            body = self._read(response)
        except BaseException:
            response.close()
            raise
        return Reply(response, response.status_code, response.headers, body)

    def _read(self, response: requests.Response) -> bytes | None:
        """The answer's problem; what is read for it, or to see that it is whole, stays bounded."""
        status, is_streamed = response.status_code, self._options[0]
        if status < 400 and not is_streamed:
            # The session would read the body anyway, only too late to try again.
            _ = response.content
            return None
        if is_streamed and not is_read_at_once(
            status, response.headers, self._response_limit_bytes
        ):
            return None
        raw = _read_raw(response, self._response_limit_bytes, self._is_over)
        return None if raw is None or status < 400 else problem_body(raw, response.headers)

    def _is_over(self) -> bool:
        """Whether a body that drips has used up the time; the session reads the rest, if at all."""
        return self._monotonic() >= self._delivery.ends_at

    async def discard(self, response: requests.Response) -> None:
        """Gives the connection back."""
        response.close()

    def is_transient(self, error: Exception) -> bool:
        """Whether the connection failed in a way that may not last."""
        return isinstance(error, _TRANSIENT) and not is_certificate_refused(error)

    @property
    def label(self) -> str:
        """Method and target, without the query, which may hold secrets."""
        target = urlsplit(self._request.url or "")
        return f"{self._request.method} {target.hostname}{target.path}"


class _Resumed(io.RawIOBase):
    """A body whose beginning was read already, as it came: that once more, then the rest."""

    def __init__(self, begun: bytes, rest: urllib3.HTTPResponse) -> None:
        super().__init__()
        self._begun = io.BytesIO(begun)
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._begun.read(len(buffer)) or _next(self._rest, len(buffer))
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._rest.close()
        # Its place in the pool, which the response in front of it knows nothing of.
        self._rest.release_conn()
        super().close()


def _read_raw(
    response: requests.Response, limit_bytes: int, is_over: Callable[[], bool]
) -> bytes | None:
    """The body as it came, still packed; None when it is over the limit, or the time is over.

    Either way the response can be read from its beginning. Packed, because a few bytes can stand
    for gigabytes, and unpacking is the caller's choice.
    """
    raw = response.raw
    begun = bytearray()
    try:
        while chunk := _next(raw, _CHUNK_BYTES):
            is_dripping = bool(begun)
            begun += chunk
            if len(begun) > limit_bytes or (is_dripping and is_over()):
                break
    except urllib3.exceptions.SSLError as error:
        raise requests.exceptions.SSLError(error) from error
    except urllib3.exceptions.ReadTimeoutError as error:
        raise requests.exceptions.ConnectionError(error) from error
    except urllib3.exceptions.ProtocolError as error:
        raise requests.exceptions.ChunkedEncodingError(error) from error
    response.raw = urllib3.HTTPResponse(
        io.BufferedReader(_Resumed(bytes(begun), raw)) if chunk else io.BytesIO(begun),
        headers=raw.headers,
        status=raw.status,
        reason=raw.reason,
        version=raw.version,
        preload_content=False,
        decode_content=False,
        # The session takes its cookies from it.
        original_response=raw._original_response,  # noqa: SLF001
        request_method=response.request.method,
    )
    return None if chunk else bytes(begun)


def _next(raw: urllib3.HTTPResponse, size_bytes: int) -> bytes:
    """What has come of a body, up to that size; empty at its end.

    `read` would wait until there is as much, for as long as the server drips.
    """
    return raw.read1(size_bytes, decode_content=False)


def _is_plain(body: object) -> bool:
    return body is None or isinstance(body, (bytes, bytearray, str))


def _is_replayable(request: requests.PreparedRequest) -> bool:
    """Whether a body can be sent again and will be the same; anything unknown cannot."""
    if _is_plain(request.body):
        return True
    # requests notes where a file began, or that it could not find out.
    return isinstance(getattr(request, "_body_position", None), int) and hasattr(
        request.body, "seek"
    )


def _buffer(request: requests.PreparedRequest, limit_bytes: int) -> bool:
    """Reads the body into memory; False when it is over the limit, and then it is sent once."""
    body: Any = request.body
    chunks: list[bytes] = []
    size_bytes = 0
    rest = _chunks(body)
    for chunk in rest:
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            request.body = chain(chunks, rest)  # type: ignore[assignment]
            return False
    request.body = b"".join(chunks)
    return True


def _chunks(body: Iterable[bytes | str]) -> Iterator[bytes]:
    for chunk in body:
        yield chunk.encode() if isinstance(chunk, str) else chunk
