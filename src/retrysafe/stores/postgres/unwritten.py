"""What becomes of endings and renewals that a batch has not written.

Each is read and decided by the core's table with the server's clock: its token may no longer hold
the key, or somebody else was at the row. Many at once are read together. A service that is behind
renews much that is being ended at the same moment, and one round trip for each would put it further
behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from retrysafe.core import transitions
from retrysafe.core.model import Decision, SettleAnswer, SettleKind, Settlement
from retrysafe.core.ports import SettleResult
from retrysafe.errors import StoreRejected, StoreUnavailable
from retrysafe.stores.postgres.reading import Reader
from retrysafe.stores.postgres.sifting import Fetch, Sifter

# Rivals that keep changing a row between our read and our write make us read again. Each round
# means that somebody else made progress, so a bound only guards against a bug.
ROUNDS_LIMIT: Final = 50
# Nobody changes such an answer, so that all rows that were applied can share one.
APPLIED: Final = SettleAnswer(Decision.APPLY)
# Nothing was read, and nobody asks when.
NO_RECORD: Final = (None, 0)


def _being_written(item: Settlement) -> StoreUnavailable:
    return StoreUnavailable("the record is being written", key=item.key.text)


class Unwritten:
    """Endings and renewals that were not written, over one statement port."""

    __slots__ = ("_end", "_fetch", "_reader", "_sifter")

    def __init__(
        self,
        fetch: Fetch,
        reader: Reader,
        sifter: Sifter,
        end: Callable[[Settlement], Awaitable[bool]],
    ) -> None:
        self._fetch = fetch
        self._reader = reader
        self._sifter = sifter
        # Writes one ending, and says whether it is written.
        self._end = end

    async def told(
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
        counts = Counter(item.key.digest for item in items)
        decided: list[SettleAnswer] = []
        renewals: dict[bytes, Settlement] = {}
        for item in items:
            digest = item.key.digest
            record, now_ms = read.get(digest, NO_RECORD)
            _, answer = transitions.settle(record, item, now_ms)
            decided.append(answer)
            # Where the batch holds more for its key, each is decided in its turn.
            if (
                answer.decision is Decision.APPLY
                and item.kind is SettleKind.EXTEND
                and counts[digest] == 1
            ):
                renewals[digest] = item
        extended = await self.extend(renewals.values()) if renewals else {}
        results: list[SettleResult] = []
        for item, answer in zip(items, decided, strict=True):
            digest = item.key.digest
            if digest in renewals:
                results.append(extended.get(digest) or _being_written(item))
            elif answer.decision is Decision.APPLY:
                results.append(await self._settle(item))
            else:
                # Final: whatever else the batch writes to its key gives no token the key back.
                results.append(answer)
        return results

    async def _settle(self, settlement: Settlement) -> SettleResult:
        """An ending or an extend of its own, until the row was written or says why not."""
        digest = settlement.key.digest
        is_extend = settlement.kind is SettleKind.EXTEND
        for _ in range(ROUNDS_LIMIT):
            record, now_ms = await self._reader.read(digest) or NO_RECORD
            _, answer = transitions.settle(record, settlement, now_ms)
            if answer.decision is not Decision.APPLY:
                return answer
            # Held by this token, and yet not written: somebody else was at the row.
            try:
                if not is_extend:
                    if await self._end(settlement):
                        return APPLIED
                    if not self._sifter.is_busy(digest):
                        continue
                else:
                    extended = await self.extend([settlement])
                    if digest in extended:
                        return extended[digest]
                # Nobody takes over a row that is locked, and other rows must not wait for it.
                return _being_written(settlement)
            except StoreRejected as error:
                return error
        raise StoreUnavailable(
            "the record changed under us again and again", key=settlement.key.text
        )

    async def extend(self, extends: Collection[Settlement]) -> dict[bytes, SettleAnswer]:
        """Extends leases whose tokens hold their keys; the answers by the digests of those."""
        rows = await self._fetch(
            "extend",
            [item.key.digest for item in extends],
            [item.token for item in extends],
            [item.lease_ms for item in extends],
        )
        return {
            bytes(digest): SettleAnswer(Decision.APPLY, remaining_ms, ends_at_ms)
            for digest, ends_at_ms, remaining_ms in rows
        }
