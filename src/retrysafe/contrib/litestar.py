"""Litestar: route handlers with their own rules, which its OpenAPI document shows.

`RetrysafePlugin` belongs to an application; `idempotent(…)` among the `guards` of a route handler,
a controller, a router or the application says what is protected and how.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final, cast
from urllib.parse import unquote

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.contrib.endpoints import EndpointPath, Endpoints, Served
from retrysafe.contrib.openapi import (
    ACCEPTED_SCHEMA,
    ACCEPTED_TEXT,
    MEDIA_TYPE,
    PROBLEM_SCHEMA,
    Description,
    description_of,
)
from retrysafe.contrib.views import view_rule
from retrysafe.core.keys.key import GlobalCaller
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.extras import missing_extra
from retrysafe.http.asgi_run import ERROR_NAME, App
from retrysafe.http.callers import CallerOf
from retrysafe.http.responses import Response as StoredResponse
from retrysafe.http.responses import response_of
from retrysafe.http.routes import Route
from retrysafe.http.rules import Rule
from retrysafe.runtime.checks import running_loop

try:
    from litestar import Litestar, Request, Response, asgi
    from litestar.config.app import AppConfig
    from litestar.connection import ASGIConnection
    from litestar.exceptions import (
        HTTPException,
        MethodNotAllowedException,
        NotFoundException,
    )
    from litestar.handlers import BaseRouteHandler
    from litestar.middleware import DefineMiddleware
    from litestar.openapi.spec import (
        Components,
        OpenAPIMediaType,
        OpenAPIResponse,
        OpenAPIType,
        Operation,
        Parameter,
        Reference,
        Schema,
        SecurityScheme,
    )
    from litestar.plugins import InitPlugin, ReceiveRoutePlugin
    from litestar.response.base import ASGIResponse
    from litestar.routes import ASGIRoute, BaseRoute, HTTPRoute
    from litestar.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "litestar", error) from error

__all__ = ["RetrysafePlugin", "idempotent"]

# Where the middleware says in a request's scope which handler it protects.
_GUARDED: Final = "retrysafe.guarded"
# Where a described operation class keeps the one that it describes.
_BASE: Final = "__retrysafe_base__"
# The scope of the request whose handler runs.
_serving: ContextVar[Any] = ContextVar("retrysafe_litestar_scope", default=None)


class Idempotent:
    """What `idempotent` returns: the rule, and a guard that lets nothing by without the plugin.

    Litestar ignores options that nobody reads, so a mere option would run unprotected where the
    plugin was forgotten.
    """

    __slots__ = ("rule",)

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    async def __call__(
        self, connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
    ) -> None:
        scope: Any = connection.scope
        # By the handler: an application that this one is mounted in may have a plugin, too.
        if scope["type"] == "http" and scope.get(_GUARDED) is not scope["route_handler"]:
            raise InvalidInput(
                f"{handler} is protected by idempotent(), and its application has no "
                "RetrysafePlugin: write Litestar(…, plugins=[RetrysafePlugin(…)]). Nothing was run"
            )


def idempotent(*misplaced: Any, **options: Any) -> Idempotent:
    """Protects handlers: `guards=[idempotent()]` of a handler, a controller, a router or all.

    Takes the options of `Rule`, except its path; the innermost one counts. Raises `PolicyInvalid`
    for options that cannot be.
    """
    if misplaced:
        raise InvalidInput("idempotent is a guard: write guards=[idempotent()], with the brackets")
    return Idempotent(view_rule(options))


def _rendered(request: Request[Any, Any, Any], value: Any) -> ASGIResponse:
    """The response that a handler's value becomes: a `Response`, or what it returns otherwise."""
    handler: Any = request.scope["route_handler"]
    response = value if isinstance(value, Response) else Response(value)
    return response.to_asgi_response(
        None,
        request,
        media_type=handler.media_type,
        status_code=handler.status_code,
        type_encoders=handler.resolve_type_encoders(),
    )


def _outcome_of(value: Any) -> StoredResponse:
    """The response that Litestar makes of what a handler returns."""
    scope = _serving.get()
    if scope is not None and not isinstance(value, ASGIResponse | StoredResponse):
        value = _rendered(Request(scope), value)
    return response_of(value)


