"""Staging: what an operation wants delivered, kept until its outcome is written.

Owns the entries of one attempt. Nothing is written here: they go into the transaction that settles
the attempt. An attempt that crashes, fails or loses its claim leaves none behind, and the one that
settles the key writes each of them once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import count
from typing import Any

from retrysafe.core.keys.key import Key
from retrysafe.core.model import StagedEntry
from retrysafe.core.outbox.entries import ENTRIES_LIMIT, entry_key, staged_entry
from retrysafe.errors import InvalidInput


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
