"""A protected request in the thread that serves it: the order of what is asked and run.

Owns what the WSGI middleware and integrations with blocking views do alike. It neither reads
requests nor sends responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.keys.key import GlobalCaller, Key
from retrysafe.core.model import StoredKey
from retrysafe.errors import StoreUnavailable
from retrysafe.http import resumers, wsgi_resume
from retrysafe.http.plan import Plan
from retrysafe.http.protection import Protection
from retrysafe.http.request import Request
from retrysafe.http.responses import Response
from retrysafe.http.routes import Route
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.http.wsgi_resume import ThreadResumption
from retrysafe.runtime.calls import Calls
from retrysafe.runtime.drive import run_sync


class Run(Protocol):
    """One run of the application, or of one of its views."""

    @property
    def response(self) -> Response | None:
        """What it answered; None before that."""

    @property
    def error(self) -> BaseException | None:
        """What it raised."""

    @property
    def has_begun(self) -> bool:
        """Whether the application was called."""

    @property
    def is_passing(self) -> bool:
        """Whether the response is on its way already, so that nothing else can be sent."""

    def invoke(self, attempt: Attempt | AtomicAttempt[Any] | None) -> Response:
        """Runs it to the end of its response; None is a run without a claim."""


def begun(
    protection: Protection, route: Route, request: Request, prefix: str, *, is_on_loop: bool = False
) -> Plan | Response | None:
    """As `Protection.begin`, and the plan of a request that a worker has sent again."""
    resumed = wsgi_resume.resumed_plan(route, request, prefix, protection.outcome_of)
    return resumed or protection.begin(route, request, prefix, is_on_loop=is_on_loop)


def register(protection: Protection, calls: Calls, routes: Iterable[Route]) -> None:
    """Lets workers find these routes; raises as `resumers.register` does."""
    resumers.register(calls.operations, protection, routes, partial(wsgi_resume.resume, calls))


def answered(protection: Protection, calls: Calls, plan: Plan, run: Run) -> Response:
    """The response to send.

    Raises what the application raises, and errors of retrysafe that are not for clients.
    """
    if isinstance(plan.resumption, ThreadResumption):
        return plan.resumption.served(run.invoke)
    is_news, answers = False, protection.answers
    if plan.ignored:
        protection.note_ignored(plan, calls.report)
    call: Call | None = None
    try:
        call = protection.call(plan)
        known = protection.known(plan, call, calls)
        if known is not None:
            return known
        is_news = not plan.is_unprotected
        try:
            answer = _answered(protection, calls, plan, call, run)
        except StoreUnavailable as error:
            if run.has_begun or not protection.fails_open(plan, error):
                raise
            is_news = False
            answer = _answered(protection, calls, plan, call, run)
        return answers.answered(plan, answer, run.response, is_news=is_news)
    except Exception as error:
        if call is not None:
            calls.report.end(call, error)
        if error is run.error:
            raise  # The application's own: whoever serves it deals with it as ever.
        refusal = answers.refused(plan, error, is_news=is_news)
        if refusal is None or run.is_passing:
            raise
        return refusal


def _answered(
    protection: Protection, calls: Calls, plan: Plan, call: Call, run: Run
) -> Answer[Any]:
    """Runs the application once: in a transaction, with a claim, or without one."""
    transaction: Any = plan.route.rule.transaction
    if transaction is not None:
        return calls.answer_atomic(call, transaction, run.invoke)
    if not plan.is_unprotected:
        return _answered_claimed(protection.unprotected, calls, call, run)

    async def invoke(attempt: None) -> Response:
        return run.invoke(attempt)

    return run_sync(protection.answer_unprotected(plan, call, invoke, calls))


def _answered_claimed(
    unprotected: UnprotectedRuns | None, calls: Calls, call: Call, run: Run
) -> Answer[Any]:
    """The answer of a run with a claim, which a service that fails open notes as well."""
    if unprotected is None:
        return calls.answer_call(call, run.invoke)

    def invoke(attempt: Attempt) -> Response:
        unprotected.begin_claimed(call, calls.run_times)
        return run.invoke(attempt)

    try:
        answer = calls.answer_call(call, invoke)
    except BaseException as error:
        unprotected.end_claimed(call, error)
        raise
    unprotected.end_claimed(call, None)
    return answer


def page(
    protection: Protection,
    calls: Calls,
    path: str,
    request: Request,
    prefix: str,
    caller_of: Callable[[Request], str | GlobalCaller | None] | None = None,
) -> Response:
    """The policy page, or the status of a key; `path` is inside the application, at `prefix`.

    `caller_of` is how an integration asks for the caller, where it can await one.
    """

    async def read(key: Key) -> StoredKey | None:
        return calls.read(key, with_audit=False)

    async def caller(request: Request) -> str | GlobalCaller | None:
        return (protection.caller if caller_of is None else caller_of)(request)

    return run_sync(
        protection.pages.page(
            path, request, prefix, caller_of=caller, read=read, run_times=calls.run_times
        )
    )
