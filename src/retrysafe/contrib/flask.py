"""Flask: an extension with a decorator for views, and rules for whole paths.

A view is protected where it is called: after `before_request` functions and after the decorators
above `idempotent`, so who calls is known by then. What is stored is the view's own response, or
what an error handler made of its exception. `after_request` functions run for replays as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from retrysafe.extras import missing_extra
from retrysafe.runtime.calls import calls_of

try:
    from flask import Flask, current_app, g, request, request_started
    from flask import Response as FlaskResponse
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "flask", error) from error

from retrysafe.contrib.flask_io import (
    body_of,
    converted,
    headers_of,
    is_held,
    kept_body,
    native_of,
    outcome_of,
    unread_request,
    with_headers,
)
from retrysafe.contrib.views import (
    RULE_NAME,
    ViewRun,
    located,
    require_function,
    require_no_acceptance,
    require_options,
    view_rule,
    written_path,
)
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.keys.key import GlobalCaller
from retrysafe.errors import InvalidInput
from retrysafe.http import resumers, thread_requests
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import CallerOf, require_blocking
from retrysafe.http.held_response import passes_at_once
from retrysafe.http.ignored_keys import NOTICED_NAME, keys_in
from retrysafe.http.limits import Limits
from retrysafe.http.pages import POLICY_PATH, STATUS_PATH
from retrysafe.http.plan import Plan
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.protection import Protection
from retrysafe.http.responses import Response
from retrysafe.http.routes import (
    NO_PARAMETERS,
    Match,
    Route,
    refuse_at_host,
    require_name_at_host,
    require_parameters,
)
from retrysafe.http.rules import Rule
from retrysafe.http.wsgi import is_run, prefix_of
from retrysafe.http.wsgi_run import ATTEMPT_NAME
from retrysafe.idempotency import Idempotency

EXTENSION: Final = "retrysafe"
POLICY_ENDPOINT: Final = "idempotency_policy"
STATUS_ENDPOINT: Final = "idempotency_status"
_KEY_NAME: Final = "HTTP_IDEMPOTENCY_KEY"
# Where the function of a protected view notes that a decorator stands above it.
_BELOW_NAME: Final = "retrysafe_is_below"

View = TypeVar("View", bound=Callable[..., Any])


class Retrysafe:
    """The extension. One object serves any number of applications, each with its own `init_app`.

    `caller` is a function of the request, or `GLOBAL`; there is no default, because keys of two
    customers must never meet. It may use `flask.g`, `flask.session` and what login extensions
    offer; `request.host` is Flask's request.
    """

    def __init__(
        self,
        app: Flask | None = None,
        idempotency: Idempotency | None = None,
        **options: Any,
    ) -> None:
        """With an application, the same as `init_app`."""
        if app is not None:
            if idempotency is None:
                raise InvalidInput("pass the Idempotency object along with the application")
            self.init_app(app, idempotency, **options)
        elif idempotency is not None or options:
            raise InvalidInput("without an application, pass everything to init_app")

    def init_app(
        self,
        app: Flask,
        idempotency: Idempotency,
        *,
        caller: CallerOf | GlobalCaller,
        rules: Iterable[Rule] = (),
        fail_open: bool = False,
        policy_path: str = POLICY_PATH,
        policy_page: PolicyReaders = True,
        status_path: str = STATUS_PATH,
        challenge: str | None = None,
        breaker: Breaker | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Prepares an application; `rules` protect views that have no decorator, by their path.

        Raises `PolicyInvalid` for rules that contradict themselves, and `InvalidInput` for a
        caller or an idempotency object that cannot be used.
        """
        if not isinstance(idempotency, Idempotency):
            raise InvalidInput(
                f"Flask runs views in threads: pass an Idempotency object, got {idempotency!r}"
            )
        require_blocking(caller)
        if EXTENSION in app.extensions:
            raise InvalidInput("this application has a Retrysafe: call init_app once")
        protection = Protection(
            calls_of(idempotency).settings,
            caller=caller,
            rules=rules,
            fail_open=fail_open,
            policy_path=policy_path,
            policy_page=policy_page,
            status_path=status_path,
            challenge=challenge,
            breaker=breaker,
            limits=limits,
            outcome_of=outcome_of,
        )
        for route in protection.table.routes:
            require_no_acceptance(route.rule)
        app.extensions[EXTENSION] = _Protected(app, idempotency, protection)

    @staticmethod
    def idempotent(*misplaced: Any, **options: Any) -> Callable[[View], View]:
        """Decorates a view so that each key runs it once; takes what `Rule` takes but the path.

        Put it below the route and below decorators that check who calls. Raises `PolicyInvalid`.
        """
        require_options(misplaced, "@retrysafe.idempotent()")
        rule = view_rule(options)

        def decorate(view: View) -> View:
            require_function(view, "write decorators = [retrysafe.idempotent()] in its body")
            is_async = inspect.iscoroutinefunction(view)

            @functools.wraps(view)
            def protected(*args: Any, **kwargs: Any) -> Any:
                called = current_app.ensure_sync(view) if is_async else view
                return _current().answer_view(rule, functools.partial(called, *args, **kwargs))

            setattr(protected, RULE_NAME, rule)
            with suppress(AttributeError):
                # A bound method has no place for it; what it would tell is only a mistake.
                setattr(inspect.unwrap(view), _BELOW_NAME, True)
            return cast("View", protected)

        return decorate


