"""A protected request in the thread that serves it: the order of what is asked and run.

Owns what the WSGI middleware and integrations with blocking views do alike. It neither reads
requests nor sends responses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.keys.key import GlobalCaller, Key
from retrysafe.errors import RetrysafeError, StoreError
from retrysafe.http.protection import Plan, Protection
from retrysafe.http.request import Request
from retrysafe.http.responses import Response
from retrysafe.http.unprotected import UnprotectedRuns
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


def answered(protection: Protection, calls: Calls, plan: Plan, run: Run) -> Response:
    """The response to send.

    Raises what the application raises, and errors of retrysafe that are not for clients.
    """
    has_asked = False
    protection.note_unread(plan, calls.report)
    try:
        call = protection.call(plan)
        answer = calls.recall(call)
        if answer is not None:
            return protection.answered(plan, answer, is_news=False)
        if protection.unprotected is not None:
            known = protection.recall_unprotected(plan, call, calls.report, calls.run_times)
            if known is not None:
                return known
        has_asked = True
        # What is known to run needs no store, and is never run unprotected beside that.
        if protection.breaker.is_open and not calls.is_in_flight(call):
            refusal = protection.closed_off(plan)
            if refusal is not None and protection.runs_unprotected(plan):
                return _answered_unprotected(protection, calls, plan, call, run)
            if refusal is not None:
                return refusal
        transaction: Any = plan.route.rule.transaction
        if transaction is None:
            answer = _answered_claimed(protection.unprotected, calls, call, run)
        else:
            answer = calls.answer_atomic(call, transaction, run.invoke)
        return protection.answered(plan, answer, run.response)
    except Exception as error:
        if error is run.error:
            raise  # The application's own: whoever serves it deals with it as ever.
        if has_asked and not run.has_begun and protection.fails_open(plan, error):
            return _answered_unprotected(protection, calls, plan, call, run)
        refusal = protection.refused(plan, error, is_news=has_asked)
        if refusal is None or run.is_passing:
            raise
        return refusal


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


def _answered_unprotected(
    protection: Protection, calls: Calls, plan: Plan, call: Call, run: Run
) -> Response:
    """The response of a run whose key nobody could claim; the service has asked for it."""
    assert protection.unprotected is not None  # Only a service that fails open comes here.
    plan.is_unprotected = True

    async def invoke(attempt: None) -> Response:
        return run.invoke(attempt)

    def recall(call: Call) -> Answer[Any] | None:
        remembered = calls.recall(call)
        plan.is_unprotected = remembered is None
        return remembered

    report, run_times = calls.report, calls.run_times
    try:
        answer = run_sync(protection.unprotected.answer(call, invoke, recall, report, run_times))
    except RetrysafeError as error:
        refusal = None if error is run.error else protection.refused(plan, error, is_news=False)
        if refusal is None or run.is_passing:
            raise
        return refusal
    if not plan.is_unprotected:
        return protection.answered(plan, answer, is_news=False)
    return protection.answered_unprotected(plan, answer)


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
    shown: Response | list[Key] | None = protection.policy_page(path, request, prefix)
    if shown is None:
        caller = (protection.caller if caller_of is None else caller_of)(request)
        shown = protection.status_keys(path, request, prefix, caller)
    if isinstance(shown, list):
        key = shown[0]
        try:
            forms = [calls.read(each, with_audit=False) for each in shown]
            shown = protection.status(forms, key, request, prefix, calls.run_times)
        except StoreError as error:
            shown = protection.status_refused(error, key, request, prefix)
    if request.method == "HEAD":
        shown.body = b""
    return shown
