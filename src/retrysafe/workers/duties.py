"""The duties of a worker: recovery, reports of what is abandoned, and the sweep.

Owns what is done in a round and how long a duty rests. Each duty is a flow, written once; threads
and event loops drive it. Two workers with the same duties do not disturb each other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final, Protocol

from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.keys.key import Key
from retrysafe.core.model import SweepReport
from retrysafe.core.pace import rest_of_command
from retrysafe.core.ports import LocalClock, Lock, Signal, Store, WorkerPool
from retrysafe.core.recovery import AbandonedReport, Recovery, RecoveryReport, Resumer
from retrysafe.errors import InvalidInput, StoreUnavailable
from retrysafe.workers.sweeper import Sweeper

_logger: Final = logging.getLogger("retrysafe")

# A store that does not answer is asked less often, at most so seldom.
_OUTAGE_MAXIMUM_SECONDS: Final = 60.0
# Rounds of a sweep that is to end. A walk over a large table takes many, because a store may end a
# round long before its limit, so that claims do not wait for what it writes.
_DRAIN_ROUNDS_LIMIT: Final = 100_000
_DRAIN_LIMIT: Final = 1_000


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """How often a worker looks, and how much it does at a time; raises `InvalidInput`."""

    # Rest between the end of a look for operations to resume and the next one. While there is room
    # for more operations, a first resumption comes after the rest of the lease and at most this, a
    # quarter of it more for the jitter.
    interval: timedelta = timedelta(seconds=5)
    # Rest between two looks for what nobody can resume; on PostgreSQL it walks over all keys.
    report_interval: timedelta = timedelta(minutes=5)
    # Operations that are resumed at the same time.
    concurrency: int = 4
    # Rest before the third attempt of an operation, doubled with each further one.
    back_off: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        for name in ("interval", "report_interval"):
            if getattr(self, name) <= timedelta(0):
                raise InvalidInput(f"{name} must be longer than nothing")
        if self.back_off < timedelta(0):
            raise InvalidInput(f"back_off must not be negative, got {self.back_off}")
        if self.concurrency < 1:
            raise InvalidInput(f"concurrency is a whole number from 1 up, got {self.concurrency}")


def duties_of(
    *,
    store: Store,
    clock: LocalClock,
    pool: DrainablePool,
    lock: Lock,
    resumers: Mapping[str, Resumer],
    report: Reporter,
    policy: WorkerPolicy,
) -> dict[str, Flow]:
    """The duties of a worker on one store, by their names."""
    recovery = Recovery(
        store=store,
        resumers=resumers,
        pool=pool,
        lock=lock,
        report=report,
        back_off_ms=policy.back_off // timedelta(milliseconds=1),
        patience_seconds=policy.interval.total_seconds(),
        notices=_Log(),
    )
    return {
        "recovery": RecoveryDuty(recovery, pool, policy.interval),
        "abandoned": ReportDuty(recovery, policy.report_interval),
        "sweep": SweepDuty(store, clock, report),
    }


class Flow(Protocol):
    """One duty."""

    @property
    def report(self) -> Any:
        """What it has done so far."""

    async def run(self, stopping: Signal) -> None:
        """Goes on until the signal; what is under way by then is finished."""

    async def drain(self) -> None:
        """Does what there is to do now."""

    def stop(self) -> None:
        """Starts nothing more; the signal is set as well."""


async def rounds(
    name: str,
    work: Callable[[], Awaitable[None]],
    interval_seconds: float,
    stopping: Signal,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Repeats a round until the signal. An outage is waited for; other errors are raised."""
    outages = 0
    while True:
        try:
            await work()
            outages = 0
        except StoreUnavailable as error:
            outages += 1
            _logger.warning("%s: the store does not answer: %s", name, error)
        rest = min(_OUTAGE_MAXIMUM_SECONDS, interval_seconds * 2 ** min(outages, 20))
        # Spread, so that workers that were started together do not look together for ever.
        if await stopping.wait(max(rest, interval_seconds) * (0.75 + jitter() / 2)):
            return


