"""Staging: what an operation wants delivered, kept until its outcome is written.

Owns the entries of one attempt, their keys and their limits. Nothing is written here: they go into
the transaction that settles the attempt. An attempt that crashes, fails or loses its claim leaves
none behind, and the one that settles the key writes each of them once.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final

from retrysafe.core.keys.canonical import Part, frame, frame_parts
from retrysafe.core.keys.key import Key, looks_derived
from retrysafe.core.model import StagedEntry
from retrysafe.errors import InvalidInput

# What brokers, subjects and routing keys can all carry as it is.
_TOPIC: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,200}\Z")
AGGREGATE_LIMIT_CHARACTERS: Final = 255
KEY_LIMIT_CHARACTERS: Final = 255
# Brokers refuse more by default, and a message of this size should be a link.
BODY_LIMIT_BYTES: Final = 1_000_000
# Settled in one transaction; more is a job of its own.
ENTRIES_LIMIT: Final = 1_000

JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
BYTES: Final = "application/octet-stream"


class Staging:
    """The outbox of one attempt: `attempt.outbox`, or `run.outbox` in an atomic block."""

    __slots__ = (
        "_correction",
        "_entries",
        "_is_closed",
        "_key",
        "_numbers",
        "_require_claim",
        "_secret",
    )

    def __init__(
        self,
        key: Key,
        secret: bytes | None,
        require_claim: Callable[[], None],
        correction: bytes = b"",
    ) -> None:
        self._key = key
        # What tells a corrected request from the one before it, whose entries may be delivered.
        self._correction = correction
        self._secret = secret
        self._require_claim = require_claim
        # By topic and name, in the order of staging.
        self._entries: dict[tuple[str, str | int | None], StagedEntry] = {}
        self._numbers: dict[str, count[int]] = {}
        self._is_closed = False

    def stage(
        self,
        topic: str,
        payload: Any,
        *,
        aggregate: str | None = None,
        deliver_at: datetime | None = None,
        name: str | None = None,
        content_type: str | None = None,
    ) -> str:
        """Has the payload delivered once the operation's outcome stands; returns the entry's key.

        The key is made of the operation's key, the topic and the name, or the number of this entry
        among its topic's: give names where the order of staging may differ between attempts.
        Nothing is delivered when the operation raises. Raises `ClaimLost` when another owner has
        the key, and `InvalidInput` for what cannot be delivered, and for a name used twice.
        """
        if self._is_closed:
            raise InvalidInput(
                f"the outcome of {self._key.text!r} is written already: stage before that",
                key=self._key.text,
            )
        self._require_claim()
        if len(self._entries) >= ENTRIES_LIMIT:
            raise InvalidInput(
                f"an operation stages at most {ENTRIES_LIMIT:,} entries: stage one that stands "
                "for all of them",
                key=self._key.text,
            )
        numbers = self._numbers.setdefault(topic, count(1)) if name is None else None
        while True:
            place = name if numbers is None else next(numbers)
            entry = staged_entry(
                entry_key(self._secret, self._key, topic, place, self._correction),
                topic,
                payload,
                aggregate=aggregate,
                deliver_at=deliver_at,
                content_type=content_type,
            )
            # One look-up that cannot be interrupted: two threads never share a number, and so
            # never a key that would make receivers drop one of their entries.
            found = self._entries.setdefault((topic, place), entry)
            if found is entry:
                return entry.key
            if numbers is None:
                if found == entry:
                    return entry.key  # The same again, as a retried transaction does.
                raise InvalidInput(
                    f"two different entries for {topic!r} are named {name!r}: receivers would "
                    "take the second for a repetition of the first",
                    key=self._key.text,
                )

    def entries(self) -> tuple[StagedEntry, ...]:
        """What was staged so far, in order."""
        return tuple(self._entries.values())

    def close(self) -> None:
        """Takes no more: whatever comes later would be in nobody's transaction."""
        self._is_closed = True


def entry_key(
    secret: bytes | None, parent: Key, topic: str, name: Part, correction: bytes = b""
) -> str:
    """The key of an entry that an operation stages: the same in every attempt and every life.

    A corrected request has entries of its own, told from those of the one before it.
    Keyed where there is a secret, so that whoever sees one entry's key cannot compute another's.
    """
    names = parent.caller.encode(), parent.text.encode()
    if correction:
        framed = frame(b"entry key of a correction 1", *names, correction, frame_parts(topic, name))
    else:
        framed = frame(b"entry key 1", *names, frame_parts(topic, name))
    mac = hmac.digest(secret or b"", framed, "sha256")
    return f"entry:{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def staged_entry(
    key: str,
    topic: str,
    payload: Any,
    *,
    aggregate: str | None,
    deliver_at: datetime | None,
    content_type: str | None,
) -> StagedEntry:
    """An entry that every store and every target can take; raises `InvalidInput`."""
    if not isinstance(topic, str) or not _TOPIC.match(topic):
        raise InvalidInput(
            f"a topic has 1 to 200 letters, digits and the signs . _ : / -, got {topic!r}"
        )
    _require_text("an entry's key", key, KEY_LIMIT_CHARACTERS)
    if not (key.isascii() and key.isprintable()):
        raise InvalidInput(f"an entry's key travels in headers: ASCII only, got {key!r}")
    if looks_derived(str(key)):
        raise InvalidInput(
            f"{key!r} is made from fields or a body, and receivers refuse such a key from a "
            "sender: leave key= out, or write one of your own, such as 'payout-42'"
        )
    if aggregate is not None:
        _require_text("an aggregate", aggregate, AGGREGATE_LIMIT_CHARACTERS)
    if content_type is not None:
        _require_text("a content type", content_type, KEY_LIMIT_CHARACTERS)
        if not (content_type.isascii() and content_type.isprintable()):
            raise InvalidInput(f"a content type is printable ASCII, got {content_type!r}")
    body, kind = _encoded(payload)
    if len(body) > BODY_LIMIT_BYTES:
        raise InvalidInput(
            f"the payload for {topic!r} has {len(body):,} bytes, and at most {BODY_LIMIT_BYTES:,} "
            "are delivered: store it elsewhere and send where it is"
        )
    return StagedEntry(key, topic, content_type or kind, body, aggregate, _instant_ms(deliver_at))


def _require_text(what: str, text: object, limit: int) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= limit or "\x00" in text:
        raise InvalidInput(f"{what} is text of 1 to {limit} characters, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} is not valid Unicode text: {text!r}") from None


def _encoded(payload: Any) -> tuple[bytes, str]:
    if isinstance(payload, bytes | bytearray | memoryview):
        return bytes(payload), BYTES
    try:
        if isinstance(payload, str):
            return payload.encode(), TEXT
        text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(), JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"the payload is delivered as bytes, text or plain JSON, and this one cannot be: "
            f"{error}"
        ) from error


def _instant_ms(at: datetime | None) -> int:
    if at is None:
        return 0
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise InvalidInput(
            f"deliver_at is an instant with a time zone, such as "
            f"datetime.now(UTC) + timedelta(hours=1), got {at!r}"
        )
    since = at.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    # Rounded up: never before the instant that was asked for.
    return max(0, math.ceil(since / timedelta(milliseconds=1)))
