"""Refusals as `application/problem+json`: one kind for every reason, each with its anchor.

Owns the words that clients of a protected API read. They say what happened and whether the same
request may be sent again; they never show the server's inside: no store, no exception, no host.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from retrysafe.errors import (
    ArgumentsNotStorable,
    AttemptsExhausted,
    CallerMissing,
    ClaimLost,
    Closed,
    FingerprintImpossible,
    KeyInvalid,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeNotStored,
    OutcomeUnavailable,
    RetrysafeError,
    StoreError,
    StoreUnavailable,
)
from retrysafe.http.headers import link_path, retry_after_text
from retrysafe.http.request import Request
from retrysafe.http.responses import Header, Response
from retrysafe.http.routes import Route


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """One reason for a refusal; neither its slug nor its code ever changes."""

    # Its anchor on the policy page.
    slug: str
    # What programs tell it by. The Agentic Commerce Protocol's word where it has one.
    code: str
    status: int
    title: str
    # For the policy page: what it means, and what a client does about it.
    meaning: str
    retryable: bool = False


KEY_MISSING: Final = ProblemKind(
    "key-missing",
    "idempotency_key_required",
    400,
    "Idempotency-Key is missing",
    "This request must bring an Idempotency-Key header. Nothing was run; send the request with a "
    "key that is new for each operation.",
)
KEY_INVALID: Final = ProblemKind(
    "key-invalid",
    "idempotency_key_invalid",
    400,
    "Idempotency-Key is malformed",
    "The key cannot be read. Nothing was run; send one header line with a quoted string of 1 to "
    "255 characters.",
)
KEY_UNEXPECTED: Final = ProblemKind(
    "key-unexpected",
    "idempotency_key_unexpected",
    400,
    "Idempotency-Key is not taken here",
    "This request is recognised by what it asks for, and takes no key from its client: two keys "
    "would not make two requests of it. Nothing was run; send it without the header.",
)
CALLER_UNKNOWN: Final = ProblemKind(
    "caller-unknown",
    "idempotency_caller_unknown",
    401,
    "Caller is unknown",
    "Keys belong to callers, and this request does not say who calls. Nothing was run; send the "
    "request with credentials.",
)
KEY_UNKNOWN: Final = ProblemKind(
    "key-unknown",
    "idempotency_key_unknown",
    404,
    "Idempotency-Key is unknown",
    "No operation of this caller has this key, or it is no longer remembered.",
)
IN_FLIGHT: Final = ProblemKind(
    "in-flight",
    "idempotency_in_flight",
    409,
    "A request with this Idempotency-Key is outstanding",
    "The first request with this key has not ended. Nothing was run; send the same request with "
    "the same key again after the time in Retry-After.",
    retryable=True,
)
OUTCOME_UNAVAILABLE: Final = ProblemKind(
    "outcome-unavailable",
    "idempotency_outcome_unavailable",
    409,
    "The operation is done and its response was not kept",
    "The first request with this key was carried out and answered, but its response was too "
    "large, was a stream, or is no longer kept, and cannot be sent again. It will not be run "
    "again; read the result from the resource that it made.",
)
CLAIM_LOST: Final = ProblemKind(
    "claim-lost",
    "idempotency_claim_lost",
    409,
    "Another attempt has taken over this request",
    "This attempt took too long and another one carries on. Send the same request with the same "
    "key again to get its outcome.",
    retryable=True,
)
BODY_INCOMPLETE: Final = ProblemKind(
    "body-incomplete",
    "idempotency_body_incomplete",
    400,
    "The request body is incomplete",
    "The connection ended before the whole body had arrived. Nothing was run; send the same "
    "request with the same key again.",
    retryable=True,
)
BODY_TOO_LARGE: Final = ProblemKind(
    "body-too-large",
    "idempotency_body_too_large",
    413,
    "The request body is too large",
    "The body is over the limit up to which requests with a key are taken. Nothing was run.",
)
BODY_TOO_COMPLEX: Final = ProblemKind(
    "body-too-complex",
    "idempotency_body_too_complex",
    400,
    "The request is too complex to be compared",
    "The body or the query has more fields, parts or levels than can be compared with those of a "
    "retry. Nothing was run.",
)
HEADER_TOO_LONG: Final = ProblemKind(
    "header-too-long",
    "idempotency_header_too_long",
    400,
    "The Prefer header is too long",
    "The Prefer header is longer than it is read. Nothing was run; send the request with fewer "
    "preferences.",
)
KEY_REUSED: Final = ProblemKind(
    "key-reused",
    "idempotency_conflict",
    422,
    "Idempotency-Key is already used",
    "The key was first used for a different request. Nothing was run; use a new key for a new "
    "request, and send retries unchanged.",
)
# An operation that goes by its method and path, as rules without a name call theirs. Clients know
# those. Other names are the server's own: of a function, or given by somebody for operators.
_ROUTE: Final = re.compile(r"[A-Z-]+ /\S*")
OPERATION_FAILED: Final = ProblemKind(
    "operation-failed",
    "idempotency_operation_failed",
    500,
    "The operation failed",
    "The request with this key was run and failed for good. It will not be run again under this "
    "key.",
)
ATTEMPTS_EXHAUSTED: Final = ProblemKind(
    "attempts-exhausted",
    "idempotency_attempts_exhausted",
    500,
    "All attempts failed",
    "Every allowed attempt at this request failed or was cut off. It will not be run again under "
    "this key; ask the operator of this API.",
)
OUTCOME_NOT_STORED: Final = ProblemKind(
    "outcome-not-stored",
    "idempotency_outcome_not_stored",
    500,
    "The operation ran and its outcome could not be stored",
    "The request was carried out, but its outcome could not be stored. A retry may carry it out "
    "again; check the result first.",
)
STORE_UNAVAILABLE: Final = ProblemKind(
    "store-unavailable",
    "idempotency_store_unavailable",
    503,
    "Idempotency cannot be guaranteed at the moment",
    "What is known about keys cannot be read right now. Nothing was run; send the same request "
    "with the same key again after the time in Retry-After.",
    retryable=True,
)
STORE_UNUSABLE: Final = ProblemKind(
    "store-unusable",
    "idempotency_store_unusable",
    503,
    "Idempotency is out of order",
    "The service is not set up rightly. Nothing was run; retrying does not help until its operator "
    "has acted.",
)
CLOSING: Final = ProblemKind(
    "closing",
    "idempotency_closing",
    503,
    "The server is shutting down",
    "This server takes no new requests. Nothing was run; send the same request again.",
    retryable=True,
)
KINDS: Final = (
    KEY_MISSING,
    KEY_INVALID,
    KEY_UNEXPECTED,
    CALLER_UNKNOWN,
    KEY_UNKNOWN,
    IN_FLIGHT,
    OUTCOME_UNAVAILABLE,
    CLAIM_LOST,
    BODY_INCOMPLETE,
    BODY_TOO_LARGE,
    BODY_TOO_COMPLEX,
    HEADER_TOO_LONG,
    KEY_REUSED,
    OPERATION_FAILED,
    ATTEMPTS_EXHAUSTED,
    OUTCOME_NOT_STORED,
    STORE_UNAVAILABLE,
    STORE_UNUSABLE,
    CLOSING,
)

# The first class that fits: subclasses stand before their bases.
_KINDS_OF_ERRORS: Final[tuple[tuple[type[RetrysafeError], ProblemKind], ...]] = (
    (OperationInFlight, IN_FLIGHT),
    (KeyReused, KEY_REUSED),
    (KeyInvalid, KEY_INVALID),
    (CallerMissing, CALLER_UNKNOWN),
    (FingerprintImpossible, BODY_TOO_COMPLEX),
    (ArgumentsNotStorable, BODY_TOO_LARGE),
    (OutcomeUnavailable, OUTCOME_UNAVAILABLE),
    (AttemptsExhausted, ATTEMPTS_EXHAUSTED),
    (OperationFailed, OPERATION_FAILED),
    (OutcomeNotStored, OUTCOME_NOT_STORED),
    (ClaimLost, CLAIM_LOST),
    (StoreUnavailable, STORE_UNAVAILABLE),
    (StoreError, STORE_UNUSABLE),
    (Closed, CLOSING),
)
# No lease frees such a key, so Retry-After is only when to ask again.
_HELD: Final = "An open transaction of the server holds its record until that transaction ends."
# Errors whose own words are made for the client and tell no more than it has sent.
_SPOKEN: Final = frozenset({KEY_INVALID, BODY_TOO_COMPLEX, BODY_TOO_LARGE})
# A client that is told nothing comes back at once.
RETRY_AFTER: Final = timedelta(seconds=1)


def kind_of(error: BaseException) -> ProblemKind | None:
    """The kind of problem that an error is; None for one that is not for clients."""
    for type_, kind in _KINDS_OF_ERRORS:
        if isinstance(error, type_):
            return kind
    return None


@dataclass(frozen=True, slots=True)
class ProblemContext:
    """Where a problem happened and where its meaning can be read."""

    policy_url: str
    instance: str
    # Without a page the URL still tells the kinds of problems apart, for programs.
    has_page: bool = True


def problem(
    kind: ProblemKind,
    context: ProblemContext,
    *,
    detail: str | None = None,
    key: str | None = None,
    retry_after: timedelta | None = None,
    retryable: bool | None = None,
    headers: tuple[Header, ...] = (),
) -> Response:
    """The refusal as a response."""
    content: dict[str, object] = {
        "type": f"{context.policy_url}#{kind.slug}",
        "title": kind.title,
        "status": kind.status,
        "code": kind.code,
        "detail": kind.meaning if detail is None else detail,
        "instance": context.instance,
        "retryable": kind.retryable if retryable is None else retryable,
    }
    if key is not None:
        content["key"] = key
    body = json.dumps(content).encode()
    lines: list[Header] = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    if context.has_page:
        lines.append((b"link", b'<%b>; rel="describedby"' % context.policy_url.encode()))
    if retry_after is None and content["retryable"]:
        retry_after = RETRY_AFTER
    if retry_after is not None:
        lines.append((b"retry-after", retry_after_text(retry_after)))
    lines += headers
    return Response(kind.status, lines, body)


def first_use(error: KeyReused) -> str | None:
    """What the caller of a reused key is told of its first use; None for the usual words."""
    first = error.first_operation
    if first is None or _ROUTE.fullmatch(first) is None:
        return None
    return KEY_REUSED.meaning.replace("a different request", first, 1)


def problem_of(
    error: BaseException,
    context: ProblemContext,
    *,
    key: str | None = None,
    detail: str | None = None,
) -> Response | None:
    """The refusal that an error means; None for one that is not for clients."""
    kind = kind_of(error)
    if kind is None or not isinstance(error, RetrysafeError):
        return None
    if isinstance(error, OperationInFlight) and error.is_locked and detail is None:
        detail = f"{kind.meaning} {_HELD}"
    return problem(
        kind,
        context,
        detail=str(error) if kind in _SPOKEN else detail,
        key=error.key or key,
        retry_after=error.retry_after if isinstance(error, OperationInFlight) else None,
        # A caller who waited for a run that failed may try again, since its failure freed the key.
        retryable=True if isinstance(error, OperationFailed) and error.retryable else None,
    )


class Refusals:
    """What clients of one application are told when a request of theirs cannot be protected."""

    def __init__(self, policy_path: str, challenge: str, *, has_policy_page: bool = True) -> None:
        self._policy_path = policy_path
        self._has_policy_page = has_policy_page
        # What a 401 asks for.
        self.challenge: tuple[Header, ...] = ((b"www-authenticate", challenge.encode()),)

    def context(self, request: Request, prefix: str) -> ProblemContext:
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
        return problem(kind, self.context(request, prefix), key=key)

    def unknown_caller(self, request: Request, prefix: str, key: str | None = None) -> Response:
        """401: whose key it is cannot be told."""
        context = self.context(request, prefix)
        return problem(CALLER_UNKNOWN, context, key=key, headers=self.challenge)

    def cut_off(self, request: Request, prefix: str, key: str | None = None) -> Response:
        """400: only a part of the body has arrived."""
        return self.problem(BODY_INCOMPLETE, request, prefix, key)

    def too_large(
        self, route: Route, request: Request, prefix: str, key: str | None = None
    ) -> Response:
        """413: the body is over the route's limit."""
        return problem(
            BODY_TOO_LARGE,
            self.context(request, prefix),
            detail=f"The body may have at most {route.rule.request_limit_bytes:,} bytes here. "
            "Nothing was run.",
            key=key,
        )
