"""The views of the reference application in Django REST framework; imported with settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.decorators import method_decorator
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.views import APIView

from retrysafe.contrib.django.decorators import idempotent
from tests.http_cases.apps.django_project import perform


class _OneRenderer(BaseContentNegotiation):
    """The cases are not about negotiation."""

    def select_parser(self, request: Any, parsers: Any) -> Any:
        return parsers[0]

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> Any:
        return renderers[0], renderers[0].media_type


class _View(APIView):
    content_negotiation_class = _OneRenderer


def view_class(methods: Iterable[str], options: dict[str, Any] | None) -> type[APIView]:
    """A view for all these methods, each protected by the rule with these options."""

    def answer(self: APIView, request: Any, **captured: str) -> Any:
        return perform(request._request, **captured)

    protected = answer if options is None else method_decorator(idempotent(**options))(answer)
    return type("View", (_View,), {method.lower(): protected for method in methods})
