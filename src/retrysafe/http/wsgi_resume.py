"""Stored requests through a WSGI application, as if their clients had sent them again.

Owns the environ of such a request. All of it happens in the worker's thread: the claim is taken
over, the application runs, the protection of the route finds the claim in the environ, runs what is
inside it and notes its response, which is the outcome. What the layers outside make of it is for
nobody.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any

from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.stop_iteration import raisable
from retrysafe.http.plan import Plan
from retrysafe.http.request import Request
from retrysafe.http.responses import Response
from retrysafe.http.resumption import RESUMED_NAME, Resumption, resumption_in
from retrysafe.http.routes import Route
from retrysafe.http.stored_request import StoredRequest, place_of
from retrysafe.http.wsgi_run import App, Environ, StartResponse
from retrysafe.runtime.calls import Calls
from retrysafe.runtime.drive import run_sync

_logger = logging.getLogger("retrysafe")


class ThreadResumption(Resumption):
    """A resumption whose request is served by the worker's own thread."""

    __slots__ = ("error", "response")

    def __init__(self, call: Call, request: StoredRequest, attempt: Attempt) -> None:
        super().__init__(call, request, attempt)
        self.response: Response | None = None
        self.error: BaseException | None = None

    def served(self, invoke: Callable[[Attempt], Response]) -> Response:
        """The response of the run, for the layers outside; raises what the application raises."""
        try:
            if self.attempt.is_lost:
                # The process stood still, or the layers outside took long.
                run_sync(self.attempt.hold())
            self.response = invoke(self.attempt)
        except BaseException as error:
            self.error = error
            raise
        if self.response.is_streamed:
            # It is done, and has no reader.
            return Response(self.response.status, [], b"")
        return self.response


def resumed_plan(
    route: Route, request: Request, prefix: str, outcome_of: Callable[[Any], Any]
) -> Plan | None:
    """The plan of a request that a worker has sent again; None for any other."""
    resumption = resumption_in(place_of(request))
    if not isinstance(resumption, ThreadResumption):
        return None
    plan = resumption.plan(route, request, prefix, outcome_of)
    if plan is not None:
        plan.resumption = resumption
    return plan


async def resume(calls: Calls, call: Call, request: StoredRequest, app: App) -> Answer[Any]:
    """Takes the claim over and sends the request through the application.

    Raises as a call does, and `ResumedRequestRefused`. It blocks; that it is awaited is for the
    worker, whose flows are the same on an event loop.
    """

    def send(attempt: Attempt) -> Response:
        resumption = ThreadResumption(call, request, attempt)
        status, raised = _sent(app, resumption)
        if resumption.error is not None:
            raise resumption.error
        if resumption.response is not None:
            if raised is not None:
                _logger.warning("a resumed request failed after its response", exc_info=raised)
            return resumption.kept(resumption.response)
        raise resumption.unserved(status, raised)

    return calls.answer_call(call, send)


def _sent(app: App, resumption: Resumption) -> tuple[int, Exception | None]:
    """Sends the request; gives the status of the response, and what the application raised."""
    statuses = [0]

    def start_response(status: str, _headers: Any, _exc_info: Any = None) -> Callable[..., None]:
        statuses.append(int(status[:3]))
        return lambda _piece: None

    try:
        _drained(app, environ_of(resumption), start_response)
    except Exception as error:
        return statuses[-1], raisable(error)
    return statuses[-1], None


def _drained(app: App, environ: Environ, start_response: StartResponse) -> None:
    result = app(environ, start_response)
    try:
        for _ in result:
            pass
    finally:
        close = getattr(result, "close", None)
        if close is not None:
            close()


def environ_of(resumption: Resumption) -> Environ:
    """The environ of a request that is sent again."""
    request = resumption.request
    path, root = request.path, request.root_path.rstrip("/").encode()
    if root and (path == root or path.startswith(root + b"/")):
        path = path[len(root) :]
    name, port = request.server
    environ: Environ = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": root.decode("latin-1"),
        "PATH_INFO": path.decode("latin-1"),
        "QUERY_STRING": request.query.decode("latin-1"),
        "CONTENT_LENGTH": str(len(request.body)),
        "SERVER_NAME": name,
        "SERVER_PORT": str(port),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": request.scheme,
        "wsgi.input": BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        RESUMED_NAME: resumption,
    }
    for line, value in request.headers:
        upper = line.decode("latin-1").upper().replace("-", "_")
        key = upper if upper == "CONTENT_TYPE" else f"HTTP_{upper}"
        text = value.decode("latin-1")
        # Lines of one name are one value in an environ.
        environ[key] = f"{environ[key]},{text}" if key in environ else text
    return environ
