"""Refusals that need nothing but the request: problems, each with a place to read about it."""

from __future__ import annotations

from retrysafe.http import problems
from retrysafe.http.headers import link_path
from retrysafe.http.problems import ProblemContext, ProblemKind, problem
from retrysafe.http.request import Request
from retrysafe.http.responses import Header, Response
from retrysafe.http.routes import Route


class Refusals:
    """What clients of one application are told when a request of theirs cannot be protected."""

    def __init__(self, policy_path: str, challenge: str, *, has_policy_page: bool = True) -> None:
        self._policy_path = policy_path
        self._has_policy_page = has_policy_page
        # What a 401 asks for.
        self.challenge: tuple[Header, ...] = ((b"www-authenticate", challenge.encode()),)

    def place(self, request: Request, prefix: str) -> ProblemContext:
        """Where the request was refused, and where the reason is explained."""
        return ProblemContext(
            f"{link_path(prefix)}{self._policy_path}",
            link_path(request.path),
            has_page=self._has_policy_page,
        )

    def problem(
        self, kind: ProblemKind, request: Request, prefix: str, key: str | None = None
    ) -> Response:
        """A refusal of this kind."""
        return problem(kind, self.place(request, prefix), key=key)

    def unknown_caller(self, request: Request, prefix: str, key: str | None = None) -> Response:
        """401: whose key it is cannot be told."""
        place = self.place(request, prefix)
        return problem(problems.CALLER_UNKNOWN, place, key=key, headers=self.challenge)

    def cut_off(self, request: Request, prefix: str, key: str | None = None) -> Response:
        """400: only a part of the body has arrived."""
        return self.problem(problems.BODY_INCOMPLETE, request, prefix, key)

    def too_large(
        self, route: Route, request: Request, prefix: str, key: str | None = None
    ) -> Response:
        """413: the body is over the route's limit."""
        return problem(
            problems.BODY_TOO_LARGE,
            self.place(request, prefix),
            detail=f"The body may have at most {route.rule.request_limit_bytes:,} bytes here. "
            "Nothing was run.",
            key=key,
        )
