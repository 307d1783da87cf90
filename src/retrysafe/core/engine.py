"""The engine: who runs, who waits, who is told what. One code for sync and async.

Owns the admission of a call: the claim is durable before the operation starts, and a duplicate
leaves as a replay, a wait, a conflict or a mismatch. It must not know stores, threads or event
loops; it speaks to ports. Every decision about a record is the store's, by the store's clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from retrysafe.core.atomic.run import AtomicRunner, Transacting
from retrysafe.core.cache import ReplayCache
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import EventKind, trace_of
from retrysafe.core.flights import Flight, Flights, Phase, is_same_request
from retrysafe.core.keys.key import Key
from retrysafe.core.model import ClaimAnswer, ClaimRequest, Decision, Payload
from retrysafe.core.nested_claims import NestedRunner
from retrysafe.core.policy import InFlight
from retrysafe.core.ports import Ports
from retrysafe.core.refusals import Refusals
from retrysafe.core.replay import gone, replayed_value
from retrysafe.core.retries import Retries
from retrysafe.core.run import Runner
from retrysafe.core.settings import Settings
from retrysafe.core.settle import Settler
from retrysafe.errors import (
    ClaimLost,
    OperationFailed,
    StoreUnavailable,
)

# A claim whose answer was lost is asked for again with the same token, which is harmless. Three
# tries ride out a dropped connection; a store that is down is reported quickly. One that only takes
# no writes is asked for longer, see `Retries`.
CLAIM_TRIES: Final = 3
# A process that stands still now and then gets its turn; a store that is always slower than the
# lease is reported instead of being asked for ever.
LATE_ANSWERS_LIMIT: Final = 10
# A foreign owner is polled quickly at first, because most operations are short.
POLL_SECONDS: Final = 0.02
POLL_MAXIMUM_SECONDS: Final = 0.5
POLL_GROWTH: Final = 1.5

_BUSY: Final = frozenset({Phase.RUNNING, Phase.AWAITING})
_GRANTED: Final = frozenset({Decision.ADMIT, Decision.TAKE_OVER, Decision.CONFIRM})

Claim = Callable[[ClaimRequest], Awaitable[ClaimAnswer]]


class Engine:
    """Runs operations once, over ports."""

    def __init__(self, ports: Ports, settings: Settings) -> None:
        self._store = ports.store
        self._writer = ports.writer
        self._clock = ports.clock
        self._monotonic = ports.clock.monotonic
        self._lock = ports.lock
        self._who = ports.executor.who
        self._mint_token = ports.mint_token
        self._report = ports.report
        self._owner = ports.owner
        self._refusals = Refusals(ports)
        self._cache = cache = ReplayCache() if settings.has_cache else None
        self._flights = flights = Flights(ports.lock)
        settler = Settler(ports)
        self._runner = runner = Runner(ports, settings, flights, cache, settler)
        self._nested_runner = NestedRunner(ports, runner, self.answer)
        self._atomic_runner = AtomicRunner(ports, settings, flights, runner, settler)

    def answer(
        self,
        call: Call,
        operation: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        transacting: Transacting | None = None,
    ) -> Coroutine[Any, Any, Answer[Any]]:
        """The outcome of the key's one run, from this call or from an earlier one.

        The operation is performed with its arguments as the port for that does it. With
        `transacting` it gets an `AtomicAttempt` alone, and its claim and its outcome are written in
        the transaction that is opened for it.

        Raises `KeyReused`, `OperationInFlight`, the stored failure, `OutcomeUnavailable`,
        `ClaimLost`, `OutcomeNotStored` or `StoreUnavailable`, and what the operation raises.
        """
        if self._report.hears_calls:
            return self._followed(call, operation, args, kwargs, transacting)
        return self._answer(call, operation, args, kwargs, transacting)

    async def _followed(
        self,
        call: Call,
        operation: Callable[..., Any],
        args: Any,
        kwargs: Any,
        transacting: Transacting | None,
    ) -> Answer[Any]:
        """The same, with a first and a last event; a level of a nested call has neither."""
        report = self._report
        if not report.begins(call, self._monotonic):
            return await self._answer(call, operation, args, kwargs, transacting)
        report.tell_begin(call)
        try:
            answer = await self._answer(call, operation, args, kwargs, transacting)
        except BaseException as error:
            report.leave(call, error)
            raise
        report.end(call)
        return answer

    async def _answer(
        self,
        call: Call,
        operation: Callable[..., Any],
        args: Any,
        kwargs: Any,
        transacting: Transacting | None,
    ) -> Answer[Any]:
        # A level inside of another is claimed with it, whatever is remembered of its key.
        if call.nest is None or not call.nest.held:
            remembered = self.recall(call)
            if remembered is not None:
                return remembered
        asked = self._monotonic()
        wait_until: float | None = None
        if call.policy.in_flight is InFlight.WAIT:
            wait_until = asked + call.policy.wait_seconds
        digest = call.key.digest
        while True:
            mine = Flight(call.fingerprints, call.operation, self._who())
            try:
                flight = self._flights.join(digest, mine, asked)
                if flight is mine:
                    if transacting is not None:
                        return await self._atomic_runner.lead(flight, call, operation, transacting)
                    return await self._lead(
                        flight, call, operation, args, kwargs, asked, wait_until
                    )
            finally:
                # By itself, as decision 31 has it: a flight that nobody lands would refuse every
                # later caller of the key, or let them wait for ever.
                mine.phase = Phase.LANDED
                self._flights.land(digest, mine)
            try:
                answer = await self._follow(flight, call, wait_until, mine)
            finally:
                if call.waiters is not None:
                    call.waiters.leave(mine)
            if answer is not None:
                return answer
            asked = self._monotonic()

    def recall(self, call: Call) -> Answer[Any] | None:
        """The answer when this process remembers it; None when the store must be asked.

        Raises `KeyReused`, the stored failure or `OutcomeUnavailable`.
        """
        if self._cache is None:
            return None
        # One look-up of a dictionary is atomic, so a miss takes no lock.
        cached = self._cache.find(call.key.digest, self._monotonic())
        if cached is None:
            return None
        self._refusals.check_same(call, cached, "process")
        with self._lock:
            self._cache.move(call.key.digest)
        return self._replay(call, cached.payload, cached.attempt, "process", cached.trace)

    def is_in_flight(self, call: Call) -> bool:
        """Whether the key's operation is known to run, so that no store need be asked of it.

        Here, or elsewhere while somebody here waits for it.
        """
        return self._flights.phase(call.key.digest) in _BUSY

    def is_claiming(self, call: Call) -> bool:
        """Whether this process asks for the key, and the store has not said anything yet."""
        return self._flights.phase(call.key.digest) is Phase.CLAIMING

    def forget(self, key: Key) -> None:
        """Drops what the process remembers of a key, after an operator changed it."""
        self._flights.revoke(key.digest)
        if self._cache is not None:
            with self._lock:
                self._cache.forget(key.digest)

    @property
    def flights_count(self) -> int:
        """How many keys this process is busy with."""
        return len(self._flights)

    # Admission: the leader asks the store.

    async def _lead(
        self,
        flight: Flight,
        call: Call,
        operation: Callable[..., Any],
        args: Any,
        kwargs: Any,
        asked: float,
        wait_until: float | None,
    ) -> Answer[Any]:
        """Claims the key, and runs the operation under the claim; raises as `answer` does."""
        request = ClaimRequest(
            key=call.key,
            fingerprints=call.fingerprints,
            token=self._mint_token(),
            lease_ms=call.policy.lease_ms,
            operation=call.operation,
            owner=call.progress.owner(self._owner),
            arguments=call.arguments,
            takes_corrections=call.nothing_happened is not None,
        )
        claim: Claim = self._writer.claim
        if call.recovers is not None:
            # A worker claims from the owner of that token, and from nobody else.
            claim = partial(self._store.take_over, held=call.recovers)
        try:
            told = await claim(request)
        except StoreUnavailable as error:
            told = await self._claim_again(flight, call, request, claim, error)
        call.progress.end_claim(asked)
        # Nothing starts on a claim whose lease has run out, see `_contend`.
        if told.decision is not Decision.ADMIT or self._is_late(told, asked):
            try:
                granted = await self._contend(flight, call, request, claim, told, asked, wait_until)
            finally:
                if call.waiters is not None:
                    call.waiters.leave(flight)
            if isinstance(granted, Answer):
                return granted
            told, asked = granted
        if call.nest is not None:
            call.nest.token = request.token
        run = self._runner.run if call.inner is None else self._nested_runner.run
        return await run(flight, call, operation, args, kwargs, request, told, asked)

    def _is_late(self, granted: ClaimAnswer, asked: float) -> bool:
        return self._monotonic() >= asked + granted.remaining_ms / 1000

    async def _contend(
        self,
        flight: Flight,
        call: Call,
        request: ClaimRequest,
        claim: Claim,
        answer: ClaimAnswer,
        asked: float,
        wait_until: float | None,
    ) -> Answer[Any] | tuple[ClaimAnswer, float]:
        """Goes on from a first answer that let nothing start: a replay, or a grant in the end."""
        poll_seconds = POLL_SECONDS
        late_answers = 0
        while True:
            decision = answer.decision
            if decision in _GRANTED:
                if not self._is_late(answer, asked):
                    return answer, asked
                # The process stood still until the lease was over. Somebody else may run by now,
                # so nothing starts on this claim; the store is asked anew.
                late_answers += 1
                if late_answers == LATE_ANSWERS_LIMIT:
                    raise StoreUnavailable(
                        f"the store grants claims later than their lease of {call.policy.lease} "
                        "lasts: nothing was run",
                        key=call.key.text,
                    )
            elif decision is Decision.REPLAY:
                return self._replay_stored(flight, call, answer, asked)
            elif decision is Decision.MISMATCH:
                flight.first_operation = answer.operation
                raise self._refusals.reused(call, answer.operation, "store")
            elif decision is Decision.LOST:
                raise ClaimLost(
                    f"somebody else went on with {call.key.text!r}, or stopped it: nothing was run",
                    key=call.key.text,
                )
            else:
                flight.conflict_ends_monotonic = asked + answer.remaining_ms / 1000
                flight.began_monotonic = asked - answer.elapsed_ms / 1000
                flight.is_locked = answer.is_locked
                now = self._monotonic()
                if wait_until is None or now >= wait_until:
                    raise self._refusals.in_flight(
                        call, flight, "store", has_waited=wait_until is not None
                    )
                if call.waiters is not None and not call.waiters.enter(flight):
                    raise self._refusals.in_flight(call, flight, "store")
                self._flights.enter(flight, Phase.AWAITING)
                call.progress.begin_wait()
                # The lease may end before the next poll is due; asking just after it is soonest.
                lease_seconds = answer.remaining_ms / 1000 + 0.001
                await self._clock.sleep(min(poll_seconds, lease_seconds, wait_until - now))
                poll_seconds = min(poll_seconds * POLL_GROWTH, POLL_MAXIMUM_SECONDS)
            asked = self._monotonic()
            try:
                answer = await claim(request)
            except StoreUnavailable as error:
                answer = await self._claim_again(flight, call, request, claim, error)

    async def _claim_again(
        self,
        flight: Flight,
        call: Call,
        request: ClaimRequest,
        claim: Claim,
        error: StoreUnavailable,
    ) -> ClaimAnswer:
        """Asks again when the answer was lost: the token tells whose claim it was."""
        retries = Retries(CLAIM_TRIES, self._monotonic)
        while True:
            self._report(EventKind.STORE_UNAVAILABLE, call, detail=str(error))
            pause = retries.pause_after(error)
            if pause is None:
                break
            await self._clock.sleep(pause)
            try:
                return await claim(request)
            except StoreUnavailable as again:
                error = again
        flight.outage = str(error)
        if flight.conflict_ends_monotonic is not None:
            # Else a service that fails open would run what is known to be running.
            error.is_in_flight = True
        raise error

    def _replay_stored(
        self, flight: Flight, call: Call, answer: ClaimAnswer, asked: float
    ) -> Answer[Any]:
        payload, flight.trace = answer.payload, trace_of(answer.owner)
        flight.active_ms = answer.remaining_ms
        if call.nest is not None:
            call.nest.is_replay, call.nest.active_ms = True, flight.active_ms
        if payload is None:
            self._report(EventKind.REPLAYED, call, answer.attempt)
            raise gone(call, answer.state)
        kept_ms = 0 if answer.nothing_happened else answer.remaining_ms
        self._runner.remember(call, flight, payload, answer.attempt, asked, kept_ms)
        if self._cache is not None:
            with self._lock:
                self._cache.move(call.key.digest)
        return self._replay(call, payload, answer.attempt, "store", flight.trace)

    # Admission: a follower waits for its leader's news.

    async def _follow(
        self, flight: Flight, call: Call, wait_until: float | None, waiter: object
    ) -> Answer[Any] | None:
        """What the flight gives this caller; None when it must ask for itself."""
        while True:
            phase = flight.phase
            if phase is not Phase.CLAIMING and phase is not Phase.LANDED:
                self._refusals.check_same(call, flight, "process")
                if (
                    wait_until is None
                    or self._refusals.is_inside(call)
                    or not (call.waiters is None or call.waiters.enter(waiter))
                ):
                    raise self._refusals.in_flight(call, flight, "process")
            if phase is Phase.LANDED:
                return self._disembark(flight, call, wait_until)
            if (
                phase is Phase.CLAIMING
                and flight.leader is not None
                and flight.leader == self._who()
            ):
                # A signal's handler that came in the middle of the claim: news come only from the
                # caller that it keeps from going on.
                raise self._refusals.in_flight(call, flight, "process")
            signal = self._clock.signal()
            if not self._flights.enlist(flight, phase, signal):
                continue
            if phase is not Phase.CLAIMING:
                call.progress.begin_wait()
            # Looked at now and then: signals may have kept the leader from telling, and past the
            # lease it may be taken away.
            while flight.phase is phase and not await signal.wait(self._patience(wait_until)):
                now = self._monotonic()
                if flight.lease is not None and flight.lease.is_given_up(now):
                    return None  # This caller may take over as any other may.
                if flight.phase is phase and wait_until is not None and now >= wait_until:
                    raise self._refusals.in_flight(call, flight, "process", has_waited=True)

    def _patience(self, wait_until: float | None) -> float:
        """How long a follower waits for news before it looks by itself."""
        left = POLL_MAXIMUM_SECONDS if wait_until is None else wait_until - self._monotonic()
        return min(POLL_MAXIMUM_SECONDS, max(0.0, left))

    def _disembark(
        self, flight: Flight, call: Call, wait_until: float | None
    ) -> Answer[Any] | None:
        if flight.outage is not None:
            # Else the followers would try the silent store one after the other, and the last of
            # a thousand would hear of the outage minutes later.
            error = StoreUnavailable(flight.outage, key=call.key.text)
            error.is_in_flight = flight.conflict_ends_monotonic is not None
            raise error
        is_same = is_same_request(call, flight)
        if flight.payload is not None and not (flight.is_released and wait_until is None):
            if not is_same:
                if call.nothing_happened is not None:
                    return None  # Whether it may be a corrected request, the store knows.
                raise self._refusals.reused(call, flight.operation, "process")
            if call.nest is not None:
                call.nest.is_replay, call.nest.active_ms = True, flight.active_ms
            try:
                return self._replay(call, flight.payload, flight.attempt, "process", flight.trace)
            except OperationFailed as error:
                error.retryable = flight.is_released
                raise
        if not is_same:
            return None  # What the leader was told does not hold for another request.
        if flight.first_operation is not None:
            raise self._refusals.reused(call, flight.first_operation, "process")
        if flight.conflict_ends_monotonic is not None and wait_until is None:
            raise self._refusals.in_flight(call, flight, "process")
        return None

    # Replays.

    def _replay(
        self, call: Call, payload: Payload, attempt: int, source: str, trace: str
    ) -> Answer[Any]:
        call.progress.replays(trace)
        self._report(EventKind.REPLAYED, call, attempt, source=source)
        return Answer(replayed_value(call, payload), True, attempt)
