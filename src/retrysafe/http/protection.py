"""One request and its answer, without any I/O: what every server and framework does alike.

Owns the whole configuration of the HTTP layer and the order of its checks. The adapters read
bodies, run the application and send what they are given here; they decide nothing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote

from retrysafe.core.call import Answer, Call
from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.key import GlobalCaller, Key
from retrysafe.core.keys.secret import PLAIN_TAG
from retrysafe.core.machine import how_far
from retrysafe.core.model import StoredKey
from retrysafe.core.nested_claims import nested
from retrysafe.core.permits import Permits
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.run_times import RunTimes
from retrysafe.core.settings import Settings
from retrysafe.errors import (
    CallerMissing,
    Closed,
    KeyInvalid,
    KeyReused,
    OperationInFlight,
    OutcomeNotStored,
    PolicyInvalid,
    StoreError,
    StoreUnavailable,
)
from retrysafe.http import problems
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import (
    CallerOf,
    Naming,
    RotatingCaller,
    checked_caller_of,
    is_async,
    is_known_by_headers,
    shipped,
    vary_of,
)
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.headers import (
    HEADER_LIMIT_BYTES,
    NO_PREFERENCE,
    Preference,
    length_of,
    link_path,
    parse_key,
    parse_prefer,
    retry_after_text,
)
from retrysafe.http.key_sources import made_key, require_own_key
from retrysafe.http.limits import Limits
from retrysafe.http.policy_page import (
    PolicyReaders,
    checked_readers,
    may_read,
    policy_response,
)
from retrysafe.http.problems import Refusals, first_use, problem, problem_of
from retrysafe.http.request import Request
from retrysafe.http.responses import NO_STORE, Header, Response, response_of, uncached
from retrysafe.http.routes import Match, Route, RouteTable
from retrysafe.http.rules import Rule, responds_async
from retrysafe.http.status_page import status_response
from retrysafe.http.unmatched import Unmatched
from retrysafe.http.unprotected import Report, UnprotectedRuns

POLICY_PATH: Final = "/idempotency-policy"
STATUS_PATH: Final = "/idempotency-status/"
# Shorter than clients wait by default, and far longer than a store takes that is well.
STORE_TIMEOUT: Final = timedelta(seconds=5)
REPLAYED: Final[Header] = (b"idempotent-replayed", b"true")
# Marks a response that was made while keys could not be looked up, by a service that fails open.
UNPROTECTED: Final[Header] = (b"idempotency-protected", b"false")
_KEY_HEADER: Final = b"idempotency-key"
_PREFER_HEADER: Final = b"prefer"
_LENGTH_HEADER: Final = b"content-length"
_NO_LINES: Final[list[bytes]] = []
_logger = logging.getLogger("retrysafe")


@dataclass(slots=True)
class Plan:
    """What is known of a protected request before its body is read."""

    route: Route
    request: Request
    # The empty text while an async function is to tell it: see `Protection.identified`.
    caller: str | GlobalCaller
    # None until the body is read, for keys that are made from it.
    key: str | None
    policy: Policy
    preference: Preference
    # The path under which the application is mounted.
    prefix: str
    # Who waits for another run at the moment.
    waiters: Permits
    # Whether it runs without a claim.
    is_unprotected: bool = False
    # Whether the key was made here, and not sent by the client.
    is_made: bool = False
    # The lines of a key that the route does not look at.
    unread: list[bytes] = field(default_factory=lambda: _NO_LINES)


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
        for name, path in (("policy_path", policy_path), ("status_path", status_path)):
            if not (isinstance(path, str) and path.startswith("/")):
                raise PolicyInvalid(f"{name} starts with a slash, got {path!r}")
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
        self.is_known_by_headers = is_known_by_headers(caller)
        vary = vary_of(caller)
        # What is said to caches of a response that is for its caller alone.
        self._no_store = [NO_STORE] if vary is None else [NO_STORE, (b"vary", vary.encode())]
        self._replayed = [*self._no_store, REPLAYED]
        self.settings = settings
        self.table = RouteTable((rule or Rule(),) if rules is None else tuple(rules), settings)
        self.find: Callable[[str, str], Match | None] = self.table.find
        # Routes whose rules stand next to their endpoints; the framework knows which ones.
        self.endpoints: tuple[Route, ...] = ()
        self.fail_open = fail_open
        # How long a claim may take, on an event loop; None for as long as the store takes.
        self.store_timeout_seconds = _checked_timeout(store_timeout)
        self.policy_path = policy_path
        self._policy_readers = checked_readers(policy_page)
        self.has_policy_page = policy_page is not False
        self.status_path = status_path.rstrip("/") + "/"
        self.breaker = breaker or Breaker()
        self.unmatched = Unmatched()
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
        self.refusals = Refusals(policy_path, challenge, has_policy_page=self.has_policy_page)
        # What a view may complete its attempt with, as a response.
        self._outcome_of = outcome_of
        self._monotonic = monotonic
        self._waits: dict[tuple[int, float], Policy] = {}

    # The pages.

    def has_page(self, path: str) -> bool:
        """Whether a GET or HEAD of this path is answered here and not by the application."""
        if path == self.policy_path:
            return self.has_policy_page
        return path.startswith(self.status_path)

    def policy_page(self, path: str, request: Request, prefix: str) -> Response | None:
        """The policy page; None when the path is that of a key's status."""
        if path != self.policy_path:
            return None
        if not may_read(self._policy_readers, request):
            return Response(404, [(b"content-length", b"0"), NO_STORE], b"")
        return policy_response(
            (*self.table.routes, *self.endpoints),
            request.header(b"accept"),
            policy_url=f"{link_path(prefix)}{self.policy_path}",
            status_url=f"{link_path(prefix)}{self.status_path}",
            has_callers=self._global is None,
            is_public=self._policy_readers is True,
        )

    def status_keys(
        self, path: str, request: Request, prefix: str, caller: str | GlobalCaller | None
    ) -> Response | list[Key]:
        """The keys whose records must be read for `status`, or a refusal.

        Several where the caller has a form by every secret: the furthest record counts.
        """
        if caller is None:
            return self.refusals.unknown_caller(request, prefix)
        callers: Iterable[str | GlobalCaller] = (caller,)
        if isinstance(caller, RotatingCaller):
            callers = caller.by_tag.values()
        try:
            return [Key(path[len(self.status_path) :], caller=each) for each in callers]
        except CallerMissing:
            # Empty or over-long: as for a request with a key, whose it is cannot be told.
            return self.refusals.unknown_caller(request, prefix)
        except KeyInvalid:
            return self.refusals.problem(problems.KEY_UNKNOWN, request, prefix)

    def status(
        self,
        forms: Iterable[StoredKey | None],
        key: Key,
        request: Request,
        prefix: str,
        run_times: RunTimes,
    ) -> Response:
        """What a caller is shown of its key, by the records of all its forms."""
        found = (item for item in forms if item is not None)
        stored = max(found, key=lambda item: how_far(item.condition), default=None)
        context = self.refusals.context(request, prefix)
        response = status_response(stored, context, key.text, run_times)
        response.headers = uncached(response.headers, self._no_store)
        return response

    def status_refused(
        self, error: StoreError, key: Key, request: Request, prefix: str
    ) -> Response:
        """The refusal when the record could not be read."""
        refusal = problem_of(error, self.refusals.context(request, prefix), key=key.text)
        assert refusal is not None  # Every error of a store has its kind.
        return refusal

    # Before the body is read.

    def begin(
        self, route: Route, request: Request, prefix: str = "", *, is_on_loop: bool = True
    ) -> Plan | Response | None:
        """The plan, or the refusal that needs no body; None when the request runs unprotected.

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
            preference = _preference(route, prefer, is_on_loop=is_on_loop)
            if preference.wait_seconds is not None:
                policy = self._waiting(policy, preference.wait_seconds)
        waiters = self._task_waiters if is_on_loop else self._thread_waiters
        plan = Plan(route, request, caller, key, policy, preference, prefix, waiters)
        if keys and key is None:
            plan.unread = keys
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

    def note_unread(self, plan: Plan, report: Report) -> None:
        """Tells of a key that was sent to a route whose keys are made from fields, if any was."""
        if not plan.unread:
            return
        request = plan.request
        route = plan.route.rule.path or request.path
        self.unmatched.note(report, request.method, route, plan.unread, has_rule=True)

    # The call.

    def call(self, plan: Plan) -> Call:
        """The call that the engine answers.

        Raises `KeyInvalid`, `CallerMissing`, and `FingerprintImpossible` past a limit.
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
            self._outcome_of,
            None,
            None,
            # Failures are not rebuilt: the server would answer the exception itself with a 500
            # that says nothing. By its place, because a name costs every request some time.
            False,
            plan.waiters,
            nothing_happened,
        )
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

    def closed_off(self, plan: Plan) -> Response | None:
        """The refusal while the store is left alone; None when it may be asked."""
        seconds = self.breaker.seconds_closed_off(self._monotonic())
        if not seconds:
            return None
        return problem(
            problems.STORE_UNAVAILABLE,
            self.refusals.context(plan.request, plan.prefix),
            key=plan.key,
            retry_after=timedelta(seconds=seconds),
        )

    def runs_unprotected(self, plan: Plan) -> bool:
        """Whether the application runs although the store is out of reach.

        Never in atomic mode: what is out of reach is the application's own database.
        """
        return self.fail_open and plan.route.rule.transaction is None

    def recall_unprotected(
        self, plan: Plan, call: Call, report: Report, run_times: RunTimes
    ) -> Response | None:
        """What this process knows of a run without a claim; None when the store is to be asked.

        Also after the store is back, which knows nothing of it. Raises `OperationInFlight` and
        `KeyReused`.
        """
        if self.unprotected is None:
            return None
        answer = self.unprotected.recall(call, report, run_times)
        return None if answer is None else self.answered_unprotected(plan, answer)

    def answered_unprotected(self, plan: Plan, answer: Answer[Any]) -> Response:
        """The response of a run without a claim, with its mark."""
        response = self.answered(plan, answer, is_news=False)
        response.headers = [*response.headers, UNPROTECTED]
        return response

    def fails_open(self, plan: Plan, error: Exception) -> bool:
        """Whether the application runs because its claim got no answer; tells the breaker.

        For errors of a call whose application has not begun. Never for a key that is known to be
        running somewhere.
        """
        if (
            not isinstance(error, StoreUnavailable)
            or error.is_in_flight
            or not self.runs_unprotected(plan)
        ):
            return False
        self.breaker.failed(self._monotonic())
        return True

    # Answers.

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
        if is_news and self.breaker.failures:
            self.breaker.succeeded()
        response = answer.value
        if type(response) is not Response:
            response = response_of(response)
        if answer.replayed:
            # Decoded for this caller alone, so it may be changed.
            response.headers = uncached(response.headers, self._replayed)
        elif sent is not None and sent is not response and _is_same(sent, response):
            # Completed in the application's transaction: what middlewares added counts as well.
            response = sent
        if plan.preference is NO_PREFERENCE:
            return response
        return self.preferred(plan, response)

    def refused(self, plan: Plan, error: BaseException, *, is_news: bool = True) -> Response | None:
        """The response to an error of the engine; None for one that is not for clients."""
        if isinstance(error, StoreUnavailable | OutcomeNotStored):
            self.breaker.failed(self._monotonic())
        elif is_news and not _is_known_here(error):
            self.breaker.succeeded()
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
        context = self.refusals.context(plan.request, plan.prefix)
        response = problem_of(error, context, key=plan.key, detail=detail)
        if response is None:
            return None
        if response.status == problems.CALLER_UNKNOWN.status:
            response.headers += self.refusals.challenge
        if (
            isinstance(error, OperationInFlight)
            and plan.policy.in_flight is InFlight.WAIT
            and not error.has_waited
        ):
            return response  # There was no place to wait in.
        return self.preferred(plan, response)

    def accepted(self, plan: Plan, retry_after: timedelta) -> Response:
        """202 with the place where the outcome will be found, and when to look there."""
        assert plan.key is not None  # Only a call that was made can be running.
        url = f"{link_path(plan.prefix)}{self.status_path}{quote(plan.key, safe='')}"
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
            return self.preferred(plan, response)
        response.headers.append((b"preference-applied", b"respond-async"))
        return response

    def preferred(self, plan: Plan, response: Response) -> Response:
        """The response with the mark of the preference that was followed."""
        if plan.preference.wait_seconds is not None:
            policy = plan.policy
            seconds = policy.wait_seconds if policy.in_flight is InFlight.WAIT else 0
            response.headers.append((b"preference-applied", b"wait=%d" % seconds))
        return response


