"""The audit of keys: outcomes and operators' actions, also of keys whose record is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from retrysafe.core.keys.key import Key
from retrysafe.core.model import OperatorAction, StoredOutcome

# An auditor asks about last year; actions of people are few.
ACTIONS_KEPT_MS: Final = 366 * 86_400_000


@runtime_checkable
class Audited(Protocol):
    """A store that keeps outcomes apart from records, and longer."""

    async def read_audit(
        self, key: Key, seconds: float | None = None
    ) -> tuple[list[StoredOutcome], str]:
        """Every stored outcome of a key, oldest first, whether or not there is a record of it.

        For people: finding them may cost a scan, and without a record there is only the digest to
        know them by. When the time is over, what was not searched is said in words.
        """

    async def read_actions(self, key: Key) -> list[OperatorAction]:
        """What operators did to a key, oldest first."""


@dataclass(slots=True)
class AuditEntry:
    """One outcome of the whole audit; its record may be gone, and its texts with it."""

    digest: bytes
    caller: str | None
    text: str | None
    operation: str | None
    outcome: StoredOutcome


@dataclass(slots=True)
class AuditPart:
    """A bounded part of the audit, in the order in which it lies in the store."""

    entries: list[AuditEntry]
    # Where the next part begins; None after the last one.
    next: tuple[int, int] | None
    # How much of it all has been read by now.
    share: float


@runtime_checkable
class Exportable(Protocol):
    """A store whose audit can be read as a whole."""

    async def audit_part(self, first_ms: int, past_ms: int, start: tuple[int, int]) -> AuditPart:
        """Outcomes that were settled between two instants, from a position on; (0, 0) is the first.

        Each part is a short statement. What is settled meanwhile may be left out.
        """

    async def actions_between(
        self, first_ms: int, past_ms: int, after_id: int, limit: int
    ) -> list[tuple[int, Key, OperatorAction]]:
        """What operators did between two instants, by their numbers, behind one of them."""
