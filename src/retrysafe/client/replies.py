"""What an answer says about trying again: its status, `Retry-After`, its problem, its replay mark.

Pure functions of an answer's head and, where it was read, its body. A server's words are never
trusted to be well formed: what cannot be understood counts as not said.
"""

from __future__ import annotations

import json
import zlib
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Protocol

from retrysafe.client.retry_policy import RetryPolicy

REPLAYED_HEADER: Final = "Idempotent-Replayed"
CONFLICT: Final = 409
# A problem is a few hundred bytes. What unpacks to more is not looked at: a small compressed answer
# can stand for gigabytes.
PROBLEM_LIMIT_BYTES: Final = 64 * 1024
# zlib's number for data that begins with the header of gzip or of zlib.
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_PACKED: Final = frozenset({"gzip", "x-gzip", "deflate"})
# An HTTP date has 29 characters; what is much longer is no date.
_DATE_LIMIT_CHARACTERS: Final = 64


class Headers(Protocol):
    """The headers of an answer, looked up without regard to case."""

    def get(self, name: str, /) -> str | None:
        """The header's value."""


class Answered(Protocol):
    """An answer of httpx or requests."""

    @property
    def headers(self) -> Headers:
        """Its headers."""


def was_replayed(response: Answered) -> bool:
    """Whether the server says that nothing ran: this is the outcome of an earlier request."""
    return is_replay(response.headers)


def is_replay(headers: Headers) -> bool:
    """Whether the replay mark is there, as a word or as an RFC 8941 boolean."""
    return (headers.get(REPLAYED_HEADER) or "").strip().lower() in ("true", "?1")


def is_retryable(
    status: int, headers: Headers, body: bytes | None, *, policy: RetryPolicy, has_key: bool
) -> bool:
    """Whether the same request may get a different answer later."""
    if status == CONFLICT:
        if not has_key:
            return False
    elif status not in policy.statuses:
        return False
    if is_replay(headers):
        # A stored outcome: every retry would get the same one.
        return False
    told = problem_retryable(headers, body)
    if status == CONFLICT and told is None:
        if headers.get("Retry-After") is not None:
            return True
        # The draft's answer to a duplicate of a running operation says nothing about a retry. A
        # problem that was too long to be read may have said that it is final.
        return policy.retries_silent_conflicts and not (body is None and has_json(headers))
    return told is not False


def problem_body(raw: bytes, headers: Headers) -> bytes | None:
    """What a JSON answer says, unpacked; None for other answers and for one over the limit."""
    if not has_json(headers):
        return None
    packing = (headers.get("Content-Encoding") or "identity").strip().lower()
    if packing in _PACKED:
        unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            raw = unpacking.decompress(raw, PROBLEM_LIMIT_BYTES + 1)
        except zlib.error:
            return None
    elif packing != "identity":
        return None
    return raw if len(raw) <= PROBLEM_LIMIT_BYTES else None


def problem_retryable(headers: Headers, body: bytes | None) -> bool | None:
    """The member `retryable` of a JSON body; None when the server does not say."""
    if not body or not has_json(headers):
        return None
    try:
        problem = json.loads(body)
    except (ValueError, RecursionError):
        return None
    told = problem.get("retryable") if isinstance(problem, dict) else None
    return told if isinstance(told, bool) else None


def has_json(headers: Headers) -> bool:
    """Whether the answer's content type is JSON or a kind of it, such as problem+json."""
    kind = (headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def retry_after_seconds(headers: Headers, now: float) -> float:
    """How long the server asks to wait; zero when it does not, or not in a way that is a time.

    A date is compared with the server's own `Date`, because its clock and ours may differ; `now`
    (seconds since the epoch) stands in for a missing one.
    """
    text = (headers.get("Retry-After") or "").strip()
    if not text:
        return 0.0
    if text.isascii() and text.isdigit():
        # More digits than a float can hold are infinity, which no time limit allows.
        return float(text)
    asked_for = _instant(text)
    if asked_for is None:
        return 0.0
    sent_at = _instant(headers.get("Date") or "")
    return max(0.0, asked_for - (now if sent_at is None else sent_at))


def _instant(text: str) -> float | None:
    if len(text) > _DATE_LIMIT_CHARACTERS:
        return None
    try:
        return _utc(parsedate_to_datetime(text)).timestamp()
    except (ValueError, IndexError, OverflowError):
        # No date, or a year that no calendar has: the answer itself is worth more than its date.
        return None


def _utc(moment: datetime) -> datetime:
    """HTTP dates are in GMT, also those that do not say so."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
