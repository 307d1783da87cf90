"""One run of an ASGI application for a protected request, apart from the client's connection.

Owns what the application is given for `receive` and `send`, and when its response is complete. It
must not know keys or stores; who runs it decides what becomes of the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final

from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.permits import Permits
from retrysafe.core.stop_iteration import raisable
from retrysafe.errors import ClaimLost
from retrysafe.http.answers import UNPROTECTED
from retrysafe.http.held_response import Held, is_from_stream, passes_at_once
from retrysafe.http.plan import Plan
from retrysafe.http.request import PROTECTED_NAME
from retrysafe.http.responses import Response
from retrysafe.http.router_marks import can_tell, is_unserved

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
# Where integrations note an exception in the scope that their framework makes a response of.
ERROR_NAME: Final = "retrysafe.error"
# What integrations add to the start of a response that they found to be past its limits.
PASSING_NAME: Final = "retrysafe.passing"
# An exception climbs out of nested middlewares in a few turns of the loop for each of them. Only a
# response in pieces, with background tasks after it, waits for as many turns: 0.3 ms.
_TURNS: Final = 64
_LISTENED_MESSAGES: Final = 8
_DOUBT: Final = "the application raised right after its response, which may have been cut short"
_NO_HEADERS: Final[list[tuple[bytes, bytes]]] = []
_logger = logging.getLogger("retrysafe")


class _NotHeld(Exception):
    """The claim was lost before the application began."""

    def __init__(self, lost: ClaimLost) -> None:
        super().__init__(str(lost))
        self.lost = lost


async def _hold(attempt: Attempt) -> None:
    try:
        await attempt.hold()
    except ClaimLost as error:
        raise _NotHeld(error) from error


class AppRun:
    """One run of the application: what it is given, and what it answers."""

    __slots__ = (
        "_app",
        "_can_tell_route",
        "_complete",
        "_gate",
        "_headers",
        "_held",
        "_is_body_given",
        "_is_ended",
        "_is_gone",
        "_late_error",
        "_news",
        "_passing",
        "_receive",
        "_runs",
        "_scope",
        "_send",
        "_status",
        "_timer",
        "answering",
        "background",
        "error",
        "is_left",
        "is_over",
        "is_passing",
        "loop",
        "plan",
        "response",
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
        self._held: Held | None = None
        # Lets it through at its time limit, in a task of its own.
        self._timer: asyncio.TimerHandle | None = None
        self._passing: asyncio.Task[None] | None = None
        self._is_body_given = False
        # Whether the application has sent the last piece of its response.
        self._is_ended = False
        # Whether the response is sent as it comes, and whether there is anybody to send it to.
        self.is_passing = False
        self._is_gone = False
        # Whether the scope is going to say if the application has found an endpoint.
        self._can_tell_route = False
        self.is_left = False
        # Opens when the response that passes is remembered as done, and not a byte earlier.
        self._gate: asyncio.Future[None] | None = None
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
        self.background: Permits | None = None
        self.answering: asyncio.Task[None] | None = None
        # Where all of this runs. Asking for it is a system call before Python 3.12.
        self.loop = asyncio.get_running_loop()

    def invoke(self, attempt: Attempt | AtomicAttempt[Any] | None) -> asyncio.Future[Response]:
        """Starts the application; the future has its response as soon as that is complete.

        Without an attempt it is a run without a claim.
        """
        scope = self._scope
        # The same scope, not a copy: middlewares around us read what routers write into it.
        scope.setdefault("state", {})["idempotency"] = attempt
        request = self.plan.request
        if self.plan.route.is_beside:
            self._can_tell_route = can_tell(scope)
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
        self.task = loop.create_task(self._serve(attempt))
        if self.background is not None:
            self.task.add_done_callback(self._end_background)
        return complete

    def _end_background(self, _: asyncio.Task[None]) -> None:
        if self.background is not None:
            self.background.leave(self)

    async def _serve(self, attempt: Attempt | AtomicAttempt[Any] | None) -> None:
        """Runs the application to its end, which may come long after its response."""
        complete = self._complete
        assert complete is not None
        try:
            if isinstance(attempt, Attempt) and attempt.is_lost:
                # The process stood still, or the loop was busy, until this task got its turn.
                await _hold(attempt)
            await self._app(self._scope, self.receive, self.capture)
            if not self._is_ended and not (self.is_passing and self._is_gone):
                raise RuntimeError("the application ended before its response was complete")
            if not complete.done():
                self._finish_held()
        except _NotHeld as error:
            # Not the application's own: it was not called.
            complete.set_exception(error.lost)
        except Exception as error:
            self._fail(error, complete)
        except BaseException:
            complete.cancel()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            # None answers for a resumed request: its worker waits for this task.
            if self._runs and (self.answering is None or self.answering.done()):
                self._runs.discard(self)
        self.is_over = self._late_error is None

    def _fail(self, error: Exception, complete: asyncio.Future[Response]) -> None:
        if not complete.done():
            if self._is_ended and not is_from_stream(error):
                # Its last piece is there. Nobody can tell whether what raised comes after it, or
                # has cut it short under a middleware that ends a response all the same. So it is
                # done, and is not taken for whole.
                self._late_error = error
                self._finish_held(_DOUBT)
            else:
                self.error = error = raisable(error)
                complete.set_exception(error)
        elif not (self.is_passing and self._is_gone):
            # The operation is done and stays done; this is the server's to report.
            self._late_error = error
        if self._late_error is not None and self.is_left:
            _logger.error("a protected request failed after its response", exc_info=error)

    # What the application calls.

    async def receive(self) -> Message:
        """The whole body first; then nothing until the response has ended, or its reader has."""
        if not self._is_body_given:
            self._is_body_given = True
            return {"type": "http.request", "body": self.plan.request.body, "more_body": False}
        while not self._is_ended and not (self.is_passing and self._is_gone):
            if self._news is None:
                self._news = self.loop.create_future()
            await asyncio.shield(self._news)
        return {"type": "http.disconnect"}

    async def capture(self, message: Message) -> None:
        """Keeps the response back until it is complete, or passes a stream on."""
        kind = message["type"]
        if kind == "http.response.body":
            if not self._status or self._is_ended:
                raise RuntimeError("the application sent a body outside of its response")
            is_last = not message.get("more_body", False)
            if self._passing is not None:
                await self._passing  # What was held back comes first.
            if self.is_passing:
                if is_last:
                    self._end()
                await self._pass_on(message)
            elif is_last and self._held is None:
                self._end()
                self._finish_response(bytes(message.get("body", b"")))
            else:
                await self._hold(message.get("body", b""), is_last)
        elif kind == "http.response.start":
            if self._status:
                raise RuntimeError("the application started its response twice")
            self._status = message["status"]
            self._headers = list(message.get("headers", ()))
            if passes_at_once(self.plan, self._headers) or PASSING_NAME in message:
                await self._begin_passing()
        elif kind != "http.response.trailers" and not self._is_gone:
            await self._send(message)

    async def _hold(self, piece: bytes, is_last: bool) -> None:
        """Takes a piece of a response that is held back."""
        held = self._held
        if held is None:
            held = self._held = Held(self.plan)
            if held.limit_seconds is not None:
                self._timer = self.loop.call_later(held.limit_seconds, self._end_silence)
        if is_last:
            held.body += piece
            self._end()
            # An application that has met an error may end its response all the same, and raise
            # right after: a few turns of the loop later at the most, and then it is not done.
            self._wait_for_the_end(_TURNS)
            return
        try:
            if held.take(piece):
                return
        except RuntimeError as error:
            if self._complete is not None and not self._complete.done():
                # Also where the application catches what its send raises.
                self.error = error
                self._complete.set_exception(error)
            raise
        await self._pass_held(held)

    async def _pass_held(self, held: Held) -> None:
        self._held = None
        await self._begin_passing()
        await self._pass_on(
            {"type": "http.response.body", "body": bytes(held.body), "more_body": True}
        )

    def _end_silence(self) -> None:
        """Called at the time limit: what is held back is not kept for a piece that never comes."""
        if self._held is not None and not self._is_ended:
            self._passing = self.loop.create_task(self._pass_in_silence(self._held))

    async def _pass_in_silence(self, held: Held) -> None:
        if self._complete is None or self._complete.done():
            return  # The application has failed before this task got its turn.
        with suppress(OSError):  # The client has gone, which the next piece is told.
            await self._pass_held(held)

    def _wait_for_the_end(self, turns: int) -> None:
        if self._complete is None or self._complete.done():
            return
        if turns:
            self.loop.call_soon(self._wait_for_the_end, turns - 1)
        else:
            self._finish_held()

    def _finish_held(self, doubt: str = "") -> None:
        held = self._held
        assert held is not None  # What came in one piece was complete at once.
        self._held = None
        self._finish_response(bytes(held.body), doubt)

    def _finish_response(self, body: bytes, doubt: str = "") -> None:
        response = Response(self._status, self._headers, body, self.is_passing, doubt)
        if self._can_tell_route:
            response.is_unserved = is_unserved(self._scope)
        self.response = response
        complete = self._complete
        assert complete is not None
        if not complete.done():
            error = self._scope.get(ERROR_NAME)
            if error is None or self._status < 500:
                complete.set_result(response)
            else:
                # How the attempt ended is for the policy to say; the client gets this response.
                self.error = error = raisable(error)
                complete.set_exception(error)

    def _end(self) -> None:
        self._is_ended = True
        if self._news is not None:
            self._wake()

    # A response that is sent as it comes.

    async def _begin_passing(self) -> None:
        """Has the response remembered as done, and begins to send it once it is.

        A crash from here on must not run the operation again: its client may have seen a part.
        """
        self.is_passing = True
        self._gate = self.loop.create_future()
        self._finish_response(b"")
        self._wake()
        if not self._is_gone:
            await asyncio.shield(self._gate)
        headers = self._headers
        if self.plan.is_unprotected:
            headers = [*headers, UNPROTECTED]
        await self._pass_on(
            {"type": "http.response.start", "status": self._status, "headers": headers}
        )

    async def _pass_on(self, message: Message) -> None:
        if self._is_gone:
            raise OSError("the client has gone")
        try:
            await self._send(message)
        except OSError:
            self._is_gone = True
            raise
        # Some servers drop what is sent to nobody without a pause. An application that sends all
        # the time would then hold the loop, which could not even hear that its client has gone.
        await asyncio.sleep(0)

    async def pass_through(self) -> None:
        """Lets a response through that is remembered as done, to its end or that of its client.

        Raises what the application raises.
        """
        self._open()
        listener = self.loop.create_task(self._listen())
        try:
            await self.finish()
        finally:
            listener.cancel()
            if self._passing is not None:
                self._passing.cancel()  # An application that failed has sent its last.

    async def _listen(self) -> None:
        """Tells the application that its client has left; it may never ask, and send for ever."""
        try:
            # Some servers say more than once that the body has ended.
            for _ in range(_LISTENED_MESSAGES):
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    break
            else:
                return
        except Exception:
            _logger.debug("a server failed to tell whether its client is there", exc_info=True)
        self._is_gone = True
        self._wake()

    def abandon(self) -> None:
        """Another answer is sent in place of a response that was about to pass."""
        if self.is_passing:
            self._is_gone = True
            self._open()
            self._wake()

    def _open(self) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)

    # Its end.

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
        self.is_left = True
        self._is_gone = True
        self.abandon()
        if self.is_passing and not self._is_ended and self.task is not None:
            # Nobody reads it, and it is remembered as done: it ends as it would without us.
            self.task.cancel()
        if any(task is not None and not task.done() for task in (self.answering, self.task)):
            self._runs.add(self)

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