def _current() -> _Protected:
    found: _Protected | None = current_app.extensions.get(EXTENSION)
    if found is None:
        raise InvalidInput(
            "this application has protected views and no protection: call Retrysafe().init_app(…)"
        )
    return found


class _Protected:
    """What one application has: its protection, and the routes of its views."""

    def __init__(self, app: Flask, idempotency: Idempotency, protection: Protection) -> None:
        self._app = app
        self.idempotency = idempotency
        self._calls = calls = calls_of(idempotency)
        thread_requests.register(protection, calls, protection.table.routes)
        resumers.protections.add(self)
        self._protection = protection
        # A rule may stand at several paths, and a path has several methods.
        self._routes: dict[tuple[int, int], Route | None] = {}
        # The host of every name that keys are made with.
        self._hosts: dict[str, str] = {}
        self._is_in_order = False
        # Before any other code of the application has read the body.
        request_started.connect(self._keep_body, app)
        pages = (
            [(protection.pages.policy_path, POLICY_ENDPOINT)] if protection.pages.has_policy else []
        )
        for path, endpoint in (
            *pages,
            # Without a key there is nothing to tell, which is better said here than by a view.
            (protection.pages.status_path, STATUS_ENDPOINT),
            (f"{protection.pages.status_path}<path:key>", STATUS_ENDPOINT),
        ):
            app.add_url_rule(path, endpoint, self._show_page, methods=["GET"], merge_slashes=False)
        if protection.table.routes:
            self._dispatch = app.dispatch_request
            app.dispatch_request = self._dispatch_by_rules  # type: ignore[method-assign]

    def refresh(self) -> None:
        """For workers: looks at all views; raises what is wrong with them."""
        self._require_order()

    # The pages.

    def _show_page(self, key: str | None = None) -> FlaskResponse:
        del key  # The path has it as well.
        asked = unread_request()
        path = request.path
        if path == self._protection.pages.policy_path:
            self._protection.pages.endpoints = tuple(self._view_routes())
        prefix = prefix_of(request.environ)
        return native_of(thread_requests.page(self._protection, self._calls, path, asked, prefix))

    def _view_routes(self) -> Iterator[Route]:
        for url_rule in self._app.url_map.iter_rules():
            view = self._app.view_functions.get(url_rule.endpoint)
            held: dict[int, tuple[Rule, list[str]]] = {}
            for method in url_rule.methods or ():
                rule = _rule_of(view, method)
                if rule is not None:
                    held.setdefault(id(rule), (rule, []))[1].append(method)
            for rule, methods in held.values():
                at_path = located(rule, url_rule.rule, methods=methods, name=url_rule.endpoint)
                if at_path is not None:
                    yield Route(at_path, self._calls.settings)

    # Where the views are.

    def _route(self, rule: Rule, url_rule: Any) -> Route | None:
        # Both live as long as the application that holds them.
        known = (id(rule), id(url_rule))
        if known not in self._routes:
            at_path = located(rule, url_rule.rule, methods=url_rule.methods, name=url_rule.endpoint)
            settings = self._calls.settings
            if at_path is not None:
                require_name_at_host(
                    at_path,
                    written_path(_host_of(url_rule)),
                    self._hosts,
                    at_path.fingerprint or settings.fingerprint,
                )
                # Functions of the application may add values to those of the route.
                if not self._app.url_value_preprocessors:
                    require_parameters(at_path, url_rule.arguments)
            route = None if at_path is None else Route(at_path, settings)
            if route is not None:
                thread_requests.register(self._protection, self._calls, (route,))
            self._routes[known] = route
        return self._routes[known]

    def _own_rule(self) -> Rule | None:
        """The rule that the request's view carries."""
        url_rule = request.url_rule
        if url_rule is None:
            return None
        return _rule_of(self._app.view_functions.get(url_rule.endpoint), request.method)

    def _match_by_path(self) -> Match | None:
        if request.url_rule is None:
            return None  # No view answers, so there is nothing to run once.
        match = self._protection.find(request.method, request.path)
        if match is not None and _host_of(request.url_rule):
            refuse_at_host(match[0].rule)
        return match

    def _dispatch_by_rules(self, *args: Any) -> Any:
        run = functools.partial(self._dispatch, *args)
        if self._own_rule() is not None:
            return run()
        match = self._match_by_path()
        if match is None:
            return self._answer(None, run)
        return self._answer(match[0], run, converted(match[0].rule.path or "", match[1]))

    def _require_order(self) -> None:
        """Raises `InvalidInput` for a view whose route stands below its decorator.

        Flask has registered it without the decorator then, and runs it unprotected. Looked at with
        the first request, when all views are there. Raises as `Route` does for rules that cannot
        be.
        """
        registered = self._app.view_functions
        reached = {id(inspect.unwrap(view)) for view in registered.values() if _has_rule(view)}
        for endpoint, view in registered.items():
            function = inspect.unwrap(view)
            if id(function) not in reached and hasattr(function, _BELOW_NAME):
                raise InvalidInput(
                    f"the view {endpoint!r} is not protected: write its route above "
                    "@retrysafe.idempotent(), because Flask takes what stands below the route"
                )
        for place in self._app.url_map.iter_rules():
            for method in place.methods or ():
                rule = _rule_of(registered.get(place.endpoint), method)
                if rule is not None:
                    self._route(rule, place)
        self._is_in_order = True

    # Bodies.

    def _keep_body(self, sender: object, **rest: Any) -> None:
        del sender, rest
        if not self._is_in_order:
            self._require_order()
        rule = self._own_rule()
        if rule is None:
            route = (self._match_by_path() or (None,))[0]
        else:
            route = self._route(rule, request.url_rule)
        if route is not None and route.rule.protected:
            kept_body(route.rule.request_limit_bytes)
        elif route is None and rule is None and _KEY_NAME in request.environ:
            self._pass()

    def _pass(self) -> None:
        """Tells of a key that comes to a view without a rule."""
        method, url_rule, environ = request.method, request.url_rule, request.environ
        around = isinstance(environ.get(ATTEMPT_NAME), Attempt | AtomicAttempt) or is_run(environ)
        table = self._protection.table
        if url_rule is None or around or table.is_covered(method, request.path):
            return
        keys = keys_in(method, unread_request().raw_headers)
        # A middleware around the application looks after its own requests.
        if keys and NOTICED_NAME not in environ:
            ignored = self._protection.ignored_keys
            ignored.note(self._calls.report, method, url_rule.rule, keys)

    # Answers.

    def answer_view(self, rule: Rule, view: Callable[[], Any]) -> Any:
        """What a decorated view answers."""
        if request.url_rule is None:
            return view()
        return self._answer(self._route(rule, request.url_rule), view, request.view_args or {})

    def _answer(
        self,
        route: Route | None,
        view: Callable[[], Any],
        parameters: Mapping[str, Any] = NO_PARAMETERS,
    ) -> Any:
        around = request.environ.get(ATTEMPT_NAME)
        if isinstance(around, Attempt | AtomicAttempt):
            # Somebody further out protects this very request; a second claim of its key would
            # find it in flight.
            g.idempotency = around
            return view()
        if is_run(request.environ):
            g.idempotency = None
            return view()
        if route is None or request.method not in route.operations or not route.rule.protected:
            g.idempotency = None
            return view()
        if NOTICED_NAME in request.environ:
            request.environ[NOTICED_NAME].append(self)
        asked = unread_request()
        asked.parameters = parameters
        protection, prefix = self._protection, prefix_of(request.environ)
        plan = thread_requests.begun(protection, route, asked, prefix)
        if isinstance(plan, Response):
            return native_of(plan)
        if plan is None:
            g.idempotency = None
            return view()
        body = kept_body(route.rule.request_limit_bytes)
        if body is None:
            return native_of(protection.refusals.too_large(route, asked, prefix, plan.key))
        asked.body = body
        if protection.is_cut_off(asked):
            return native_of(protection.refusals.cut_off(asked, prefix, plan.key))
        return self._answer_plan(plan, view)

    def _answer_plan(self, plan: Plan, view: Callable[[], Any]) -> Any:
        run = ViewRun(functools.partial(_run_view, plan, view), FlaskResponse.close)
        response, added = run.answered(self._protection, self._calls, plan)
        return native_of(response) if added is None else with_headers(run.native, added)