class _Log:
    """Nobody called, so nobody but the log hears of it."""

    def failed(self, key: Key, error: BaseException) -> None:
        """What a resumed operation raised."""
        _logger.warning("resuming %s failed", key, exc_info=error)

    def is_full(self, size: int) -> None:
        """Operations that hang keep their places, and the others wait without a sign."""
        _logger.warning(
            "recovery: an operation waits for longer than the interval, because %d others are "
            "under way: they hang, or the concurrency of the worker is too low",
            size,
        )

    def has_more(self, limit: int) -> None:
        """What was not seen was not reported."""
        _logger.warning(
            "abandoned: there are more than %d abandoned keys, and only these were looked at: "
            "`retrysafe keys list --condition abandoned` with a higher --limit shows the others",
            limit,
        )


class DrainablePool(WorkerPool, Protocol):
    """A pool that a duty can end."""

    def stop(self) -> None:
        """Starts nothing more."""

    def give_up(self) -> None:
        """Cancels what is under way, where that can be done: its leases free the keys."""

    async def drain(self) -> None:
        """Waits until everything that was started has ended."""


class RecoveryDuty:
    """Resumes what can be resumed."""

    def __init__(self, recovery: Recovery, pool: DrainablePool, interval: timedelta) -> None:
        self._recovery = recovery
        self._pool = pool
        self._interval_seconds = interval.total_seconds()

    @property
    def report(self) -> RecoveryReport:
        """What was recovered so far."""
        return self._recovery.report

    async def run(self, stopping: Signal) -> None:
        """Looks for operations to resume until the signal, and waits for those under way."""
        try:
            await rounds("recovery", self._recovery.resume_all, self._interval_seconds, stopping)
        except asyncio.CancelledError:
            self._pool.give_up()
            raise
        except Exception:
            # Told before the wait for what is under way, which may take long.
            _logger.exception("recovery: ends by an error, once what is under way has ended")
            raise
        finally:
            await self._pool.drain()

    async def drain(self) -> None:
        """Resumes what can be resumed now."""
        await self._recovery.resume_all()
        await self._pool.drain()

    def stop(self) -> None:
        """Resumes nothing more."""
        self._pool.stop()


class ReportDuty:
    """Reports what nobody can resume."""

    def __init__(self, recovery: Recovery, interval: timedelta) -> None:
        self._recovery = recovery
        self._interval_seconds = interval.total_seconds()

    @property
    def report(self) -> AbandonedReport:
        """What was reported so far."""
        return self._recovery.abandoned

    async def run(self, stopping: Signal) -> None:
        """Looks until the signal."""
        work = self._recovery.report_abandoned
        await rounds("abandoned", work, self._interval_seconds, stopping)

    async def drain(self) -> None:
        """Looks once."""
        await self._recovery.report_abandoned()

    def stop(self) -> None:
        """A look is short."""


class SweepDuty:
    """Removes what is past its window, and tends the partitions of a store that has some."""

    def __init__(self, store: Store, clock: LocalClock, report: Reporter) -> None:
        self._store = store
        self._report = report
        # Since the last time that nothing was left.
        self._removed = 0
        self._clock = clock
        self._total = SweepReport()
        self._sweeper = Sweeper(store, clock, on_round=self._add, on_outage=_log_outage)

    @property
    def report(self) -> SweepReport:
        """What was removed so far."""
        return replace(self._total)

    async def run(self, stopping: Signal) -> None:
        """Sweeps until the signal."""
        await self._sweeper.run(stopping)

    async def drain(self) -> None:
        """Sweeps until nothing is left, with rests: a service may be at work on the same store."""
        for _ in range(_DRAIN_ROUNDS_LIMIT):
            started_at = self._clock.monotonic()
            report = await self._store.sweep(_DRAIN_LIMIT)
            self._add(report)
            if not report.has_more:
                return
            rest = rest_of_command(report, self._clock.monotonic() - started_at)
            await self._clock.sleep(rest)

    def stop(self) -> None:
        """A round is short."""

    def _add(self, report: SweepReport) -> None:
        total = self._total
        total.keys += report.keys
        total.outcomes += report.outcomes
        total.partitions += report.partitions
        total.entries += report.entries
        total.has_more = report.has_more
        self._removed += report.keys + report.outcomes + report.entries
        if not report.has_more:
            removed, self._removed = self._removed, 0
            self._report.worked(EventKind.SWEPT, removed)


def _log_outage(error: StoreUnavailable) -> None:
    _logger.warning("sweep: the store does not answer: %s", error)
