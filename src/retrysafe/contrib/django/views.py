"""Requests and responses of Django in the words of retrysafe, and back.

Owns the run of one view: in the thread that serves it, or as a task of the event loop. It decides
nothing; what is stored and what is refused is decided by the protection.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, Final

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from retrysafe.contrib.django.bodies import body_of, has_raw_body
from retrysafe.contrib.django.streams import (
    captured,
    captured_on_loop,
    discard,
    discard_on_loop,
)
from retrysafe.contrib.django.transactions import HOOK_ERROR_NAME, hook_failure, raised_by_hook
from retrysafe.contrib.views import ViewRun
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.values.trees import NotStorable
from retrysafe.errors import InvalidInput
from retrysafe.http import thread_requests
from retrysafe.http.asgi import IdempotencyMiddleware
from retrysafe.http.asgi_io import exact_path
from retrysafe.http.asgi_run import PASSING_NAME, Message, Receive, Scope, Send
from retrysafe.http.ignored_keys import NOTICED_NAME, keys_in
from retrysafe.http.plan import Plan
from retrysafe.http.protection import Protection
from retrysafe.http.request import PROTECTED_NAME, Request
from retrysafe.http.responses import Header, Response, response_of
from retrysafe.http.router_marks import UNSERVED_NAME
from retrysafe.http.routes import Route
from retrysafe.http.wsgi import request_of
from retrysafe.http.wsgi_run import ATTEMPT_NAME
from retrysafe.runtime.calls import Calls

View = Callable[[], Any]
# Answers an exception of a view, or raises it again.
Answering = Callable[[Exception], Any]

_RUN_NAME: Final = "retrysafe.run"
# What the running view was called with, for rendering a response that it completes with.
_serving: ContextVar[Any] = ContextVar("retrysafe_django_request", default=None)


# Requests.


def django_request(request: Any) -> Any:
    """Django's own request inside one of REST framework.

    Raises `InvalidInput` for a view that is called with something else.
    """
    plain = getattr(request, "_request", request)
    if not isinstance(plain, HttpRequest):
        raise InvalidInput(
            f"a view was called with {type(request).__qualname__} in the place of its request: "
            "above a method of a class, write @method_decorator(idempotent())"
        )
    return plain


def prefix_of(request: Any) -> str:
    """Where the project is mounted, without the slash at the end."""
    prefix: str = request.path.removesuffix(request.path_info)
    return prefix.rstrip("/")


def attempt_around(plain: Any) -> Attempt | AtomicAttempt[Any] | None:
    """The attempt that this very request runs as, if somebody further out protects it.

    That is a decorator or the middleware of this project, or one around its WSGI or ASGI
    application. A second claim of the key would find it in flight.
    """
    attempt = getattr(plain, "idempotency", None)
    if attempt is None:
        scope = getattr(plain, "scope", None)
        if scope is None:
            attempt = plain.META.get(ATTEMPT_NAME)
        else:
            attempt = scope.get("state", {}).get("idempotency")
        plain.idempotency = attempt
    return attempt if isinstance(attempt, Attempt | AtomicAttempt) else None


def is_run(plain: Any) -> bool:
    """Whether somebody further out runs this very request, with a claim or without."""
    if attempt_around(plain) is not None or getattr(plain, "is_run_by_retrysafe", False):
        return True
    run = _around(plain).get(PROTECTED_NAME)
    if run is None:
        return False
    asked = unread_request(plain)
    return bool(run == (asked.method, asked.path))


def unread_request(request: Any) -> Request:
    """The request with its body unread; its host is what the view is called with."""
    plain = django_request(request)
    scope = getattr(plain, "scope", None)
    if scope is None:
        # Django has put the decoded path into the environ, which is no longer bytes in disguise.
        asked = request_of(plain.META, plain.path)
    else:
        path = exact_path(scope, plain.path)
        query = scope.get("query_string", b"")
        if isinstance(query, str):
            query = query.encode("latin-1")  # Django's own test client gives it as text.
        asked = Request(plain.method, path, query, scope["headers"])
    asked.host = request
    return asked


def notice(plain: Any) -> None:
    """A rule looks at this request, so nobody further out tells of its key."""
    plain.is_noticed_by_retrysafe = True
    around = _around(plain)
    if NOTICED_NAME in around:
        around[NOTICED_NAME].append(plain)


def _around(plain: Any) -> Any:
    """What a middleware around the project has seen of the request: a scope or an environ."""
    return getattr(plain, "scope", None) or plain.META


def report_ignored_key(protection: Protection, calls: Calls, plain: Any) -> None:
    """Tells of a key whose request has passed, and no rule has looked at it."""
    method, path = plain.method, plain.path_info
    if (
        "HTTP_IDEMPOTENCY_KEY" not in plain.META
        or getattr(plain, "is_noticed_by_retrysafe", False)
        or NOTICED_NAME in _around(plain)
        or is_run(plain)
        or protection.table.is_covered(method, path)
    ):
        return
    keys = keys_in(method, unread_request(plain).raw_headers)
    if keys:
        match = plain.resolver_match
        route = path if match is None else f"/{match.route}"
        protection.ignored_keys.note(calls.report, method, route, keys)


def planned(
    protection: Protection, route: Route, request: Any, parameters: dict[str, str]
) -> Plan | HttpResponse | None:
    """The plan with its body, or the refusal; None when the request passes."""
    plan = _begun(protection, route, request, parameters)
    if protection.has_async_caller and isinstance(plan, Plan):
        plan = async_to_sync(protection.identified)(plan)
    return _with_body(protection, plan)


def _begun(
    protection: Protection,
    route: Route,
    request: Any,
    parameters: dict[str, Any],
    *,
    is_on_loop: bool = False,
) -> Plan | Response | None:
    asked, prefix = unread_request(request), prefix_of(django_request(request))
    asked.parameters = parameters
    return thread_requests.begun(protection, route, asked, prefix, is_on_loop=is_on_loop)


def _with_body(protection: Protection, plan: Plan | Response | None) -> Plan | HttpResponse | None:
    if not isinstance(plan, Plan):
        return None if plan is None else native_of(plan)
    route, asked, prefix = plan.route, plan.request, plan.prefix
    plain = django_request(asked.host)
    body = body_of(plain, asked, route.rule.request_limit_bytes)
    if body is None:
        return native_of(protection.refusals.too_large(route, asked, prefix, plan.key))
    asked.body = body
    if has_raw_body(plain) and protection.is_cut_off(asked):
        return native_of(protection.refusals.cut_off(asked, prefix, plan.key))
    return plan


# Responses.


def native_of(response: Response) -> HttpResponse:
    """The response in Django's words."""
    native = HttpResponse(response.body, status=response.status)
    # Django would call a response without a type HTML.
    del native.headers["Content-Type"]
    return with_headers(native, response.headers)


