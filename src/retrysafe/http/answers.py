"""Answers: what the engine says of a call, as the response that its client gets.

Owns the marks of a response: replayed, unprotected, the preference that was followed; and which
error is which refusal. The breaker hears here whether the store has answered.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

from retrysafe.core.call import Answer
from retrysafe.core.keys.key import GlobalCaller
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.run_times import RunTimes
from retrysafe.errors import (
    Closed,
    KeyReused,
    OperationInFlight,
    OutcomeNotStored,
    StoreError,
    StoreUnavailable,
)
from retrysafe.http import problems
from retrysafe.http.breaker import Breaker
from retrysafe.http.headers import NO_PREFERENCE, link_path, retry_after_text
from retrysafe.http.plan import Plan
from retrysafe.http.problems import Refusals, first_use, problem_of
from retrysafe.http.responses import Header, Response, response_of, uncached

REPLAYED: Final[Header] = (b"idempotent-replayed", b"true")
# Marks a response that was made while keys could not be looked up, by a service that fails open.
UNPROTECTED: Final[Header] = (b"idempotency-protected", b"false")
_logger = logging.getLogger("retrysafe")


class Answers:
    """The responses of one application to calls that were answered, refused or accepted."""

    def __init__(
        self,
        refusals: Refusals,
        breaker: Breaker,
        status_path: str,
        private: list[Header],
        monotonic: Callable[[], float],
    ) -> None:
        self._refusals = refusals
        self._breaker = breaker
        self._status_path = status_path
        self._replayed = [*private, REPLAYED]
        self._monotonic = monotonic

    def answered(
        self,
        plan: Plan,
        answer: Answer[Any],
        sent: Response | None = None,
        *,
        is_news: bool = True,
    ) -> Response:
        """The response to send; `sent` is what the application answered in this very run.

        `is_news` says that the store was asked. A replay from the process says nothing about it.
        """
        if is_news and self._breaker.failures:
            self._breaker.succeeded()
        response = answer.value
        if type(response) is not Response:
            response = response_of(response)
        if answer.replayed:
            # Decoded for this caller alone, so it may be changed.
            response.headers = uncached(response.headers, self._replayed)
        elif sent is not None and sent is not response and _is_same(sent, response):
            # Completed in the application's transaction: what middlewares added counts as well.
            response = sent
        if plan.is_unprotected:
            response.headers = [*response.headers, UNPROTECTED]
        if plan.preference is NO_PREFERENCE:
            return response
        return self._preferred(plan, response)

    def refused(self, plan: Plan, error: BaseException, *, is_news: bool = True) -> Response | None:
        """The response to an error of the engine; None for one that is not for clients."""
        if isinstance(error, StoreUnavailable | OutcomeNotStored):
            self._breaker.failed(self._monotonic())
        elif is_news and not _is_known_here(error):
            self._breaker.succeeded()
        if isinstance(error, StoreError) and not isinstance(error, StoreUnavailable):
            _logger.error("a protected request was refused", exc_info=error)
        # Not to a client who asked to wait instead, and did: it gets what every wait ends with.
        accepts = plan.preference.respond_async or (
            plan.route.accepts_duplicates and plan.policy.in_flight is not InFlight.WAIT
        )
        if isinstance(error, OperationInFlight) and error.has_record and accepts:
            return self.accepted(plan, error.retry_after)
        detail: str | None = None
        if isinstance(error, KeyReused) and plan.is_made:
            detail = plan.route.told_of_reuse
        elif isinstance(error, KeyReused) and not isinstance(plan.caller, GlobalCaller):
            # In a namespace that all callers share, the first use may be somebody else's.
            detail = first_use(error)
        context = self._refusals.context(plan.request, plan.prefix)
        response = problem_of(error, context, key=plan.key, detail=detail)
        if response is None:
            return None
        if response.status == problems.CALLER_UNKNOWN.status:
            response.headers += self._refusals.challenge
        if (
            isinstance(error, OperationInFlight)
            and plan.policy.in_flight is InFlight.WAIT
            and not error.has_waited
        ):
            return response  # There was no place to wait in.
        return self._preferred(plan, response)

    def accepted(self, plan: Plan, retry_after: timedelta) -> Response:
        """202 with the place where the outcome will be found, and when to look there."""
        assert plan.key is not None  # Only a call that was made can be running.
        url = f"{link_path(plan.prefix)}{self._status_path}{quote(plan.key, safe='')}"
        body = json.dumps({"state": "running", "key": plan.key, "status_url": url}).encode()
        response = Response(
            202,
            [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"location", url.encode()),
                (b"retry-after", retry_after_text(retry_after)),
                (b"cache-control", b"no-store"),
            ],
            body,
        )
        if not plan.preference.respond_async:
            # The route answers so unasked, also where no wait was asked for in so many words.
            return self._preferred(plan, response)
        response.headers.append((b"preference-applied", b"respond-async"))
        return response

    def _preferred(self, plan: Plan, response: Response) -> Response:
        """The response with the mark of the preference that was followed."""
        if plan.preference.wait_seconds is not None:
            policy = plan.policy
            seconds = policy.wait_seconds if policy.in_flight is InFlight.WAIT else 0
            response.headers.append((b"preference-applied", b"wait=%d" % seconds))
        return response


def first_look(operation: str, policy: Policy, run_times: RunTimes) -> timedelta:
    """When to look for the outcome of a run that has just begun."""
    lease_seconds = policy.lease.total_seconds()
    return timedelta(seconds=run_times.retry_after(operation, 0.0, lease_seconds))


def _is_known_here(error: BaseException) -> bool:
    """Whether a call was refused without a word from the store.

    Else the duplicates of one long request would send all others to a store that is down.
    """
    if isinstance(error, OperationInFlight | KeyReused):
        return error.is_known_here
    return isinstance(error, Closed)


def _is_same(first: Response, second: Response) -> bool:
    return first.status == second.status and first.body == second.body