class RetrysafePlugin(Endpoints, InitPlugin, ReceiveRoutePlugin):
    """The protection of a Litestar application, as one of its `plugins`.

    Adds the policy and status pages, and closes the `AsyncIdempotency` when the application ends.
    """

    outcome_of = staticmethod(_outcome_of)

    def __init__(
        self, idempotency: AsyncIdempotency, *, caller: CallerOf | GlobalCaller, **options: Any
    ) -> None:
        """Takes what `Retrysafe` of the other frameworks takes, and raises as it does."""
        super().__init__(idempotency, caller=caller, **options)
        self._shown: dict[tuple[str, frozenset[str] | None], Route] = {}
        # Whether the OpenAPI document has the scheme of the caller's credential.
        self._is_secured = False

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Called by Litestar: adds the middleware, the pages and the end."""
        app_config.middleware.append(DefineMiddleware(_Guard, plugin=self))
        app_config.lifespan.append(self.lifespan)
        app_config.after_exception.append(_note)
        known = self.protection.shipped_caller
        document = app_config.openapi_config
        if known is not None and known.scheme is not None and document is not None:
            # A document that says for all operations what they need holds the caller already.
            self._is_secured = not document.security
            if self._is_secured:
                own = document.components
                # A copy: the default one is shared by all applications.
                app_config.openapi_config = document = copy(document)
                document.components = [
                    Components(security_schemes=_security_schemes(*known.scheme)),
                    *(own if isinstance(own, list) else [own]),
                ]
        status_path = self.protection.pages.status_path.rstrip("/")
        if self.protection.pages.has_policy:
            policy_path = self.protection.pages.policy_path
            app_config.route_handlers.append(asgi(policy_path, copy_scope=False)(_page(self)))
        app_config.route_handlers += (
            # A mount, because a key may have slashes.
            asgi(status_path, is_mount=True, copy_scope=False)(_page(self, status_path)),
        )
        return app_config

    def receive_route(self, route: BaseRoute) -> None:
        """Called by Litestar for every route: raises what is wrong with its handlers' rules."""
        for handler in _handlers(route):
            rule = rule_of(handler)
            if rule is None:
                continue
            endpoint = endpoint_path(handler, route.path_format)
            ready = self.serving(_never, rule, endpoint)
            if not ready.is_shown:
                continue
            # Litestar tells of a route again when a handler is added to its path.
            self._shown[endpoint.path, endpoint.methods] = ready.route
            if isinstance(route, HTTPRoute) and rule.protected:
                told = description_of(
                    ready.route, self.protection, has_callers=not self.has_global_caller
                )
                if not self._is_secured:
                    told = replace(told, security=None)
                base = getattr(handler.operation_class, _BASE, handler.operation_class)
                handler.operation_class = _described(base, told)
        self.protection.pages.endpoints = tuple(self._shown.values())

    @asynccontextmanager
    async def lifespan(self, app: Litestar) -> AsyncIterator[None]:
        """Closes the `AsyncIdempotency` at the end, after waiting for running requests."""
        running_loop()
        try:
            # Inside: a start that fails has opened connections already.
            await self.start()
            yield
        finally:
            await self.close()


class _Guard:
    """The middleware around one handler of one route."""

    def __init__(self, app: App, plugin: RetrysafePlugin) -> None:
        self.app = app
        self._plugin = plugin
        self._served: Served | None = None
        self._mount = ""
        self._is_known = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self._is_known:
            self._get_to_know(scope)
        scope[_GUARDED] = scope["route_handler"]
        if self._served is None or scope["type"] != "http":
            if scope["type"] == "http":
                self._plugin.note_ignored_key(scope, scope["path_template"])
            await self.app(scope, receive, send)
            return
        # Litestar takes the root path and the mount out of the path.
        path = scope.get("root_path", "") + self._mount + scope["path"]
        await self._served(scope, receive, send, path)

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        token = _serving.set(scope)
        try:
            await self.app(scope, receive, send)
        finally:
            _serving.reset(token)

    def _get_to_know(self, scope: Any) -> None:
        """Litestar says with the first request only which handler it is."""
        handler = scope["route_handler"]
        rule = rule_of(handler)
        if rule is not None:
            if getattr(handler, "is_mount", False):
                self._mount = min(handler.paths).rstrip("/")
            endpoint = endpoint_path(handler, scope["path_template"])
            self._served = self._plugin.serving(self._run, rule, endpoint)
        self._is_known = True


def rule_of(handler: Any) -> Rule | None:
    """The rule of a handler, from itself or from a layer above it; raises `PolicyInvalid`."""
    if isinstance(handler.opt.get("idempotency"), Rule):
        # Litestar takes any option, so nobody else would say that it protects nothing.
        raise PolicyInvalid(
            f"the option idempotency of {handler} protects nothing: write "
            "guards=[idempotent(…)] instead, with what the Rule has"
        )
    # The outermost layer comes first.
    rules = [guard.rule for guard in handler.resolve_guards() if isinstance(guard, Idempotent)]
    return rules[-1] if rules else None


def endpoint_path(handler: Any, path: str) -> EndpointPath:
    """Where a handler is; one that is no HTTP handler answers every method."""
    methods = getattr(handler, "http_methods", None)
    if methods is None:
        return EndpointPath(min(handler.paths).rstrip("/") + "/*" if handler.is_mount else path)
    served = frozenset(str(getattr(item, "value", item)) for item in methods)
    return EndpointPath(path, served, convert=_plain_paths)


