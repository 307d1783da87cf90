"""Responses of Django as they are stored, and streaming ones up to their limits.

Owns the pieces of a streaming response: it is held back as one, or goes on as it comes when it is
past its limits. Django itself collects a stream of the other world (an async one behind WSGI, a
plain one behind ASGI) to its end, so such a stream is turned into one of this world.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, Final, Self

from asgiref.sync import async_to_sync, sync_to_async
from django.http import HttpResponse

from retrysafe.http.held_response import Held, passes_at_once
from retrysafe.http.plan import Plan
from retrysafe.http.responses import Header, Response


def captured(
    native: Any, plan: Plan, render: Callable[[], Any], *, is_on_loop: bool
) -> tuple[Any, Response]:
    """What a view answered, in Django's words and in ours; the run of a thread.

    `is_on_loop` says that the server is one of ASGI, which runs the view in a thread.
    """
    try:
        if native.streaming:
            return _captured_stream(native, plan, is_on_loop=is_on_loop)
        return _captured_whole(native if _is_passing(native, plan) else render(), plan)
    except BaseException:
        discard(native)
        raise


def _captured_stream(native: Any, plan: Plan, *, is_on_loop: bool) -> tuple[Any, Response]:
    is_async = native.is_async
    if _is_passing(native, plan):
        if is_async is not is_on_loop:
            turned: Any = _on_a_loop if is_async else _in_threads
            native.streaming_content = turned(native.streaming_content)
        return native, _passing(native)
    held = Held(plan)
    if is_async and plan.route.rule.transaction is not None:
        # In the thread, and so on the connection, of the transaction. Past a limit it raises.
        async_to_sync(_gathered)(held, native.streaming_content)
        return _whole(native, held)
    pieces: Any = native.streaming_content
    if is_async:
        pieces = _on_a_loop(pieces)
        # Django closes a plain stream by itself.
        native._resource_closers.append(pieces.close)  # noqa: SLF001 — there is no other way.
    if all(map(held.take, pieces)):
        return _whole(native, held)
    rest = chain([bytes(held.body)], pieces)
    native.streaming_content = _in_threads(rest) if is_on_loop else rest
    return native, _passing(native)


async def captured_on_loop(
    native: Any, plan: Plan, render: Callable[[], Any]
) -> tuple[Any, Response]:
    """The same for a run on an event loop."""
    try:
        if native.streaming:
            return await _captured_stream_on_loop(native, plan)
        if not _is_passing(native, plan) and not getattr(native, "is_rendered", True):
            native = await sync_to_async(render)()
        return _captured_whole(native, plan)
    except BaseException:
        await discard_on_loop(native)
        raise


async def _captured_stream_on_loop(native: Any, plan: Plan) -> tuple[Any, Response]:
    if _is_passing(native, plan):
        if not native.is_async:
            native.streaming_content = _in_threads(native.streaming_content)
        return native, _passing(native)
    held, stream = Held(plan), native.streaming_content
    pieces: AsyncIterator[bytes] = stream if native.is_async else _in_threads(stream)
    if await _gathered(held, pieces):
        return _whole(native, held)
    native.streaming_content = _Continued(bytes(held.body), pieces, native._iterator)  # noqa: SLF001 — what the view has made.
    return native, _passing(native)


def _is_passing(native: Any, plan: Plan) -> bool:
    return passes_at_once(plan, _headers_of(native))


def _captured_whole(native: Any, plan: Plan) -> tuple[Any, Response]:
    return native, _passing(native) if _is_passing(native, plan) else _stored(native)


# A response that is not sent: what its stream holds open must not stay open.


def discard(native: Any) -> None:
    """Closes what a response holds open.

    Not by its own `close`, which tells all of Django that the request has ended.
    """
    closers = native._resource_closers  # noqa: SLF001 — there is no other way.
    while closers:
        with suppress(Exception):
            closers.pop(0)()


async def discard_on_loop(native: Any) -> None:
    """The same on an event loop, where a stream may have to be closed by awaiting that."""
    close = getattr(getattr(native, "_iterator", None), "aclose", None)
    if close is not None:
        with suppress(Exception):
            await close()
    await sync_to_async(discard)(native)


async def _gathered(held: Held, pieces: AsyncIterator[bytes]) -> bool:
    """Whether all pieces are held; else there may be more of them."""
    async for piece in pieces:
        # Also without a byte: an endless stream of such pieces is past a limit some time.
        if not held.take(piece):
            return False
    return True


class _Continued:
    """The rest of a stream whose first pieces were held; it is closed also if it never goes on."""

    __slots__ = ("_begun", "_pieces", "_source")

    def __init__(self, begun: bytes, pieces: AsyncIterator[bytes], source: Any) -> None:
        self._begun: bytes | None = begun
        self._pieces = pieces
        # What the pieces are taken from, which Django does not close with them.
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        begun, self._begun = self._begun, None
        return await anext(self._pieces) if begun is None else begun

    async def aclose(self) -> None:
        """For servers and for `discard_on_loop`."""
        for stream in (self._pieces, self._source):
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()


_END: Final = object()


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A plain stream on an event loop, piece by piece."""

    def following() -> Any:
        return next(pieces, _END)

    step = sync_to_async(following)
    while (piece := await step()) is not _END:
        yield piece


def _on_a_loop(pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
    """An async stream in a thread, piece by piece, on one loop from its beginning to its end.

    A loop for each piece would close, at its end, what the stream itself waits for.
    """
    loop = asyncio.new_event_loop()

    async def following() -> Any:
        return await anext(pieces, _END)

    try:
        while (piece := loop.run_until_complete(following())) is not _END:
            yield piece
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _headers_of(native: Any) -> list[Header]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in native.headers.items()
    ]


def _passing(native: Any) -> Response:
    return Response(native.status_code, _headers_of(native), b"", is_streamed=True)


def _stored(native: Any) -> Response:
    return Response(native.status_code, _headers_of(native), bytes(native.content))


def _whole(native: Any, held: Held) -> tuple[HttpResponse, Response]:
    """A streaming response in one piece."""
    whole = HttpResponse(bytes(held.body), status=native.status_code, reason=native.reason_phrase)
    whole.headers = native.headers
    whole.cookies = native.cookies
    # What the stream holds open is closed with the response, as before.
    whole._resource_closers += native._resource_closers  # noqa: SLF001 — there is no other way.
    return whole, _stored(whole)