def with_headers(native: Any, headers: Iterable[Header]) -> Any:
    """The response with more headers; lines of one name become one line."""
    for name, value in headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        native.headers[key] = f"{native.headers[key]}, {text}" if key in native.headers else text
    return native


def outcome_of(value: Any) -> Response:
    """The response that a view completes with inside its transaction, rendered if need be."""
    if isinstance(value, HttpResponseBase):
        value = _rendered(value, _serving.get())
    return response_of(value)


def _rendered(native: Any, request: Any) -> Any:
    """A response that Django or REST framework would render later; raises `NotStorable`."""
    if getattr(native, "is_rendered", True):
        return native
    if hasattr(native, "data") and not hasattr(native, "accepted_renderer"):
        _negotiate(native, request)
    return native.render()


def _negotiate(native: Any, request: Any) -> None:
    """Tells a response of REST framework how its view would render it."""
    view = getattr(request, "parser_context", {}).get("view")
    if view is None:
        raise NotStorable(
            "this response is not rendered yet, and only its view knows how: put idempotent on the "
            "method, or complete with self.finalize_response(request, response).render()"
        )
    native.accepted_renderer = request.accepted_renderer
    native.accepted_media_type = request.accepted_media_type
    native.renderer_context = view.get_renderer_context()


# Runs.


def _require_no_hook_error(plain: Any) -> None:
    """Raises what a hook has raised of which Django has made a response already."""
    error = getattr(plain, HOOK_ERROR_NAME, None)
    if error is not None:
        raise error


def _refuse_hook_error(error: Exception, plain: Any) -> None:
    """Raises `CommitHookFailed` for an exception that came after a commit."""
    if raised_by_hook(error):
        match = plain.resolver_match
        raise hook_failure(error, plain.path if match is None else match.view_name) from error


def answer(
    protection: Protection,
    calls: Calls,
    plan: Plan,
    view: View,
    answering: Answering | None,
) -> Any:
    """What a request is answered with, in this thread."""
    request = plan.request.host
    plain = django_request(request)

    def run(attempt: Attempt | AtomicAttempt[Any] | None) -> tuple[Any, Response]:
        plain.idempotency = attempt
        plain.is_run_by_retrysafe = True
        token = _serving.set(request)
        try:
            try:
                native = view()
                _require_no_hook_error(plain)
            except Exception as error:
                _refuse_hook_error(error, plain)
                if answering is None:
                    raise
                native = answering(error)
            native, response = captured(
                native,
                plan,
                lambda: _rendered(native, request),
                is_on_loop=hasattr(plain, "scope"),
            )
            response.is_unserved = plain.resolver_match is None
            return native, response
        finally:
            _serving.reset(token)

    made = ViewRun(run, discard)
    response, added = made.answered(protection, calls, plan)
    return native_of(response) if added is None else with_headers(made.native, added)


