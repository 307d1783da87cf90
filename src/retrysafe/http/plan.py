"""What is known of a protected request before its body is read.

Owns the plan that is passed from the checks to the run and on to the answer. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrysafe.core.keys.key import GlobalCaller
from retrysafe.core.permits import Permits
from retrysafe.core.policy import Policy
from retrysafe.http.headers import Preference
from retrysafe.http.request import Request
from retrysafe.http.routes import Route


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
