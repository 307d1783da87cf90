"""The reference application in Django REST framework, with a decorator on every view's methods."""

from __future__ import annotations

from typing import Any

from django.core.wsgi import get_wsgi_application

from tests.http_cases.apps.django_project import configure, set_urls
from tests.http_cases.configuration import METHODS, RULES, Mount, options_of

_REST = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "UNAUTHENTICATED_USER": None,
}


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    configure(mount, REST_FRAMEWORK=_REST)
    # Needs the settings.
    from tests.http_cases.apps.drf_views import view_class

    set_urls(
        lambda number: view_class(METHODS, options_of(RULES[number])).as_view(),
        view_class(METHODS, None).as_view(),
        has_pages=True,
    )
    return get_wsgi_application()
