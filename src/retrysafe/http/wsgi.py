"""The middleware for WSGI applications, whatever framework made them.

Owns the reading of bodies, the running of the application and the sending of answers, in the
server's own thread. A request that no rule protects passes untouched.
"""

from __future__ import annotations

from collections.abc import Iterable
from http.client import responses as reasons
from io import BytesIO
from typing import Final

from retrysafe.core.keys.key import GlobalCaller
from retrysafe.errors import InvalidInput
from retrysafe.http import resumers, thread_requests
from retrysafe.http.background_runs import BackgroundRun, is_accepted
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import CallerOf, require_blocking
from retrysafe.http.headers import length_of
from retrysafe.http.ignored_keys import NOTICED_NAME, keys_in
from retrysafe.http.limits import Limits
from retrysafe.http.pages import PAGE_METHODS, POLICY_PATH, STATUS_PATH
from retrysafe.http.plan import Plan
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.protection import Protection
from retrysafe.http.request import PROTECTED_NAME, Request
from retrysafe.http.responses import Header, Response
from retrysafe.http.resumption import resumption_in
from retrysafe.http.routes import Match
from retrysafe.http.rules import Rule, checked_rules
from retrysafe.http.wsgi_run import (
    App,
    Environ,
    StartResponse,
    WsgiRun,
    text_header,
)
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.calls import calls_of

_KEY_NAME: Final = "HTTP_IDEMPOTENCY_KEY"
_READ_BYTES: Final = 64 * 1024


