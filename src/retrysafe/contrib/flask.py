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
from io import BytesIO
from itertools import chain
from typing import Any, Final, TypeVar, cast

from retrysafe.extras import missing_extra
from retrysafe.runtime.calls import Calls, calls_of

try:
    from flask import Flask, current_app, g, request, request_started
    from flask import Response as FlaskResponse
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "flask", error) from error

from retrysafe.contrib.views import (
    RULE_NAME,
    ViewRun,
    located,
    require_function,
    require_options,
    view_rule,
)
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.keys.key import GlobalCaller
from retrysafe.errors import InvalidInput
from retrysafe.http import thread_requests
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import CallerOf, require_blocking
from retrysafe.http.held_response import Held, passes_at_once
from retrysafe.http.limits import Limits
from retrysafe.http.policy_page import PolicyReaders
from retrysafe.http.protection import POLICY_PATH, STATUS_PATH, Plan, Protection
from retrysafe.http.request import Request
from retrysafe.http.responses import Header, Response
from retrysafe.http.routes import (
    NO_PARAMETERS,
    Match,
    Route,
    require_name_at_host,
    require_parameters,
)
from retrysafe.http.rules import Rule
from retrysafe.http.unmatched import NOTICED_NAME, keys_in
from retrysafe.http.wsgi import is_run, prefix_of, request_of
from retrysafe.http.wsgi_run import ATTEMPT_NAME
from retrysafe.idempotency import Idempotency

EXTENSION: Final = "retrysafe"
POLICY_ENDPOINT: Final = "idempotency_policy"
STATUS_ENDPOINT: Final = "idempotency_status"
_BODY_NAME: Final = "retrysafe.body"
_KEY_NAME: Final = "HTTP_IDEMPOTENCY_KEY"
_READ_BYTES: Final = 64 * 1024
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
        calls = calls_of(idempotency)
        protection = Protection(
            calls.settings,
            caller=caller,
            rules=rules,
            fail_open=fail_open,
            policy_path=policy_path,
            policy_page=policy_page,
            status_path=status_path,
            challenge=challenge,
            breaker=breaker,
            limits=limits,
            outcome_of=_outcome_of,
        )
        app.extensions[EXTENSION] = _Protected(app, calls, protection)

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

    def __init__(self, app: Flask, calls: Calls, protection: Protection) -> None:
        self._app = app
        self._calls = calls
        self._protection = protection
        # A rule may stand at several paths, and a path has several methods.
        self._routes: dict[tuple[int, int], Route | None] = {}
        self._is_in_order = False
        # Before any other code of the application has read the body.
        request_started.connect(self._keep_body, app)
        pages = [(protection.policy_path, POLICY_ENDPOINT)] if protection.has_policy_page else []
        for path, endpoint in (
            *pages,
            # Without a key there is nothing to tell, which is better said here than by a view.
            (protection.status_path, STATUS_ENDPOINT),
            (f"{protection.status_path}<path:key>", STATUS_ENDPOINT),
        ):
            app.add_url_rule(path, endpoint, self._show_page, methods=["GET"], merge_slashes=False)
        if protection.table.routes:
            self._dispatch = app.dispatch_request
            app.dispatch_request = self._dispatch_by_rules  # type: ignore[method-assign]

    # The pages.

    def _show_page(self, key: str | None = None) -> FlaskResponse:
        del key  # The path has it as well.
        asked = _request()
        path = request.path
        if path == self._protection.policy_path:
            self._protection.endpoints = tuple(self._view_routes())
        prefix = prefix_of(request.environ)
        return _native(thread_requests.page(self._protection, self._calls, path, asked, prefix))

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
                if url_rule.subdomain or url_rule.host:
                    require_name_at_host(at_path)
                # Functions of the application may add values to those of the route.
                if not self._app.url_value_preprocessors:
                    require_parameters(at_path, url_rule.arguments)
            self._routes[known] = None if at_path is None else Route(at_path, settings)
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
        return self._protection.find(request.method, request.path)

    def _dispatch_by_rules(self, *args: Any) -> Any:
        run = functools.partial(self._dispatch, *args)
        if self._own_rule() is not None:
            return run()
        route, taken = self._match_by_path() or (None, NO_PARAMETERS)
        return self._answer(route, run, taken)

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
            _kept_body(route.rule.request_limit_bytes)
        elif route is None and rule is None and _KEY_NAME in request.environ:
            self._pass()

    def _pass(self) -> None:
        """Tells of a key that comes to a view without a rule."""
        method, url_rule, environ = request.method, request.url_rule, request.environ
        around = isinstance(environ.get(ATTEMPT_NAME), Attempt | AtomicAttempt) or is_run(environ)
        table = self._protection.table
        if url_rule is None or around or table.is_covered(method, request.path):
            return
        keys = keys_in(method, _request().raw_headers)
        # A middleware around the application looks after its own requests.
        if keys and NOTICED_NAME not in environ:
            unmatched = self._protection.unmatched
            unmatched.note(self._calls.report, method, url_rule.rule, keys)

    # Answers.

    def answer_view(self, rule: Rule, view: Callable[[], Any]) -> Any:
        """What a decorated view answers."""
        if request.url_rule is None:
            return view()
        return self._answer(self._route(rule, request.url_rule), view)

    def _answer(
        self,
        route: Route | None,
        view: Callable[[], Any],
        taken: Mapping[str, Any] = NO_PARAMETERS,
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
        asked = _request()
        # A rule's pattern may have names of its own; of the view's, Flask has made values.
        asked.parameters = {**taken, **(request.view_args or {})}
        protection, prefix = self._protection, prefix_of(request.environ)
        plan = protection.begin(route, asked, prefix, is_on_loop=False)
        if isinstance(plan, Response):
            return _native(plan)
        if plan is None:
            g.idempotency = None
            return view()
        body = _kept_body(route.rule.request_limit_bytes)
        if body is None:
            return _native(protection.refusals.too_large(route, asked, prefix, plan.key))
        asked.body = body
        if protection.is_cut_off(asked):
            return _native(protection.refusals.cut_off(asked, prefix, plan.key))
        return self._answer_plan(plan, view)

    def _answer_plan(self, plan: Plan, view: Callable[[], Any]) -> Any:
        run = ViewRun(functools.partial(_run_view, plan, view), FlaskResponse.close)
        response, added = run.answered(self._protection, self._calls, plan)
        return _native(response) if added is None else _with_headers(run.native, added)


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
        headers = _headers_of(native)
        if passes_at_once(plan, headers) or not _is_held(native, plan):
            return native, Response(native.status_code, headers, b"", is_streamed=True)
        return native, Response(native.status_code, headers, _body_of(native))
    except BaseException:
        native.close()
        raise


def _is_held(native: FlaskResponse, plan: Plan) -> bool:
    """Whether the whole response is in memory; a stream past its limits goes on as it comes."""
    # Files are sent past Python otherwise, and could not be read here.
    native.direct_passthrough = False
    if not native.is_streamed:
        return True
    source: Any = native.response
    held, pieces = Held(plan), native.iter_encoded()
    is_whole = all(map(held.take, pieces))
    close = getattr(source, "close", None)
    if close is not None:
        # What takes its place has no close of its own.
        native.call_on_close(close)
    native.response = [bytes(held.body)] if is_whole else chain([bytes(held.body)], pieces)
    return is_whole


def _outcome_of(value: Any) -> Response:
    """The response that a view means by what it returns; for completing inside a transaction."""
    if type(value) is Response:
        return value
    native = current_app.make_response(value)
    return Response(native.status_code, _headers_of(native), _body_of(native))


def _headers_of(native: FlaskResponse) -> list[Header]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in native.headers.items()
    ]


