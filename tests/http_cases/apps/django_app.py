"""The reference application in Django, with a decorator on every view."""

from __future__ import annotations

from typing import Any

from django.core.wsgi import get_wsgi_application

from retrysafe.contrib.django.decorators import idempotent
from tests.http_cases.apps.django_project import configure, perform, set_urls
from tests.http_cases.configuration import RULES, Mount, options_of


def make(mount: Mount) -> Any:
    """The application as one mount has it."""
    configure(mount)
    set_urls(
        lambda number: idempotent(**options_of(RULES[number]))(perform), perform, has_pages=True
    )
    return get_wsgi_application()
