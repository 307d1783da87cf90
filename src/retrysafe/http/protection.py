"""The checks of a protected request, in their order, without any I/O: alike for every server.

Owns the whole configuration of the HTTP layer. `begin` looks at the head, `call` at the body, and
`known` says what is answered without a store. The adapters read bodies, run the application and
send what they are given here; they decide nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Final

from retrysafe.core.call import Answer, Call
from retrysafe.core.events import UNFOLLOWED, EventKind, Reporter
from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.key import GlobalCaller, Key
from retrysafe.core.keys.secret import PLAIN_TAG
from retrysafe.core.nested_claims import nested
from retrysafe.core.permits import Permits
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.settings import Settings
from retrysafe.errors import KeyInvalid, PolicyInvalid, StoreUnavailable
from retrysafe.http import problems
from retrysafe.http.answers import Answers
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import (
    CallerOf,
    Naming,
    RotatingCaller,
    checked_caller_of,
    is_async,
    shipped,
    vary_of,
)
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.headers import (
    HEADER_LIMIT_BYTES,
    NO_PREFERENCE,
    length_of,
    parse_key,
)
from retrysafe.http.ignored_keys import IgnoredKeys
from retrysafe.http.key_sources import made_key, require_own_key
from retrysafe.http.limits import Limits
from retrysafe.http.pages import POLICY_PATH, STATUS_PATH, Pages
from retrysafe.http.plan import Plan, granted_preference
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.problems import Refusals, problem, problem_of
from retrysafe.http.request import Request
from retrysafe.http.responses import NO_STORE, Response, response_of
from retrysafe.http.resumption import arguments_of
from retrysafe.http.routes import Match, Route, RouteTable
from retrysafe.http.rules import Rule
from retrysafe.http.unprotected import UnprotectedRuns
from retrysafe.runtime.async_calls import AsyncCalls
from retrysafe.runtime.calls import Calls

# Shorter than clients wait by default, and far longer than a store takes that is well.
STORE_TIMEOUT: Final = timedelta(seconds=5)
_KEY_HEADER: Final = b"idempotency-key"
_PREFER_HEADER: Final = b"prefer"
_LENGTH_HEADER: Final = b"content-length"
_NO_LINES: Final[list[bytes]] = []
_logger = logging.getLogger("retrysafe")


class Protection:
    """The rules of an application and what they mean for one request.

    Raises `PolicyInvalid` for rules that contradict themselves, and `InvalidInput` for a caller
    that is neither a function of the request nor `GLOBAL`.
    """

    def __init__(
        self,
        settings: Settings,
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
        outcome_of: Callable[[Any], Response] = response_of,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if rules is not None and rule is not None:
            raise PolicyInvalid("pass rules for many routes or rule for one, not both")
        if isinstance(rules, Rule):
            raise PolicyInvalid("rules takes a list: rules=[Rule(…)]")
        self._global = caller if isinstance(caller, GlobalCaller) else None
        self._caller_of = None if isinstance(caller, GlobalCaller) else checked_caller_of(caller)
        # Then `begin` leaves the caller to `identified`.
        self.has_async_caller = is_async(self._caller_of)
        self._is_rotating = settings.secrets.is_several
        self._fingerprints = settings.secrets.fingerprints
        self._named = Naming(settings.secrets).named
        self.shipped_caller = shipped(caller)
        known = self.shipped_caller
        if known is not None and known.has_credential and not settings.secrets.listed:
            _logger.warning(
                "there is no secret, so credentials of callers are stored as plain SHA-256, "
                "against which short ones can be tried: pass secret=… or set RETRYSAFE_SECRET"
            )
        vary = vary_of(caller)
        # What is said to caches of a response that is for its caller alone.
        private = [NO_STORE] if vary is None else [NO_STORE, (b"vary", vary.encode())]
        self.settings = settings
        self.table = RouteTable((rule or Rule(),) if rules is None else tuple(rules), settings)
        self.find: Callable[[str, str], Match | None] = self.table.find
        self.fail_open = fail_open
        # How long a claim may take, on an event loop; None for as long as the store takes.
        self.store_timeout_seconds = _checked_timeout(store_timeout)
        self.breaker = breaker or Breaker()
        self.ignored_keys = IgnoredKeys()
        limits = Limits() if limits is None else limits
        if not isinstance(limits, Limits):
            raise PolicyInvalid(f"limits is Limits(…), got {limits!r}")
        # Who waits on an event loop, and in threads.
        self._task_waiters = Permits(limits.waiters_for(is_on_loop=True))
        self._thread_waiters = Permits(limits.waiters_for(is_on_loop=False))
        # Runs that go on behind a 202.
        self.background = Permits(limits.background_runs)
        # What runs without a claim, and ran; None where nothing ever does.
        self.unprotected = UnprotectedRuns(self.breaker, monotonic) if fail_open else None
        if challenge is None:
            challenge = "Bearer" if known is None else known.challenge
        self.refusals = refusals = Refusals(
            policy_path, challenge, has_policy_page=policy_page is not False
        )
        self.pages = pages = Pages(
            policy_path,
            status_path,
            policy_page,
            self.table.routes,
            refusals,
            private,
            has_callers=self._global is None,
        )
        self.answers = Answers(refusals, self.breaker, pages.status_path, private, monotonic)
        # What a view may complete its attempt with, as a response.
        self.outcome_of = outcome_of
        self._monotonic = monotonic
        self._waits: dict[tuple[int, float], Policy] = {}

    # Before the body is read.

    def begin(
        self, route: Route, request: Request, prefix: str = "", *, is_on_loop: bool = True
    ) -> Plan | Response | None:
        """The plan, or the refusal that needs no body; None when the request passes.

        `is_on_loop` says that a wait holds no thread.
        """
        lines = request.lines_by_name()
        if lines is None:
            keys = request.header_lines(_KEY_HEADER)
            prefer = request.header_lines(_PREFER_HEADER)
            length = request.header(_LENGTH_HEADER)
        else:
            # No list is made for a header that is not there, as most requests have no preference.
            keys = [lines[_KEY_HEADER]] if _KEY_HEADER in lines else _NO_LINES
            prefer = [lines[_PREFER_HEADER]] if _PREFER_HEADER in lines else _NO_LINES
            length = lines.get(_LENGTH_HEADER)
        key: str | None = None
        if keys:
            sent = self._sent_key(route, keys, request, prefix)
            if isinstance(sent, Response):
                return sent
            key = sent
        elif route.maker is None:
            if not route.is_required:
                return None
            return self.refusals.problem(problems.KEY_MISSING, request, prefix)
        caller = "" if self.has_async_caller else self.caller(request)
        if caller is None:
            return self.refusals.unknown_caller(request, prefix, key)
        if (
            length is not None
            and len(length) > route.short_digits
            and self.is_too_large(route, length)
        ):
            return self.refusals.too_large(route, request, prefix, key)
        policy = route.made_policy if key is None else route.policy
        preference = NO_PREFERENCE
        if prefer:
            if sum(map(len, prefer)) > HEADER_LIMIT_BYTES:
                return self.refusals.problem(problems.HEADER_TOO_LONG, request, prefix, key)
            preference = granted_preference(route, prefer, is_on_loop=is_on_loop)
            if preference.wait_seconds is not None:
                policy = self._waiting(policy, preference.wait_seconds)
        waiters = self._task_waiters if is_on_loop else self._thread_waiters
        plan = Plan(route, request, caller, key, policy, preference, prefix, waiters)
        if keys and key is None:
            plan.ignored = keys
        return plan

    def _sent_key(
        self, route: Route, keys: list[bytes], request: Request, prefix: str
    ) -> str | Response | None:
        """The client's key, or the refusal of it; None where fields of the request make the key."""
        if not route.has_header_key:
            if isinstance(route.maker, BodyKey):
                # Two keys are two intents to their client, and would be one here.
                return self.refusals.problem(problems.KEY_UNEXPECTED, request, prefix)
            return None
        try:
            key = parse_key(keys, strict=route.rule.strict)
            require_own_key(key)
        except KeyInvalid as error:
            return problem_of(error, self.refusals.context(request, prefix))
        return key

    def caller(self, request: Request) -> str | GlobalCaller | None:
        """Who calls; None when that is not known. Raises `InvalidInput` for what is no caller."""
        if self._caller_of is None:
            return self._global
        told = self._caller_of(request)
        return told if type(told) is str else self._named(told)

    async def caller_on_loop(self, request: Request) -> str | GlobalCaller | None:
        """As `caller`, where an async function can be awaited."""
        if not self.has_async_caller:
            return self.caller(request)
        caller_of: Any = self._caller_of
        return self._named(await caller_of(request))

    async def identified(self, plan: Plan) -> Plan | Response:
        """The plan with its caller, which an async function tells; or the refusal."""
        caller = await self.caller_on_loop(plan.request)
        if caller is None:
            return self.refusals.unknown_caller(plan.request, plan.prefix, plan.key)
        plan.caller = caller
        return plan

    @staticmethod
    def is_too_large(route: Route, length: bytes) -> bool:
        """Whether a declared length is over the limit; a broken one is the server's to refuse."""
        declared = length_of(length)
        return declared is not None and declared > route.rule.request_limit_bytes

    @staticmethod
    def is_cut_off(request: Request) -> bool:
        """Whether the client went away before its whole body had arrived.

        For frameworks that give what has arrived as if it were all. A body that was decoded on its
        way has another length than the one that was declared.
        """
        length = length_of(request.header(_LENGTH_HEADER) or b"")
        return (
            length is not None
            and len(request.body) < length
            and request.header(b"content-encoding") is None
        )

    def _waiting(self, policy: Policy, wait_seconds: float) -> Policy:
        """The policy of a request that waits for a running one, up to the route's own limit."""
        seconds = min(wait_seconds, policy.wait_seconds)
        if seconds <= 0:
            return policy.with_changes(in_flight=InFlight.FAIL)
        found = self._waits.get((id(policy), seconds))
        if found is None:
            found = policy.with_changes(
                in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=seconds)
            )
            # Clients choose the number, so what is kept of it is bounded.
            if len(self._waits) < 256:
                self._waits[id(policy), seconds] = found
        return found

    def note_ignored(self, plan: Plan, report: Reporter) -> None:
        """Tells of a key that was sent to a route whose keys are made from fields."""
        request = plan.request
        route = plan.route.rule.path or request.path
        self.ignored_keys.note(report, request.method, route, plan.ignored, has_rule=True)

    # The call.

    def call(self, plan: Plan) -> Call:
        """The call that the engine answers.

        Raises `KeyInvalid`, `CallerMissing`, and past a limit `FingerprintImpossible` or
        `ArgumentsNotStorable`.
        """
        route, request = plan.route, plan.request
        operation = route.operations[request.method]
        request.has_exact_path = route.rule.exact_path
        text, nothing_happened = plan.key, None
        if text is None:
            plan.is_made = True
            assert route.maker is not None  # Else the plan would have its key.
            # Only where the key is made here, whatever the source takes beside that: a key that its
            # client has sent belongs to one request for good.
            nothing_happened = route.nothing_happened
            text = plan.key = made_key(
                route.maker,
                request,
                operation=operation,
                rule=route.fingerprint,
                secret=self.settings.secrets.value,
            )
        call = Call(
            Key(text, caller=plan.caller),
            self._fingerprints(request_fingerprints(request, route.fingerprint)),
            plan.policy,
            operation,
            route.codec,
            route.judge,
            self.outcome_of,
            arguments_of(plan),
            None,
            # Failures are not rebuilt: the server would answer the exception itself with a 500
            # that says nothing. By its place, because a name costs every request some time.
            False,
            plan.waiters,
            nothing_happened,
        )
        call.fails_open = self._may_run_unprotected(plan)
        return nested(call, self._keys_by_tag(plan, call)) if self._is_rotating else call

    def _keys_by_tag(self, plan: Plan, call: Call) -> Iterator[tuple[bytes, Key]]:
        """The request's key as every secret that is listed makes it."""
        secrets, route, caller = self.settings.secrets, plan.route, plan.caller
        by_tag = caller.by_tag if isinstance(caller, RotatingCaller) else {}
        is_of_body = plan.is_made and isinstance(route.maker, BodyKey)
        for secret in secrets.listed:
            text = call.key.text
            if is_of_body:
                assert route.maker is not None  # It has made the key.
                text = made_key(
                    route.maker,
                    plan.request,
                    operation=call.operation,
                    rule=route.fingerprint,
                    secret=secret.value,
                )
            yield secret.tag, Key(text, caller=by_tag.get(secret.tag, caller))
        if PLAIN_TAG in by_tag and not is_of_body:
            yield PLAIN_TAG, Key(call.key.text, caller=by_tag[PLAIN_TAG])

    # What is answered without a store.

    def known(self, plan: Plan, call: Call, calls: Calls | AsyncCalls) -> Response | None:
        """The answer that needs no store; None when the application has to be run for it.

        `plan.is_unprotected` then says that it runs without a claim, because the store is down.
        Raises `KeyReused`, `OperationInFlight`, the stored failure or `OutcomeUnavailable`.
        """
        report = calls.report
        if not report.begins(call, self._monotonic):
            return self._known(plan, call, calls)
        try:
            response = self._known(plan, call, calls)
        except BaseException as error:
            report.end(call, error)
            raise
        if response is None:
            call.progress = UNFOLLOWED  # It begins when it is run.
        else:
            report.end(call)
        return response

    def _known(self, plan: Plan, call: Call, calls: Calls | AsyncCalls) -> Response | None:
        answer = calls.recall(call)
        if answer is None and self.unprotected is not None:
            # Also after the store is back, which knows nothing of runs without a claim.
            answer = self.unprotected.recall(call, calls.report, calls.run_times)
            plan.is_unprotected = answer is not None
        if answer is not None:
            return self.answers.answered(plan, answer, is_news=False)
        # What is known to run needs no store, and is never run unprotected beside that.
        if not self.breaker.is_open or calls.is_in_flight(call):
            return None
        seconds = self.breaker.seconds_closed_off(self._monotonic())
        if seconds and self._may_run_unprotected(plan):
            plan.is_unprotected = True
        elif seconds:
            # Not told: each request of an outage would be.
            call.progress.note(EventKind.STORE_UNAVAILABLE)
            return problem(
                problems.STORE_UNAVAILABLE,
                self.refusals.context(plan.request, plan.prefix),
                key=plan.key,
                retry_after=timedelta(seconds=seconds),
            )
        return None

    def _may_run_unprotected(self, plan: Plan) -> bool:
        """Never in atomic mode: what is out of reach is the application's own database."""
        return self.fail_open and plan.route.rule.transaction is None

    def fails_open(self, plan: Plan, error: Exception) -> bool:
        """Whether the application runs unprotected because its claim got no answer.

        For errors of a call whose application has not begun. Never for a key that is known to be
        running somewhere. The plan says so from then on, and the breaker hears of the error.
        """
        if (
            plan.is_unprotected
            or not isinstance(error, StoreUnavailable)
            or error.is_in_flight
            or not self._may_run_unprotected(plan)
        ):
            return False
        self.breaker.failed(self._monotonic())
        plan.is_unprotected = True
        return True

    async def answer_unprotected(
        self,
        plan: Plan,
        call: Call,
        invoke: Callable[[None], Awaitable[Any]],
        calls: Calls | AsyncCalls,
    ) -> Answer[Any]:
        """Runs the application without a claim, unless this process knows of an earlier run."""
        assert self.unprotected is not None  # Only a service that fails open comes here.

        def recall(call: Call) -> Answer[Any] | None:
            remembered = calls.recall(call)
            plan.is_unprotected = remembered is None
            return remembered

        report = calls.report
        # Unless it was begun with a claim in mind, see `Reporter.leave`.
        report.begins(call, self._monotonic)
        report.tell_begin(call)
        try:
            answer = await self.unprotected.answer(call, invoke, recall, report, calls.run_times)
        except BaseException as error:
            report.end(call, error)
            raise
        report.end(call)
        return answer


def _checked_timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, timedelta) or timeout < timedelta(0):
        raise PolicyInvalid(f"store_timeout is a timedelta, or None for no limit, got {timeout!r}")
    return timeout.total_seconds() or None