def _body_of(native: FlaskResponse) -> bytes:
    native.direct_passthrough = False
    return native.get_data()


def _with_headers(native: FlaskResponse, headers: Iterable[Header]) -> FlaskResponse:
    for name, value in headers:
        native.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    return native


def _native(response: Response) -> FlaskResponse:
    native = current_app.response_class(response.body, response.status)
    # Flask would call a response without a type HTML.
    native.headers.clear()
    return _with_headers(native, response.headers)


def _request() -> Request:
    asked = request_of(request.environ)
    asked.host = _plain_request()
    return asked


def _plain_request() -> Any:
    """Flask's request itself, and not the proxy that means another one in every thread."""
    proxy: Any = request
    return proxy._get_current_object()  # noqa: SLF001 — the proxy's documented way in.


def _kept_body(limit_bytes: int) -> bytes | None:
    """The whole body, which stays readable in every way that Flask has; None past the limit."""
    environ = request.environ
    if _BODY_NAME not in environ:
        environ[_BODY_NAME] = _read_body(limit_bytes)
    body: bytes | None = environ[_BODY_NAME]
    return body


def _read_body(limit_bytes: int) -> bytes | None:
    length = request.content_length
    if length is not None and length > limit_bytes:
        return None
    read: dict[str, Any] = _plain_request().__dict__
    cached: bytes | None = read.get("_cached_data")
    if cached:
        # Somebody has called `get_data`, which keeps what it reads.
        return cached if len(cached) <= limit_bytes else None
    if "stream" in read and length != 0:
        # With an empty body in its place, any two requests would count as the same one.
        raise InvalidInput(
            "the body was read before the view was reached, so it cannot be compared: use "
            "functools.wraps in the decorators above idempotent, and it is kept in time"
        )
    chunks: list[bytes] = []
    left = limit_bytes + 1
    while left > 0:
        chunk = request.stream.read(min(left, _READ_BYTES))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    if left <= 0:
        return None
    body = b"".join(chunks)
    request.environ["wsgi.input"] = BytesIO(body)
    if length is None:
        # A length that was declared stays: it tells whether all of the body has arrived.
        request.environ["CONTENT_LENGTH"] = str(len(body))
    # Made anew, from the input that was just put there.
    read.pop("stream", None)
    return body
