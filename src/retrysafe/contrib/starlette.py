"""Starlette: endpoints with their own rules.

`Retrysafe` belongs to an application; `@idempotent(…)` on an endpoint, or the middleware
`Idempotent` on a route, a router or a mount, says what is protected and how.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from retrysafe.contrib.endpoints import EndpointPath, Endpoints, Served
from retrysafe.contrib.views import require_options, view_rule
from retrysafe.errors import InvalidInput
from retrysafe.extras import missing_extra
from retrysafe.http.asgi_io import paths_of
from retrysafe.http.asgi_run import App, Receive, Scope, Send
from retrysafe.runtime.checks import running_loop

try:
    from starlette.applications import Starlette
    from starlette.routing import BaseRoute, Host, Mount, Route, compile_path, request_response
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "starlette", error) from error

__all__ = ["Idempotent", "Retrysafe", "idempotent"]

_STATE_NAME: Final = "retrysafe"


class Idempotent:
    """A middleware for a route, a router, a mount or a whole application.

    Takes the options of `Rule`, except its path. Raises `PolicyInvalid` for options that cannot be.
    """

    def __init__(self, app: App, **options: Any) -> None:
        self.app = app
        self.rule = view_rule(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, under the protection of the application that it came to."""
        if scope["type"] == "http":
            await retrysafe_of(scope).served(self, scope)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def idempotent(*misplaced: Any, **options: Any) -> Callable[[Callable[..., Any]], Idempotent]:
    """Protects an endpoint: a function, an `HTTPEndpoint`, or any ASGI application.

    Takes the options of `Rule`, except its path. Raises `PolicyInvalid` for options that cannot be.
    The route names the methods, as in `Route("/charges", charge, methods=["POST"])`.
    """
    require_options(misplaced, "@idempotent()")
    rule = view_rule(options)

    def decorate(endpoint: Callable[..., Any]) -> Idempotent:
        plain = endpoint
        while isinstance(plain, functools.partial):
            plain = plain.func
        is_function = inspect.isfunction(plain) or inspect.ismethod(plain)
        app: Any = request_response(endpoint) if is_function else endpoint
        made = Idempotent(app)
        made.rule = rule
        # Starlette names a route by its endpoint.
        made.__name__ = getattr(plain, "__name__", type(plain).__name__)  # type: ignore[attr-defined]
        made.__doc__ = plain.__doc__
        return made

    return decorate


