"""What becomes of endings that a batch has not written.

Each is read and decided by the core's table with the server's clock: its token may no longer hold
the key, or somebody else was at the row. Many at once are read together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from retrysafe.core import transitions
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Decision, Record, SettleAnswer, Settlement
from retrysafe.core.ports import SettleResult
from retrysafe.errors import StoreRejected, StoreUnavailable
from retrysafe.stores.postgres.busy_keys import BusyKeys
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.reading import Reader

# Rivals that keep changing a row between our read and our write make us read again. Each round
# means that somebody else made progress, so a bound only guards against a bug.
ROUNDS_LIMIT: Final = 50
# Nobody changes such an answer, so that all rows that were applied can share one.
APPLIED: Final = SettleAnswer(Decision.APPLY)
# Nothing was read, and nobody asks when.
NO_RECORD: Final = (None, 0)


def being_written(key: Key) -> StoreUnavailable:
    """The answer for a row that somebody else is at."""
    return StoreUnavailable("the record is being written", key=key.text)


class UnsettledEndings:
    """Endings that were not written, over one statement port."""

    __slots__ = ("_busy_keys", "_confirm", "_end", "_reader")

    def __init__(
        self,
        reader: Reader,
        busy_keys: BusyKeys,
        end: Callable[[Settlement], Awaitable[bool]],
        confirm: Callable[[Record], Awaitable[bool]],
    ) -> None:
        self._reader = reader
        self._busy_keys = busy_keys
        # Writes one ending, and says whether it is written.
        self._end = end
        # Makes sure that a record stands, see `Batches.confirm`.
        self._confirm = confirm

    async def answered(
        self, items: Sequence[Settlement], results: Sequence[SettleResult | None]
    ) -> list[SettleResult]:
        """The results, with one for each of the items that has none yet."""
        rest = [item for item, result in zip(items, results, strict=True) if result is None]
        answers = iter(await self._settle_all(rest))
        return [next(answers) if result is None else result for result in results]

    async def _settle_all(self, items: Sequence[Settlement]) -> list[SettleResult]:
        if len(items) < 2:
            return [await self._settle(item) for item in items]
        read = await self._reader.read_all([item.key.digest for item in items])
        results: list[SettleResult] = []
        for item in items:
            record, now_ms = read.get(item.key.digest, NO_RECORD)
            _, answer = transitions.settle(record, item, now_ms)
            if answer.decision is not Decision.LOST:
                results.append(await self._settle(item))
            else:
                # Final: whatever else the batch writes to its key gives no token the key back.
                results.append(answer)
        return results

    async def _settle(self, settlement: Settlement) -> SettleResult:
        """An ending of its own, until the row was written or says why not."""
        digest = settlement.key.digest
        for _ in range(ROUNDS_LIMIT):
            record, now_ms = (await self._reader.read_all([digest])).get(digest, NO_RECORD)
            _, answer = transitions.settle(record, settlement, now_ms)
            if record is None or answer.decision is Decision.LOST:
                return answer
            if answer.decision is Decision.CONFIRM:
                try:
                    if await self._confirm(record):
                        return answer
                except Locked:
                    return being_written(settlement.key)
                continue
            # Held by this token, and yet not written: somebody else was at the row.
            try:
                if await self._end(settlement):
                    return APPLIED
            except StoreRejected as error:
                return error
            if self._busy_keys.is_busy(digest):
                # Nobody takes over a row that is locked, and other rows must not wait for it.
                return being_written(settlement.key)
        raise StoreUnavailable(
            "the record changed under us again and again", key=settlement.key.text
        )
