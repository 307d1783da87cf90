"""FastAPI: endpoints with their own rules, which its OpenAPI document shows.

`Retrysafe` belongs to an application. A dependency made by `idempotent(…)`, on an endpoint, a
router or an inclusion, says what is protected and how; `IdempotentRoute` is the route class that
follows it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from re import Pattern
from typing import Any, Final

from retrysafe.contrib.endpoints import Served, attempt_in
from retrysafe.contrib.openapi import (
    ACCEPTED_SCHEMA,
    ACCEPTED_TEXT,
    MEDIA_TYPE,
    PROBLEM_NAME,
    PROBLEM_SCHEMA,
    description_of,
)
from retrysafe.contrib.views import view_rule
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.http.asgi_io import is_below
from retrysafe.http.asgi_run import App, Receive, Scope, Send
from retrysafe.http.field_values import NOT_TAKEN
from retrysafe.http.request import plain_path
from retrysafe.http.responses import Response as StoredResponse
from retrysafe.http.responses import response_of
from retrysafe.http.rules import Rule
from retrysafe.runtime.drive import run_sync

try:
    from fastapi import FastAPI, Request, Response, params, routing
    from fastapi.datastructures import DefaultPlaceholder
    from fastapi.routing import APIRoute
    from fastapi.utils import is_body_allowed_for_status_code
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "fastapi", error) from error

from retrysafe.contrib.starlette import Idempotent, as_they_are, guards_of, walk
from retrysafe.contrib.starlette import Retrysafe as StarletteRetrysafe

__all__ = ["Idempotent", "IdempotentRoute", "Retrysafe", "idempotent"]

_RULE: Final = "__retrysafe_rule__"
# Set on every request that an IdempotentRoute has looked at.
_SEEN: Final = "retrysafe.seen"
# What tells how the endpoint that runs is answered: its route, or that as a router includes it.
_running: ContextVar[Any] = ContextVar("retrysafe_fastapi_route", default=None)
# Later versions make the bytes of a model themselves where the route names no class of responses.
_MAKES_BYTES: Final = "dump_json" in inspect.signature(routing.serialize_response).parameters


class _Idempotent(params.Depends):
    """A dependency that has an endpoint run once per key; its value is the attempt.

    That is an `Attempt`, an `AtomicAttempt` when the rule has a transaction, and None for a request
    that passes: without a key where that is optional. Of several the nearest to the
    endpoint counts.
    """

    # The object `idempotent` is one itself. Were it a function, FastAPI would take it for the plain
    # default of a parameter where the brackets are forgotten, and run the endpoint unprotected.

    def __call__(self, *misplaced: Any, **options: Any) -> Any:
        """Takes the options of `Rule`, except its path.

        Raises `PolicyInvalid` for options that cannot be.
        """
        if misplaced:
            raise InvalidInput(
                "idempotent() is a dependency and no decorator: write dependencies=[idempotent()] "
                "in the route, or make it a parameter of the endpoint"
            )
        return _Idempotent(_attempt_under(view_rule(options)))


def _attempt_under(rule: Rule) -> Callable[[Request], Any]:
    """What FastAPI calls for the attempt, with the rule that it is under."""

    async def attempt_of(request: Request) -> Any:
        if _SEEN not in request.scope:
            raise InvalidInput(
                f"{request.scope['path']} depends on idempotent(), and nothing protects it: "
                "install a Retrysafe before the endpoints, and use IdempotentRoute as the "
                "route_class of routers"
            )
        return attempt_in(request.scope.get("state", {}))

    setattr(attempt_of, _RULE, rule)
    return attempt_of


idempotent: Final = _Idempotent(_attempt_under(Rule()))


class IdempotentRoute(APIRoute):
    """The route class of routers whose endpoints depend on `idempotent(…)`."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, once per key where the endpoint asks for it."""
        retrysafe = getattr(scope["app"].state, "retrysafe", None)
        if isinstance(retrysafe, Retrysafe):
            scope[_SEEN] = True
            served = retrysafe.served_route(self, scope)
            if served is not None:
                await served(scope, receive, send)
                return
            retrysafe.note_ignored_key(scope, self.path)
        await self.run(scope, receive, send)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request as a plain route does."""
        await super().handle(scope, receive, send)


def _outcome_of(value: Any) -> StoredResponse:
    """The response that FastAPI makes of what an endpoint returns.

    What the endpoint sets on its `Response` parameter is not in it.
    """
    told = _running.get()
    if told is None or isinstance(value, Response | StoredResponse):
        return response_of(value)
    kind, field = told.response_class, told.response_field
    options: dict[str, Any] = {
        name: getattr(told, f"response_model_{name}")
        for name in (
            "include",
            "exclude",
            "by_alias",
            "exclude_unset",
            "exclude_defaults",
            "exclude_none",
        )
    }
    makes_bytes = _MAKES_BYTES and field is not None and isinstance(kind, DefaultPlaceholder)
    if makes_bytes:
        options["dump_json"] = True
    content = run_sync(routing.serialize_response(field=field, response_content=value, **options))
    status = {} if told.status_code is None else {"status_code": told.status_code}
    if makes_bytes:
        response = Response(content, media_type="application/json", **status)
    else:
        made = kind.value if isinstance(kind, DefaultPlaceholder) else kind
        response = made(content, **status)
    if not is_body_allowed_for_status_code(response.status_code):
        response.body = b""
    return response_of(response)


class Retrysafe(StarletteRetrysafe):
    """The protection of a FastAPI application: `install(app)` puts it there.

    Its `lifespan` closes the `AsyncIdempotency` when the application ends.
    """

    outcome_of = staticmethod(_outcome_of)

    def install(self, app: FastAPI) -> None:  # type: ignore[override]
        """Makes this the protection of the application, and adds the policy and status pages.

        The application's OpenAPI document tells what is protected, and how.
        Endpoints that are added to the application itself afterwards are `IdempotentRoute`s; those
        of routers are when the router says so. Raises `InvalidInput` the second time, and after
        endpoints that it came too late for.
        """
        for route, told, endpoint in walk(app.routes, flattened):
            if (
                isinstance(route, APIRoute)
                and not isinstance(route, IdempotentRoute)
                and rule_in(told.dependant) is not None
            ):
                raise InvalidInput(
                    f"{endpoint.path} depends on idempotent() and was added before: install the "
                    "Retrysafe before the endpoints, and use IdempotentRoute as the route_class "
                    "of routers"
                )
        super().install(app)
        # By identity: routes compare by their paths, and cannot be hashed.
        self._by_route: dict[int, list[tuple[Pattern[str], Served | None]]] = {}
        if app.router.route_class is APIRoute:
            app.router.route_class = IdempotentRoute
        generate = app.openapi
        described: dict[str, Any] | None = None

        def openapi() -> dict[str, Any]:
            nonlocal described
            schema = generate()
            # FastAPI keeps the document until routes are added.
            if schema is not described:
                self.describe(schema)
                described = schema
            return schema

        app.openapi = openapi  # type: ignore[method-assign]

    def served_route(self, route: APIRoute, scope: Scope) -> Served | None:
        """What serves a request of this route; None when its endpoint is not protected."""
        paths = self._by_route.get(id(route))
        if paths is None:
            self.refresh()
            paths = self._by_route.get(id(route))
            if paths is None:
                raise InvalidInput(
                    f"{scope['path']} is served by a route that its application does not list: "
                    "include its router, or mount it as a part of the application's routes"
                )
        if len(paths) == 1:
            return paths[0][1]
        # A router that was included twice has two places for one route.
        path = plain_path(scope["path"])
        root: str = scope.get("root_path", "").rstrip("/")
        if root and is_below(path, root):
            path = path[len(root) :]
        for pattern, served in paths:
            if pattern.match(path):
                return served
        # To run it unprotected would be a guess, and the next retry a second run.
        raise InvalidInput(
            f"{scope['path']} is served by a route that was included at several places, and is at "
            "none of them: check root_path"
        )

    def refresh(self) -> None:
        """Looks for endpoints that are new since the last time; raises what is wrong with them."""
        super().refresh()
        by_route: dict[int, list[tuple[Pattern[str], Served | None]]] = {}
        assert self._app is not None  # Installed, or nobody could ask.
        for route, told, endpoint in walk(self._app.routes, flattened):
            if isinstance(route, IdempotentRoute):
                places = self._served.get((id(route), endpoint.path))
                served = None if places is None else places[0]
                by_route.setdefault(id(route), []).append((told.path_regex, served))
        self._by_route = by_route

    def _found(self, app: Any) -> Iterator[tuple[Any, App, Any, Any]]:
        for route, told, endpoint in walk(app.routes, flattened):
            if isinstance(route, IdempotentRoute):
                rule = rule_in(told.dependant)
                if rule is not None:
                    convert = functools.partial(_converted, told.dependant)
                    converted = replace(endpoint, convert=convert)
                    run = functools.partial(_run, route, told)
                    yield (id(route), endpoint.path), run, rule, converted
            else:
                yield from guards_of(route, endpoint)

    def describe(self, schema: dict[str, Any]) -> None:
        """Adds the key, the refusals and the retention to an OpenAPI document of the application.

        For applications that replace `app.openapi` themselves; `install` does it otherwise.
        """
        self.refresh()
        is_any = False
        for served in itertools.chain.from_iterable(self._served.values()):
            route = served.route
            if not route.rule.protected or not served.is_shown or served.endpoint.depth:
                continue
            told = description_of(route, self.protection, has_callers=not self.has_global_caller)
            operations = schema.get("paths", {}).get(served.endpoint.path, {})
            for method in route.operations:
                operation = operations.get(method.lower())
                if operation is not None:
                    is_any = True
                    _describe(operation, told)
                    if told.security is not None:
                        _secure(schema, operation, *told.security)
        if is_any:
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {})[PROBLEM_NAME] = PROBLEM_SCHEMA


async def _run(
    route: IdempotentRoute, told: Any, scope: Scope, receive: Receive, send: Send
) -> None:
    token = _running.set(told)
    try:
        await route.run(scope, receive, send)
    finally:
        _running.reset(token)


def _describe(operation: dict[str, Any], told: Any) -> None:
    own_parameters = operation.setdefault("parameters", [])
    # An endpoint that reads one of these headers itself has described it.
    known = {item.get("name", "").lower() for item in own_parameters if item.get("in") == "header"}
    own_parameters += [item for item in told.parameters if item["name"].lower() not in known]
    earlier = operation.get("description")
    operation["description"] = told.text if not earlier else f"{earlier}\n\n{told.text}"
    responses = operation.setdefault("responses", {})
    for status, text in told.responses.items():
        response = responses.setdefault(str(status), {})
        # FastAPI itself answers 422, for requests that do not fit; its text comes first.
        own = response.get("description")
        response["description"] = text if not own else f"{own}; or {text}"
        reference = {"schema": {"$ref": f"#/components/schemas/{PROBLEM_NAME}"}}
        response.setdefault("content", {}).setdefault(MEDIA_TYPE, reference)
    if told.may_accept:
        response = responses.setdefault("202", {})
        own = response.get("description")
        response["description"] = f"{own}; or {ACCEPTED_TEXT}" if own else ACCEPTED_TEXT
        response.setdefault("content", {}).setdefault(
            "application/json", {"schema": ACCEPTED_SCHEMA}
        )


def _secure(
    schema: dict[str, Any], operation: dict[str, Any], name: str, scheme: dict[str, Any]
) -> None:
    """Adds the credential that tells the caller to an operation that names none."""
    if "security" in operation or "security" in schema:
        return  # The application has said itself what it needs, and that holds the caller.
    components = schema.setdefault("components", {})
    components.setdefault("securitySchemes", {}).setdefault(name, scheme)
    operation["security"] = [{name: []}]


def flattened(routes: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Routes, those of included routers among them, and what tells their paths and methods."""
    contexts = getattr(routing, "iter_route_contexts", None)
    if contexts is None:
        # Earlier versions copy the routes of a router that is included.
        yield from as_they_are(routes)
    else:
        for context in contexts(list(routes)):
            yield context.original_route, context


