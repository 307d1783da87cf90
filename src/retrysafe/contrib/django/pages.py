"""The policy page and the status page, and where the project's protected views are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponseNotAllowed
from django.http.response import HttpResponseBase
from django.urls import Resolver404, get_resolver, resolve
from django.utils.module_loading import import_string

from retrysafe.contrib.django.configuration import current
from retrysafe.contrib.django.route_names import path_of
from retrysafe.contrib.django.views import native_of, prefix_of, unread_request
from retrysafe.contrib.views import RULE_NAME, located
from retrysafe.http import thread_requests
from retrysafe.http.rules import STATE_CHANGING, Rule

PAGE_METHODS: Final = ("GET", "HEAD")
# Set on middlewares that serve the pages.
SERVING_NAME: Final = "serves_retrysafe_pages"


def page(request: Any, key: str | None = None) -> HttpResponseBase:
    """Shows the policy of all views, or the status of a key."""
    if request.method not in PAGE_METHODS:
        return HttpResponseNotAllowed(PAGE_METHODS)
    made = current()
    protection = made.protection
    path: str = request.path_info
    if key is None and path == protection.pages.policy_path:
        protection.pages.endpoints = tuple(map(made.made_route, _located_rules()))
    shown = thread_requests.page(
        protection,
        made.calls,
        path,
        unread_request(request),
        prefix_of(request),
        async_to_sync(protection.caller_on_loop) if protection.has_async_caller else None,
    )
    return native_of(shown)


def require_status_page() -> None:
    """Raises `ImproperlyConfigured` when the URLs that 202 tells would lead nowhere."""
    if any(hasattr(import_string(name), SERVING_NAME) for name in settings.MIDDLEWARE):
        return
    try:
        is_served = resolve(f"{current().protection.pages.status_path}k").func is page
    except Resolver404:
        is_served = False
    if not is_served:
        raise ImproperlyConfigured(
            "a view with in_flight=ACCEPT tells its clients a status URL, and nothing serves it: "
            "add retrysafe.contrib.django.middleware.RetrysafeMiddleware to MIDDLEWARE, or "
            'path("", include("retrysafe.contrib.django.urls")) to the root of the URLs'
        )


def _located_rules() -> Iterator[Rule]:
    for route, callback in _views(get_resolver(), ""):
        held: dict[int, tuple[Rule, list[str]]] = {}
        for method in STATE_CHANGING:
            rule = _rule_of(callback, method)
            if rule is not None:
                held.setdefault(id(rule), (rule, []))[1].append(method)
        name = getattr(callback, "__qualname__", repr(callback))
        for rule, methods in held.values():
            at_path = located(rule, path_of(route), methods=methods, name=name)
            if at_path is not None:
                yield at_path


def _views(resolver: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every view with its whole route, in the order in which they are tried."""
    for pattern in resolver.url_patterns:
        route = prefix + str(pattern.pattern)
        if hasattr(pattern, "url_patterns"):
            yield from _views(pattern, route)
        else:
            yield route, pattern.callback


def _rule_of(callback: Any, method: str) -> Rule | None:
    """The rule that a view carries for a method, or that the method of its class does."""
    view_class = getattr(callback, "view_class", None) or getattr(callback, "cls", None)
    # A view set of REST framework has names of its own for the methods.
    name = getattr(callback, "actions", None) or {}
    of_class = getattr(view_class, name.get(method.lower(), method.lower()), None)
    if view_class is not None and of_class is None:
        return None
    rule: Rule | None = getattr(callback, RULE_NAME, None) or getattr(of_class, RULE_NAME, None)
    return rule
