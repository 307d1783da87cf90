"""A sample of a store's records: what can be said of millions of them without reading them all."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from retrysafe.core.model import StoredKey


@runtime_checkable
class Sampled(Protocol):
    """A store that shows some of its records, spread over all of them."""

    async def sample(self, size: int) -> list[StoredKey]:
        """About so many records, without steps and audit; all of them where there are fewer."""
