"""Transports for httpx, blocking and async, that wrap any other transport."""

from __future__ import annotations

import random as system_random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Final

from retrysafe.client.budget import RetryBudget
from retrysafe.client.faults import is_certificate_refused
from retrysafe.client.flow import (
    TRIES_EXTENSION,
    ClientSettings,
    Reply,
    Sending,
    Timing,
    deliver,
)
from retrysafe.client.intents import KEY_EXTENSION, KEY_HEADER
from retrysafe.client.replies import problem_body
from retrysafe.client.request_keys import (
    NOT_GIVEN,
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
    # anyio comes with httpx and sleeps on every event loop that httpx runs on.
    import anyio
    import httpx
except ModuleNotFoundError as error:
    if error.name not in {"anyio", "httpx"}:
        raise
    # Whichever of the two is looked for first: httpx is what the reader knows, and it brings both.
    raise ModuleNotFoundError(
        "retrysafe.client.httpx needs httpx: install retrysafe with its extra client, from a clone "
        "with pip install '/path/to/clone[client]'",
        name=error.name,
    ) from error

__all__ = ["AsyncRetryTransport", "RetryTransport"]

# The connection failed, or the server broke it off. Errors of the request itself, of a proxy's
# refusal or of the caller's own making would be the same again.
_TRANSIENT: Final = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)


class TaskTiming:
    """The system's clocks; `sleep` suspends the calling task."""

    monotonic = staticmethod(time.monotonic)
    now = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """Suspends."""
        await anyio.sleep(seconds)


class RetryTransport(httpx.BaseTransport):
    """Sends requests with a key, and again with the same key while that can help."""

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        timing: Timing | None = None,
        random: Callable[[], float] = system_random.random,
    ) -> None:
        """`transport` does the sending; without one, a plain `httpx.HTTPTransport`.

        `budget` may be shared by several transports. `timing` and `random` are for tests.
        """
        self._transport = httpx.HTTPTransport() if transport is None else transport
        self._settings = ClientSettings(policy, budget, timing or ThreadTiming(), random)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The response to keep; raises what the last try raised when there is none."""
        settings = self._settings
        delivery = _begun(settings, request)
        if delivery is None:
            return self._transport.handle_request(request)
        if not _is_replayable(request.stream):
            assert isinstance(request.stream, httpx.SyncByteStream)
            limit_bytes = settings.policy.request_buffer_bytes
            if limit_bytes:
                request.stream = _read(request.stream, limit_bytes)
            delivery.is_repeatable = isinstance(request.stream, httpx.ByteStream)
        wire = _Wire(self._transport, request, settings, delivery)
        response = run_sync(deliver(wire, delivery, settings.timing))
        response.extensions[TRIES_EXTENSION] = delivery.report()
        return response

    def close(self) -> None:
        """Closes the wrapped transport."""
        self._transport.close()

    def __enter__(self) -> RetryTransport:
        self._transport.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._transport.__exit__(kind, error, traceback)


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """`RetryTransport` for `httpx.AsyncClient`."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        policy: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        timing: Timing | None = None,
        random: Callable[[], float] = system_random.random,
    ) -> None:
        """Takes what `RetryTransport` takes."""
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport
        self._settings = ClientSettings(policy, budget, timing or TaskTiming(), random)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The response to keep; raises what the last try raised when there is none."""
        settings = self._settings
        delivery = _begun(settings, request)
        if delivery is None:
            return await self._transport.handle_async_request(request)
        if not _is_replayable(request.stream):
            assert isinstance(request.stream, httpx.AsyncByteStream)
            limit_bytes = settings.policy.request_buffer_bytes
            if limit_bytes:
                request.stream = await _async_read(request.stream, limit_bytes)
            delivery.is_repeatable = isinstance(request.stream, httpx.ByteStream)
        wire = _AsyncWire(self._transport, request, settings, delivery)
        response = await deliver(wire, delivery, settings.timing)
        response.extensions[TRIES_EXTENSION] = delivery.report()
        return response

    async def aclose(self) -> None:
        """Closes the wrapped transport."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncRetryTransport:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(kind, error, traceback)


def _begun(settings: ClientSettings, request: httpx.Request) -> Sending | None:
    """The request's delivery, with the key on the request.

    The key stays on the request object: a redirect that keeps the method keeps the key, and so
    does a caller who sends the same object again.
    """
    headers = request.headers
    header: str | None = headers.get(KEY_HEADER)
    if header is not None and not takes_key(request.method):
        del headers[KEY_HEADER]
    delivery = begin(
        settings,
        method=request.method,
        path=request.url.path,
        header=header,
        given=request.extensions.get(KEY_EXTENSION, NOT_GIVEN),
    )
    if header is None and delivery is not None and delivery.key is not None:
        headers[KEY_HEADER] = delivery.key
    prefer = prefer_of(settings, delivery, headers.get(PREFER_HEADER))
    if prefer is not None:
        headers[PREFER_HEADER] = prefer
    return delivery


