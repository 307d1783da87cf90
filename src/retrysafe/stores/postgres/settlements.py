"""Endings of attempts, answered: those that were written, and why the others were not.

Where the table is spelled out in SQL: an ending is applied if its token holds a pending row
(`commit` in claims.sql, `settle_one` in settlements.sql). Whatever these statements skipped is read
and decided here by `core.transitions`, with the server's clock: its token may no longer hold the
key, or somebody else was at the row. The store suite's `table` cases prove that both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from retrysafe.core import transitions
from retrysafe.core.model import Decision, SettleAnswer, Settlement
from retrysafe.core.ports import SettleResult
from retrysafe.errors import StoreRejected
from retrysafe.stores.postgres.contended import (
    ROUNDS_LIMIT,
    Contended,
    being_written,
    kept_changing,
)
from retrysafe.stores.postgres.drivers.port import Locked
from retrysafe.stores.postgres.reading import NO_RECORD, Reader

# Nobody changes such an answer, so that all rows that were applied can share one.
_APPLIED: Final = SettleAnswer(Decision.APPLY)


class Settlements:
    """Answers endings."""

    def __init__(self, reader: Reader, contended: Contended) -> None:
        self._reader = reader
        self._contended = contended

    async def answered(self, items: Sequence[Settlement], ended: set[bytes]) -> list[SettleResult]:
        """The answers to the endings of a batch, of which those digests were written."""
        left = set(ended)
        results: list[SettleResult | None] = []
        for item in items:
            # A write answers the first row of its key; a second one asks for itself.
            is_written = item.key.digest in left
            left.discard(item.key.digest)
            results.append(_APPLIED if is_written else None)
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
                    if await self._contended.confirm(record):
                        return answer
                except Locked:
                    return being_written(settlement.key)
                continue
            # Held by this token, and yet not written: somebody else was at the row.
            try:
                if (await self._contended.write([], [settlement])).ended:
                    return _APPLIED
            except StoreRejected as error:
                return error
            if digest in self._contended.busy_keys:
                # Nobody takes over a row that is locked, and other rows must not wait for it.
                return being_written(settlement.key)
        raise kept_changing(settlement.key)
