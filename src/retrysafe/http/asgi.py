"""The middleware for ASGI applications, whatever framework made them.

Owns the order in which a request is matched, read, run and answered. One that no rule protects
passes untouched. A protected one runs apart from its connection: neither a client that goes away
nor a server that cancels ends it, and nothing is sent before it is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, Self, cast

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.keys.key import GlobalCaller
from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput
from retrysafe.http import asgi_resume, resumers
from retrysafe.http.answers import first_look
from retrysafe.http.asgi_io import (
    TOO_LARGE,
    app_prefix_of,
    is_protected,
    is_refused,
    paths_of,
    prefix_of,
    read_body,
    request_of,
    send_early,
    send_response,
)
from retrysafe.http.asgi_run import (
    App,
    AppRun,
    Receive,
    Scope,
    Send,
)
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import CallerOf
from retrysafe.http.claim_timeout import ClaimLookout
from retrysafe.http.ignored_keys import NOTICED_NAME, keys_in
from retrysafe.http.large_bodies import LARGE_BODIES, LARGE_BODY_BYTES
from retrysafe.http.limits import Limits
from retrysafe.http.pages import PAGE_METHODS, POLICY_PATH, STATUS_PATH
from retrysafe.http.plan import Plan
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.protection import STORE_TIMEOUT, Protection
from retrysafe.http.request import PROTECTED_NAME, Request
from retrysafe.http.responses import Response
from retrysafe.http.resumption import RESUMED_NAME, resumption_in
from retrysafe.http.routes import Route
from retrysafe.http.rules import Rule, checked_rules
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.runtime.calls import calls_of

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
        idempotency: AsyncIdempotency,
        *,
        caller: CallerOf | GlobalCaller,
        rules: Iterable[Rule] | None = None,
        rule: Rule | None = None,
        fail_open: bool = False,
        store_timeout: timedelta | None = STORE_TIMEOUT,
        policy_path: str = POLICY_PATH,
        policy_page: PolicyReaders = True,
        status_path: str = STATUS_PATH,
        challenge: str | None = None,
        breaker: Breaker | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Raises `InvalidInput` and `PolicyInvalid` for what would fail with the first request."""
        if not isinstance(idempotency, AsyncIdempotency):
            raise InvalidInput(
                f"an ASGI application needs an AsyncIdempotency object, got {idempotency!r}"
            )
        rules = checked_rules(rules)
        protection = Protection(
            calls_of(idempotency).settings,
            caller=caller,
            rules=rules,
            rule=rule,
            fail_open=fail_open,
            store_timeout=store_timeout,
            policy_path=policy_path,
            policy_page=policy_page,
            status_path=status_path,
            challenge=challenge,
            breaker=breaker,
            limits=limits,
        )
        self._assemble(app, idempotency, protection)
        self.register(protection.table.routes)
        resumers.protections.add(self)
        # Around one endpoint of an application, the pages are where its other rules are.
        self._prefix_of = prefix_of if rule is None else app_prefix_of

    @classmethod
    def sharing(cls, app: App, idempotency: AsyncIdempotency, protection: Protection) -> Self:
        """For integrations: a middleware around one endpoint of an application.

        All endpoints of an application share its protection, and so its breaker and its pages.
        """
        made = cls.__new__(cls)
        made._assemble(app, idempotency, protection)  # noqa: SLF001 — its own, as in __init__.
        return made

    def register(self, routes: Iterable[Route]) -> None:
        """For integrations: lets workers find these routes; raises as `resumers.register` does."""
        calls = self.calls
        resumers.register(
            calls.operations, self.protection, routes, partial(asgi_resume.resume, calls)
        )

    def refresh(self) -> None:
        """For workers: all routes are known from the start."""

    def around(self, app: App) -> Self:
        """For integrations: the same around another endpoint; both share what is remembered."""
        made = copy(self)
        made.app = app
        return made

    def _assemble(self, app: App, idempotency: AsyncIdempotency, protection: Protection) -> None:
        self.app = app
        self.idempotency = idempotency
        self.calls = calls = calls_of(idempotency)
        self.protection = protection
        self._find = protection.find
        self._has_async_caller = protection.has_async_caller
        self._prefix_of = prefix_of
        # The loop itself holds tasks weakly, so a run whose client has gone is held here.
        self._runs: set[AppRun] = set()
        seconds = protection.store_timeout_seconds
        self._lookout: ClaimLookout | None = None
        # A store that never waits has answered a claim before anybody can lose patience.
        if seconds is not None and calls.store.capabilities.waits is not Waits.NEVER:
            let_go = None if protection.fail_open else calls.let_go
            self._lookout = ClaimLookout(seconds, calls.is_claiming, let_go)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; what is not HTTP, or is protected already, passes untouched."""
        if scope["type"] != "http" or (PROTECTED_NAME in scope and is_protected(scope)):
            if scope["type"] != "lifespan" or not await is_refused(receive, send):
                await self.app(scope, receive, send)
            return
        inner, whole = paths_of(scope)
        method: str = scope["method"]
        if not method.isupper():
            # Some frameworks take `post` for POST, and no rule may be passed by like that.
            method = method.upper()
        match = self._find(method, inner)
        if match is None:
            if (resumption := resumption_in(scope)) is not None:
                resumption.require_rule(whole, method, self.protection.table.routes)
            await self._pass(method, inner, scope, receive, send)
            return
        # What the rule has seen is what the application runs.
        scope["method"] = method
        if NOTICED_NAME in scope:
            scope[NOTICED_NAME].append(self)
        route, parameters = match
        request = Request(
            method,
            whole,
            scope.get("query_string", b""),
            scope["headers"],
            b"",
            scope,
            parameters,
        )
        await self.protect(route, request, self._prefix_of(scope), receive, send)

    async def _pass(
        self, method: str, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """A page, or a request that no rule protects; a key that comes with it is told of."""
        if method in PAGE_METHODS and self.protection.pages.serve(path):
            await self.show_page(path, request_of(scope), self._prefix_of(scope), send)
            return
        keys = keys_in(method, scope["headers"])
        if not keys or NOTICED_NAME in scope or self.protection.table.is_covered(method, path):
            await self.app(scope, receive, send)
            return
        # Endpoints may have rules of their own.
        noticed = scope[NOTICED_NAME] = []
        try:
            await self.app(scope, receive, send)
        finally:
            if not noticed:
                self.protection.ignored_keys.note(self.calls.report, method, path, keys)

    async def show_page(self, path: str, request: Request, prefix: str, send: Send) -> None:
        """Answers with the policy page, or with the status of a key.

        `path` is the page's path inside the application, which is mounted at `prefix`.
        """
        page = await self.protection.pages.page(
            path,
            request,
            prefix,
            caller_of=self.protection.caller_on_loop,
            read=partial(self.calls.read, with_audit=False),
            run_times=self.calls.run_times,
        )
        await send_response(send, page)

    async def protect(
        self, route: Route, request: Request, prefix: str, receive: Receive, send: Send
    ) -> None:
        """For integrations: answers a request of a route; its `host` is the ASGI scope."""
        if RESUMED_NAME in request.host:
            resumed = asgi_resume.resumed_plan(route, request, prefix, self.protection.outcome_of)
            if resumed is not None:
                run = AppRun(self.app, self._runs, resumed, request.host, receive, send)
                await asgi_resume.serve(run, request.host, send)
                return
        plan = self.protection.begin(route, request, prefix)
        if self._has_async_caller and isinstance(plan, Plan):
            plan = await self.protection.identified(plan)
        body: bytes | object | None = None
        if isinstance(plan, Plan):
            body = await read_body(receive, route.rule.request_limit_bytes)
            if isinstance(body, bytes):
                request.body = body
                await self.answer(plan, request.host, receive, send)
                return
        await self._decline(plan, request, prefix, body, receive, send)

    async def _decline(
        self,
        plan: Plan | Response | None,
        request: Request,
        prefix: str,
        body: bytes | object | None,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answers a request that is refused by its head or its body, or passes."""
        if isinstance(plan, Response):
            await send_early(send, receive, plan, request)
        elif plan is None:
            await self.app(request.host, receive, send)
        elif body is not None:  # Else the client went away before it had asked for anything.
            refusal = self.protection.refusals.too_large(plan.route, request, prefix, plan.key)
            await send_early(send, receive, refusal, request, is_body_read=body is TOO_LARGE)

    async def answer(
        self,
        plan: Plan,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answers a planned request whose body has been read; raises what the application does."""
        protection, run = self.protection, None
        if plan.ignored:
            protection.note_ignored(plan, self.calls.report)
        try:
            call = (
                protection.call(plan)
                if len(plan.request.body) + len(plan.request.query) < LARGE_BODY_BYTES
                else await LARGE_BODIES.run(protection.call, plan)
            )
            response = protection.known(plan, call, self.calls)
        except Exception as error:
            response = protection.answers.refused(plan, error, is_news=False)
            if response is None:
                raise
        if response is None:
            run = AppRun(self.app, self._runs, plan, scope, receive, send)
            response = await self._answered(run, call)
            if response is None:
                run = AppRun(self.app, self._runs, plan, scope, receive, send)
                response = await self._answered(run, call)
                assert response is not None  # It fails open once.
            if response.is_streamed:
                await run.pass_through()
                return
        await send_response(send, response)
        if run is not None and not run.is_over and not run.is_left:
            run.abandon()
            await run.finish()

    async def _answered(self, run: AppRun, call: Call) -> Response | None:
        """The response of a run; None when it never began, and the plan is to run unprotected.

        The application runs in tasks of its own, which go on when this one is cancelled. Raises
        what the application raises, and errors of retrysafe that are not for clients.
        """
        plan, answers, loop = run.plan, self.protection.answers, run.loop
        is_news = not plan.is_unprotected
        waiter: asyncio.Future[Answer[Any]] = loop.create_future()
        # Without a place in the background it is answered when it has ended, within the limits that
        # the server has for requests.
        may_go_on = is_news and (plan.preference.respond_async or plan.route.accepts_first)
        if may_go_on and self.protection.background.enter(run):
            run.started = loop.create_future()
            run.background = self.protection.background
        # A transaction of the application's own has the time-outs that its database was given.
        if self._lookout is not None and is_news and plan.route.rule.transaction is None:
            self._lookout.watch(run, call, waiter, loop)
        run.answering = loop.create_task(self._answer_apart(run, call, waiter))
        try:
            if run.started is not None and not await _is_prompt(run, waiter):
                return answers.accepted(
                    plan, first_look(call.operation, call.policy, self.calls.run_times)
                )
            return answers.answered(plan, await waiter, run.response, is_news=is_news)
        except asyncio.CancelledError:
            _leave(run, waiter)
            raise
        except Exception as error:
            if error is run.error:
                self.calls.report.end(call, error)
                if run.response is None:
                    raise  # The application's own: the server above us deals with it as ever.
                return run.response
            if run.task is None and self.protection.fails_open(plan, error):
                return None
            self.calls.report.end(call, error)
            refusal = answers.refused(plan, error, is_news=is_news)
            if refusal is None:
                run.abandon()
                raise
            return refusal

    def _outcome(self, run: AppRun, call: Call) -> Coroutine[Any, Any, Answer[Any]]:
        """Runs the application once: in a transaction, with a claim, or without one."""
        calls, unprotected = self.calls, self.protection.unprotected
        plan, transaction = run.plan, cast("Any", run.plan.route.rule.transaction)
        if transaction is not None:
            return calls.answer_atomic(call, transaction, run.invoke)
        if unprotected is None:
            return calls.answer_call(call, run.invoke)
        if plan.is_unprotected:
            return self.protection.answer_unprotected(plan, call, run.invoke, calls)
        return self._outcome_claimed(unprotected, run, call)

    async def _outcome_claimed(
        self, unprotected: UnprotectedRuns, run: AppRun, call: Call
    ) -> Answer[Any]:
        """Runs the application with a claim, in a service that also runs it without one."""
        calls = self.calls

        def invoke(attempt: Attempt) -> asyncio.Future[Response]:
            unprotected.begin_claimed(call, calls.run_times)
            return run.invoke(attempt)

        try:
            answer = await calls.answer_call(call, invoke)
        except BaseException as error:
            unprotected.end_claimed(call, error)
            raise
        unprotected.end_claimed(call, None)
        return answer

    async def _answer_apart(
        self, run: AppRun, call: Call, waiter: asyncio.Future[Answer[Any]]
    ) -> None:
        """Answers the call, and tells the waiter at once: a task's own callbacks come later."""
        try:
            answer = await self._outcome(run, call)
        except Exception as error:
            if not waiter.done():
                waiter.set_exception(error)
            else:
                self.calls.report.end(call, error)
                _logger.exception("a protected request failed after its client had gone")
        except BaseException as error:
            if waiter.cancelled():
                self.calls.report.end(call, error)
            waiter.cancel()
            raise
        else:
            if not waiter.done():
                waiter.set_result(answer)
        finally:
            if self._lookout is not None:
                self._lookout.forget(run)
            if run.background is not None and run.task is None:
                run.background.leave(run)
            if self._runs and (run.task is None or run.task.done()):
                self._runs.discard(run)


async def _is_prompt(run: AppRun, waiter: asyncio.Future[Answer[Any]]) -> bool:
    """Whether the answer is there in time, counted from the start of the run; else it is left.

    Nothing is promised before the key is claimed: a refusal must reach the client itself. A stream
    that is on its way is the answer already.
    """
    assert run.started is not None
    await asyncio.wait((waiter, run.started), return_when=asyncio.FIRST_COMPLETED)
    if not waiter.done():
        await asyncio.wait((waiter,), timeout=run.plan.preference.wait_seconds or 0)
    if not waiter.done() and not run.is_passing:
        _leave(run, waiter)
        return False
    return True


def _leave(run: AppRun, waiter: asyncio.Future[Answer[Any]]) -> None:
    """Lets a run go on by itself."""
    run.leave()
    waiter.cancel()
