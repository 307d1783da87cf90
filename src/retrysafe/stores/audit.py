"""The audit of keys that are gone: what a store can show when it has no record any more."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from retrysafe.core.keys.key import Key
from retrysafe.core.model import StoredOutcome


@runtime_checkable
class Audited(Protocol):
    """A store that keeps outcomes apart from records, and longer."""

    async def read_audit(self, key: Key) -> list[StoredOutcome]:
        """Every stored outcome of a key, oldest first, whether or not there is a record of it.

        For people: finding them may cost a scan, and without a record there is only the digest to
        know them by.
        """
