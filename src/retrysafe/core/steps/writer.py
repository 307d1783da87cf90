"""Writing steps: a finished step's result becomes durable, or the operation is told what is not.

Owns that write, and what happens to it when its caller is cancelled. The step has
run by now, so nothing here may forget that quietly.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from retrysafe.core.call import Call
from retrysafe.core.events import EventKind
from retrysafe.core.handlers import is_refusal
from retrysafe.core.insist import insist
from retrysafe.core.lease import Lease
from retrysafe.core.model import Decision, Step, StepWrite
from retrysafe.core.ports import Ports
from retrysafe.core.retries import Retries
from retrysafe.errors import ClaimLost, StepNotStored, StoreError, StoreUnavailable

# Nothing has run yet when the stored steps are read, so a store that is down is reported quickly.
READ_TRIES: Final = 3


class StepWriter:
    """Reads and writes the steps of one attempt."""

    __slots__ = (
        "_attempt",
        "_background",
        "_call",
        "_clock",
        "_held",
        "_lease",
        "_report",
        "_store",
        "handed_over",
    )

    def __init__(self, ports: Ports, call: Call, lease: Lease, attempt: int) -> None:
        self._store = ports.store
        self._clock = ports.clock
        self._background = ports.background
        self._report = ports.report
        self._call = call
        self._lease = lease
        self._attempt = attempt
        # The steps that are written in the background, for callers who are gone.
        self.handed_over: set[str] = set()
        # The claims on other keys of the request: each of them has all steps, because a process
        # that knows another secret finds only one of the keys.
        self._held = () if call.nest is None else call.nest.held

    async def read(self) -> dict[str, Step]:
        """What earlier attempts have recorded; raises `ClaimLost` or `StoreUnavailable`."""
        steps = await self._read(self._lease)
        if not self._held:
            return steps
        found = [(self._lease, steps)]
        for lease in self._held:
            others = await self._read(lease)
            found.append((lease, others))
            steps = others | steps
        for lease, known in found:
            for step in steps.values():
                if step.name in known:
                    continue
                if await self._write(self._write_by(lease, step), None) is Decision.LOST:
                    # Its new owner may run what is skipped here.
                    raise self.lost()
        return steps

    async def _read(self, lease: Lease) -> dict[str, Step]:
        retries = Retries(READ_TRIES, self._clock.monotonic)
        while True:
            try:
                stored = await self._store.read(lease.key)
                break
            except StoreUnavailable as error:
                self.tell(EventKind.STORE_UNAVAILABLE, str(error))
                pause = retries.pause_after(error)
                if pause is None:
                    raise
            await self._clock.sleep(pause)
        if stored is None or stored.record.token != lease.token:
            # Whatever is stored now may be the work of the new owner.
            raise self.lost()
        return {step.name: step for step in stored.steps}

    def write_of(self, step: Step) -> StepWrite:
        """The write of a step with the claim's token."""
        return self._write_by(self._lease, step)

    def writes_around(self, step: Step) -> list[StepWrite]:
        """The same under the other keys of the request."""
        return [self._write_by(lease, step) for lease in self._held]

    @staticmethod
    def _write_by(lease: Lease, step: Step) -> StepWrite:
        return StepWrite(lease.key, lease.token, step, lease.lease_ms)

    async def record(self, step: Step, value: Any = None) -> None:
        """Makes a finished step durable; raises `ClaimLost` or `StepNotStored`.

        It is written as well where its caller is cancelled meanwhile.
        """
        try:
            await self.write(step, value)
        except BaseException as error:
            if not is_refusal(error):
                # The caller is being cancelled, and the step has run: its result must not be lost
                # with the caller. Writing it twice is harmless, the first result stands.
                self.handed_over.add(step.name)
                orphan = self._record_orphan(self.write_of(step))
                self._background.finish(orphan, partial(self.abandon, step.name))
            raise

    async def write(self, step: Step, value: Any) -> None:
        """The same for a caller who is looked after elsewhere."""
        decision = await self._insist(self.write_of(step), value)
        # Also when the store has said so before. A copy of the claim that was late may have brought
        # the token back, and what stands now may be a step of the owner in between.
        if decision is Decision.LOST or self._lease.is_revoked:
            raise self.lost()

    async def _insist(self, write: StepWrite, value: Any) -> Decision:
        """Writes under all keys of the request until it stands; LOST where one of them is."""
        for around in self.writes_around(write.step):
            if await self._write(around, value) is Decision.LOST:
                return Decision.LOST
        return await self._write(write, value)

    async def _write(self, write: StepWrite, value: Any) -> Decision:
        """Writes until it stands, within the policy's patience; else `StepNotStored`."""
        try:
            return await self._store.record_step(write)
        except StoreError as error:
            return await insist(
                partial(self._store.record_step, write),
                write.step,
                error,
                patience_seconds=self._call.policy.settle_patience.total_seconds(),
                clock=self._clock,
                tell=self.tell,
                not_stored=partial(self._not_stored, write.step, value),
            )

    async def _record_orphan(self, write: StepWrite) -> None:
        """The same for a step whose caller is gone; there is nobody left to tell."""
        try:
            await self._insist(write, None)
        except StepNotStored:
            return  # The step runs again, as after a crash at this point.

    def abandon(self, name: str, reason: str) -> None:
        """Tells of a step that ran, and that nobody can store any more."""
        self.tell(EventKind.SETTLE_FAILED, f"the result of step {name!r}: {reason}")

    # Words.

    def tell(self, kind: EventKind, detail: str = "", error: str = "") -> None:
        """Reports something about this attempt."""
        call = self._call
        self._report.beside(
            kind, call.key, call.operation, self._attempt, detail, call.progress, error
        )

    def lost(self) -> ClaimLost:
        """The refusal of a step by an owner that has lost its claim."""
        # From now on the attempt knows it too, so it has no say in how the key's run ends.
        self._lease.revoke()
        self.tell(EventKind.LOST)
        text = self._call.key.text
        return ClaimLost(
            f"the claim on {text!r} was taken over, or released by an operator: its steps are "
            "another owner's now",
            key=text,
        )

    def _not_stored(self, step: Step, value: Any, error: StoreError) -> StepNotStored:
        text = self._call.key.text
        return StepNotStored(
            f"step {step.name!r} of {text!r} ran, but its result could not be stored: {error}. A "
            "later attempt runs it again",
            key=text,
            value=value,
        )
