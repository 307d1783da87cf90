"""The engine's ports for one simulated process. Every call of a port is a scheduling point.

Owns the faults of the way to the store: a row is lost before its effect, its answer after it, or
it arrives late, when nobody waits for the answer any more; or the store is not there at all.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Decision,
    ExtendAnswer,
    Extension,
    SettleAnswer,
    Settlement,
    StepWrite,
    StoredKey,
    StoredOutcome,
)
from retrysafe.core.ports import Capabilities, Waits
from retrysafe.core.renewal import due_leases, next_renewal, renew
from retrysafe.errors import StoreMissing, StoreUnavailable
from tests.simulation.scheduler import NEVER, READY, Process, Task, suspend

if TYPE_CHECKING:
    from tests.simulation.world import World

CAPABILITIES = Capabilities(Waits.SUSPENDING)


class Fault(Enum):
    """What goes wrong between a process and its store."""

    BEFORE = auto()
    AFTER = auto()
    LATE = auto()
    BROKEN = auto()


@dataclass(slots=True)
class TakeOver:
    """A worker's claim of what it saw held by that token."""

    request: ClaimRequest
    held: bytes

    @property
    def key(self) -> Key:
        """The key that is claimed."""
        return self.request.key

    @property
    def token(self) -> bytes:
        """The worker's own token."""
        return self.request.token


class SimulatedWriter:
    """The way to the shared store for one process: a writer, and as much of a store as is asked."""

    capabilities = CAPABILITIES

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    async def claim(self, request: ClaimRequest) -> ClaimAnswer:
        """Claims a key, with faults."""
        return await self._transmit(request)

    async def take_over(self, request: ClaimRequest, held: bytes) -> ClaimAnswer:
        """Claims an abandoned key for a worker, with faults."""
        return await self._transmit(TakeOver(request, held))

    async def settle(self, settlement: Settlement) -> SettleAnswer:
        """Ends an attempt, with faults."""
        return await self._transmit(settlement)

    async def extend(
        self, extensions: Sequence[Extension], timeout_seconds: float
    ) -> list[ExtendAnswer]:
        """Extends leases one after the other, with faults; a late answer is one of them."""
        return [await self._transmit(extension) for extension in extensions]

    async def record_step(self, write: StepWrite) -> Decision:
        """Records a step, with faults."""
        return await self._transmit(write)

    async def read(self, key: Key) -> StoredKey | None:
        """The record of a key, or no answer."""
        await self._ask()
        return await self._world.read(key)

    async def last_outcome(self, key: Key) -> StoredOutcome | None:
        """The last ending of a key, or no answer."""
        await self._ask()
        return await self._world.last_outcome(key)

    async def _ask(self) -> None:
        """The way of a read to the store; one that is lost has no effect anywhere."""
        self._process.check_alive()
        fault = self._world.draw_fault()
        await suspend(READY)
        if fault is Fault.BROKEN:
            raise StoreMissing("simulated: the database is gone")
        if fault is not None:
            raise StoreUnavailable("simulated: no answer")

    async def _transmit(self, row: Any) -> Any:
        world = self._world
        self._process.check_alive()
        fault = world.draw_fault()
        try:
            await suspend(READY)
        except BaseException:
            # Whoever waited is gone; the row may be on its way all the same.
            world.maybe_send_late(row)
            raise
        if fault is Fault.BEFORE:
            raise StoreUnavailable("simulated: the row was lost")
        if fault is Fault.BROKEN:
            raise StoreMissing("simulated: the database is gone")
        if fault is Fault.LATE:
            world.send_late(row)
            raise StoreUnavailable("simulated: the row is late")
        answer = await world.apply(row)
        await suspend(READY)
        if fault is Fault.AFTER:
            raise StoreUnavailable("simulated: the answer was lost")
        world.ledger.told(row, answer)
        return answer


class SimulatedSignal:
    """Wakes one waiting task."""

    __slots__ = ("_clock", "_is_set", "_waiter")

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._is_set = False
        self._waiter: Task | None = None

    def set(self) -> None:
        """Wakes the waiter, now or when it starts to wait."""
        self._is_set = True
        if self._waiter is not None:
            self._waiter.wakes_at_ms = READY

    async def wait(self, timeout_seconds: float | None) -> bool:
        """Waits for `set`, or until the time is over."""
        clock = self._clock
        clock.process.check_alive()
        if self._is_set:
            await suspend(READY)
            return True
        self._waiter = clock.world.scheduler.current
        try:
            await suspend(
                NEVER if timeout_seconds is None else clock.instant_after(timeout_seconds)
            )
        finally:
            self._waiter = None
        return self._is_set


class SimulatedClock:
    """Local time of one process, skewed, and waiting by it."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process

    def monotonic(self) -> float:
        """The process's own seconds."""
        process = self.process
        return process.offset_seconds + self.world.scheduler.now_ms / 1000 * process.rate

    def instant_after(self, seconds: float) -> float:
        """The simulated instant at which so many local seconds are over, and a little more."""
        return self.world.scheduler.now_ms + seconds * 1000 / self.process.rate + 0.01

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        self.process.check_alive()
        await suspend(self.instant_after(seconds))

    def signal(self) -> SimulatedSignal:
        """A fresh signal."""
        return SimulatedSignal(self)


class SimulatedRenewals:
    """A heartbeat that is punctual, late, or dead."""

    def __init__(
        self,
        world: World,
        process: Process,
        clock: SimulatedClock,
        writer: SimulatedWriter,
        lateness_seconds: float | None,
    ) -> None:
        self._world = world
        self._process = process
        self._clock = clock
        self._store = writer
        self._lateness_seconds = lateness_seconds
        self._leases: dict[bytes, Lease] = {}
        self._is_beating = False

    def add(self, lease: Lease) -> None:
        """Starts renewing."""
        self._leases[lease.token] = lease
        if not self._is_beating and self._lateness_seconds is not None:
            self._is_beating = True
            self._world.scheduler.spawn(
                self._beat(self._lateness_seconds),
                self._process,
                f"{self._process.name} heartbeat",
            )

    def remove(self, lease: Lease) -> None:
        """Stops renewing."""
        self._leases.pop(lease.token, None)

    async def _beat(self, lateness_seconds: float) -> None:
        clock = self._clock
        try:
            while self._leases:
                now = clock.monotonic()
                upcoming = next_renewal(self._leases.values(), now)
                if upcoming is None:
                    return
                await clock.sleep(max(0.0, upcoming - now) + lateness_seconds)
                due = due_leases(list(self._leases.values()), clock.monotonic())
                if due:
                    await renew(self._store, due, clock.monotonic, self._world.report)
        finally:
            self._is_beating = False


class SimulatedBackground:
    """Finishes the last write of a cancelled caller, as long as the process lives."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Callable[[str], None]) -> None:
        """Runs the flow as a task of its own."""
        scheduler = self._world.scheduler
        if self._process.is_dead or scheduler.is_over:
            flow.close()
            abandon("the process is gone")
            return
        self._world.saw("outcome written for a cancelled caller")
        scheduler.spawn(flow, self._process, f"{self._process.name} background")
