"""The middleware for ASGI applications, whatever framework made them.

Owns the reading of bodies, the running of the application and the sending of answers. A request
that no rule protects passes untouched. A protected one runs apart from its connection: neither a
client that goes away nor a server that cancels ends it, and nothing is sent before it is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final

from retrysafe.core.atomic_lead import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import EventKind
from retrysafe.core.keys import GlobalCaller, Key
from retrysafe.errors import StoreError
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import CallerOf
from retrysafe.http.exchange import POLICY_PATH, STATUS_PATH, UNPROTECTED, Plan, Protection
from retrysafe.http.request import Request
from retrysafe.http.responses import Response, is_event_stream
from retrysafe.http.rules import Match, Rule, Streaming
from retrysafe.runtime.tasks import AsyncFace

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
_PAGE_METHODS: Final = ("GET", "HEAD")
_logger = logging.getLogger("retrysafe")


class IdempotencyMiddleware:
    """Protects the routes of an ASGI application.

    `caller` is a function of the request, or `GLOBAL`; there is no default, because keys of two
    customers must never meet. Pass `rules` for an application, `rule` around a single endpoint;
    with neither, every POST, PUT, PATCH and DELETE needs a key.
    """

    def __init__(
        self,
        app: App,
        idempotency: AsyncFace,
        *,
        caller: CallerOf | GlobalCaller,
        rules: Iterable[Rule] | None = None,
        rule: Rule | None = None,
        fail_open: bool = False,
        policy_path: str = POLICY_PATH,
        status_path: str = STATUS_PATH,
        challenge: str = "Bearer",
        breaker: Breaker | None = None,
    ) -> None:
        self.app = app
        self.idempotency = idempotency
        self.protection = Protection(
            idempotency.settings,
            caller=caller,
            rules=rules,
            rule=rule,
            fail_open=fail_open,
            policy_path=policy_path,
            status_path=status_path,
            challenge=challenge,
            breaker=breaker,
        )
        self._find = self.protection.find
        # The loop itself holds tasks weakly, so a run whose client has gone is held here.
        self._runs: set[_Run] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; everything that is not HTTP passes untouched."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :]
        match = self._find(scope["method"], path)
        if match is not None:
            await self._protect(match, scope, receive, send)
        elif scope["method"] in _PAGE_METHODS and self.protection.has_page(path):
            await self._show_page(path, scope, send)
        else:
            await self.app(scope, receive, send)

    async def _show_page(self, path: str, scope: Scope, send: Send) -> None:
        protection, request, prefix = self.protection, _request(scope), _prefix(scope)
        page = protection.page(path, request, prefix)
        if isinstance(page, Key):
            key = page
            try:
                stored = await self.idempotency.read(key)
                page = protection.status(stored, key, request, prefix)
            except StoreError as error:
                page = protection.status_refused(error, key, request, prefix)
        if scope["method"] == "HEAD":
            page.body = b""
        await _send(send, page)

    async def _protect(self, match: Match, scope: Scope, receive: Receive, send: Send) -> None:
        protection = self.protection
        request = _request(scope)
        request.parameters = match[1]
        prefix = _prefix(scope)
        plan = protection.begin(match[0], request, prefix)
        if type(plan) is Plan:
            body = await _read_body(receive, plan.route.rule.request_limit_bytes)
            if body is None:
                return  # The client went away before it had asked for anything.
            if type(body) is bytes:
                request.body = body
                await self._answer(plan, scope, receive, send)
            else:
                await _send(send, protection.too_large(plan.route, request, prefix, plan.key))
        elif isinstance(plan, Response):
            await _send(send, plan)
        else:
            await self.app(scope, receive, send)

    async def _answer(self, plan: Plan, scope: Scope, receive: Receive, send: Send) -> None:
        protection = self.protection
        run: _Run | None = None
        try:
            call = protection.call(plan)
            answer = self.idempotency.recall(call)
            if answer is None:
                response = protection.closed_off(plan) if protection.breaker.is_open else None
                if response is not None and protection.runs_unprotected(plan):
                    await self._run_unprotected(call, plan, scope, receive, send)
                    return
                if response is None:
                    run = _Run(self, plan, scope, receive, send)
                    response = await self._run(run, call)
            else:
                response = protection.answered(plan, answer)
        except Exception as error:
            if run is not None and error is run.error:
                raise  # The application's own: the server above us deals with it as ever.
            refusal = protection.refused(plan, error)
            if refusal is None:
                raise
            response = refusal
        if not response.is_streamed:
            await _send(send, response)
        if run is not None:
            await run.finish()

    async def _run_unprotected(
        self, call: Call, plan: Plan, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs the application although nobody can tell whether it ran before, as was asked for."""
        self.idempotency.report(EventKind.UNPROTECTED, call.key, call.operation)
        is_given = False

        async def replayed() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": plan.request.body, "more_body": False}

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), UNPROTECTED]
            await send(message)

        await self.app(scope, replayed, marked)

    async def _run(self, run: _Run, call: Call) -> Response:
        """Runs the application in tasks of its own; cancelling the caller leaves them alone."""
        plan = run.plan
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Answer[Any]] = loop.create_future()
        if plan.preference.respond_async:
            run.started = loop.create_future()
        run.settling = loop.create_task(self._settle(run, call, waiter))
        self._runs.add(run)
        try:
            if run.started is not None and not await _is_prompt(
                waiter, run.started, plan.preference.wait_seconds or 0
            ):
                run.leave()
                waiter.cancel()
                return self.protection.accepted(plan)
            answer = await waiter
        except asyncio.CancelledError:
            run.leave()
            waiter.cancel()
            raise
        return self.protection.answered(plan, answer, run.response)

    async def _settle(self, run: _Run, call: Call, waiter: asyncio.Future[Answer[Any]]) -> None:
        """Answers the call, and tells the waiter at once: a task's own callbacks come later."""
        transaction: Any = run.plan.route.rule.transaction
        try:
            if transaction is None:
                answer = await self.idempotency.answer_call(call, run.invoke)
            else:
                answer = await self.idempotency.answer_atomic(call, transaction, run.invoke)
        except Exception as error:
            if not waiter.done():
                waiter.set_exception(error)
            else:
                _logger.exception("a protected request failed after its client had gone")
        except BaseException:
            waiter.cancel()
            raise
        else:
            if not waiter.done():
                waiter.set_result(answer)
        finally:
            if run.task is None or run.task.done():
                self._runs.discard(run)


