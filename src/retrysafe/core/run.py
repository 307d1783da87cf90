"""The run of a granted claim: the operation under its lease, and how it ended.

Owns the order from the first instruction of an attempt to its last: the lease is renewed before the
operation starts, and what came of it is durable before anybody hears of it. What a duplicate may be
told afterwards is remembered here. Who may run at all is decided before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from retrysafe.core.atomic.complete_in import JoinedOutcome
from retrysafe.core.attempt import Attempt
from retrysafe.core.cache import ReplayCache
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import ENDING_KINDS, EventKind
from retrysafe.core.flights import Flight, Flights, Phase
from retrysafe.core.handlers import is_refusal
from retrysafe.core.keys.key import Key
from retrysafe.core.lease import Lease
from retrysafe.core.model import (
    ClaimAnswer,
    ClaimRequest,
    Condition,
    Ending,
    Payload,
    State,
)
from retrysafe.core.one_call import is_interruption
from retrysafe.core.ports import Fate, Ports
from retrysafe.core.settings import Settings
from retrysafe.core.settle import Settler, settlement_of
from retrysafe.core.steps.compensation import Compensator, Verdict
from retrysafe.core.steps.run import StepRun
from retrysafe.core.values import codec
from retrysafe.errors import ClaimLost, StoreError


class Runner:
    """Runs operations whose claims were granted."""

    __slots__ = (
        "_cache",
        "_compensator",
        "_flights",
        "_lock",
        "_monotonic",
        "_perform",
        "_ports",
        "_renewals",
        "_report",
        "_run_times",
        "_settings",
        "_settler",
        "_store",
    )

    def __init__(
        self,
        ports: Ports,
        settings: Settings,
        flights: Flights,
        cache: ReplayCache | None,
        settler: Settler,
    ) -> None:
        self._ports = ports
        self._settings = settings
        self._flights = flights
        self._cache = cache
        self._settler = settler
        self._compensator = Compensator(ports, settler)
        self._store = ports.store
        self._renewals = ports.renewals
        self._lock = ports.lock
        self._report = ports.report
        self._monotonic = ports.clock.monotonic
        self._perform = ports.executor.perform
        self._run_times = ports.run_times

    async def run(
        self,
        flight: Flight,
        call: Call,
        operation: Callable[..., Any],
        args: Any,
        kwargs: Any,
        request: ClaimRequest,
        answer: ClaimAnswer,
        asked: float,
    ) -> Answer[Any]:
        """Runs the operation once, and settles how it ended before anybody is told.

        Raises what the operation raises, or why its ending does not stand.
        """
        policy, number = call.policy, answer.attempt
        event_kind = (
            EventKind.TAKEN_OVER if answer.condition is Condition.ABANDONED else EventKind.CLAIMED
        )
        self._report(event_kind, call, number)
        lease = self.begin(flight, call, request, answer, asked)
        # Crashes of the levels around count as if they were this one's.
        count = (
            number
            if (nest := call.nest) is None
            else max(number, nest.crashes + answer.releases + 1)
        )
        if count > 1 and (limit := policy.exhausted_limit(count, answer.releases)):
            # The attempts so far may have died half-way; running again could kill the next worker.
            return await self._exhaust(flight, call, lease, number, limit)
        attempt = Attempt(call, lease, answer, self._ports, self._settings)
        try:
            # Inside the try: a signal right after it must not leave a lease that is renewed for
            # ever, with nobody to run for it.
            self._renewals.add(lease)
            # Only a clean exception is an ending. Cancellation and process exit pass through:
            # nobody knows how far the operation got, so only the lease frees the key.
            try:
                if nest or lease.is_lost(self._monotonic()):
                    # The process stood still since its claim was granted.
                    await attempt.hold()
                value = await self._perform(attempt, operation, args, kwargs)
            except Exception as error:
                if is_interruption(attempt.made, error):
                    # A signal's handler raised it in here, before the operation or after it.
                    raise
                told = await self._failed(flight, call, lease, attempt, error)
                if told is None:
                    raise
                return told
            ended = self._monotonic()
            self._run_times.add(call.operation, ended - asked)
            call.progress.end_operation()
            joined = attempt.joined
            if joined and await self._is_settled(flight, call, joined, number, ended, None):
                return Answer(joined.value, False, number)
            ending, payload = self._settler.payload_of(call, value, number)
            entries = attempt.staged()
            steps = attempt.steps if attempt.is_first else attempt.steps_to_conclude
            if steps is not None:
                verdict = await self._compensator.conclude(
                    steps, lease, ending, payload, value=value, entries=entries
                )
                call = _with_steps(call, steps)
                if verdict is not None:
                    return await self._end_by(verdict, flight, call, lease, number, verdict.error)
            payload = await self._settler.settle(
                call, lease, ending, payload, number, value, entries, came_to=value
            )
            self._remember_ending(call, flight, ending, payload, number, ended, value)
        except BaseException as error:
            self._keep_returned(call, lease, attempt, error)
            raise
        finally:
            lease.is_held = False
            self._renewals.remove(lease)
        return Answer(value, False, number)

    def _keep_returned(
        self, call: Call, lease: Lease, attempt: Attempt, error: BaseException
    ) -> None:
        """Has the outcome stored of an operation that has returned, for a caller who is gone.

        A signal's handler raised in our own frames, or the caller was cancelled where we ask the
        store: the operation is done, and its outcome must not be lost with the caller.
        """
        made = attempt.made
        if made is None or not made.has_returned or lease.is_settled or lease.is_handed_over:
            return
        if is_refusal(error):
            return
        # As far as its caller will ever know.
        call.progress.note(EventKind.COMPLETED)
        orphan = self._settle_returned(call, lease, attempt, made.value)
        self._ports.background.finish(orphan, self._settler.abandoning(call, attempt.number))

    async def _settle_returned(
        self, call: Call, lease: Lease, attempt: Attempt, value: Any
    ) -> None:
        joined, number = attempt.joined, attempt.number
        if joined is not None:
            with suppress(StoreError):  # Nobody can tell; an outcome that stands confirms this one.
                if await joined.fate() is not Fate.UNDONE:
                    return
        ending, payload = self._settler.payload_of(call, value, number)
        entries, steps = attempt.staged(), attempt.steps_to_conclude
        if steps is None:
            settlement = settlement_of(call, lease, ending, payload, entries, value)
            await self._settler.settle_orphans(call, lease, settlement, number)
        else:
            await self._compensator.conclude_orphan(steps, lease, ending, payload, None, entries)

    def begin(
        self,
        flight: Flight,
        call: Call,
        request: ClaimRequest,
        answer: ClaimAnswer,
        asked: float,
    ) -> Lease:
        """The lease of a granted claim, under which the flight goes on as running."""
        flight.lease = lease = Lease(
            key=call.key,
            token=request.token,
            lease_ms=call.policy.lease_ms,
            remaining_ms=answer.remaining_ms,
            ends_at_ms=answer.lease_ends_at_ms,
            asked_monotonic=asked,
            run_limit_seconds=call.policy.run_limit_seconds,
        )
        flight.began_monotonic = asked
        flight.trace = call.progress.trace
        # The owner that was in the way is gone: followers must not be told of it any more.
        flight.conflict_ends_monotonic = None
        self._flights.enter(flight, Phase.RUNNING)
        return lease

    async def _failed(
        self, flight: Flight, call: Call, lease: Lease, attempt: Attempt, error: Exception
    ) -> Answer[Any] | None:
        """Settles an operation that raised; None when its caller is to hear of that very error."""
        if isinstance(error, ClaimLost) and attempt.is_lost:
            # The operation stopped because it may no longer own the key, so it has no say in how
            # the key's run ended.
            return None
        asked, number = self._monotonic(), attempt.number
        self._run_times.add(call.operation, flight.seconds_run(asked))
        call.progress.end_operation()
        joined = attempt.joined
        if joined and await self._is_settled(flight, call, joined, number, asked, error):
            return None
        steps = attempt.steps_to_conclude
        if steps is not None:
            verdict = await self._compensator.conclude(
                steps, lease, *self._settler.judged(call, error), error=error
            )
            call = _with_steps(call, steps)
            if verdict is not None:
                return await self._end_by(verdict, flight, call, lease, number, error)
        ending, payload = await self._settler.settle_error(call, lease, error, number)
        self._remember_ending(call, flight, ending, payload, number, asked, error)
        return None

    async def _end_by(
        self,
        verdict: Verdict,
        flight: Flight,
        call: Call,
        lease: Lease,
        attempt: int,
        error: Exception | None,
    ) -> Answer[Any]:
        """Settles what the steps say of the ending, and tells the caller that."""
        asked = self._monotonic()
        ending, payload = await self._settler.settle_judged(
            call, lease, verdict.ending, verdict.payload, attempt, error
        )
        self._remember_ending(call, flight, ending, payload, attempt, asked, error)
        return Answer(verdict.told(call), False, attempt)

    async def _is_settled(
        self,
        flight: Flight,
        call: Call,
        joined: JoinedOutcome,
        attempt: int,
        asked: float,
        error: Exception | None,
    ) -> bool:
        """Whether the user's transaction settles the attempt, so that nothing is left to write."""
        # Nobody may ever hear whether it stands.
        call.progress.note(ENDING_KINDS[joined.kind])
        try:
            fate = await joined.fate()
        except StoreError:
            # Nobody can tell now. A value is settled as usual: an outcome that stands confirms
            # it. An exception must not free a key whose business write may have been committed.
            return error is not None
        if fate is Fate.STANDS:
            assert flight.lease is not None  # It is the flight of a run.
            flight.lease.is_settled = True
            self._report(ENDING_KINDS[joined.kind], call, attempt)
            self.remember(call, flight, joined.payload, attempt, asked, call.policy.active_ms)
        # While it is open, the record is locked by it and only its commit or its rollback decides;
        # writing here would wait for a caller who waits for us.
        return fate is not Fate.UNDONE

    async def _exhaust(
        self, flight: Flight, call: Call, lease: Lease, attempt: int, limit: str
    ) -> Answer[Any]:
        """Settles the record as failed for good, and raises that failure."""
        asked = self._monotonic()
        ending = await self._last_failure(call.key)
        # Before the write, which a cancelled caller does not see the end of.
        self._report(EventKind.EXHAUSTED, call, attempt, ending)
        payload = await self._settler.settle(
            call,
            lease,
            Ending.FAILED,
            codec.exhausted(limit, getattr(call.policy, limit), ending),
            attempt,
        )
        self._remember_ending(call, flight, Ending.FAILED, payload, attempt, asked, None)
        raise codec.decode_failure(payload, (), call.key.text)

    async def _last_failure(self, key: Key) -> str:
        """The last failure that an attempt has left in the store, in words."""
        try:
            last = await self._store.last_outcome(key)
        except Exception as error:
            # Only words are at stake. The key must be given up whatever the store says here, else
            # its next claim would come for one more attempt.
            return f"the last failure could not be read: {codec.message_of(error)}"
        # A failure for good that an operator has taken back is none of these attempts.
        if last is None or last.state is not State.RELEASED:
            return "none of them left an error in the store"
        told = codec.freed_by(last.payload)
        return f"the last failure that was stored, of attempt {last.attempt}: {told}"

    # What duplicates may be told.

    def _remember_ending(
        self,
        call: Call,
        flight: Flight,
        ending: Ending,
        payload: Payload,
        attempt: int,
        asked: float,
        came_to: Any,
    ) -> None:
        if ending is Ending.RELEASED:
            flight.share(payload, attempt, is_released=True)
        else:
            # As `settlement_of` has it, whichever way the ending came here.
            is_kept = (
                ending is Ending.SUCCEEDED
                or call.nothing_happened is None
                or not call.nothing_happened(came_to)
            )
            active_ms = call.policy.active_ms if is_kept else 0
            self.remember(call, flight, payload, attempt, asked, active_ms)

    def remember(
        self,
        call: Call,
        flight: Flight,
        payload: Payload,
        attempt: int,
        asked: float,
        remaining_ms: int,
    ) -> None:
        """Hands an outcome to those who wait for it, and keeps it for those who come soon.

        Not one after which nothing happened, which comes with no time left: a corrected request may
        take its place at any moment, in any process, and from then on it is not replayed any more.
        """
        flight.payload, flight.attempt, flight.is_released = payload, attempt, False
        cache = self._cache
        if cache is None:
            return
        with self._lock:
            cache.keep(call.key.digest, call, payload, attempt, asked, remaining_ms, flight.trace)


def _with_steps(call: Call, steps: StepRun) -> Call:
    """The call for the ending of these steps.

    A step that ran has happened, also when it could not be stored and the operation went on: no
    store knows of it, so a corrected request would run it once more. So may have one that timed out
    or was cancelled, whatever the operation came to after that.
    """
    if call.nothing_happened is None or not (steps.has_unrecorded or steps.has_uncertain):
        return call
    return replace(call, nothing_happened=None)
