"""Records as the command line shows them: the JSON of --json, and times in words.

This JSON is a promise to scripts: names are added, never changed. Tokens are left out:
whoever holds one can settle the key.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from retrysafe.core.events import UNNAMED
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    Condition,
    OperatorAction,
    Payload,
    Record,
    State,
    Step,
    StoredKey,
    StoredOutcome,
)
from retrysafe.core.policy import FOREVER
from retrysafe.core.recovery import back_off_ms
from retrysafe.core.transitions import correction_of
from retrysafe.core.values.codec import BYTES, WITHHELD
from retrysafe.core.values.trees import NotReadable
from retrysafe.stores import clock
from retrysafe.workers.duties import WorkerPolicy

_DIGEST: Final = re.compile(r"^(bearer:[0-9a-f]{8})[0-9a-f]{32}$")
# What workers rest by unless they are told otherwise; a record does not say by whom it is resumed.
_BACK_OFF_MS: Final = WorkerPolicy().back_off // timedelta(milliseconds=1)
# Nobody states a window of half of FOREVER.
_FOREVER_MS: Final = FOREVER // timedelta(milliseconds=2)
_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def instant_text(at_ms: int | None) -> str | None:
    """The instant in ISO 8601, UTC, with milliseconds."""
    return None if at_ms is None else clock.instant_text(at_ms)


def duration_text(duration_ms: int) -> str:
    """A duration in its two largest units, such as `2 h 5 min`."""
    rest_ms = max(0, duration_ms)
    if rest_ms < 1_000:
        return f"{rest_ms} ms"
    parts = []
    for unit_ms, name in _UNITS:
        count, rest_ms = divmod(rest_ms, unit_ms)
        if count:
            parts.append(f"{count} {name}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)


def caller_text(record: Record) -> str:
    """The caller for people; the shared namespace is stored as an empty text."""
    return record.caller or "GLOBAL"


def short_caller_text(record: Record) -> str:
    """The caller for a screen: of a token's digest as much as tells two callers apart."""
    return _DIGEST.sub(r"\1…", caller_text(record))


def operation_text(record: Record) -> str:
    """The operation's name for people; a lambda has none."""
    return record.operation or UNNAMED


def time_left_text(stored: StoredKey) -> str:
    """What is left of the lease while pending, of the active window after that."""
    record = stored.record
    if stored.condition is Condition.RUNNING:
        return f"lease {duration_text(record.lease_ends_at_ms - stored.now_ms)}"
    if stored.condition is Condition.ABANDONED:
        return f"lease ended {duration_text(stored.now_ms - record.lease_ends_at_ms)} ago"
    if record.expires_at_ms is None or record.expires_at_ms - stored.now_ms > _FOREVER_MS:
        return "never expires"
    if stored.condition is Condition.OUTLIVED:
        return f"expired {duration_text(stored.now_ms - record.expires_at_ms)} ago"
    return f"expires in {duration_text(record.expires_at_ms - stored.now_ms)}"


def worker_tries_at_ms(stored: StoredKey) -> int | None:
    """From when on a worker with the default back-off resumes the key; None when none does."""
    record = stored.record
    if stored.arguments is None or record.state is not State.PENDING:
        return None
    return record.lease_ends_at_ms + back_off_ms(record.attempt, _BACK_OFF_MS)


def next_try_text(stored: StoredKey, tries_at_ms: int) -> str:
    """Who tries a pending key next, and when."""
    left_ms = tries_at_ms - stored.now_ms
    if left_ms <= 0:
        return "due, by a worker or the next call"
    worker = f"by a worker in {duration_text(left_ms)} (with the default back-off)"
    if stored.condition is Condition.RUNNING:
        return f"{worker}, unless the lease is renewed"
    return f"{worker}, or by the next call at once"


def record_json(stored: StoredKey) -> dict[str, Any]:
    """One record as JSON."""
    record = stored.record
    is_pending = record.state is State.PENDING
    return {
        "caller": record.caller or None,
        "is_global": record.caller == "",
        "key": record.text,
        "operation": record.operation,
        "condition": stored.condition.value,
        "attempt": record.attempt,
        "owner": record.owner,
        "first_claimed_at": instant_text(record.first_claimed_at_ms),
        "claimed_at": instant_text(record.claimed_at_ms),
        "settled_at": instant_text(record.settled_at_ms),
        "lease_ends_at": instant_text(record.lease_ends_at_ms) if is_pending else None,
        "expires_at": instant_text(record.expires_at_ms),
        "age_ms": max(0, stored.now_ms - record.first_claimed_at_ms),
        "lease_left_ms": max(0, record.lease_ends_at_ms - stored.now_ms) if is_pending else None,
        "expires_in_ms": (
            None if record.expires_at_ms is None else max(0, record.expires_at_ms - stored.now_ms)
        ),
    }