class _Run:
    """One run of the application: what it is given, and what it answers."""

    __slots__ = (
        "_app",
        "_chunks",
        "_complete",
        "_headers",
        "_is_body_given",
        "_is_gone",
        "_is_left",
        "_is_passing",
        "_news",
        "_receive",
        "_runs",
        "_scope",
        "_send",
        "_status",
        "error",
        "plan",
        "response",
        "settling",
        "started",
        "task",
    )

    def __init__(
        self,
        middleware: IdempotencyMiddleware,
        plan: Plan,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._app = middleware.app
        self._runs = middleware._runs  # noqa: SLF001 — the run is the middleware's own.
        self.plan = plan
        self._scope = scope
        self._receive = receive
        self._send = send
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._is_body_given = False
        # Whether the response is sent as it comes, and whether there is anybody to send it to.
        self._is_passing = False
        self._is_gone = False
        self._is_left = False
        self._complete: asyncio.Future[None] | None = None
        self._news: asyncio.Future[None] | None = None
        self.response: Response | None = None
        self.error: BaseException | None = None
        # The task that the application runs in, and the one that stores its response.
        self.task: asyncio.Task[None] | None = None
        self.started: asyncio.Future[None] | None = None
        self.settling: asyncio.Task[None] | None = None

    async def invoke(self, attempt: Attempt | AtomicAttempt) -> Response:
        """Runs the application until its response is complete."""
        scope = self._scope
        # The same scope, not a copy: middlewares around us read what routers write into it.
        scope.setdefault("state", {})["idempotency"] = attempt
        extensions = scope.get("extensions")
        if extensions and not extensions.keys().isdisjoint(_HIDDEN_EXTENSIONS):
            scope["extensions"] = {
                name: value for name, value in extensions.items() if name not in _HIDDEN_EXTENSIONS
            }
        if self.started is not None:
            self.started.set_result(None)
        loop = asyncio.get_running_loop()
        complete = self._complete = loop.create_future()
        # A task of its own: the response is stored and sent while background tasks still run.
        self.task = loop.create_task(self._serve())
        self.task.add_done_callback(self._app_ended)
        await complete
        response = self.response
        assert response is not None
        return response

    async def _serve(self) -> None:
        await self._app(self._scope, self.receive, self.capture)

    def _app_ended(self, task: asyncio.Task[None]) -> None:
        complete = self._complete
        assert complete is not None
        if complete.done():
            self._runs.discard(self)
            if self._is_left and not task.cancelled() and task.exception() is not None:
                _logger.error(
                    "a protected request failed after its response", exc_info=task.exception()
                )
            return
        if task.cancelled():
            complete.cancel()
            return
        error = task.exception()
        if self._is_passing and self._is_gone:
            # The stream had no reader any more. That says nothing against the operation.
            self.response = Response(self._status, self._headers, b"", is_streamed=True)
            complete.set_result(None)
            self.task = None
            return
        if error is None:
            error = RuntimeError("the application ended before its response was complete")
        self.error = error
        complete.set_exception(error)

    # What the application calls.

    async def receive(self) -> Message:
        """The whole body first; then nothing until the response is complete."""
        if not self._is_body_given:
            self._is_body_given = True
            return {"type": "http.request", "body": self.plan.request.body, "more_body": False}
        complete = self._complete
        assert complete is not None
        while not complete.done():
            if self._is_passing:
                if self._is_gone:
                    break
                message = await self._receive()
                self._is_gone = message["type"] == "http.disconnect"
                return message
            if self._news is None:
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)
        return {"type": "http.disconnect"}

    async def capture(self, message: Message) -> None:
        """Keeps the response back until it is complete, or passes a stream on."""
        kind = message["type"]
        if kind == "http.response.body":
            await self._capture_body(message)
        elif kind == "http.response.start":
            if self._status:
                raise RuntimeError("the application started its response twice")
            self._status = message["status"]
            self._headers = [(name, value) for name, value in message.get("headers", ())]
            if self.plan.route.rule.streaming is Streaming.PASS or is_event_stream(self._headers):
                self._is_passing = True
                self._wake()
                await self._pass_on(message)
        elif kind != "http.response.trailers" and not self._is_gone:
            await self._send(message)

    async def _capture_body(self, message: Message) -> None:
        complete = self._complete
        assert complete is not None
        if not self._status or self.response is not None:
            raise RuntimeError("the application sent a body outside of its response")
        if self._is_passing:
            await self._pass_on(message)
        else:
            self._chunks.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        chunks = self._chunks
        body = bytes(chunks[0]) if len(chunks) == 1 else b"".join(chunks)
        self.response = Response(self._status, self._headers, body, self._is_passing)
        if not complete.done():
            complete.set_result(None)
        self._wake()

    async def _pass_on(self, message: Message) -> None:
        if self._is_gone:
            raise OSError("the client has gone")
        try:
            await self._send(message)
        except OSError:
            self._is_gone = True
            raise

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
        task.result()

    def leave(self) -> None:
        """The connection is no longer ours: whoever sends or listens hears that it is gone."""
        self._is_gone = True
        self._is_left = True
        if self._is_passing:
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)