async def answer_on_loop(
    middleware: IdempotencyMiddleware,
    plan: Plan,
    view: Callable[[], Awaitable[Any]],
    answering: Answering | None,
) -> Any:
    """What a request is answered with; the run is a task of its own, as with the ASGI middleware.

    A client that goes away, whereupon Django cancels the view, does not end it.
    """
    run = _TaskRun(plan, view, answering)
    try:
        await middleware.answer(plan, {"state": {}, _RUN_NAME: run}, _nothing_more, run.collect)
    except BaseException:
        await run.drop()
        raise
    return await run.native_reply()


async def plan_on_loop(
    protection: Protection, route: Route, request: Any, parameters: dict[str, Any]
) -> Plan | HttpResponse | None:
    """As `planned`; a caller that reads the database is asked in a thread."""
    # Under WSGI each request has a loop of its own, and its thread waits for it.
    is_on_loop = isinstance(django_request(request), ASGIRequest)
    begun = functools.partial(_begun, protection, route, request, parameters, is_on_loop=is_on_loop)
    try:
        plan = begun()
    except SynchronousOnlyOperation:
        plan = await sync_to_async(begun)()
    if protection.has_async_caller and isinstance(plan, Plan):
        plan = await protection.identified(plan)
    return _with_body(protection, plan)


async def serve_view(scope: Scope, receive: Receive, send: Send) -> None:
    """The application that the ASGI middleware protects: one view."""
    del receive  # The view has its request already.
    await scope[_RUN_NAME].serve(scope, send)


async def _nothing_more() -> Message:
    """Django tells a view of its client's end by itself: nobody hears of it here."""
    message: Message = await asyncio.get_running_loop().create_future()
    return message


class _TaskRun:
    """One run of a view on the event loop, seen as an ASGI application and as its server."""

    __slots__ = (
        "_answering",
        "_body",
        "_headers",
        "_is_dropped",
        "_native",
        "_plan",
        "_response",
        "_status",
        "_view",
    )

    def __init__(
        self, plan: Plan, view: Callable[[], Awaitable[Any]], answering: Answering | None
    ) -> None:
        self._plan = plan
        self._view = view
        self._answering = answering
        self._native: Any = None
        # Whether nobody is going to send what the view answers.
        self._is_dropped = False
        self._response: Response | None = None
        self._status = 0
        self._headers: list[Header] = []
        self._body = b""

    async def serve(self, scope: Scope, send: Send) -> None:
        """Runs the view and sends what it answers."""
        request = self._plan.request.host
        plain = django_request(request)
        plain.idempotency = scope["state"].get("idempotency")
        plain.is_run_by_retrysafe = True
        _serving.set(request)  # The task has a context of its own.
        try:
            native = await self._view()
            _require_no_hook_error(plain)
        except Exception as error:
            _refuse_hook_error(error, plain)
            if self._answering is None:
                raise
            native = await sync_to_async(self._answering)(error)
        self._native, response = await captured_on_loop(
            native, self._plan, lambda: _rendered(native, request)
        )
        self._response = response
        scope[UNSERVED_NAME] = plain.resolver_match is None
        start: Message = {
            "type": "http.response.start",
            "status": response.status,
            "headers": response.headers,
        }
        if response.is_streamed:
            start[PASSING_NAME] = True
        try:
            await send(start)
            await send({"type": "http.response.body", "body": response.body})
        except BaseException:
            self._is_dropped = True
            raise
        finally:
            if self._is_dropped:
                await self.drop()

    async def drop(self) -> None:
        """Closes the view's response, now or when there is one: it is not sent.

        Its client has gone, or gets another answer; a stream would hold open what it reads from.
        """
        self._is_dropped = True
        native, self._native = self._native, None
        if native is not None:
            await discard_on_loop(native)

    async def collect(self, message: Message) -> None:
        """Takes what the middleware sends."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
        else:
            self._body += message.get("body", b"")

    async def native_reply(self) -> Any:
        """What was sent: the view's own response with what was added to it, or another one."""
        own = self._response
        if own is not None and (own.status, own.body) == (self._status, self._body):
            return with_headers(self._native, self._headers[len(own.headers) :])
        await self.drop()
        return native_of(Response(self._status, self._headers, self._body))
