"""A user's transaction that fails where a test tells it to.

Owns the names of its calls; which of them fail, and when, the `FaultyStore` says.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    Settlement,
    StagedEntry,
    StepWrite,
)
from retrysafe.core.ports import Fate, Transaction, Waits


class FaultyTransaction:
    """A transaction of a `FaultyStore`; its methods are named `transaction.begin` and so on."""

    def __init__(
        self, transaction: Transaction, call: Callable[..., Coroutine[Any, Any, Any]]
    ) -> None:
        self._transaction = transaction
        self._call = call

    @property
    def waits(self) -> Waits:
        """As the wrapped transaction does."""
        return self._transaction.waits

    @property
    def is_open(self) -> Callable[[], bool]:
        """Asks the wrapped transaction; it never fails.

        One that cannot be asked has no such method, and then this one has none either.
        """
        wrapped: Any = self._transaction
        ask: Callable[[], bool] = wrapped.is_open
        return ask

    async def begin(self) -> None:
        """Marks the point that `undo` returns to."""
        await self._call("transaction.begin", self._transaction.begin)

    async def keep(self) -> None:
        """Hands what was written to the user's transaction."""
        await self._call("transaction.keep", self._transaction.keep)

    async def undo(self) -> None:
        """Takes back everything since `begin`."""
        await self._call("transaction.undo", self._transaction.undo)

    async def lock(self, key: Key, wait_seconds: float | None) -> bool:
        """Keeps other transactions off the key."""
        is_ours: bool = await self._call(
            "transaction.lock", self._transaction.lock, key, wait_seconds
        )
        return is_ours

    async def look(self, request: ClaimRequest) -> ClaimAnswer:
        """What a claim would be answered."""
        answer: ClaimAnswer = await self._call("transaction.look", self._transaction.look, request)
        return answer

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key under the lock."""
        answer: ClaimAnswer = await self._call(
            "transaction.claim", self._transaction.claim, request
        )
        return answer

    async def sees_changes(self) -> bool:
        """Whether asking again can show what others commit."""
        sees: bool = await self._call("transaction.sees_changes", self._transaction.sees_changes)
        return sees

    async def settle(self, settlement: Settlement) -> Decision:
        """Ends an attempt."""
        decision: Decision = await self._call(
            "transaction.settle", self._transaction.settle, settlement
        )
        return decision

    async def stage(self, entries: Sequence[StagedEntry]) -> None:
        """Writes outbox entries."""
        await self._call("transaction.stage", self._transaction.stage, entries)

    async def fate(self, settlement: Settlement) -> Fate:
        """What became of a settlement."""
        fate: Fate = await self._call("transaction.fate", self._transaction.fate, settlement)
        return fate

    async def record_step(self, write: StepWrite) -> Decision:
        """Records a step."""
        decision: Decision = await self._call(
            "transaction.record_step", self._transaction.record_step, write
        )
        return decision

    async def step_fate(self, write: StepWrite) -> Fate:
        """What became of a step."""
        fate: Fate = await self._call("transaction.step_fate", self._transaction.step_fate, write)
        return fate


if TYPE_CHECKING:

    def _is_a_transaction(transaction: FaultyTransaction) -> Transaction:
        """Fails the type check when the port changes and the wrapper does not."""
        return transaction
