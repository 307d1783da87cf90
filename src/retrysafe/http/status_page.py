"""The state of one key, for its own caller: what a client reads after it was told 202.

Owns what a stored record means in HTTP. It must not know how the record was read.
"""

from __future__ import annotations

import json
from datetime import timedelta

from retrysafe.core.model import Condition, Payload, StoredKey
from retrysafe.core.run_times import RunTimes
from retrysafe.core.values import codec
from retrysafe.core.values.trees import NotReadable
from retrysafe.http import problems
from retrysafe.http.headers import retry_after_text
from retrysafe.http.problems import ProblemContext, problem
from retrysafe.http.responses import Response, ResponseCodec

_CODEC = ResponseCodec()
# What a client does while there is no outcome: look again, or send its request again.
_ADVICE = {
    Condition.RUNNING: "The operation is running. Ask again after the time in Retry-After.",
    Condition.ABANDONED: "The operation was cut off. Send the request with the same key again.",
    Condition.RELEASED: "The operation did not succeed, and may be tried again: send the request "
    "with the same key again.",
}

# The same of a request that is stored with its claim. No worker may be running, so that sending it
# again is right as well.
_RESUMED = (
    "The operation was cut off, and a worker finishes it. Ask again after the time in Retry-After, "
    "or send the request with the same key again."
)
# How often a worker looks, unless it is told otherwise.
_LOOK = timedelta(seconds=5)


def status_response(
    stored: StoredKey | None, context: ProblemContext, key: str, run_times: RunTimes
) -> Response:
    """What is known of a key: its state while there is no outcome, then the stored response."""
    if stored is None or stored.condition in (Condition.ABSENT, Condition.OUTLIVED):
        return problem(problems.KEY_UNKNOWN, context, key=key)
    if stored.condition in _ADVICE:
        return _state(stored, key, run_times)
    payload = _payload_of(stored)
    if payload is None and stored.condition is Condition.FAILED:
        return problem(problems.OPERATION_FAILED, context, key=key)
    if payload is None or payload.form == codec.WITHHELD:
        return problem(problems.OUTCOME_UNAVAILABLE, context, key=key)
    if payload.form == codec.EXHAUSTED:
        return problem(problems.ATTEMPTS_EXHAUSTED, context, key=key)
    if payload.form == codec.FAILURE:
        return problem(problems.OPERATION_FAILED, context, key=key)
    try:
        response = _CODEC.decode(payload)
    except NotReadable:
        return problem(problems.OUTCOME_UNAVAILABLE, context, key=key)
    response.headers.append((b"idempotent-replayed", b"true"))
    return response


def _payload_of(stored: StoredKey) -> Payload | None:
    """The outcome of the record as it is now; earlier lives of the key have other tokens."""
    for outcome in stored.outcomes:
        if outcome.token == stored.record.token:
            return outcome.payload
    return None


def _state(stored: StoredKey, key: str, run_times: RunTimes) -> Response:
    is_resumed = stored.condition is Condition.ABANDONED and stored.arguments is not None
    body = json.dumps(
        {
            "state": stored.condition.value,
            "key": key,
            "attempt": stored.record.attempt,
            "detail": _RESUMED if is_resumed else _ADVICE[stored.condition],
        }
    ).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
    ]
    if stored.condition is Condition.RUNNING:
        record, now_ms = stored.record, stored.now_ms
        seconds = run_times.retry_after(
            record.operation,
            max(0, now_ms - record.claimed_at_ms) / 1000,
            (record.lease_ends_at_ms - now_ms) / 1000,
        )
        headers.append((b"retry-after", retry_after_text(timedelta(seconds=seconds))))
    elif is_resumed:
        headers.append((b"retry-after", retry_after_text(_LOOK)))
    return Response(200, headers, body)