def detail_json(stored: StoredKey) -> dict[str, Any]:
    """One record with its steps and its audit as JSON."""
    record = stored.record
    is_corrected = bool(correction_of(record))
    return {
        # By which the rows of every table are found in SQL.
        "digest": record.digest.hex(),
        "record": record_json(stored)
        | {
            "fingerprint": record.fingerprint.hex(),
            # Negative in the store where it is keyed.
            "fingerprint_rule": abs(record.rule),
            "fingerprint_is_keyed": record.rule < 0,
            # Of the attempts before this one, those that said how they ended; the others crashed.
            "releases": record.releases,
            # Whether a natural key takes a corrected request now.
            "nothing_happened": record.nothing_happened,
            "corrected_at": instant_text(record.corrected_at_ms) if is_corrected else None,
            # With the default back-off; null when no worker resumes it.
            "worker_tries_at": instant_text(worker_tries_at_ms(stored)),
        },
        # What a worker would resume the operation with; null when it is not resumable, or done.
        "arguments": None if stored.arguments is None else payload_json(stored.arguments),
        "steps": [_step_json(step) for step in stored.steps],
        "outcomes": [outcome_json(outcome, stored) for outcome in stored.outcomes],
    }


def past_json(key: Key, outcomes: Sequence[StoredOutcome]) -> dict[str, Any]:
    """The same of a key whose record is gone, and its audit not yet."""
    return {
        "digest": key.digest.hex(),
        "record": None,
        "arguments": None,
        "steps": [],
        "outcomes": [outcome_json(outcome, None) for outcome in outcomes],
    }


def action_json(action: OperatorAction) -> dict[str, Any]:
    """What an operator did to a key as JSON."""
    return {
        "command": action.command,
        "condition_before": action.condition,
        "attempt": action.attempt,
        "operator": action.operator,
        "reason": action.reason,
        "acted_at": instant_text(action.acted_at_ms),
    }


def _step_json(step: Step) -> dict[str, Any]:
    return {"name": step.name, "position": step.position} | payload_json(step.payload)


def is_withheld(stored: StoredKey) -> bool:
    """Whether the outcome that counts could not be stored, so that retries do not get it."""
    return any(
        outcome.payload.form == WITHHELD and _is_current(outcome, stored)
        for outcome in stored.outcomes
    )


def _is_current(outcome: StoredOutcome, stored: StoredKey | None) -> bool:
    if stored is None:
        return False
    is_settled = stored.condition in (Condition.SUCCEEDED, Condition.FAILED)
    return is_settled and outcome.token == stored.record.token


def outcome_json(outcome: StoredOutcome, stored: StoredKey | None = None) -> dict[str, Any]:
    """One ending in the audit as JSON."""
    return {
        "attempt": outcome.attempt,
        "ending": outcome.state.name.lower(),
        # The one that a retry gets; the others are the audit of earlier attempts and lives.
        "is_replayed": _is_current(outcome, stored),
        # Its value could not be stored: a retry gets OutcomeUnavailable in its place.
        "is_withheld": outcome.payload.form == WITHHELD,
        "settled_at": instant_text(outcome.settled_at_ms),
        "audit_ends_at": instant_text(outcome.audit_ends_at_ms),
    } | payload_json(outcome.payload)


def payload_json(payload: Payload) -> dict[str, Any]:
    """A payload as JSON; exactly one of `body`, `body_text` and `body_base64` is there."""
    name, body = readable_body(payload)
    document = {
        "form": payload.form,
        "head": payload.head.decode(errors="backslashreplace"),
        "size_bytes": payload.size_bytes,
        name: body,
    }
    response = response_json(payload)
    return document if response is None else document | {"response": response}


def response_json(payload: Payload) -> dict[str, Any] | None:
    """Status and headers of a stored HTTP response; None for any other payload."""
    if not payload.form.startswith("http."):
        return None
    # Imported here: most stores hold nothing of HTTP.
    from retrysafe.http.responses import ResponseCodec  # noqa: PLC0415

    try:
        response = ResponseCodec().decode(payload)
    except NotReadable:
        return None  # A later release's, or damaged: it is shown as it is stored.
    headers = [
        [name.decode("latin-1"), value.decode("latin-1")] for name, value in response.headers
    ]
    return {"status": response.status, "headers": headers}


def status_text(status: int) -> str:
    """A status with its phrase, where there is one."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def readable_body(payload: Payload) -> tuple[str, Any]:
    """The body as JSON, else as text, else in base 64, with the name that says which.

    Plain bytes are never read as JSON: the operation returned bytes, not what they may mean.
    """
    return readable(payload.body, may_be_json=payload.form != BYTES)


def readable(body: bytes, *, may_be_json: bool) -> tuple[str, Any]:
    """Bytes as JSON, else as text, else in base 64, with the name that says which."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "body_base64", base64.b64encode(body).decode()
    if may_be_json:
        try:
            return "body", json.loads(text)
        except ValueError:
            pass  # A form that is not JSON; it is shown as the text that it is.
    return "body_text", text
