"""Views that carry their own rules, in frameworks that run them in the server's thread.

Owns what the integrations for Flask and Django share. It knows no framework: each integration
brings its own requests and responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.errors import InvalidInput, PolicyInvalid
from retrysafe.http import thread_requests
from retrysafe.http.key_sources import FieldsKey
from retrysafe.http.plan import Plan
from retrysafe.http.protection import Protection
from retrysafe.http.responses import Header, Response
from retrysafe.http.rules import Rule
from retrysafe.http.stored_request import Resumable
from retrysafe.runtime.calls import Calls

# Where a view holds its rule. Decorators that use `functools.wraps` carry it along.
RULE_NAME: Final = "retrysafe_rule"
# <id>, <int:id> and <int(min=1):id>: one parameter of a route, as Flask and Django write it.
_PARAMETER: Final = re.compile(r"<(?:[^<>]*:)?([A-Za-z_][A-Za-z0-9_]*)>")

# What a path is not written with: regular expressions, and parameters that are not plain names.
_NO_PATH: Final = re.compile(r"[\^$()\[\]\\?+|<>\s]")


def view_rule(options: Mapping[str, Any]) -> Rule:
    """The rule of a view, whose path the framework knows; raises `PolicyInvalid`."""
    if "path" in options:
        raise PolicyInvalid("a view's rule takes no path: its route has one")
    return Rule(**options)


def require_options(given: tuple[object, ...], written: str) -> None:
    """Raises `InvalidInput` for what was given to a decorator in the place of its options."""
    if given:
        raise InvalidInput(f"write {written} above the view, with the brackets")


def require_function(view: object, way: str) -> None:
    """Raises `InvalidInput` for a decorated class, with the way that classes are protected."""
    if isinstance(view, type):
        raise InvalidInput(
            f"{view.__qualname__} is a class, and idempotent is for functions: {way}"
        )


def written_path(route: str) -> str:
    """A route, or a host, as rules write it: with {id} for <int:id>."""
    return _PARAMETER.sub(r"{\1}", route)


def located(
    rule: Rule, route: str | None, *, methods: Collection[str] | None = None, name: str
) -> Rule | None:
    """The rule at the path of its view; `methods` are those that lead there, None for all.

    None when no method leads there that the rule protects. What cannot be written as a path, such
    as a regular expression or no route at all, goes by the name.
    """
    require_no_acceptance(rule)
    kept = tuple(method for method in rule.methods if methods is None or method in methods)
    if not kept:
        return None
    path = None if route is None else written_path(route)
    if path is None or _NO_PATH.search(path) is not None:
        if isinstance(rule.key, FieldsKey) and not rule.name and len(kept) > 1:
            # To change order 7 and to delete it would have one key.
            raise PolicyInvalid(
                f"the route of {name} is no plain path, so keys of FieldsKey begin with its name, "
                f"and {', '.join(kept)} would share them: write methods=… with the one that it is "
                "for, or name=… if all of them have one effect"
            )
        if rule.resumable and not rule.name:
            raise PolicyInvalid(
                f"the route of {name} is no plain path, and a worker finds it by its name: give "
                "its rule one that stays the same in every release, name=…"
            )
        return replace(rule, methods=kept, name=rule.name or name)
    return replace(rule, methods=kept, path=path)


def require_no_acceptance(rule: Rule) -> None:
    """Raises `PolicyInvalid` for a view whose first request is to be answered before it has run.

    A view is what its framework calls in the thread that answers.
    """
    if isinstance(rule.resumable, Resumable) and rule.resumable.accepts:
        raise PolicyInvalid(
            "accepts=True answers before the view has run, and only a middleware around the "
            "application can: use WSGIIdempotencyMiddleware, or leave accepts out"
        )


class ViewRun:
    """One run of a view: what it answered, in the framework's words and in ours."""

    __slots__ = ("_close", "_header_count", "_view", "error", "has_begun", "native", "response")

    # A view returns its response; nothing is on its way before that.
    is_passing = False

    def __init__(
        self,
        view: Callable[[Attempt | AtomicAttempt[Any] | None], tuple[Any, Response]],
        close: Callable[[Any], None],
    ) -> None:
        self._view = view
        # Closes a response of the framework that is not sent.
        self._close = close
        self._header_count = 0
        self.has_begun = False
        self.native: Any = None
        self.response: Response | None = None
        self.error: BaseException | None = None

    def invoke(self, attempt: Attempt | AtomicAttempt[Any] | None) -> Response:
        """Runs the view."""
        self.has_begun = True
        try:
            self.native, response = self._view(attempt)
        except BaseException as error:
            self.error = error
            raise
        self.response = response
        self._header_count = len(response.headers)
        return response

    def answered(
        self, protection: Protection, calls: Calls, plan: Plan
    ) -> tuple[Response, list[Header] | None]:
        """The response to send, and what was added to the view's own; None for another one.

        A response of the view that is not sent is closed: its stream may hold a file or a
        connection open. Raises as `thread_requests.answered` does.
        """
        try:
            response = thread_requests.answered(protection, calls, plan, self)
        except BaseException:
            self._drop()
            raise
        if response is self.response:
            return response, response.headers[self._header_count :]
        self._drop()
        return response, None

    def _drop(self) -> None:
        native, self.native = self.native, None
        if native is not None:
            self._close(native)
