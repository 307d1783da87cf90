"""The reference application as a Django project: its settings, its views and their URLs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import include, path

from tests.http_cases.acts import ACT_HEADER, PLAY_HEADER, Reply
from tests.http_cases.apps.performing import AsyncPerformance, Performance
from tests.http_cases.configuration import NUMBERED_PATH, RULES, Mount

URLS = "retrysafe_cases_urls"


def configure(mount: Mount, **more: Any) -> None:
    """The project's settings, with the mount's options in the one that is retrysafe's."""
    options = {name.upper(): value for name, value in mount.options().items()}
    face = {name.upper(): value for name, value in mount.face_options().items()}
    retrysafe = {"STORE": mount.store(), **face, **options, **more.pop("RETRYSAFE", {})}
    settings.configure(
        ROOT_URLCONF=URLS,
        ALLOWED_HOSTS=["*"],
        DATABASES={},
        LOGGING_CONFIG=None,
        RETRYSAFE=retrysafe,
        **more,
    )
    django.setup()


def set_urls(view_of: Callable[[int], Any], other: Any, *, has_pages: bool) -> None:
    """The URLs: the view of every rule by its number, and the one of all other paths."""
    urls = ModuleType(URLS)
    pages = [path("", include("retrysafe.contrib.django.urls"))] if has_pages else []
    views = [path(path_of(rule.path or ""), view_of(n)) for n, rule in enumerate(RULES)]
    urls.urlpatterns = [*pages, *views, path("<path:rest>", other)]  # type: ignore[attr-defined]
    sys.modules[URLS] = urls


def path_of(rule_path: str) -> str:
    """A rule's path as Django writes it."""
    parameter = "<int:id>" if rule_path == NUMBERED_PATH else "<str:id>"
    shown = rule_path.removeprefix("/").replace("{id}", parameter)
    return shown.removesuffix("*") + "<path:rest>" if shown.endswith("*") else shown


def perform(request: HttpRequest, **_: Any) -> HttpResponseBase:
    """Answers every method of every path as its act says."""
    performance = Performance(
        request.headers.get(ACT_HEADER),
        request.headers.get(PLAY_HEADER),
        request.method or "",
        request.body,
    )
    if performance.act.is_streamed:
        return _told(StreamingHttpResponse(performance.chunks()), performance.reply)
    return _told(HttpResponse(performance.body()), performance.reply)


async def perform_on_loop(request: HttpRequest, **_: Any) -> HttpResponseBase:
    """The same on an event loop."""
    performance = await AsyncPerformance.begin(
        request.headers.get(ACT_HEADER),
        request.headers.get(PLAY_HEADER),
        request.method or "",
        request.body,
    )
    if performance.act.is_streamed:
        return _told(StreamingHttpResponse(performance.chunks()), performance.reply)
    return _told(HttpResponse(await performance.body()), performance.reply)


def _told(response: HttpResponseBase, reply: Reply) -> HttpResponseBase:
    response.status_code = reply.status
    del response.headers["Content-Type"]
    for name, value in reply.headers:
        response.headers[name] = value
    return response
