"""What clients are answered: what was made, or a problem as `application/problem+json`."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from retrysafe.contrib.openapi import ACCEPTED_SCHEMA, ACCEPTED_TEXT
from retrysafe.demo.ledger import Entry
from retrysafe.demo.wishes import Ending

_PROBLEM: Final = {"content": {"application/problem+json": {"schema": {"type": "object"}}}}
# For the API's description; retrysafe gives all of these answers but 402 and 500 itself.
PROTECTED: Final[dict[int | str, dict[str, Any]]] = {
    201: {"description": "Done; retries get this very answer with `Idempotent-Replayed: true`"},
    400: {"description": "The key is missing or malformed, or the body broken"} | _PROBLEM,
    401: {"description": "The bearer token is missing"} | _PROBLEM,
    402: {"description": "Declined; kept and replayed"} | _PROBLEM,
    409: {"description": "The first request with this key has not ended"} | _PROBLEM,
    413: {"description": "The body is too large"} | _PROBLEM,
    422: {"description": "The key was used for another request, or the body is invalid"} | _PROBLEM,
    500: {"description": "It failed; the key is free again"} | _PROBLEM,
    503: {"description": "The store does not answer; nothing was run"} | _PROBLEM,
}
# A transaction has no status that could be read before its end: only leased routes answer so.
LEASED: Final = PROTECTED | {
    202: {
        "description": f"{ACCEPTED_TEXT} (`Prefer: respond-async`)",
        "content": {"application/json": {"schema": ACCEPTED_SCHEMA}},
    },
}
READ: Final[dict[int | str, dict[str, Any]]] = {
    404: {"description": "There is no such entry"} | _PROBLEM,
    422: {"description": "The request is invalid"} | _PROBLEM,
}


def problem(status: int, title: str, **more: Any) -> Response:
    """A refusal in the form that retrysafe uses as well."""
    content = {"type": "about:blank", "title": title, "status": status} | more
    return Response(json.dumps(content), status_code=status, media_type="application/problem+json")


def answer(entry: Entry) -> Response:
    """The answer to an execution."""
    if entry.outcome == Ending.DECLINE:
        return problem(402, f"The {entry.operation} was declined", retryable=False, id=entry.id)
    if entry.outcome == Ending.ERROR:
        return problem(500, f"The {entry.operation} failed", retryable=True)
    location = f"/{entry.operation}s/{entry.id}"
    return JSONResponse(entry.shape(), status_code=201, headers={"Location": location})


async def refused(_: Request, error: Exception) -> Response:
    """What the framework refuses, in the same form: a broken body, a path that nobody serves."""
    assert isinstance(error, HTTPException)
    response = problem(error.status_code, str(error.detail), retryable=False)
    response.headers.update(error.headers or {})
    return response


# What a newcomer tries next is the corrected request under the same key, which is another request.
_KEPT: Final = "This answer is kept like any other: send the corrected request with a new key."
_NOT_JSON: Final = "The body was not read as JSON: send it with Content-Type: application/json."


async def invalid(request: Request, error: Exception) -> Response:
    """The answer to a request that does not fit the description; its values are not repeated."""
    assert isinstance(error, RequestValidationError)
    faults = [
        {"where": "/".join(str(part) for part in fault["loc"]), "what": fault["msg"]}
        for fault in error.errors()
    ]
    if request.method != "POST":
        return problem(422, "The request is invalid", retryable=False, errors=faults)
    detail = _KEPT if _is_json(request) else f"{_NOT_JSON} {_KEPT}"
    return problem(422, "The request is invalid", detail=detail, retryable=False, errors=faults)


def _is_json(request: Request) -> bool:
    """Whether the framework took the body for JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" or media_type.endswith("+json")