async def _is_prompt(
    waiter: asyncio.Future[Answer[Any]], started: asyncio.Future[None], seconds: float
) -> bool:
    """Whether the answer is there in time, counted from the start of the run.

    Nothing is promised before the key is claimed: a refusal must reach the client itself.
    """
    await asyncio.wait((waiter, started), return_when=asyncio.FIRST_COMPLETED)
    if not waiter.done():
        await asyncio.wait((waiter,), timeout=seconds)
    return waiter.done()


def _request(scope: Scope) -> Request:
    return Request(
        scope["method"],
        scope["path"],
        scope.get("query_string", b""),
        scope["headers"],
        b"",
        scope,
    )


def _prefix(scope: Scope) -> str:
    """Where the whole application is mounted; routers move `root_path` further down."""
    prefix: str = scope["app_root_path"] if "app_root_path" in scope else scope.get("root_path", "")
    return prefix


_TOO_LARGE: Final = object()


async def _read_body(receive: Receive, limit_bytes: int) -> bytes | object | None:
    """The whole body; None when the client left, `_TOO_LARGE` past the limit."""
    message = await receive()
    if message["type"] != "http.request":
        return None
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        return body if len(body) <= limit_bytes else _TOO_LARGE
    chunks = [body]
    size = len(body)
    while size <= limit_bytes:
        message = await receive()
        if message["type"] != "http.request":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        chunks.append(chunk)
        if not message.get("more_body", False):
            break
    return b"".join(chunks) if size <= limit_bytes else _TOO_LARGE


async def _send(send: Send, response: Response) -> None:
    await send(
        {"type": "http.response.start", "status": response.status, "headers": response.headers}
    )
    await send({"type": "http.response.body", "body": response.body})
