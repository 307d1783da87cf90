"""One run of an ASGI application for a protected request, apart from the client's connection.

Owns what the application is given for `receive` and `send`, and when its response is complete. It
must not know keys or stores; who runs it decides what becomes of the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from retrysafe.core.atomic_lead import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.places import Places
from retrysafe.http.exchange import Plan
from retrysafe.http.request import PROTECTED_NAME
from retrysafe.http.responses import Response, is_event_stream
from retrysafe.http.rules import Streaming

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Ways to send a body past us. An application that does not see them sends it the plain way.
_HIDDEN_EXTENSIONS: Final = (
    "http.response.pathsend",
    "http.response.zerocopysend",
    "http.response.trailers",
)
# What servers put into a path in place of bytes that are no UTF-8.
REPLACED: Final = "\ufffd"
# Looked up once: members of an enum are dear to look up on every call.
_PASS: Final = Streaming.PASS
# Where integrations note an exception in the scope that their framework makes a response of.
ERROR_NAME: Final = "retrysafe.error"
_NO_HEADERS: Final[list[tuple[bytes, bytes]]] = []
_logger = logging.getLogger("retrysafe")


def is_below(path: str, root: str) -> bool:
    """Whether the path has the mount in front; `/payments` does not lie below `/pay`."""
    root = root.rstrip("/")
    return path == root or path.startswith(f"{root}/")


def exact_path(scope: Scope, path: str) -> str:
    """The path with the bytes that a server has replaced because they are no UTF-8.

    Replaced, two paths would count as one request. A server that does not give the raw path keeps
    the two apart from nobody: the application sees one path as well.
    """
    raw: bytes | None = scope.get("raw_path")
    if REPLACED not in path or not raw:
        return path
    return unquote_to_bytes(raw.partition(b"?")[0]).decode("utf-8", "surrogateescape")


class AppRun:
    """One run of the application: what it is given, and what it answers."""

    __slots__ = (
        "_app",
        "_chunks",
        "_complete",
        "_end",
        "_headers",
        "_is_body_given",
        "_is_gone",
        "_late_error",
        "_news",
        "_receive",
        "_runs",
        "_scope",
        "_send",
        "_status",
        "background",
        "error",
        "is_left",
        "is_over",
        "is_passing",
        "loop",
        "plan",
        "response",
        "settling",
        "started",
        "task",
    )

    def __init__(
        self,
        app: App,
        runs: set[AppRun],
        plan: Plan,
        scope: Scope,
        receive: Receive,
        send: Send,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._app = app
        # Where a run is held whose client has gone; the loop itself holds tasks weakly.
        self._runs = runs
        self.plan = plan
        self._scope = scope
        self._receive = receive
        self._send = send
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = _NO_HEADERS
        # The body of a response that comes in pieces; nearly all come in one.
        self._chunks: list[bytes] | None = None
        self._end: Message | None = None
        self._is_body_given = False
        # Whether the response is sent as it comes, and whether there is anybody to send it to.
        self.is_passing = False
        self._is_gone = False
        self.is_left = False
        # Whether the application has ended, with nothing to tell.
        self.is_over = False
        self._complete: asyncio.Future[Response] | None = None
        self._news: asyncio.Future[None] | None = None
        self.response: Response | None = None
        # What the application raised: before its response was complete, and after.
        self.error: Exception | None = None
        self._late_error: Exception | None = None
        # The task that the application runs in, and the one that stores its response.
        self.task: asyncio.Task[None] | None = None
        self.started: asyncio.Future[None] | None = None
        # Where it has a place for as long as the application runs, if it may go on behind a 202.
        self.background: Places | None = None
        self.settling: asyncio.Task[None] | None = None
        # Where all of this runs. Asking for it is a system call before Python 3.12.
        self.loop: asyncio.AbstractEventLoop = loop

    def invoke(self, attempt: Attempt | AtomicAttempt) -> asyncio.Future[Response]:
        """Starts the application; the future has its response as soon as that is complete."""
        scope = self._scope
        # The same scope, not a copy: middlewares around us read what routers write into it.
        scope.setdefault("state", {})["idempotency"] = attempt
        request = self.plan.request
        scope[PROTECTED_NAME] = (request.method, request.path)
        extensions = scope.get("extensions")
        if extensions and not extensions.keys().isdisjoint(_HIDDEN_EXTENSIONS):
            scope["extensions"] = {
                name: value for name, value in extensions.items() if name not in _HIDDEN_EXTENSIONS
            }
        if self.started is not None:
            self.started.set_result(None)
        loop = self.loop
        complete = self._complete = loop.create_future()
        # A task of its own: the response is stored and sent while background tasks still run.
        self.task = loop.create_task(self._serve())
        if self.background is not None:
            self.task.add_done_callback(self._end_background)
        return complete

    def _end_background(self, _: asyncio.Task[None]) -> None:
        if self.background is not None:
            self.background.leave(self)

    async def _serve(self) -> None:
        """Runs the application to its end, which may come long after its response."""
        complete = self._complete
        assert complete is not None
        try:
            await self._app(self._scope, self.receive, self.capture)
            if not complete.done() and not (self.is_passing and self._is_gone):
                raise RuntimeError("the application ended before its response was complete")
        except Exception as error:
            self._fail(error, complete)
        except BaseException:
            complete.cancel()
            raise
        finally:
            if self._runs and self.settling is not None and self.settling.done():
                self._runs.discard(self)
        self.is_over = self._late_error is None
        if not complete.done():
            # The stream had no reader any more, or broke off. It is done from its first byte: its
            # client has seen that, and a second run would do the work again.
            self.response = Response(self._status, self._headers, b"", is_streamed=True)
            complete.set_result(self.response)

    def _fail(self, error: Exception, complete: asyncio.Future[Response]) -> None:
        if not complete.done() and not self.is_passing:
            self.error = error
            complete.set_exception(error)
        elif complete.done() or not self._is_gone:
            # The operation is done and stays done; this is the server's to report.
            self._late_error = error
            if self.is_left:
                _logger.error("a protected request failed after its response", exc_info=error)

    # What the application calls.

    async def receive(self) -> Message:
        """The whole body first; then nothing until the response is complete."""
        if not self._is_body_given:
            self._is_body_given = True
            return {"type": "http.request", "body": self.plan.request.body, "more_body": False}
        complete = self._complete
        assert complete is not None
        while not complete.done():
            if self.is_passing:
                if self._is_gone:
                    break
                message = await self._receive()
                self._is_gone = message["type"] == "http.disconnect"
                return message
            if self._news is None:
                self._news = self.loop.create_future()
            await asyncio.shield(self._news)
        return {"type": "http.disconnect"}

    async def capture(self, message: Message) -> None:
        """Keeps the response back until it is complete, or passes a stream on."""
        kind = message["type"]
        if kind == "http.response.body":
            if not self._status or self.response is not None:
                raise RuntimeError("the application sent a body outside of its response")
            is_last = not message.get("more_body", False)
            if not self.is_passing:
                if is_last and self._chunks is None:
                    self._finish_response(bytes(message.get("body", b"")))
                else:
                    self._take_chunk(message.get("body", b""), is_last)
            elif is_last:
                # Kept back until the stream is remembered as done. With its bytes: a client that
                # knows the length takes them for the end.
                self._end = message
                self._finish_response(b"")
            else:
                await self._pass_on(message)
        elif kind == "http.response.start":
            if self._status:
                raise RuntimeError("the application started its response twice")
            self._status = message["status"]
            self._headers = list(message.get("headers", ()))
            if self.plan.route.rule.streaming is _PASS or is_event_stream(self._headers):
                self.is_passing = True
                self._wake()
                await self._pass_on(message)
        elif kind != "http.response.trailers" and not self._is_gone:
            await self._send(message)

    def _take_chunk(self, chunk: bytes, is_last: bool) -> None:
        if self._chunks is None:
            self._chunks = []
        self._chunks.append(chunk)
        if is_last:
            self._finish_response(b"".join(self._chunks))

    def _finish_response(self, body: bytes) -> None:
        response = Response(self._status, self._headers, body, self.is_passing)
        self.response = response
        complete = self._complete
        assert complete is not None
        if not complete.done():
            error = self._scope.get(ERROR_NAME)
            if error is None or self._status < 500:
                complete.set_result(response)
            else:
                # How the attempt ended is for the policy to say; the client gets this response.
                self.error = error
                complete.set_exception(error)
        if self._news is not None:
            self._wake()

    async def _pass_on(self, message: Message) -> None:
        if self._is_gone:
            raise OSError("the client has gone")
        try:
            await self._send(message)
        except OSError:
            self._is_gone = True
            raise

    async def end_stream(self) -> None:
        """Sends the end of a stream, unless there is nobody to send it to."""
        if not self._is_gone and self._end is not None:
            await self._send(self._end)

    async def finish(self) -> None:
        """Waits for what the application does after its response; raises what that raises."""
        task = self.task
        if task is None:
            return
        if not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError:
                self.leave()
                raise
        if self._late_error is not None:
            raise self._late_error

    def leave(self) -> None:
        """The connection is no longer ours: whoever sends or listens hears that it is gone."""
        self._is_gone = True
        self.is_left = True
        if any(task is not None and not task.done() for task in (self.settling, self.task)):
            self._runs.add(self)

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