def rule_in(dependant: Any) -> Rule | None:
    """The rule of an endpoint with these dependencies: the last is the nearest to the endpoint.

    Raises `InvalidInput` for `Depends(idempotent)`, with and without the inner brackets.
    """
    found: Rule | None = None
    for dependency in dependant.dependencies:
        if isinstance(dependency.call, _Idempotent):
            # FastAPI would take its options from the query, and run the endpoint unprotected.
            raise InvalidInput("idempotent() is a dependency itself: write it without Depends")
        own: Rule | None = getattr(dependency.call, _RULE, None)
        found = own or rule_in(dependency) or found
    return found


def _converted(
    dependant: Any, names: tuple[str, ...], parameters: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The parameters of the path, those of these names as the endpoint gets them.

    A key is made before FastAPI calls the endpoint: `/orders/07` must be order 7 by then.
    """
    made = dict(parameters)
    for field in _path_fields(dependant):
        name = field.alias
        if name in names and name in parameters:
            value, errors = field.validate(parameters[name], {}, loc=("path", name))
            made[name] = NOT_TAKEN if errors else value
            # The endpoint's own parameter comes first; what dependencies make of it is theirs.
            names = tuple(item for item in names if item != name)
    return made


def _path_fields(dependant: Any) -> Iterator[Any]:
    """The declared parameters of the path: the endpoint's, then those of its dependencies."""
    yield from dependant.path_params
    for dependency in dependant.dependencies:
        yield from _path_fields(dependency)
