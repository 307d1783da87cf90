"""A sweeper that goes on until it is stopped; any number of them may work on one store."""

from __future__ import annotations

from collections.abc import Callable

from retrysafe.core.model import SweepReport
from retrysafe.core.pace import Pace
from retrysafe.core.ports import LocalClock, Signal, Store
from retrysafe.errors import StoreUnavailable


class Sweeper:
    """Removes what is past its window at the pace at which it expires."""

    def __init__(
        self,
        store: Store,
        clock: LocalClock,
        *,
        pace: Pace | None = None,
        on_round: Callable[[SweepReport], None] | None = None,
        on_outage: Callable[[StoreUnavailable], None] | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._pace = pace or Pace()
        self._on_round = on_round
        self._on_outage = on_outage

    async def run(self, stopping: Signal) -> None:
        """Sweeps until the signal is set. An outage is waited for; other errors are raised."""
        while True:
            rest_seconds = await self._round()
            if await stopping.wait(rest_seconds):
                return

    async def _round(self) -> float:
        started_at = self._clock.monotonic()
        try:
            report = await self._store.sweep(self._pace.limit)
        except StoreUnavailable as error:
            if self._on_outage is not None:
                self._on_outage(error)
            return self._pace.rest_after_failure()
        if self._on_round is not None:
            self._on_round(report)
        return self._pace.rest_after(
            report, started_at=started_at, ended_at=self._clock.monotonic()
        )
