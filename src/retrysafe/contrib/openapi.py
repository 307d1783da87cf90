"""What an OpenAPI document says about a protected endpoint.

Owns the words and the shape of it, as plain data; each integration puts it where its framework
wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.policy import InFlight
from retrysafe.http import problems
from retrysafe.http.durations import spoken
from retrysafe.http.key_sources import HeaderKey, described
from retrysafe.http.problems import ProblemKind
from retrysafe.http.protection import Protection
from retrysafe.http.routes import Route
from retrysafe.http.rules import responds_async

PROBLEM_NAME: Final = "IdempotencyProblem"
PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "title": PROBLEM_NAME,
    "type": "object",
    "description": "Why a request was refused before it was carried out, or cannot be repeated.",
    "required": ["type", "title", "status", "code", "detail", "instance", "retryable"],
    "properties": {
        "type": {"type": "string", "description": "The policy page, at the reason."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "The reason, for programs; it never changes."},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request may be sent again.",
        },
        "key": {"type": "string"},
    },
}
ACCEPTED_TEXT: Final = "The request runs; its outcome will be at the status URL"
ACCEPTED_SCHEMA: Final[dict[str, Any]] = {
    "title": "IdempotencyAccepted",
    "type": "object",
    "description": "Where the outcome of a request can be read that still runs.",
    "required": ["state", "key", "status_url"],
    "properties": {
        "state": {"type": "string"},
        "key": {"type": "string"},
        "status_url": {"type": "string", "description": "Also in `Location`."},
    },
}
MEDIA_TYPE: Final = "application/problem+json"
_EXAMPLE: Final = '"7c9e6679-7425-40de-944b-e07fc1f90ae7"'


@dataclass(frozen=True, slots=True)
class Description:
    """What is said about one endpoint."""

    # The key, when it is sent in a header, and what a client may prefer.
    parameters: tuple[dict[str, Any], ...]
    # The text for every status that retrysafe itself may refuse with.
    responses: dict[int, str]
    # Whether 202 and a place to look may be the answer, asked for or not.
    may_accept: bool
    # A paragraph for the description of the operation.
    text: str
    # The name and the scheme of the credential that tells the caller; None where no client sends
    # one, or nobody knows.
    security: tuple[str, dict[str, Any]] | None = None


def description_of(route: Route, protection: Protection, *, has_callers: bool) -> Description:
    """What is said about an endpoint with this rule."""
    rule = route.rule
    retention = spoken(route.policy.active_window)
    has_header = isinstance(route.rule.key, HeaderKey)
    is_required = has_header and route.maker is None and rule.required
    responses: dict[int, str] = {}
    for kind in _kinds(route, is_required=is_required, has_callers=has_callers):
        earlier = responses.get(kind.status)
        responses[kind.status] = kind.title if earlier is None else f"{earlier}; or {kind.title}"
    if has_header:
        start = "Send" if is_required else "May be sent with"
        text = (
            f"{start} an `Idempotency-Key`: a new one for every operation, the same one with the "
            "same request for a retry. "
        )
        if route.maker is not None:
            text += f"Without one, repeated requests are recognised by {described(route.maker)}. "
    else:
        text = f"Repeated requests are recognised by {described(route.rule.key)}. "
    if route.accepts_duplicates:
        duplicate = (
            "gets 202 with the URL where its outcome can be read, or 409 after a wait in vain"
        )
    elif route.policy.in_flight is InFlight.WAIT:
        duplicate = f"waits for its response up to {spoken(route.policy.wait_limit)}, then gets 409"
    else:
        duplicate = "gets 409"
    if route.accepts_first:
        text += "The first request, too, gets 202 with the URL where its outcome can be read. "
    text += (
        "A retry gets the first response again, marked with `Idempotent-Replayed: true`, for "
        f"{retention} after the first one. A duplicate of a request that still runs {duplicate}."
    )
    if protection.pages.has_policy:
        text += f" See [the idempotency policy]({protection.pages.policy_path})."
    parameters = []
    if has_header:
        quotes = "" if rule.strict else "; also taken without the quotes"
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": is_required,
                "description": (
                    f"A string of 1 to 255 characters in double quotes{quotes}. Remembered for "
                    f"{retention}."
                ),
                "schema": {"type": "string", "minLength": 1},
                "example": _EXAMPLE,
            }
        )
    may_accept = responds_async(rule) or route.accepts_first
    parameters.append(_preference(may_accept=may_accept))
    known = protection.shipped_caller
    security = None
    if known is not None and known.scheme is not None:
        name, scheme = known.scheme
        security = name, dict(scheme)
    return Description(tuple(parameters), responses, may_accept, text, security)


def _preference(*, may_accept: bool) -> dict[str, Any]:
    text = "`wait=10`: a duplicate of a request that still runs waits for it up to ten seconds."
    if may_accept:
        text += " `respond-async`: 202 with a status URL, while the request runs."
    return {
        "name": "Prefer",
        "in": "header",
        "required": False,
        "description": text,
        "schema": {"type": "string", "minLength": 1},
        "example": "respond-async" if may_accept else "wait=10",
    }


def _kinds(route: Route, *, is_required: bool, has_callers: bool) -> Iterator[ProblemKind]:
    if is_required:
        yield problems.KEY_MISSING
    yield problems.KEY_UNEXPECTED if isinstance(route.rule.key, BodyKey) else problems.KEY_INVALID
    if has_callers:
        yield problems.CALLER_UNKNOWN
    # Also where the route accepts: a wait that a client asks for may run out.
    yield problems.IN_FLIGHT
    yield problems.OUTCOME_UNAVAILABLE
    yield problems.BODY_TOO_LARGE
    yield problems.KEY_REUSED
    yield problems.STORE_UNAVAILABLE
