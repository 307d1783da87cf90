"""The ending of an operation that has steps: is it complete, and what has to be undone first.

Owns the order of an operation's failure: that it failed is durable before the first step is taken
back, every step that was taken back is remembered, and only then is the failure settled. A crash in
between leaves a key whose next attempt goes on undoing and starts nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrysafe.core.call import Call
from retrysafe.core.events import EventKind
from retrysafe.core.handlers import is_of_handler, is_refusal
from retrysafe.core.lease import Lease
from retrysafe.core.model import Ending, Payload, StagedEntry, Step
from retrysafe.core.one_call import is_interruption
from retrysafe.core.ports import Ports
from retrysafe.core.replay import replayed_value
from retrysafe.core.settle import Settler
from retrysafe.core.steps.history import FAILURE_NAME, UNDO_PREFIX
from retrysafe.core.steps.run import StepRun
from retrysafe.core.steps.taken import undoing
from retrysafe.core.values import codec
from retrysafe.errors import (
    ClaimLost,
    CompensationFailed,
    InvalidInput,
    OutcomeNotStored,
    RetrysafeError,
    StepNotStored,
    StoreError,
)

_DONE = Payload(codec.JSON, b"", b"null")


@dataclass(slots=True)
class Verdict:
    """How an operation with steps ends, where that is not what the operation itself said."""

    ending: Ending
    payload: Payload
    # What the caller is told; None when the payload says it.
    error: Exception | None = None

    def told(self, call: Call) -> Any:
        """The value for the caller, or its exception."""
        if self.error is not None:
            raise self.error
        return replayed_value(call, self.payload)


class _LeftToLease(Exception):
    """Somebody else goes on with this ending, once the lease is over."""


class Compensator:
    """Brings the ending of an operation and its steps together, before it is settled."""

    __slots__ = ("_background", "_renewals", "_settler")

    def __init__(self, ports: Ports, settler: Settler) -> None:
        self._settler = settler
        self._background = ports.background
        self._renewals = ports.renewals

    async def conclude(
        self,
        run: StepRun,
        lease: Lease,
        ending: Ending,
        payload: Payload,
        *,
        error: Exception | None = None,
        value: Any = None,
        entries: tuple[StagedEntry, ...] = (),
    ) -> Verdict | None:
        """What has to be settled instead of this ending; None when it stands as it is.

        When it returns, a failure for good has been undone. Raises `ClaimLost`, or
        `OutcomeNotStored` when the store could not be asked or told; `StepNotStored` when that is
        what the operation raised, and the step still cannot be stored.
        """
        try:
            return await _told(run, ending, payload, error, value, is_orphan=False)
        except BaseException as problem:
            if not is_refusal(problem):
                # The caller is being cancelled, and the operation is done: its outcome must not be
                # lost with the caller.
                lease.is_handed_over = True
                orphan = self.conclude_orphan(run, lease, ending, payload, error, entries)
                told = self._settler.abandoning(run.call, run.attempt_number)
                self._background.finish(orphan, told)
            raise

    async def conclude_orphan(
        self,
        run: StepRun,
        lease: Lease,
        ending: Ending,
        payload: Payload,
        error: Exception | None,
        entries: tuple[StagedEntry, ...],
    ) -> None:
        """The same for an ending whose caller is gone; there is nobody left to tell.

        It calls nothing of the user's: what must be undone is left to the next attempt.
        """
        call, number = run.call, run.attempt_number
        leases = (lease,) if call.nest is None else (lease, *call.nest.held)
        try:
            # Until the ending is written, as `Settler` does it for those without steps.
            for each in leases:
                each.is_held = True
                self._renewals.add(each)
            verdict = await _told(run, ending, payload, error, None, is_orphan=True)
            if verdict is not None:
                # Not what the operation said, so what it wanted to send is not sent.
                ending, payload, entries = verdict.ending, verdict.payload, ()
            if self._settler.is_postponed(call, ending, number, error):
                return
            payload = await self._settler.settle(
                call, lease, ending, payload, number, entries=entries
            )
            await self._settler.settle_around(call, lease, ending, payload, number)
        except (_LeftToLease, RetrysafeError):
            return  # Reported where it was raised.
        finally:
            for each in leases:
                each.is_held = False
            for each in leases:
                self._renewals.remove(each)


async def _told(
    run: StepRun,
    ending: Ending,
    payload: Payload,
    error: Exception | None,
    value: Any,
    *,
    is_orphan: bool,
) -> Verdict | None:
    """The conclusion, with what stands in its way in the words for the caller."""
    try:
        # Nothing may be settled, and nothing undone, while a step is under way.
        await run.end()
        return await _conclude(run, ending, payload, error, is_orphan=is_orphan)
    except ClaimLost as lost:
        raise lost from error
    except (StoreError, StepNotStored, InvalidInput) as problem:
        if is_of_handler(problem):
            raise
        run.writer.tell(EventKind.SETTLE_FAILED, str(problem))
        if isinstance(error, StepNotStored) and isinstance(problem, StepNotStored):
            # It says the same, and it has the step's result.
            raise error from error.__cause__
        text = run.call.key.text
        raise OutcomeNotStored(
            f"the operation for {text!r} ran, but its ending could not be stored: {problem}. The "
            "key is blocked until its lease ends; a retry after that goes on from the last step",
            key=text,
            value=value,
        ) from (error or problem)


async def _conclude(
    run: StepRun, ending: Ending, payload: Payload, error: Exception | None, *, is_orphan: bool
) -> Verdict | None:
    book = run.book
    if run.joined is not None:
        await run.joined.look_after()
    if error is not None and run.is_terminal(error):
        ending = Ending.FAILED
    if ending is Ending.RELEASED and book.failure is None:
        await run.record_the_rest()
        return None
    await run.load()
    missing = book.missing()
    if book.failure is not None:
        if is_orphan:
            raise _LeftToLease
        return await _go_on_undoing(run, book.failure, missing, error)
    if ending is Ending.SUCCEEDED:
        if not missing:
            return None
        await run.record_the_rest()
        error = book.changed(missing)
        ending = run.call.policy.judge(error)
        payload = codec.encode_failure(error, run.call.policy.outcome_limit_bytes)
    if ending is Ending.FAILED and book.undos:
        # A crash while undoing leaves it to an attempt that knows the recorded steps only.
        await run.record_the_rest()
        await run.writer.record(Step(FAILURE_NAME, book.next_position(), payload))
        if is_orphan:
            raise _LeftToLease
        failed = await _undo_all(run, error)
        if failed is not None:
            return _released(run, failed)
    return Verdict(ending, payload, error) if error is not None else None


async def _go_on_undoing(
    run: StepRun, failure: Payload, missing: list[str], error: Exception | None
) -> Verdict:
    """Ends what an earlier attempt began; the failure that it remembered is the outcome."""
    if missing:
        # The code did not come as far as before, so nobody knows how to undo the rest.
        return _released(run, error or run.book.changed(missing))
    failed = await _undo_all(run, error)
    if failed is not None:
        return _released(run, failed)
    return Verdict(Ending.FAILED, failure)


def _released(run: StepRun, error: Exception) -> Verdict:
    payload = codec.encode_failure(error, run.call.policy.outcome_limit_bytes)
    return Verdict(Ending.RELEASED, payload, error)


async def _undo_all(run: StepRun, error: Exception | None) -> CompensationFailed | None:
    """Takes the finished steps back, the last one first; what stops it, if something does."""
    book = run.book
    position = book.next_position()
    for undo in reversed(book.undos.values()):
        position += 1
        name = f"{UNDO_PREFIX}{undo.name}"
        if book.is_recorded(name):
            continue
        taken = undoing(name, undo.call, undo.value, undo.retry)
        try:
            if undo.error is not None:
                raise undo.error
            await run.perform(taken)
        except ClaimLost:
            raise
        except Exception as problem:
            if is_interruption(taken.made, problem):
                if taken.has_returned:
                    # A signal's handler raised after it: it is done, and must not be done again.
                    await run.writer.record(Step(name, position, _DONE))
                raise
            text = run.call.key.text
            failed = CompensationFailed(
                f"{text!r} failed for good, and step {undo.name!r} could not be undone: "
                f"{codec.message_of(problem)}. A later attempt goes on undoing",
                key=text,
            )
            # The compensation's own problem is what has to be mended; it names the failure too.
            problem.__context__ = problem.__context__ or error
            failed.__cause__ = problem
            return failed
        await run.writer.record(Step(name, position, _DONE))
    return None
