"""Lists of records, as operators ask for them: filters that combine, and pages that go on.

Owns what a filter means and the order of a list. Knows nothing of how a store searches; one that
cannot search everything in its time says so in the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from retrysafe.core.model import Condition, StoredKey


class Position(NamedTuple):
    """Where a list of records goes on: behind the record of this claim and digest."""

    claimed_at_ms: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.claimed_at_ms}-{self.digest.hex()}"

    @classmethod
    def of(cls, text: str) -> Position | None:
        """The position of a text that `str` has made; None for any other text."""
        claimed, mark, digest = text.partition("-")
        if not (mark and claimed.isascii() and claimed.isdigit() and len(claimed) < 19):
            return None
        try:
            return cls(int(claimed), bytes.fromhex(digest))
        except ValueError:
            return None


@dataclass(slots=True)
class RecordQuery:
    """Which records an operator wants to see, newest claim first."""

    caller: str | None = None
    text_prefix: str = ""
    conditions: frozenset[Condition] = frozenset()
    limit: int = 50
    operation: str | None = None
    # How long ago the last claim was, by the store's clock.
    older_than_ms: int | None = None
    newer_than_ms: int | None = None
    # Only what comes behind it: the next page of a list.
    after: Position | None = None
    # How long to search at most, where a search can be long; None searches everything.
    seconds: float | None = None

    def matches(self, stored: StoredKey) -> bool:
        """Whether a record passes every filter and comes behind the position."""
        record = stored.record
        age_ms = stored.now_ms - record.claimed_at_ms
        return (
            (self.caller is None or record.caller == self.caller)
            and record.text.startswith(self.text_prefix)
            and (not self.conditions or stored.condition in self.conditions)
            and (self.operation is None or record.operation == self.operation)
            and (self.older_than_ms is None or age_ms >= self.older_than_ms)
            and (self.newer_than_ms is None or age_ms <= self.newer_than_ms)
            and (self.after is None or _order(stored) > (-self.after[0], self.after[1]))
        )

    def page_of(self, found: Iterable[StoredKey], unsearched: str = "") -> RecordPage:
        """The first of those that match, where a store has all of them at hand."""
        matching = sorted((item for item in found if self.matches(item)), key=_order)
        return RecordPage.of(matching[: self.limit], self.limit, unsearched)


def _order(stored: StoredKey) -> tuple[int, bytes]:
    return (-stored.record.claimed_at_ms, stored.record.digest)


@dataclass(slots=True)
class RecordPage:
    """Records in their order, and where the list goes on."""

    keys: list[StoredKey]
    # None when there is nothing behind it; a page that is full may be the last one all the same.
    after: Position | None = None
    # What the search did not reach in its time, in words; empty when it reached everything.
    unsearched: str = ""

    @classmethod
    def of(cls, keys: list[StoredKey], limit: int, unsearched: str = "") -> RecordPage:
        """A page that goes on behind its last record, if it is full."""
        after = None
        if keys and len(keys) >= limit:
            last = keys[-1].record
            after = Position(last.claimed_at_ms, last.digest)
        return cls(keys, after, unsearched)