class WSGIIdempotencyMiddleware:
    """Protects the routes of a WSGI application; takes what the ASGI middleware takes.

    `Prefer: respond-async` gets 202 for a request that runs already. A first one is answered when
    it has ended, because its thread has nobody else to run it; on a resumable route a thread of its
    own goes on behind the 202, and what that leaves behind when its process ends, a worker ends.
    """

    def __init__(
        self,
        app: App,
        idempotency: Idempotency,
        *,
        caller: CallerOf | GlobalCaller,
        rules: Iterable[Rule] | None = None,
        rule: Rule | None = None,
        fail_open: bool = False,
        policy_path: str = POLICY_PATH,
        policy_page: PolicyReaders = True,
        status_path: str = STATUS_PATH,
        challenge: str | None = None,
        breaker: Breaker | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Raises `InvalidInput` and `PolicyInvalid` for what would fail with the first request."""
        if not isinstance(idempotency, Idempotency):
            raise InvalidInput(
                f"a WSGI application needs an Idempotency object, got {idempotency!r}"
            )
        require_blocking(caller)
        rules = checked_rules(rules)
        self.app = app
        self.idempotency = idempotency
        self.calls = calls = calls_of(idempotency)
        self.protection = Protection(
            calls.settings,
            caller=caller,
            rules=rules,
            rule=rule,
            fail_open=fail_open,
            policy_path=policy_path,
            policy_page=policy_page,
            status_path=status_path,
            challenge=challenge,
            breaker=breaker,
            limits=limits,
        )
        thread_requests.register(self.protection, calls, self.protection.table.routes)
        resumers.protections.add(self)

    def refresh(self) -> None:
        """For workers: all routes are known from the start."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answers one request."""
        # Some frameworks take `post` for POST, and no rule may be passed by like that.
        method = environ["REQUEST_METHOD"].upper()
        path = _decoded(environ.get("PATH_INFO", "")) or "/"
        match = self.protection.find(method, path)
        if match is not None:
            if is_run(environ):
                return self.app(environ, start_response)
            # What the rule has seen is what the application runs.
            environ["REQUEST_METHOD"] = method
            if NOTICED_NAME in environ:
                environ[NOTICED_NAME].append(self)
            return self._protect(match, environ, start_response)
        if method in PAGE_METHODS and self.protection.pages.serve(path):
            return self._show_page(path, environ, start_response)
        return self._pass(method, path, environ, start_response)

    def _pass(
        self, method: str, path: str, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        """A request that no rule protects; a key that comes with it is told of."""
        if (resumption := resumption_in(environ)) is not None:
            whole = request_of(environ).path
            resumption.require_rule(whole, method, self.protection.table.routes)
        keys = keys_in(method, request_of(environ).raw_headers) if _KEY_NAME in environ else []
        is_seen = NOTICED_NAME in environ or self.protection.table.is_covered(method, path)
        # Nor is a request told of that somebody further out runs.
        if not keys or is_seen or is_run(environ):
            return self.app(environ, start_response)
        # Views may have rules of their own.
        noticed = environ[NOTICED_NAME] = []
        try:
            return self.app(environ, start_response)
        finally:
            if not noticed:
                self.protection.ignored_keys.note(self.calls.report, method, path, keys)

    def _show_page(
        self, path: str, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        request, prefix = request_of(environ), prefix_of(environ)
        return _sent(
            start_response,
            thread_requests.page(self.protection, self.calls, path, request, prefix),
        )

    def _protect(
        self, match: Match, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        protection, request, prefix = self.protection, request_of(environ), prefix_of(environ)
        request.parameters = match[1]
        plan = thread_requests.begun(protection, match[0], request, prefix)
        if plan is None:
            return self.app(environ, start_response)
        if isinstance(plan, Response):
            return _sent(start_response, plan)
        try:
            body = _read_body(environ, plan.route.rule.request_limit_bytes)
        except _BodyCutOff:
            return _sent(start_response, protection.refusals.cut_off(request, prefix, plan.key))
        if body is None:
            return _sent(
                start_response, protection.refusals.too_large(plan.route, request, prefix, plan.key)
            )
        request.body = body
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        return self._answer(plan, environ, start_response)

    def _answer(
        self, plan: Plan, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        protection, calls = self.protection, self.calls
        is_left = is_accepted(plan)
        # A run that goes on without its server must not share what belongs to that.
        run = WsgiRun(self.app, plan, dict(environ) if is_left else environ, start_response)
        try:
            if is_left and protection.background.enter(run):
                response = BackgroundRun(protection, calls, plan, run).answered()
            else:
                response = thread_requests.answered(protection, calls, plan, run)
        except BaseException:
            run.close()
            raise
        if run.late_error is not None:
            raise run.late_error  # The server breaks the stream off, now that it is stored.
        if run.is_passing:
            return ()  # All of it was written.
        if response.is_streamed:
            return run.rest(response)
        run.close()
        return _sent(start_response, response)


def request_of(environ: Environ, path: str | None = None) -> Request:
    """The request of an environ, with its body unread; `path` where a framework has its own."""
    if path is None:
        path = _decoded(environ.get("SCRIPT_NAME", "")) + _decoded(environ.get("PATH_INFO", ""))
    headers: list[Header] = [
        (name[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in environ.items()
        if name.startswith("HTTP_") and name not in _TOLD_TWICE
    ]
    for name, header in _NAMED_APART:
        value = environ.get(name)
        if value:
            headers.append((header, value.encode("latin-1")))
    return Request(
        environ["REQUEST_METHOD"].upper(),
        path or "/",
        environ.get("QUERY_STRING", "").encode("latin-1"),
        headers,
        b"",
        environ,
    )


# Servers may give these with the prefix as well; the names without it are the standard's.
_NAMED_APART: Final = (("CONTENT_TYPE", b"content-type"), ("CONTENT_LENGTH", b"content-length"))
_TOLD_TWICE: Final = frozenset({"HTTP_CONTENT_TYPE", "HTTP_CONTENT_LENGTH"})


def _decoded(text: str) -> str:
    """A path of WSGI is bytes in disguise; the bytes are UTF-8 in nearly every URL of today.

    Bytes that are not stay what they are: replaced, two paths would count as one request.
    """
    return text.encode("latin-1").decode("utf-8", "surrogateescape")


def prefix_of(environ: Environ) -> str:
    """Where the application is mounted, without the slash at the end."""
    mount: str = environ.get("SCRIPT_NAME", "")
    # It is written into links, where only text can be.
    return mount.encode("latin-1").decode("utf-8", "replace").rstrip("/")


def is_run(environ: Environ) -> bool:
    """Whether somebody further out runs this very request, with a claim or without."""
    if PROTECTED_NAME not in environ:
        return False
    request = request_of(environ)
    run: tuple[str, str] = environ[PROTECTED_NAME]
    return run == (request.method, request.path)


class _BodyCutOff(Exception):
    """The client went away in the middle of its body."""


def _read_body(environ: Environ, limit_bytes: int) -> bytes | None:
    """The whole body; None past the limit. Raises `_BodyCutOff`."""
    stream = environ["wsgi.input"]
    declared = length_of(environ.get("CONTENT_LENGTH") or "")
    if declared is not None:
        # The standard allows no more than that to be read: beyond it some servers block.
        left = declared
    elif environ.get("wsgi.input_terminated"):
        left = limit_bytes + 1
    else:
        return b""
    chunks: list[bytes] = []
    while left > 0:
        chunk = stream.read(min(left, _READ_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    if left and declared is not None:
        # Half a request was never asked for, and its key must stay free for the whole one. A body
        # without a length is for the server to check: it alone knows how that ends.
        raise _BodyCutOff
    body = b"".join(chunks)
    return body if len(body) <= limit_bytes else None


def _sent(start_response: StartResponse, response: Response) -> Iterable[bytes]:
    reason = reasons.get(response.status, "")
    start_response(
        f"{response.status} {reason}", [text_header(header) for header in response.headers]
    )
    return (response.body,)
