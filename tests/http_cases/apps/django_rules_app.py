"""The reference application in Django, with the middleware and rules for paths."""

from __future__ import annotations

from typing import Any

from django.core.wsgi import get_wsgi_application

from tests.http_cases.apps.django_project import configure, perform, set_urls
from tests.http_cases.configuration import RULES, Mount


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    middleware = ["retrysafe.contrib.django.middleware.RetrysafeMiddleware"]
    configure(mount, MIDDLEWARE=middleware, RETRYSAFE={"RULES": RULES})
    set_urls(lambda _: perform, perform, has_pages=False)
    return get_wsgi_application()