def _plain_paths(names: tuple[str, ...], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters, with those of `{id:path}` as a handler reads them that takes a `Path`.

    Litestar gives the text with a slash in front, which nothing else begins with: `/a/./b` is the
    path `/a/b`, and `/07` may be order 7.
    """
    return {
        name: str(PurePosixPath(value)).removeprefix("/")
        if isinstance(value, str) and value.startswith("/")
        else value
        for name, value in parameters.items()
    }


def _handlers(route: BaseRoute) -> Iterable[Any]:
    if isinstance(route, HTTPRoute):
        return route.route_handlers
    return (route.route_handler,) if isinstance(route, ASGIRoute) else ()


async def _note(error: Exception, scope: Scope) -> None:
    """Litestar makes a response of every exception; the policy is to judge the exception itself."""
    if not isinstance(error, HTTPException):
        cast("dict[str, Any]", scope)[ERROR_NAME] = error


async def _never(scope: Any, receive: Any, send: Any) -> None:
    """Stands for the handler while only its rule is looked at."""


def _page(plugin: RetrysafePlugin, mount: str = "") -> Any:
    async def retrysafe_page(scope: Scope, receive: Receive, send: Send) -> None:
        asked: Any = scope
        if asked["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowedException
        prefix: str = asked.get("root_path", "")
        # As sent: Litestar tidies the path up, and a key may end with a slash.
        raw = asked.get("raw_path")
        path = (
            unquote(raw.decode("latin-1")).removeprefix(prefix)
            if raw
            else mount + asked["path"].rstrip("/")
        )
        if not plugin.protection.pages.serve(path):
            raise NotFoundException  # Litestar takes every path that starts like the mount.
        await plugin.show_page(asked, send, path, prefix)  # type: ignore[arg-type]

    return retrysafe_page


def _described(base: type[Operation], told: Description) -> type[Operation]:
    """The class of an operation in the OpenAPI document, with what is told about its endpoint."""

    @dataclass
    class IdempotentOperation(base):  # type: ignore[misc,valid-type]
        def __post_init__(self) -> None:
            after = getattr(super(), "__post_init__", None)
            if after is not None:
                after()
            _describe(self, told)

    setattr(IdempotentOperation, _BASE, base)
    return IdempotentOperation


def _describe(operation: Operation, told: Description) -> None:
    own = list(operation.parameters or ())
    # A handler that reads one of these headers itself has described it.
    known = {
        item.name.lower()
        for item in own
        if isinstance(item, Parameter) and item.param_in == "header"
    }
    operation.parameters = own + [
        _parameter(item) for item in told.parameters if item["name"].lower() not in known
    ]
    operation.description = "\n\n".join(filter(None, (operation.description, told.text)))
    responses = dict(_responses(operation.responses or {}, told.responses, MEDIA_TYPE, _PROBLEM))
    if told.may_accept:
        accepted = {202: ACCEPTED_TEXT}
        responses = dict(_responses(responses, accepted, "application/json", _ACCEPTED))
    operation.responses = responses
    if told.security is not None and operation.security is None:
        operation.security = [{told.security[0]: []}]


def _security_schemes(
    name: str, scheme: Mapping[str, Any]
) -> dict[str, SecurityScheme | Reference]:
    made = SecurityScheme(
        type=scheme["type"],
        name=scheme.get("name"),
        security_scheme_in=scheme.get("in"),
        scheme=scheme.get("scheme"),
    )
    return {name: made}


def _parameter(told: dict[str, Any]) -> Parameter:
    return Parameter(
        name=told["name"],
        param_in=told["in"],
        required=told["required"],
        description=told["description"],
        schema=Schema(type=OpenAPIType.STRING, min_length=told["schema"]["minLength"]),
        example=told["example"],
    )


def _responses(
    own: dict[str, Any], told: dict[int, str], media_type: str, schema: Schema
) -> Iterator[tuple[str, Any]]:
    """The handler's own responses, with a second meaning where they have one."""
    media = {media_type: OpenAPIMediaType(schema=schema)}
    yield from own.items()
    for status, text in told.items():
        response = own.get(str(status))
        if response is None:
            yield str(status), OpenAPIResponse(description=text, content=media)
        else:
            yield (
                str(status),
                OpenAPIResponse(
                    description=f"{response.description}; or {text}",
                    headers=response.headers,
                    content={**media, **(response.content or {})},
                    links=response.links,
                ),
            )


_TYPES: Final = {item.value: item for item in OpenAPIType}


def _schema(told: dict[str, Any]) -> Schema:
    return Schema(
        type=OpenAPIType.OBJECT,
        title=told["title"],
        description=told["description"],
        required=told["required"],
        properties={
            name: Schema(type=_TYPES[part["type"]], description=part.get("description"))
            for name, part in told["properties"].items()
        },
    )


_PROBLEM: Final = _schema(PROBLEM_SCHEMA)
_ACCEPTED: Final = _schema(ACCEPTED_SCHEMA)
