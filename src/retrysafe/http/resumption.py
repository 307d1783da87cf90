"""A request that a worker sends through the application again, in the place of its client.

Owns what such a request brings along: the claim that it runs under, and whose it is. Both stand in
its scope or environ as an object of this process, which no client can send. How it is sent is for
`asgi_resume` and `wsgi_resume` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Call
from retrysafe.core.keys.key import GLOBAL, GlobalCaller
from retrysafe.core.model import Ending, Payload
from retrysafe.core.permits import Permits
from retrysafe.core.policy import InFlight
from retrysafe.errors import ResumedRequestRefused
from retrysafe.http.headers import NO_PREFERENCE
from retrysafe.http.plan import Plan
from retrysafe.http.request import Request
from retrysafe.http.responses import Response
from retrysafe.http.routes import Route
from retrysafe.http.stored_request import StoredRequest, payload_of, place_of

# Where a scope or an environ says that a worker has sent the request. Servers put what clients send
# under other names, and never an object of ours.
RESUMED_NAME: Final = "retrysafe.resumed"
# What an application answers that does not know who calls. The client was let in once.
_REFUSALS: Final = frozenset({401, 403})
_WHO_CALLED: Final = (
    "It brings no credential: have your authentication ask resumed_caller(request) who called"
)
_NO_WAITERS: Final = Permits(0)


class Resumption:
    """One request that is sent again: its claim, its caller, and what the route answered."""

    __slots__ = ("_misled", "attempt", "call", "is_taken", "request")

    def __init__(self, call: Call, request: StoredRequest, attempt: Attempt) -> None:
        self.call = call
        self.request = request
        self.attempt = attempt
        # Whether a protection has found the route of it, and runs it.
        self.is_taken = False
        # Why it is not run where it has come to.
        self._misled: ResumedRequestRefused | None = None

    @property
    def caller(self) -> str | GlobalCaller:
        """Whose request it is, as it was stored."""
        return self.call.key.caller or GLOBAL

    def plan(
        self,
        route: Route,
        request: Request,
        prefix: str,
        outcome_of: Callable[[Any], Any],
    ) -> Plan | None:
        """The plan of the request at its route; None for another request.

        An application may send itself requests, with copies of the scope. The route that serves it
        says what is kept of it, because two mounts may have routes of one name. Raises
        `ResumedRequestRefused` at another route, which would run it under another claim.
        """
        call, operation = self.call, route.operations.get(request.method)
        if self.is_taken or request.path != self.request.seen_path:
            return None
        if operation != call.operation:
            raise self._led_astray(f"is served by {operation!r}")
        self.is_taken = True
        call.codec, call.judge, call.outcome_of = route.codec, route.judge, outcome_of
        policy = route.made_policy if self.request.is_made else route.policy
        call.policy = policy.with_changes(in_flight=InFlight.FAIL)
        return Plan(
            route,
            request,
            self.caller,
            call.key.text,
            call.policy,
            NO_PREFERENCE,
            prefix,
            _NO_WAITERS,
        )

    def require_rule(self, path: str, method: str, routes: Iterable[Route]) -> None:
        """Raises `ResumedRequestRefused` where the rule of the request is, and no longer fits it.

        It is said by a protection that is about to pass the request by: what is inside would run it
        without a claim, once for each attempt. Another protection may be further inside.
        """
        if self.is_taken or path != self.request.seen_path:
            return
        if any(route.operations.get(method) == self.call.operation for route in routes):
            raise self._led_astray("is protected by no rule any more")

    def _led_astray(self, what: str) -> ResumedRequestRefused:
        self._misled = self._refused(
            f"was not run, because it is of {self.call.operation!r} and its path {what}. Keep a "
            "rule of that name for the path until the requests of before the change have ended"
        )
        return self._misled

    def kept(self, response: Response) -> Response:
        """The response as the outcome of the request; raises `ResumedRequestRefused`.

        One that would free the key leaves it to its lease instead: no client is there to try again.
        """
        judge = self.call.judge
        status = response.status
        if status in _REFUSALS:
            raise self._refused(f"was answered with {status}, which is not kept. {_WHO_CALLED}")
        if judge is not None and judge(response) is Ending.RELEASED:
            raise self._refused(f"was answered with {status}, which is not kept")
        return response

    def unserved(self, status: int, error: BaseException | None = None) -> ResumedRequestRefused:
        """The refusal of a request that no protection has run."""
        if self._misled is not None:
            return self._misled
        if error is None and status // 100 == 2:
            # Nobody knows by what: a client's next retry would run it, and so would each attempt.
            refused = self._refused(
                f"was answered {status} by something that no rule protects. It may have run, and "
                "is not sent again. Keep the rule of an endpoint until its requests have ended"
            )
            refused.is_final, refused.retryable = True, False
            return refused
        did = f"raised {type(error).__name__}" if error else f"answered {status or 'nothing'}"
        return self._refused(f"did not reach its route: the application {did}. {_WHO_CALLED}")

    def _refused(self, what: str) -> ResumedRequestRefused:
        request, key = self.request, self.call.key.text
        told = f"{request.method} {request.raw_path} was sent again for {key!r} and {what}"
        return ResumedRequestRefused(told, key=key)


def resumption_in(place: Mapping[str, Any]) -> Resumption | None:
    """What a scope or an environ says of the worker that has sent its request; None for others."""
    found = place.get(RESUMED_NAME)
    # Of the type alone: text under that name may come from anywhere.
    return found if isinstance(found, Resumption) else None


def resumed_caller(request: Any) -> str | GlobalCaller | None:
    """Whose request it is that a worker has sent again; None for a client's own request.

    For authentication: such a request brings no credential, and was let in when it first came. It
    takes an ASGI scope, a WSGI environ, or a request of Starlette, FastAPI, Litestar, Flask or
    Django. The caller is what your `caller=` function told; `GLOBAL` where all callers are one.
    """
    found = resumption_in(place_of(request))
    return None if found is None else found.caller


def arguments_of(plan: Plan) -> Payload | None:
    """The request itself where a worker may have to send it again; None elsewhere."""
    resumable = plan.route.resumable
    if resumable is None:
        return None
    limit_bytes = plan.policy.arguments_limit_bytes
    return payload_of(plan.request, resumable, plan.prefix, limit_bytes, is_made=plan.is_made)
