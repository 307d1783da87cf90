"""The decorator for views: functions, methods of classes, sync and async, REST framework's too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.exception import response_for_exception
from django.http import Http404
from django.http.multipartparser import MultiPartParserError

from retrysafe.contrib.django.configuration import Configuration, current
from retrysafe.contrib.django.pages import require_status_page
from retrysafe.contrib.django.route_names import path_of
from retrysafe.contrib.django.transactions import (
    EXEMPTION_NAME,
    exemption,
    require_none_around,
    require_none_open,
    with_transactions,
)
from retrysafe.contrib.django.views import (
    answer,
    answer_on_loop,
    django_request,
    is_run,
    notice,
    plan_on_loop,
    planned,
)
from retrysafe.contrib.views import (
    RULE_NAME,
    located,
    require_function,
    require_options,
    view_rule,
)
from retrysafe.http.paths import names_in
from retrysafe.http.plan import Plan
from retrysafe.http.routes import Route, require_parameters
from retrysafe.http.rules import ACCEPT, Rule

View = TypeVar("View", bound=Callable[..., Any])
# What Django answers with 400, 403 or 404; anything else is a failure of the server.
_ANSWERED = (Http404, PermissionDenied, BadRequest, SuspiciousOperation, MultiPartParserError)


def idempotent(*misplaced: Any, **options: Any) -> Callable[[View], View]:
    """Decorates a view so that each key runs it once; takes what `Rule` takes but the path.

    Works on functions, and by `method_decorator` on `dispatch` or on a method of a class. Put it
    below decorators that check who calls. Raises `PolicyInvalid`.
    """
    require_options(misplaced, "@idempotent()")
    rule = view_rule(options)

    def decorate(view: View) -> View:
        require_function(view, 'write @method_decorator(idempotent(), name="dispatch") above it')
        if _is_async(view):

            @functools.wraps(view)
            async def protected(request: Any, *args: Any, **kwargs: Any) -> Any:
                called = functools.partial(view, request, *args, **kwargs)
                return await _answered_on_loop(rule, view, request, called)

        else:

            @functools.wraps(view)
            def protected(request: Any, *args: Any, **kwargs: Any) -> Any:
                return _answered(rule, view, request, args, kwargs)

            setattr(protected, EXEMPTION_NAME, exemption(view))
        setattr(protected, RULE_NAME, rule)
        return cast("View", protected)

    return decorate


def _is_async(view: Any) -> bool:
    """Also for `dispatch`, a plain method that gives back what its async methods give."""
    owner = getattr(getattr(view, "func", None), "__self__", None)
    return iscoroutinefunction(view) or getattr(owner, "view_is_async", False) is True


def _answered(
    rule: Rule, view: Any, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    plain = django_request(request)
    notice(plain)
    match = plain.resolver_match
    # Whatever happens, the view is in the transactions that Django was told to leave out.
    called = with_transactions(view, match and match.func)
    run = functools.partial(called, request, *args, **kwargs)
    if is_run(plain):
        return run()
    made = current()
    route = _route(made, rule, view, plain)
    if route is None:
        plain.idempotency = None
        return run()
    plan = planned(made.protection, route, request, _parameters(plain))
    if not isinstance(plan, Plan):
        plain.idempotency = None
        return run() if plan is None else plan

    def checked() -> Any:
        if plan.route.rule.transaction is None:
            require_none_open()
        return run()

    return answer(made.protection, made.calls, plan, checked, functools.partial(_caught, request))


async def _answered_on_loop(rule: Rule, view: Any, request: Any, run: Callable[[], Any]) -> Any:
    plain = django_request(request)
    notice(plain)
    match = plain.resolver_match
    require_none_around(match and match.func)
    if is_run(plain):
        return await run()
    made = current()
    route = _route(made, rule, view, plain)
    plan = None
    if route is not None:
        plan = await plan_on_loop(made.protection, route, request, _parameters(plain))
    if not isinstance(plan, Plan):
        plain.idempotency = None
        return await run() if plan is None else plan
    caught = functools.partial(_caught, request)
    if isinstance(plain, ASGIRequest):
        return await answer_on_loop(made.on_loop, plan, run, caught)

    async def awaited() -> Any:
        return await run()

    # Under WSGI each request has a loop of its own, which ends with it: the thread that serves
    # the request is what lasts.
    blocking_view: Any = async_to_sync(awaited)
    return await sync_to_async(answer)(made.protection, made.calls, plan, blocking_view, caught)


def _route(made: Configuration, rule: Rule, view: Any, plain: Any) -> Route | None:
    """The rule at the path of the request's view; None when it does not protect this method."""
    match = plain.resolver_match
    path = None if match is None else path_of(match.route)
    name = getattr(view, "__qualname__", "") if match is None else match.view_name or match.route
    names = frozenset(_parameters(plain))
    route = made.route(rule, path, functools.partial(_located, rule, path, name, names))
    if route is None or not route.rule.protected or plain.method not in route.operations:
        return None
    return route


def _located(rule: Rule, path: str | None, name: str, names: frozenset[str]) -> Rule | None:
    if rule.in_flight is ACCEPT:
        require_status_page()
    at_path = located(rule, path, name=name)
    if at_path is not None and at_path.path is not None:
        # A regular expression may have parameters that not every request has.
        require_parameters(at_path, names.union(names_in(at_path.path)))
    return at_path


def _parameters(plain: Any) -> dict[str, Any]:
    """What the route took from the path, as its converters made it."""
    match = plain.resolver_match
    return {} if match is None else match.kwargs


def _caught(request: Any, error: Exception) -> Any:
    """What Django, or REST framework around the view, answers to its exception.

    Raises it again when that is not for the client: Django then goes its usual way to 500.
    """
    view = getattr(request, "parser_context", {}).get("view")
    if view is not None:
        return view.handle_exception(error)
    if isinstance(error, _ANSWERED):
        return response_for_exception(request, error)
    raise error
