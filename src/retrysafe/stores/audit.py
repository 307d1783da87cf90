"""The audit of keys: outcomes and operators' actions, also of keys whose record is gone."""

from __future__ import annotations

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
