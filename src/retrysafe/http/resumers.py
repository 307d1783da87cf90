"""The resumable routes of applications, as workers find them: by the names of their operations.

Owns how an abandoned record of a route becomes a call and a request, and which protections there
are in this process. How a request is sent is given by the adapter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from retrysafe.core.call import Answer, Call
from retrysafe.core.model import Fingerprint, StoredKey
from retrysafe.core.policy import InFlight
from retrysafe.core.recovery import key_of
from retrysafe.core.values.trees import NotReadable
from retrysafe.errors import PolicyInvalid
from retrysafe.http.protection import Protection
from retrysafe.http.routes import Route
from retrysafe.http.stored_request import StoredRequest, request_of
from retrysafe.runtime.operations import Operations

# Sends a request through the application, under the claim that the call takes over.
Resume = Callable[[Call, StoredRequest, Any], Awaitable[Answer[Any]]]


class HasRoutes(Protocol):
    """A middleware or an integration: what has routes, and the object that they belong to."""

    idempotency: Any

    def refresh(self) -> None:
        """Looks for routes that the framework has been given since."""


# All that were made in this process and still are there; for a worker that is given an application.
protections: WeakSet[HasRoutes] = WeakSet()


class RouteResumer:
    """A resumable route; many requests may have run by its name."""

    __slots__ = ("_operations", "_resume", "_route", "name")

    def __init__(self, name: str, route: Route, operations: Operations, resume: Resume) -> None:
        self.name = name
        self._route = route
        self._operations = operations
        self._resume = resume

    def prepare(self, stored: StoredKey) -> Callable[[], Awaitable[Answer[Any]]]:
        """What takes an abandoned claim over and sends its request; raises `NotReadable`."""
        app = self._operations.app
        if app is None:
            raise NotReadable(
                "they are a request, and this worker has no application to send it through: use "
                "`retrysafe worker --app module:app`, or worker(app=…)"
            )
        assert stored.arguments is not None  # Only such records are resumed.
        request = request_of(stored.arguments)
        record, route = stored.record, self._route
        call = Call(
            key_of(record),
            # As in `Resumable.prepare`: it is the request that the record was made for.
            (Fingerprint(record.rule, record.fingerprint),),
            route.policy.with_changes(in_flight=InFlight.FAIL),
            self.name,
            route.codec,
            recovers=record.token,
            rebuilds_failures=False,
        )
        return partial(self._resume, call, request, app)


def register(
    operations: Operations, protection: Protection, routes: Iterable[Route], resume: Resume
) -> None:
    """Lets workers find the resumable routes among these.

    Raises `PolicyInvalid` for a stored header that holds the callers' credential, and
    `InvalidInput` for a name that a resumable function has.
    """
    for route in routes:
        if route.resumable is None:
            continue
        known = protection.shipped_caller
        if known is not None and known.has_credential:
            name = known.header.lower().encode()
            if name in route.resumable.names:
                raise PolicyInvalid(
                    f"{known.header} holds the credential of callers here, which is never stored "
                    "with a request: leave it out of Resumable(headers=…)"
                )
        for operation in dict.fromkeys(route.operations.values()):
            resumer = RouteResumer(operation, route, operations, resume)
            operations.resumables.register_route(operation, resumer)


def has_resumable_routes(operations: Operations) -> bool:
    """Whether any route of this object is resumable."""
    found = operations.resumables.by_name.values()
    return any(isinstance(resumer, RouteResumer) for resumer in found)
