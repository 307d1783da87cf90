"""Endpoints that carry their own rules, in applications on an event loop.

Owns what the integrations for ASGI frameworks share: one protection per application, a middleware
around every endpoint, and the list of them for the policy page. It knows no framework; each
integration tells where its endpoints are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.keys.key import GlobalCaller
from retrysafe.errors import InvalidInput, StoreUnavailable
from retrysafe.http import resumers
from retrysafe.http.asgi import IdempotencyMiddleware
from retrysafe.http.asgi_io import exact_path, is_below, is_protected
from retrysafe.http.asgi_run import App, Receive, Scope, Send
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import CallerOf
from retrysafe.http.ignored_keys import NOTICED_NAME, keys_in
from retrysafe.http.key_sources import FieldsKey
from retrysafe.http.limits import Limits
from retrysafe.http.pages import POLICY_PATH, STATUS_PATH
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.protection import STORE_TIMEOUT, Protection
from retrysafe.http.request import PROTECTED_NAME, Request
from retrysafe.http.responses import Response, response_of
from retrysafe.http.routes import (
    NO_PARAMETERS,
    Route,
    require_name_at_host,
    require_one_operation,
)
from retrysafe.http.rules import Rule
from retrysafe.runtime.calls import calls_of

_logger: Final = logging.getLogger("retrysafe")
# Where the attempt is in the request's state, for endpoints.
STATE_NAME: Final = "idempotency"


def attempt_in(state: Mapping[str, Any]) -> Attempt | AtomicAttempt[Any] | None:
    """The attempt that a request runs as; None when it has no claim."""
    found = state.get(STATE_NAME)
    return found if isinstance(found, Attempt | AtomicAttempt) else None


# The names that are wanted, and the parameters; gives all parameters, those converted.
Convert = Callable[[tuple[str, ...], Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class EndpointPath:
    """Where the routes of an application lead to an endpoint."""

    # As rules write it: /charges/{id}, or /v1/* for everything below.
    path: str
    # None: whatever the rule protects.
    methods: frozenset[str] | None = None
    # How many segments of the path belong to routers in between, which move `root_path` there.
    depth: int = 0
    # What the endpoint makes of parameters of the path that are given by name; None where it takes
    # what the router made of them.
    convert: Convert | None = None
    # Parameters that requests have beside those of the path, such as those of a host.
    names: frozenset[str] = frozenset()
    # Whose it is, as {shop}.example.org, where others may have the same path; empty for every host.
    host: str = ""
    # The path as its router matches it, with converters such as {id:int}.
    pattern: str = ""

    def prefix(self, root: str) -> str:
        """Where its application is mounted, by the `root_path` of a request that came here."""
        return root.rsplit("/", self.depth)[0] if self.depth else root


class Served:
    """An endpoint of an application, ready for requests."""

    __slots__ = ("_convert", "_converted", "_is_on", "_middleware", "endpoint", "route")

    def __init__(
        self, middleware: IdempotencyMiddleware, route: Route, endpoint: EndpointPath
    ) -> None:
        self._middleware = middleware
        # The rule made ready, and where it holds.
        self.route = route
        self.endpoint = endpoint
        self._is_on = route.rule.protected
        source = route.rule.key
        # The parameters whose converted values are part of the key.
        self._converted: tuple[str, ...] = ()
        self._convert: Convert | None = None
        if isinstance(source, FieldsKey) and source.parameters:
            self._converted, self._convert = source.converted_parameters, endpoint.convert

    @property
    def is_shown(self) -> bool:
        """Whether the policy page lists it: one that changes nothing is not worth a word."""
        methods = self.endpoint.methods
        return methods is None or not methods.isdisjoint(self.route.operations)

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, path: str | None = None
    ) -> None:
        """Answers a request for the endpoint; `path` is its whole path where the scope's is not."""
        if NOTICED_NAME in scope:
            scope[NOTICED_NAME].append(self)
        # Some endpoints take `post` for POST, and no rule may be passed by like that.
        method: str = scope["method"].upper()
        if (
            not self._is_on
            or method not in self.route.operations
            # A middleware further out protects this very request; a second claim would find it
            # in flight.
            or attempt_in(scope.get("state", NO_PARAMETERS)) is not None
            or (PROTECTED_NAME in scope and is_protected(scope))
        ):
            await self._middleware.app(scope, receive, send)
            return
        scope["method"] = method
        root: str = scope.get("root_path", "")
        if path is None:
            path = scope["path"]
            if root and not is_below(path, root):
                path = root.rstrip("/") + path
        path = exact_path(scope, path)
        parameters = scope.get("path_params") or NO_PARAMETERS
        if self._convert is not None:
            parameters = self._convert(self._converted, parameters)
        query = scope.get("query_string", b"")
        request = Request(method, path, query, scope["headers"], b"", scope, parameters)
        prefix = self.endpoint.prefix(root)
        await self._middleware.protect(self.route, request, prefix, receive, send)


