"""Stored requests through an ASGI application, as if their clients had sent them again.

Owns the scope and the messages of such a request, and the lifespan of an application that has no
server. The claim is taken over first; the middleware of the route finds it in the scope, runs what
is inside it, and tells its response, which is the outcome. What the layers outside make of that
response is for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Self

from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.stop_iteration import raisable
from retrysafe.errors import InvalidInput
from retrysafe.http.asgi_io import send_response
from retrysafe.http.asgi_run import App, AppRun, Message, Receive, Scope, Send
from retrysafe.http.plan import Plan
from retrysafe.http.request import Request
from retrysafe.http.responses import Response
from retrysafe.http.resumption import RESUMED_NAME, Resumption, resumption_in
from retrysafe.http.routes import Route
from retrysafe.http.stored_request import StoredRequest
from retrysafe.runtime.async_calls import AsyncCalls

_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_logger = logging.getLogger("retrysafe")


class TaskResumption(Resumption):
    """A resumption on an event loop, where the route and the worker are two tasks."""

    __slots__ = ("_outcome", "_run", "_settled", "is_answered")

    def __init__(self, call: Call, request: StoredRequest, attempt: Attempt) -> None:
        super().__init__(call, request, attempt)
        self._outcome: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._settled = asyncio.Event()
        self._run: AppRun | None = None
        # Whether the route has answered; what the application raises after that is told by nobody.
        self.is_answered = False

    async def served(self, run: AppRun) -> Response:
        """The response of the run, when it is stored; raises what the application raises.

        A layer outside that loses patience leaves the run alone, as a client does that has gone.
        """
        completing = run.invoke(self.attempt)
        self._run = run
        completing.add_done_callback(self._complete)
        try:
            response = await asyncio.shield(completing)
        except asyncio.CancelledError:
            run.leave()
            raise
        self.is_answered = True
        await self._settled.wait()
        return response

    def _complete(self, completed: asyncio.Future[Response]) -> None:
        if completed.cancelled():
            # No ending: nobody knows how far it got.
            self._fail(self._refused("was cut off before its response was complete"))
        elif (error := completed.exception()) is not None:
            self._fail(error)
        elif not self._outcome.done():
            self._outcome.set_result(completed.result())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The one that the application runs in behind its protection, once there is one."""
        return [] if self._run is None or self._run.task is None else [self._run.task]

    async def outcome(self) -> Response:
        """What the route answered; raises what it raised, or `ResumedRequestRefused`."""
        return self.kept(await self._outcome)

    def settle(self) -> None:
        """The outcome is stored, or nothing is."""
        self._settled.set()
        self._outcome.cancel()

    def end(self, status: int, error: BaseException | None) -> None:
        """The application has ended; behind its protection it may go on."""
        if not self.is_taken:
            self._fail(self.unserved(status, error))
        elif self._run is None:
            self._fail(error or RuntimeError("the application ended before its route began"))

    def _fail(self, error: BaseException) -> None:
        if not self._outcome.done() and isinstance(error, Exception):
            self._outcome.set_exception(raisable(error))


async def resume(calls: AsyncCalls, call: Call, request: StoredRequest, app: App) -> Answer[Any]:
    """Takes the claim over and sends the request through the application.

    Raises as a call does, and `ResumedRequestRefused`. Returns when the application has ended, also
    with what it does after its response.
    """
    sending: list[tuple[TaskResumption, asyncio.Task[None]]] = []

    async def send(attempt: Attempt) -> Response:
        resumption = TaskResumption(call, request, attempt)
        task = asyncio.get_running_loop().create_task(_sent(app, resumption))
        sending.append((resumption, task))
        return await resumption.outcome()

    try:
        return await calls.answer_call(call, send)
    except asyncio.CancelledError:
        for resumption, task in sending:
            for each in (task, *resumption.tasks):
                each.cancel()
        raise
    finally:
        for resumption, task in sending:
            resumption.settle()
            await asyncio.wait((task, *resumption.tasks))


async def _sent(app: App, resumption: TaskResumption) -> None:
    """Sends the request, and drops what the application makes of the response."""
    status = 0
    ended = asyncio.Event()
    is_body_given = False

    async def receive() -> Message:
        nonlocal is_body_given
        if not is_body_given:
            is_body_given = True
            body = resumption.request.body
            return {"type": "http.request", "body": body, "more_body": False}
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            ended.set()

    raised: BaseException | None = None
    try:
        await app(scope_of(resumption), receive, send)
    except Exception as error:
        raised = error
        if resumption.is_answered:
            _logger.warning("a resumed request failed after its response", exc_info=error)
    finally:
        ended.set()
        resumption.end(status, raised)


def resumed_plan(
    route: Route, request: Request, prefix: str, outcome_of: Callable[[Any], Any]
) -> Plan | None:
    """The plan of a request that a worker has sent again; None for any other.

    Its body is the stored one, which is what the route saw when it first came.
    """
    resumption = resumption_in(request.host)
    if not isinstance(resumption, TaskResumption):
        return None
    request.body = resumption.request.body
    return resumption.plan(route, request, prefix, outcome_of)


async def serve(run: AppRun, scope: Scope, send: Send) -> None:
    """Runs such a request under its claim, and sends its response to the layers outside."""
    resumption = scope[RESUMED_NAME]
    try:
        response = await resumption.served(run)
    except Exception as error:
        if error is not run.error or run.response is None:
            raise
        response = run.response
    if response.is_streamed:
        run.leave()  # It is done, and has no reader.
        response = Response(response.status, [], b"")
    await send_response(send, response)
    await run.finish()


def scope_of(resumption: Resumption) -> Scope:
    """The scope of a request that is sent again."""
    request = resumption.request
    headers = [*request.headers, (b"content-length", b"%d" % len(request.body))]
    return {
        "type": "http",
        "asgi": dict(_ASGI),
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        # As servers decode it.
        "path": request.path.decode("utf-8", "replace"),
        "raw_path": request.raw_path.encode("latin-1"),
        "query_string": request.query,
        "root_path": request.root_path,
        "headers": headers,
        "client": None,
        "server": request.server,
        "state": {},
        RESUMED_NAME: resumption,
    }


class Lifespan:
    """An application without a server: started and stopped as servers do it, with its state.

    Raises `InvalidInput` when the application refuses to start.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._state: dict[str, Any] = {}
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request, which gets a copy of what the lifespan has left in its state."""
        scope["state"] = dict(self._state)
        await self._app(scope, receive, send)

    async def __aenter__(self) -> Self:
        """Starts the application; one that knows no lifespan needs none."""
        self._task = asyncio.get_running_loop().create_task(self._live())
        self._messages.put_nowait({"type": "lifespan.startup"})
        answer = await self._answers.get()
        if answer is not None and answer["type"] == "lifespan.startup.failed":
            await asyncio.wait((self._task,))
            raise InvalidInput(
                f"the application did not start: {answer.get('message') or 'it does not say why'}"
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops the application, and waits for that."""
        assert self._task is not None  # Entered before it is left.
        if not self._task.done():
            self._messages.put_nowait({"type": "lifespan.shutdown"})
            await asyncio.wait((self._task,))

    async def _live(self) -> None:
        scope: Scope = {"type": "lifespan", "asgi": dict(_ASGI), "state": self._state}
        try:
            await self._app(scope, self._messages.get, self._answers.put)
        except Exception as error:
            _logger.debug("the application has no lifespan, or failed in it", exc_info=error)
        finally:
            self._answers.put_nowait(None)