def _preference(route: Route, lines: list[bytes], *, is_on_loop: bool) -> Preference:
    """What the client asks for, as far as the route gives it."""
    preference = parse_prefer(lines)
    if preference is NO_PREFERENCE:
        return preference
    rule, wait_seconds = route.rule, preference.wait_seconds
    # Not to wait is always granted, and so is to wait for less long than the route does by itself.
    if wait_seconds and route.policy.in_flight is not InFlight.WAIT:
        may_wait = is_on_loop if rule.wait is None else rule.wait
        if not may_wait:
            wait_seconds = None
    respond_async = preference.respond_async and responds_async(rule)
    if wait_seconds is None and not respond_async:
        return NO_PREFERENCE
    return Preference(wait_seconds, respond_async)


def _is_known_here(error: BaseException) -> bool:
    """Whether a call was refused without a word from the store.

    Else the duplicates of one long request would send all others to a store that is down.
    """
    if isinstance(error, OperationInFlight | KeyReused):
        return error.is_known_here
    return isinstance(error, Closed)


def _is_same(first: Response, second: Response) -> bool:
    return first.status == second.status and first.body == second.body


def _checked_timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    if not isinstance(timeout, timedelta) or timeout < timedelta(0):
        raise PolicyInvalid(f"store_timeout is a timedelta, or None for no limit, got {timeout!r}")
    return timeout.total_seconds() or None
