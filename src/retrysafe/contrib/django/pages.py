"""The policy page and the status page of a project."""

from __future__ import annotations

from typing import Any, Final

from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponseNotAllowed
from django.http.response import HttpResponseBase
from django.urls import Resolver404, resolve
from django.utils.module_loading import import_string

from retrysafe.contrib.django.configuration import current
from retrysafe.contrib.django.view_rules import located_rules
from retrysafe.contrib.django.views import native_of, prefix_of, unread_request
from retrysafe.http import thread_requests

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
        protection.pages.endpoints = tuple(map(made.made_route, located_rules()))
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
