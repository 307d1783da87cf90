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
from typing import Any, Final, Self, cast

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.keys.key import GlobalCaller, Key
from retrysafe.core.ports import Waits
from retrysafe.errors import InvalidInput, StoreError
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
from retrysafe.http.large_bodies import LARGE_BODIES, LARGE_BODY_BYTES
from retrysafe.http.limits import Limits
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.protection import (
    POLICY_PATH,
    STATUS_PATH,
    STORE_TIMEOUT,
    Plan,
    Protection,
)
from retrysafe.http.request import PROTECTED_NAME, Request
from retrysafe.http.responses import Response
from retrysafe.http.routes import Route
from retrysafe.http.rules import Rule, checked_rules
from retrysafe.http.unmatched import NOTICED_NAME, keys_in
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.runtime.calls import calls_of

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
        if method in _PAGE_METHODS and self.protection.has_page(path):
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
                self.protection.unmatched.note(self.calls.report, method, path, keys)

    async def show_page(self, path: str, request: Request, prefix: str, send: Send) -> None:
        """Answers with the policy page, or with the status of a key.

        `path` is the page's path inside the application, which is mounted at `prefix`.
        """
        protection = self.protection
        page: Response | list[Key] | None = protection.policy_page(path, request, prefix)
        if page is None:
            caller = await protection.caller_on_loop(request)
            page = protection.status_keys(path, request, prefix, caller)
        if isinstance(page, list):
            key = page[0]
            try:
                forms = [await self.calls.read(each, with_audit=False) for each in page]
                page = protection.status(forms, key, request, prefix, self.calls.run_times)
            except StoreError as error:
                page = protection.status_refused(error, key, request, prefix)
        if request.method == "HEAD":
            page.body = b""
        await send_response(send, page)

    async def protect(
        self, route: Route, request: Request, prefix: str, receive: Receive, send: Send
    ) -> None:
        """For integrations: answers a request of a route; its `host` is the ASGI scope."""
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
        """Answers a request that is refused by its head or its body, or runs unprotected."""
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
        protection = self.protection
        run: AppRun | None = None
        waiter: asyncio.Future[Answer[Any]] | None = None
        # None: the application runs unprotected, as was asked for.
        response: Response | None
        protection.note_unread(plan, self.calls.report)
        try:
            call = (
                protection.call(plan)
                if len(plan.request.body) + len(plan.request.query) < LARGE_BODY_BYTES
                else await LARGE_BODIES.run(protection.call, plan)
            )
            answer = self.calls.recall(call)
            if answer is not None:
                response = protection.answered(plan, answer, is_news=False)
            elif protection.unprotected and (known := self._recall_unprotected(plan, call)):
                response = known
            elif protection.breaker.is_open and (closed := self._closed_off(plan, call)):
                response = None if protection.runs_unprotected(plan) else closed
            else:
                loop = asyncio.get_running_loop()
                run = AppRun(self.app, self._runs, plan, scope, receive, send, loop)
                waiter = self._start(run, call)
                if run.started is not None and not await _is_prompt(run, waiter):
                    response = protection.accepted(plan, self._hint(call))
                else:
                    response = protection.answered(plan, await waiter, run.response)
        except asyncio.CancelledError:
            _leave(run, waiter)
            raise
        except Exception as error:
            response = self._answer_to(error, run, plan)
        if response is None:
            run, response = await self._answer_unprotected(call, plan, scope, receive, send)
        if run is not None and response.is_streamed:
            await run.pass_through()
            return
        await send_response(send, response)
        if run is not None and not run.is_over and not run.is_left:
            run.abandon()
            await run.finish()

    def _answer_to(self, error: Exception, run: AppRun | None, plan: Plan) -> Response | None:
        """The response to an error, or None to run unprotected; raises what is not for clients."""
        if run is not None and error is run.error:
            if run.response is None:
                raise error  # The application's own: the server above us deals with it as ever.
            return run.response
        protection = self.protection
        has_asked = run is not None and not plan.is_unprotected
        if (
            has_asked
            and run is not None
            and run.task is None
            and protection.fails_open(plan, error)
        ):
            return None
        refusal = protection.refused(plan, error, is_news=has_asked)
        if refusal is None:
            if run is not None:
                run.abandon()
            raise error
        return refusal

    def _closed_off(self, plan: Plan, call: Call) -> Response | None:
        """The refusal while the store is left alone.

        What is known to run needs no store, and is never run unprotected beside that.
        """
        return None if self.calls.is_in_flight(call) else self.protection.closed_off(plan)

    def _hint(self, call: Call) -> timedelta:
        """When to look for the outcome of a run that has just begun."""
        policy = call.policy
        run_times = self.calls.run_times
        return timedelta(
            seconds=run_times.retry_after(call.operation, 0.0, policy.lease.total_seconds())
        )

    async def _answer_unprotected(
        self, call: Call, plan: Plan, scope: Scope, receive: Receive, send: Send
    ) -> tuple[AppRun, Response]:
        """Runs the application although nobody can tell whether it ran before, as was asked for.

        Once at a time in this process, and apart from its connection, as with a claim.
        """
        plan.is_unprotected = True
        loop = asyncio.get_running_loop()
        run = AppRun(self.app, self._runs, plan, scope, receive, send, loop)
        waiter: asyncio.Future[Answer[Any]] = loop.create_future()
        run.settling = loop.create_task(self._settle(run, call, waiter))
        try:
            answer = await waiter
            if not plan.is_unprotected:
                return run, self.protection.answered(plan, answer, is_news=False)
            return run, self.protection.answered_unprotected(plan, answer)
        except asyncio.CancelledError:
            _leave(run, waiter)
            raise
        except Exception as error:
            response = self._answer_to(error, run, plan)
            assert response is not None  # It runs unprotected already.
            return run, response

    def _recall_unprotected(self, plan: Plan, call: Call) -> Response | None:
        calls = self.calls
        return self.protection.recall_unprotected(plan, call, calls.report, calls.run_times)

    def _start(self, run: AppRun, call: Call) -> asyncio.Future[Answer[Any]]:
        """Runs the application in tasks of its own; cancelling the future leaves them alone."""
        plan, loop = run.plan, run.loop
        waiter: asyncio.Future[Answer[Any]] = loop.create_future()
        # Without a place in the background it is answered when it has ended, within the limits that
        # the server has for requests.
        if plan.preference.respond_async and self.protection.background.enter(run):
            run.started = loop.create_future()
            run.background = self.protection.background
        # A transaction of the application's own has the time-outs that its database was given.
        if self._lookout is not None and plan.route.rule.transaction is None:
            self._lookout.watch(run, call, waiter, loop)
        run.settling = loop.create_task(self._settle(run, call, waiter))
        return waiter

    def _outcome(self, run: AppRun, call: Call) -> Coroutine[Any, Any, Answer[Any]]:
        """Runs the application once: in a transaction, with a claim, or without one."""
        calls, unprotected = self.calls, self.protection.unprotected
        plan, transaction = run.plan, cast("Any", run.plan.route.rule.transaction)
        if transaction is not None:
            return calls.answer_atomic(call, transaction, run.invoke)
        if unprotected is None:
            return calls.answer_call(call, run.invoke)
        if not plan.is_unprotected:
            return self._outcome_claimed(unprotected, run, call)

        def recall(call: Call) -> Answer[Any] | None:
            remembered = calls.recall(call)
            plan.is_unprotected = remembered is None
            return remembered

        report, run_times = calls.report, calls.run_times
        return unprotected.answer(call, run.invoke, recall, report, run_times)

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

    async def _settle(self, run: AppRun, call: Call, waiter: asyncio.Future[Answer[Any]]) -> None:
        """Answers the call, and tells the waiter at once: a task's own callbacks come later."""
        try:
            answer = await self._outcome(run, call)
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


def _leave(run: AppRun | None, waiter: asyncio.Future[Answer[Any]] | None) -> None:
    """Lets a run go on by itself; without one there is nothing to leave."""
    if run is not None and waiter is not None:
        run.leave()
        waiter.cancel()
