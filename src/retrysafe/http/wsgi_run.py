"""One run of a WSGI application for a protected request, in the server's own thread.

Owns what the application is given for `start_response`, and where its response has to be passed on.
It must not know keys or stores; who runs it decides what becomes of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Final

from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.http.answers import UNPROTECTED
from retrysafe.http.held_response import Held, passes_at_once
from retrysafe.http.plan import Plan
from retrysafe.http.request import PROTECTED_NAME
from retrysafe.http.responses import Header, Response
from retrysafe.http.router_marks import can_tell, is_unserved

Environ = dict[str, Any]
Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]
App = Callable[[Environ, StartResponse], Iterable[bytes]]

# Where the application finds its attempt, beside `current_attempt()`.
ATTEMPT_NAME: Final = "retrysafe.attempt"


def text_header(header: Header) -> tuple[str, str]:
    """A header line as WSGI has it."""
    return header[0].decode("latin-1"), header[1].decode("latin-1")


class WsgiRun:
    """One run of the application: what it is given, and what it answers."""

    __slots__ = (
        "_app",
        "_can_tell_route",
        "_environ",
        "_headers",
        "_held",
        "_is_gone",
        "_is_unserved",
        "_lines",
        "_passes_at_once",
        "_pieces",
        "_plan",
        "_result",
        "_start_response",
        "_status",
        "_write",
        "error",
        "has_begun",
        "is_passing",
        "late_error",
        "on_begin",
        "response",
    )

    def __init__(
        self, app: App, plan: Plan, environ: Environ, start_response: StartResponse
    ) -> None:
        self._app = app
        self._plan = plan
        self._environ = environ
        self._start_response = start_response
        self._status = ""
        self._headers: list[tuple[str, str]] = []
        self._lines: list[Header] = []
        self._passes_at_once = False
        self._held: Held | None = None
        # What the application has returned, while there is more of it to come.
        self._result: Iterable[bytes] | None = None
        self._pieces: Iterable[bytes] = ()
        # The server's own way to write, for an application that writes by itself.
        self._write: Write | None = None
        self._is_gone = False
        # Whether the environ is going to say if the application has found an endpoint, and did.
        self._can_tell_route = False
        self._is_unserved = False
        self.has_begun = False
        # Told when the application is about to be called, under its claim.
        self.on_begin: Callable[[], None] | None = None
        self.is_passing = False
        self.response: Response | None = None
        # What the application raised: before its response began to be sent, and after.
        self.error: BaseException | None = None
        self.late_error: Exception | None = None

    def invoke(self, attempt: Attempt | AtomicAttempt[Any] | None) -> Response:
        """Runs the application to the end of its response, or to where it has to be passed on.

        Without an attempt it is a run without a claim.
        """
        self.has_begun = True
        if self.on_begin is not None and attempt is not None:
            self.on_begin()
        environ, request = self._environ, self._plan.request
        environ[ATTEMPT_NAME] = attempt
        environ[PROTECTED_NAME] = (request.method, request.path)
        self._can_tell_route = self._plan.route.is_beside and can_tell(environ)
        is_whole = True
        try:
            is_whole = self._collect()
        except Exception as error:
            if not self.is_passing:
                self.error = error
                raise
            # It is done from its first byte: its client has seen that, and a second run would do
            # the work again. That a stream had no reader any more is nobody's fault.
            if not self._is_gone:
                self.late_error = error
        except BaseException as error:
            self.error = error
            raise
        is_streamed = self.is_passing or not is_whole
        self.response = Response(
            int(self._status[:3]),
            self._lines,
            b"" if is_streamed else self._body(),
            is_streamed,
            is_unserved=self._is_unserved,
        )
        return self.response

    def _collect(self) -> bool:
        """Whether the whole response is here; else its rest follows once it is remembered."""
        result = self._result = self._app(self._environ, self._start)
        try:
            pieces = self._pieces = iter(result)
            for piece in pieces:
                # Also without a byte: an endless stream of such pieces is past a limit some time.
                if not self._take(piece):
                    return False
        except BaseException:
            self.close()
            raise
        self.close()
        if not self._status:
            raise RuntimeError("the application ended without a response")
        return self.is_passing or not self._passes_at_once

    def rest(self, response: Response) -> Iterable[bytes]:
        """The response that is remembered as done, as the server asks for it."""
        assert self._status
        headers = [text_header(header) for header in response.headers]
        try:
            self._start_response(self._status, headers)
        except BaseException:
            self.close()
            raise
        return _Rest(chain((self._body(),), self._pieces), self)

    def leave(self) -> None:
        """Its client has another answer: whoever writes hears that nobody reads."""
        self._start_response = _gone

    def close(self) -> None:
        """Ends what the application has returned; once."""
        result, self._result = self._result, None
        close = getattr(result, "close", None)
        if close is not None:
            close()

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Write:
        """What the application is given for `start_response`."""
        if self._status and exc_info is None:
            raise RuntimeError("the application started its response twice")
        if exc_info is not None and (self.is_passing or self.response is not None):
            raise exc_info[1].with_traceback(exc_info[2])
        # An application that meets an error may start over until something was sent.
        self._status, self._headers = status, list(headers)
        self._lines = [
            (name.encode("latin-1").lower(), text.encode("latin-1")) for name, text in headers
        ]
        self._passes_at_once = passes_at_once(self._plan, self._lines)
        # Now, because Flask takes its mark away when it has returned.
        self._is_unserved = self._can_tell_route and is_unserved(self._environ)
        self._held = None
        return self._write_out

    def _body(self) -> bytes:
        return b"" if self._held is None else bytes(self._held.body)

    def _take(self, piece: bytes) -> bool:
        """Takes a piece; False when it and all that follows have to be passed on."""
        if not self._status and piece:
            raise RuntimeError("the application sent a body before its response")
        if self.is_passing:
            self._write_on(piece)
            return True
        held = self._held
        if held is None:
            held = self._held = Held(self._plan)
        is_held = held.take(piece) and not self._passes_at_once
        if not is_held and not self._status:
            raise RuntimeError("the application sent pieces without a byte, and no response")
        return is_held

    def _write_out(self, piece: bytes) -> None:
        """What the application is given to write by itself, in the old way of PEP 3333.

        Such a run cannot rest while its response is stored. So what is past a limit is written at
        once, under the lease, and is remembered as done at the end of the run.
        """
        if not self.is_passing:
            if self._take(piece):
                return
            headers = self._headers
            if self._plan.is_unprotected:
                headers = [*headers, text_header(UNPROTECTED)]
            self._write = self._start_response(self._status, headers)
            self.is_passing = True
            piece = self._body()
        self._write_on(piece)

    def _write_on(self, piece: bytes) -> None:
        assert self._write is not None
        try:
            self._write(piece)
        except OSError:
            self._is_gone = True
            raise


def _gone(*_: Any) -> Write:
    raise OSError("the client has its answer")


class _Rest:
    """A response on its way; its end, and its early end, closes what the application returned."""

    __slots__ = ("_pieces", "_run")

    def __init__(self, pieces: Iterator[bytes], run: WsgiRun) -> None:
        self._pieces = pieces
        self._run = run

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        """For servers, which call it when the response is sent or its client has gone."""
        self._run.close()