def _host_of(url_rule: Any) -> str:
    """The host or the subdomain that a route is for; empty for one of every host."""
    return url_rule.host or url_rule.subdomain or ""


def _has_rule(view: Any) -> bool:
    """Whether a view, or what its decorators call in the end, carries a rule."""
    return hasattr(inspect.unwrap(view, stop=lambda link: hasattr(link, RULE_NAME)), RULE_NAME)


def _rule_of(view: Any, method: str) -> Rule | None:
    """The rule that a view carries, or that the method of its class does."""
    rule: Rule | None = getattr(view, RULE_NAME, None)
    if rule is None:
        of_class = getattr(getattr(view, "view_class", None), method.lower(), None)
        rule = getattr(of_class, RULE_NAME, None)
    return rule


def _run_view(
    plan: Plan, view: Callable[[], Any], attempt: Attempt | AtomicAttempt[Any] | None
) -> tuple[Any, Response]:
    """Runs the view as Flask does, with the error handlers that answer for it."""
    g.idempotency = attempt
    request.environ[ATTEMPT_NAME] = attempt
    app = current_app
    try:
        native = app.make_response(view())
    except Exception as error:
        # Raises again what no handler answers; Flask then goes its usual way to 500.
        native = app.make_response(app.handle_user_exception(error))
    try:
        headers = headers_of(native)
        if passes_at_once(plan, headers) or not is_held(native, plan):
            return native, Response(native.status_code, headers, b"", is_streamed=True)
        return native, Response(native.status_code, headers, body_of(native))
    except BaseException:
        native.close()
        raise
