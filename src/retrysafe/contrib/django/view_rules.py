"""The views of a project that carry rules, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.urls import get_resolver

from retrysafe.contrib.django.route_names import path_of
from retrysafe.contrib.views import RULE_NAME, located
from retrysafe.http.rules import STATE_CHANGING, Rule


def located_rules() -> Iterator[Rule]:
    """The rules of all views, at their paths."""
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