class _OneWire:
    """A request and what is the same for both kinds of transport."""

    __slots__ = ("_delivery", "_monotonic", "_request", "_response_limit_bytes")

    def __init__(self, request: httpx.Request, settings: ClientSettings, delivery: Sending) -> None:
        self._request = request
        self._response_limit_bytes = settings.policy.response_buffer_bytes
        self._monotonic = settings.timing.monotonic
        self._delivery = delivery

    def is_transient(self, error: Exception) -> bool:
        """Whether the connection failed in a way that may not last."""
        return isinstance(error, _TRANSIENT) and not is_certificate_refused(error)

    @property
    def label(self) -> str:
        """Method and target, without the query, which may hold secrets."""
        url = self._request.url
        return f"{self._request.method} {url.host}{url.path}"

    def _is_read_at_once(self, response: httpx.Response) -> bool:
        return is_read_at_once(response.status_code, response.headers, self._response_limit_bytes)

    def _is_over(self) -> bool:
        """Whether a body that drips has used up the time; the caller reads the rest, if at all."""
        return self._monotonic() >= self._delivery.ends_at


class _Wire(_OneWire):
    __slots__ = ("_transport",)

    def __init__(
        self,
        transport: httpx.BaseTransport,
        request: httpx.Request,
        settings: ClientSettings,
        delivery: Sending,
    ) -> None:
        super().__init__(request, settings, delivery)
        self._transport = transport

    async def send(self) -> Reply[httpx.Response]:
        """Sends once; blocks."""
        response = self._transport.handle_request(self._request)
        if self._is_read_at_once(response):
            assert isinstance(response.stream, httpx.SyncByteStream)
            try:
                response.stream = _read(response.stream, self._response_limit_bytes, self._is_over)
            except BaseException:
                response.close()
                raise
        return _reply(response)

    async def discard(self, response: httpx.Response) -> None:
        """Gives the connection back."""
        response.close()


class _AsyncWire(_OneWire):
    __slots__ = ("_transport",)

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        request: httpx.Request,
        settings: ClientSettings,
        delivery: Sending,
    ) -> None:
        super().__init__(request, settings, delivery)
        self._transport = transport

    async def send(self) -> Reply[httpx.Response]:
        """Sends once."""
        response = await self._transport.handle_async_request(self._request)
        if self._is_read_at_once(response):
            assert isinstance(response.stream, httpx.AsyncByteStream)
            try:
                response.stream = await _async_read(
                    response.stream, self._response_limit_bytes, self._is_over
                )
            except BaseException:
                await response.aclose()
                raise
        return _reply(response)

    async def discard(self, response: httpx.Response) -> None:
        """Gives the connection back."""
        await response.aclose()


def _reply(response: httpx.Response) -> Reply[httpx.Response]:
    """The response with its problem, which is unpacked on the side.

    The caller's response must still be unread, so that it can be streamed.
    """
    status, stream = response.status_code, response.stream
    body = None
    if status >= 400 and isinstance(stream, httpx.ByteStream):
        body = problem_body(b"".join(stream), response.headers)
    return Reply(response, status, response.headers, body)


def _is_replayable(stream: object) -> bool:
    """Whether a body can be sent again and will be the same; anything unknown cannot."""
    if isinstance(stream, httpx.ByteStream):
        return True
    # A form with files; httpx rewinds those that can be, before it reads them.
    fields = getattr(stream, "fields", None)
    if not type(stream).__module__.startswith("httpx.") or not isinstance(fields, list):
        return False
    return all(_is_rewound(getattr(field, "file", b"")) for field in fields)


def _is_rewound(file: object) -> bool:
    if isinstance(file, (bytes, str)):
        return True
    seekable = getattr(file, "seekable", None)
    return callable(seekable) and bool(seekable())


class _Resumed(httpx.SyncByteStream):
    """A stream whose beginning was read already; it is given once more, then the rest."""

    def __init__(
        self, chunks: list[bytes], rest: Iterator[bytes], stream: httpx.SyncByteStream
    ) -> None:
        self._chunks = chunks
        self._rest = rest
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        while self._chunks:
            yield self._chunks.pop(0)
        yield from self._rest

    def close(self) -> None:
        self._stream.close()


class _AsyncResumed(httpx.AsyncByteStream):
    """`_Resumed` for tasks."""

    def __init__(
        self, chunks: list[bytes], rest: AsyncIterator[bytes], stream: httpx.AsyncByteStream
    ) -> None:
        self._chunks = chunks
        self._rest = rest
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._chunks:
            yield self._chunks.pop(0)
        async for chunk in self._rest:
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _never() -> bool:
    return False


def _read(
    stream: httpx.SyncByteStream, limit_bytes: int, is_over: Callable[[], bool] = _never
) -> httpx.SyncByteStream:
    """The same bytes, in memory if they are within the limit and come before the time is over."""
    chunks: list[bytes] = []
    size_bytes = 0
    rest = iter(stream)
    for chunk in rest:
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > limit_bytes or (len(chunks) > 1 and is_over()):
            return _Resumed(chunks, rest, stream)
    stream.close()
    return httpx.ByteStream(b"".join(chunks))


async def _async_read(
    stream: httpx.AsyncByteStream, limit_bytes: int, is_over: Callable[[], bool] = _never
) -> httpx.AsyncByteStream:
    """`_read` for tasks."""
    chunks: list[bytes] = []
    size_bytes = 0
    rest = stream.__aiter__()
    async for chunk in rest:
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > limit_bytes or (len(chunks) > 1 and is_over()):
            return _AsyncResumed(chunks, rest, stream)
    await stream.aclose()
    return httpx.ByteStream(b"".join(chunks))
