"""The middleware: rules by path, the pages, and bodies that stay readable for protected views.

It protects everything below it in the list. Put it below the middleware that authenticates, and
above those whose work a replay should not repeat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.exceptions import RequestDataTooBig

from retrysafe.contrib.django.configuration import current
from retrysafe.contrib.django.pages import PAGE_METHODS, page
from retrysafe.contrib.django.transactions import HOOK_ERROR_NAME, raised_by_hook
from retrysafe.contrib.django.views import (
    answer,
    answer_on_loop,
    is_run,
    notice,
    plan_on_loop,
    planned,
    report_ignored_key,
)
from retrysafe.http.headers import length_of
from retrysafe.http.plan import Plan
from retrysafe.http.rules import REQUEST_LIMIT_BYTES


class RetrysafeMiddleware:
    """Protects the paths that the setting's `RULES` name, in threads and on an event loop."""

    sync_capable = True
    async_capable = True
    serves_retrysafe_pages = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        """Raises `ImproperlyConfigured` for a setting that contradicts itself."""
        current()
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        """Answers one request; on an event loop it is awaited."""
        if self._is_async:
            return self._answer_on_loop(request)
        made = current()
        match = made.protection.find(request.method, request.path_info)
        if match is not None and is_run(request):
            return self.get_response(request)
        if match is None:
            if _is_page(request):
                return page(request)
            response = self.get_response(_readable(request))
            report_ignored_key(made.protection, made.calls, request)
            return response
        notice(request)
        plan = planned(made.protection, match[0], request, dict(match[1]))
        if not isinstance(plan, Plan):
            return self.get_response(request) if plan is None else plan
        run = functools.partial(self.get_response, request)
        return answer(made.protection, made.calls, plan, run, None)

    def process_exception(self, request: Any, error: Exception) -> None:
        """Notes an exception that came after a commit, before Django makes a 500 of it."""
        if raised_by_hook(error):
            setattr(request, HOOK_ERROR_NAME, error)

    async def _answer_on_loop(self, request: Any) -> Any:
        made = current()
        match = made.protection.find(request.method, request.path_info)
        if match is not None and is_run(request):
            return await self.get_response(request)
        if match is None:
            if _is_page(request):
                return await sync_to_async(page)(request)
            response = await self.get_response(_readable(request))
            report_ignored_key(made.protection, made.calls, request)
            return response
        notice(request)
        plan = await plan_on_loop(made.protection, match[0], request, dict(match[1]))
        if not isinstance(plan, Plan):
            return await self.get_response(request) if plan is None else plan
        run = functools.partial(self.get_response, request)
        return await answer_on_loop(made.on_loop, plan, run, None)


def _is_page(request: Any) -> bool:
    return request.method in PAGE_METHODS and current().protection.pages.serve(request.path_info)


def _readable(request: Any) -> Any:
    """The request, whose body is kept when it brings a key: a view further in may compare it."""
    length = length_of(request.META.get("CONTENT_LENGTH") or "0")
    if (
        "HTTP_IDEMPOTENCY_KEY" in request.META
        and length is not None
        and length <= REQUEST_LIMIT_BYTES
    ):
        try:
            request.body  # noqa: B018 — reading it is what keeps it.
        except RequestDataTooBig:
            pass  # Whoever needs it is told the same.
    return request