class Endpoints:
    """The protected endpoints of one application, and what they share.

    `caller` is a function of the request, or `GLOBAL`; there is no default, because keys of two
    customers must never meet. Raises as `IdempotencyMiddleware` does.
    """

    # The response that the framework makes of what an endpoint returns; for `complete_in`.
    outcome_of: Callable[[Any], Response] = staticmethod(response_of)

    def __init__(
        self,
        idempotency: AsyncIdempotency,
        *,
        caller: CallerOf | GlobalCaller,
        fail_open: bool = False,
        store_timeout: timedelta | None = STORE_TIMEOUT,
        policy_path: str = POLICY_PATH,
        policy_page: PolicyReaders = True,
        status_path: str = STATUS_PATH,
        challenge: str | None = None,
        breaker: Breaker | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not isinstance(idempotency, AsyncIdempotency):
            raise InvalidInput(
                f"an ASGI application needs an AsyncIdempotency object, got {idempotency!r}"
            )
        self.idempotency = idempotency
        self.calls = calls = calls_of(idempotency)
        self.protection = Protection(
            calls.settings,
            caller=caller,
            rules=(),
            fail_open=fail_open,
            store_timeout=store_timeout,
            policy_path=policy_path,
            policy_page=policy_page,
            status_path=status_path,
            challenge=challenge,
            breaker=breaker,
            limits=limits,
            outcome_of=self.outcome_of,
        )
        self.has_global_caller = isinstance(caller, GlobalCaller)
        self._pages = IdempotencyMiddleware.sharing(_nothing, idempotency, self.protection)
        # The host of every name that keys are made with.
        self._hosts: dict[str, str] = {}
        resumers.protections.add(self)

    def refresh(self) -> None:
        """Looks for endpoints that are new since the last time; raises what is wrong with them."""

    def serving(self, app: App, rule: Rule, endpoint: EndpointPath) -> Served:
        """An endpoint of the application, protected by its rule; raises as rules do."""
        methods = rule.methods
        if endpoint.methods is not None:
            # Of a route that only reads, nothing is left, and nothing needs protection.
            methods = tuple(method for method in methods if method in endpoint.methods) or methods
        located = replace(rule, path=endpoint.path, methods=methods)
        require_one_operation(located, endpoint.names)
        route = Route(located, self.calls.settings)
        require_name_at_host(located, endpoint.host, self._hosts, route.fingerprint)
        self._pages.register((route,))
        return Served(self._pages.around(app), route, endpoint)

    def note_ignored_key(self, scope: Scope, route: str) -> None:
        """Tells of a key that comes to an endpoint without a rule, which is about to be run."""
        method = scope["method"].upper()
        keys = keys_in(method, scope["headers"])
        # A middleware further out looks after its own requests, also after those that it runs
        # without a claim.
        is_run = attempt_in(scope.get("state", {})) is not None or (
            PROTECTED_NAME in scope and is_protected(scope)
        )
        if keys and NOTICED_NAME not in scope and not is_run:
            self.protection.ignored_keys.note(self.calls.report, method, route, keys)

    async def show_page(self, scope: Scope, send: Send, path: str, prefix: str) -> None:
        """Answers with the policy page or a status page; the path is the application's own."""
        request = Request(
            scope["method"],
            prefix + path,
            scope.get("query_string", b""),
            scope["headers"],
            b"",
            scope,
        )
        await self._pages.show_page(path, request, prefix, send)

    async def start(self) -> None:
        """Takes requests, also when an earlier start of the application has ended.

        Raises a `StoreError` that every request would meet: no database, no current schema. A store
        that is away at the moment is no reason not to start.
        """
        self.calls.reopen()
        try:
            await self.idempotency.check()
        except StoreUnavailable as error:
            _logger.warning("the store does not answer at the start: %s", error)

    async def close(self) -> None:
        """Waits for running requests and closes the `AsyncIdempotency`."""
        await self.idempotency.close()


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind the pages: there is none."""
