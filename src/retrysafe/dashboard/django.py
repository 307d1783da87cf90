"""The dashboard in Django: its URLs, for staff alone.

Put `path("ops/keys/", include(urls(dashboard)))` into your URLs. Make the dashboard with
`authorize=staff_name`.
"""

from __future__ import annotations

from typing import Any

from retrysafe.dashboard.app import Dashboard
from retrysafe.dashboard.web import BODY_LIMIT_BYTES, Request
from retrysafe.extras import missing_extra

try:
    from django.contrib.admin.views.decorators import staff_member_required
    from django.http import HttpRequest, HttpResponse
    from django.urls import re_path
    from django.views.decorators.csrf import csrf_exempt
except ModuleNotFoundError as error:
    raise missing_extra(__name__, "django", error) from error


def staff_name(request: Any) -> str | None:
    """The name of the member of staff who asks; for `authorize`."""
    user = getattr(request, "user", None)
    return user.get_username() if user is not None and user.is_active and user.is_staff else None


def urls(dashboard: Dashboard) -> list[Any]:
    """The patterns to include; everybody else is sent to the sign-in of the admin."""

    def view(request: HttpRequest, path: str) -> HttpResponse:
        response = dashboard.respond(_of_django(request, path))
        return HttpResponse(
            response.body,
            status=response.status,
            content_type=response.media_type,
            headers=response.headers,
        )

    # The dashboard's forms carry a mark of their own, which also guards what is sent with a token.
    return [re_path(r"^(?P<path>.*)$", staff_member_required(csrf_exempt(view)))]


def _of_django(request: HttpRequest, path: str) -> Request:
    size = request.headers.get("content-length") or "0"
    is_small = size.isascii() and size.isdigit() and int(size[:12]) <= BODY_LIMIT_BYTES
    below = f"/{path}"
    return Request(
        method=request.method,
        path=below,
        root=request.path.removesuffix(below).rstrip("/"),
        query=request.META.get("QUERY_STRING", ""),
        headers={name.lower(): value for name, value in request.headers.items()},
        body=request.body if is_small else b"",
        is_https=request.is_secure(),
        client=request.META.get("REMOTE_ADDR", ""),
        raw=request,
    )
