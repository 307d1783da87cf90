"""What is known of a protected request before its body is read.

Owns the plan that is passed from the checks to the run and on to the answer, and what the client's
preference comes to on its route. Nothing else is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrysafe.core.keys.key import GlobalCaller
from retrysafe.core.permits import Permits
from retrysafe.core.policy import InFlight, Policy
from retrysafe.http.headers import NO_PREFERENCE, Preference, parse_prefer
from retrysafe.http.request import Request
from retrysafe.http.routes import Route
from retrysafe.http.rules import responds_async


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
    # The lines of a key that the route does not read.
    ignored: Sequence[bytes] = ()
    # What a worker's thread sends with a request, which runs under a claim that it has made.
    resumption: object = None

    @property
    def operation(self) -> str:
        """What its record is listed under."""
        return self.route.operations[self.request.method]


def granted_preference(route: Route, lines: list[bytes], *, is_on_loop: bool) -> Preference:
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