class Retrysafe(Endpoints):
    """The protection of a Starlette application: `install(app)` puts it there.

    Its `lifespan` closes the `AsyncIdempotency` when the application ends.
    """

    _app: Starlette | None = None

    def install(self, app: Starlette) -> None:
        """Makes this the protection of the application, and adds the policy and status pages.

        Endpoints may be added before and after. Raises `InvalidInput` the second time.
        """
        if self._app is not None or hasattr(app.state, _STATE_NAME):
            raise InvalidInput(
                "an application has one Retrysafe, and a Retrysafe one application: make another "
                "one with the same AsyncIdempotency for a mounted application"
            )
        self._app = app
        setattr(app.state, _STATE_NAME, self)
        # One endpoint may stand in several routes, each with its own path and methods.
        self._served: dict[Any, list[Served]] = {}
        page = _Page(self)
        pages = [self.protection.pages.status_path + "{key:path}"]
        if self.protection.pages.has_policy:
            pages.insert(0, self.protection.pages.policy_path)
        for path in pages:
            # In front: a mount at the root would take them.
            app.router.routes.insert(
                0, Route(path, page, methods=["GET"], name="retrysafe", include_in_schema=False)
            )

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The lifespan of the application, or a part of it.

        Installs itself if that has not been done. At the start it raises what is wrong with any
        endpoint's rule; at the end it waits for running requests and closes the `AsyncIdempotency`.
        """
        running_loop()
        try:
            # Inside: a start that fails has opened connections already.
            await self.start()
            if self._app is None:
                self.install(app)
            self.refresh()
            yield
        finally:
            await self.close()

    def served(self, protected: Any, scope: Scope) -> Served:
        """What serves a request of a protected route or middleware; raises `InvalidInput`."""
        served = self._served_by(protected, scope)
        if served is not None:
            return served
        self.refresh()
        if protected not in self._served:
            # Around the whole application, or behind a middleware that does not show what it wraps.
            around = self.serving(protected.app, protected.rule, _EVERYWHERE)
            self._served[protected] = [around]
            self._list()
            return around
        places = self._served[protected]
        served = places[0] if len(places) == 1 else self._served_by(protected, scope)
        if served is None:
            # The rule of another place may leave this one's method alone.
            raise InvalidInput(
                f"{scope['path']} leads to an endpoint that stands in several routes, and is none "
                "of them: decorate it once for each route"
            )
        return served

    def _served_by(self, protected: Any, scope: Scope) -> Served | None:
        places = self._served.get(protected, ())
        return next((served for served in places if _leads_to(served.endpoint, scope)), None)

    def refresh(self) -> None:
        """Looks for endpoints that are new since the last time; raises what is wrong with them."""
        app = self._app
        if app is None:
            return  # It has no application yet, and so no endpoints.
        for protected, inner, rule, endpoint in self._found(app):
            places = self._served.get(protected, [])
            if not any(_is_place(served.endpoint, endpoint) for served in places):
                self._served[protected] = [*places, self.serving(inner, rule, endpoint)]
        self._list()

    def _found(self, app: Starlette) -> Iterator[tuple[Any, App, Any, EndpointPath]]:
        """Every protected endpoint: what it is known by, what it runs, its rule and its path."""
        for route, _, endpoint in walk(app.routes):
            yield from guards_of(route, endpoint)

    def _list(self) -> None:
        self.protection.pages.endpoints = tuple(
            served.route for places in self._served.values() for served in places if served.is_shown
        )


def retrysafe_of(scope: Scope) -> Any:
    """The protection of the application that a request came to; raises `InvalidInput`."""
    try:
        return getattr(scope["app"].state, _STATE_NAME)
    except (KeyError, AttributeError):
        raise InvalidInput(
            "this endpoint is idempotent, and its application has no Retrysafe: call "
            "Retrysafe(AsyncIdempotency(…), caller=…).install(app)"
        ) from None


class _Page:
    """The policy page and the status pages, as an ASGI application."""

    def __init__(self, retrysafe: Retrysafe) -> None:
        self._retrysafe = retrysafe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._retrysafe.refresh()
        prefix: str = scope.get("root_path", "")
        await self._retrysafe.show_page(scope, send, scope["path"].removeprefix(prefix), prefix)


def as_they_are(routes: Iterable[BaseRoute]) -> Iterator[tuple[BaseRoute, Any]]:
    """Routes, and what tells their paths and methods: themselves."""
    return ((route, route) for route in routes)


Flatten = Callable[[Iterable[BaseRoute]], Iterable[tuple[BaseRoute, Any]]]
_ROOT: Final = EndpointPath("")
_EVERYWHERE: Final = EndpointPath("/*", pattern="/{rest:path}")


def walk(
    routes: Iterable[BaseRoute], flatten: Flatten = as_they_are, above: EndpointPath = _ROOT
) -> Iterator[tuple[BaseRoute, Any, EndpointPath]]:
    """Every route at or below these, with what tells about it, and its path.

    An application that is mounted has a protection of its own and is left out.
    """
    for route, told in flatten(routes):
        if isinstance(route, Route):
            methods = None if told.methods is None else frozenset(told.methods)
            path, pattern = above.path + told.path_format, above.pattern + told.path
            yield route, told, replace(above, path=path, methods=methods, pattern=pattern)
            continue
        # A host has no path, and only mounts change the root path of what is below them.
        path = getattr(told, "path", "") if isinstance(route, Mount) else ""
        below = replace(
            above,
            path=above.path + path,
            depth=above.depth + path.count("/"),
            names=above.names.union(getattr(route, "param_convertors", ())),
            host=route.host if isinstance(route, Host) else above.host,
            pattern=above.pattern + path,
        )
        path, pattern = below.path + _EVERYWHERE.path, below.pattern + _EVERYWHERE.pattern
        yield route, told, replace(below, path=path, pattern=pattern)
        if not any(isinstance(layer, Starlette) for layer in layers_of(route)):
            yield from walk(getattr(route, "routes", None) or (), flatten, below)


def _is_place(known: EndpointPath, found: EndpointPath) -> bool:
    """Whether two looks at the routes have found the same place."""
    return (known.path, known.methods, known.host) == (found.path, found.methods, found.host)


def _leads_to(endpoint: EndpointPath, scope: Scope) -> bool:
    """Whether a request came by the route of this place, as its router has matched it."""
    methods = endpoint.methods
    prefix = endpoint.prefix(scope.get("root_path", "")).rstrip("/")
    path = paths_of(scope)[1].removeprefix(prefix)
    is_served = methods is None or scope["method"] in methods
    return is_served and _expression(endpoint.pattern).match(path) is not None


_PARAMETER: Final = re.compile(r"\{[^{}:]*")


# Every request asks, and an application has few routes.
@functools.lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    # A mount and a route below it may have parameters of one name, which one expression has not.
    number = itertools.count()
    return compile_path(_PARAMETER.sub(lambda _: f"{{p{next(number)}", pattern))[0]


def guards_of(
    route: BaseRoute, endpoint: EndpointPath
) -> Iterator[tuple[Any, App, Any, EndpointPath]]:
    """Every `Idempotent` around what a route leads to."""
    for layer in layers_of(route):
        if isinstance(layer, Idempotent):
            yield layer, layer.app, layer.rule, endpoint


def layers_of(route: BaseRoute) -> Iterator[Any]:
    """The application of a route, and what its middlewares wrap, as far as they show it."""
    app = getattr(route, "app", None)
    while app is not None:
        yield app
        # A router keeps its middlewares elsewhere; an application makes them when it is first used.
        inner = None if isinstance(app, Starlette) else getattr(app, "middleware_stack", None)
        app = getattr(app, "app", None) if inner is None else inner
