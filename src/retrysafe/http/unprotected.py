"""Runs without a claim, of a service that fails open: one at a time for each key of this process.

Owns what this process knows of such runs: which are under way, and what the last ones came to. No
store can tell, so it is all that keeps a key from running beside itself, and a retry from running
again, while the store is down. Runs with a claim are noted here for as long as they last, because a
store that goes down or comes back lets both kinds of one key begin at the same time. Other
processes know nothing of it. Everything is bounded: in number, in bytes and in time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from retrysafe.core.call import Answer, Call
from retrysafe.core.events import EventKind, Reporter
from retrysafe.core.flights import is_same_request
from retrysafe.core.model import Ending, Fingerprint, Payload
from retrysafe.core.replay import in_flight, replayed_value, reused
from retrysafe.core.run_times import MINIMUM_SECONDS, RunTimes
from retrysafe.core.values import codec
from retrysafe.errors import OperationInFlight, OutcomeNotStored, StoreError, StoreUnavailable
from retrysafe.http.breaker import Breaker

# More keys than a process runs and ends while a store is down for minutes.
RUNS_LIMIT: Final = 10_000
BYTES_LIMIT: Final = 32 * 1024 * 1024
# Counted from the last silence of the store, so for as long as the outage lasts and then some. The
# store knows nothing of these runs: a retry that comes later runs again.
KEPT_SECONDS: Final = 600.0

Invoke = Callable[[None], Awaitable[Any]]
Recall = Callable[[Call], Answer[Any] | None]


@dataclass(slots=True)
class _Run:
    """One key: what was asked for, and what became of it."""

    fingerprints: tuple[Fingerprint, ...]
    operation: str
    began_monotonic: float
    lease_seconds: float
    # None while it runs, and when it was cut off.
    payload: Payload | None = None
    # When it ended, well or not; None while it runs.
    ended_monotonic: float | None = None
    # Whether the store knows of it, and says when its key is free.
    has_claim: bool = False


class UnprotectedRuns:
    """The runs of one application without a claim, in one process; for threads and for tasks."""

    __slots__ = ("_breaker", "_bytes", "_claimed", "_lock", "_monotonic", "ended", "running")

    def __init__(self, breaker: Breaker, monotonic: Callable[[], float]) -> None:
        self._breaker = breaker
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._bytes = 0
        # By the digest of the key: runs without a claim, and what has ended, the oldest first.
        self.running: dict[bytes, _Run] = {}
        self.ended: OrderedDict[bytes, _Run] = OrderedDict()
        # Runs with a claim, each with the call that it answers.
        self._claimed: dict[bytes, tuple[Call, _Run]] = {}

    def recall(self, call: Call, report: Reporter, run_times: RunTimes) -> Answer[Any] | None:
        """What this process knows of the key; None when nothing, or no longer.

        Raises `OperationInFlight`, `KeyReused`, the failure or `OutcomeUnavailable`.
        """
        if not self.running and not self.ended:
            return None
        with self._lock:
            run = self._without_claim(call.key.digest)
        return None if run is None else self._answer(run, call, report, run_times)

    async def answer(
        self, call: Call, invoke: Invoke, recall: Recall, report: Reporter, run_times: RunTimes
    ) -> Answer[Any]:
        """Runs it without a claim, unless it runs or has run here; raises what the run raises.

        `recall` says what the process remembers of runs with a claim. Also raises as it does and as
        the method of that name does, and `StoreUnavailable` when there is no room to note the run.
        """
        digest = call.key.digest
        run = self._run_of(call)
        with self._lock:
            # Looked up and noted in one piece, else two could both be the first. A run with a claim
            # counts here: that it has begun may not have been known when the store was asked.
            claimed = self._claimed.get(digest)
            known = self._known(digest) if claimed is None else claimed[1]
            if known is None:
                self._make_room(call)
                self.running[digest] = run
        if known is not None:
            return self._answer(known, call, report, run_times)
        try:
            # Once more: a run with a claim may have ended since this was looked at before.
            remembered = recall(call)
        except BaseException:
            self._withdraw(digest, run)
            raise
        if remembered is not None:
            self._withdraw(digest, run)
            return remembered
        try:
            report(EventKind.UNPROTECTED, call)
            value = await invoke(None)
        except Exception as error:
            ending = call.policy.judge(error)
            self._end(call, run, ending, codec.encode_failure(error, _limit_of(call)))
            raise
        except BaseException:
            # Cancelled or interrupted: nobody knows how far it got, so it is left alone for as long
            # as a lease would leave it.
            self._cut_off(digest, run)
            raise
        run_times.add(call.operation, self._monotonic() - run.began_monotonic)
        self._end(call, run, *_outcome(call, value))
        return Answer(value, False, 1)

    # Runs with a claim.

    def begin_claimed(self, call: Call, run_times: RunTimes) -> None:
        """Notes that a run with a claim is about to begin; `end_claimed` follows in any case.

        Raises `OperationInFlight` when the key runs or has run here without one, which the store
        that granted the claim cannot know. The refusal frees the key: nothing was run. The retry is
        then answered by `recall`.
        """
        digest = call.key.digest
        run = self._run_of(call)
        run.has_claim = True
        with self._lock:
            known = self._without_claim(digest)
            if known is None:
                # Of two runs with a claim the store says whose it is: it has granted this one.
                self._claimed[digest] = call, run
                return
        if known.ended_monotonic is None:
            refusal = self._in_flight(known, call, run_times)
        else:
            message = f"{call.key.text!r} has just ended in this process, without a claim"
            refusal = in_flight(call, message, MINIMUM_SECONDS)
        refusal.has_record = False
        raise refusal

    def end_claimed(self, call: Call, error: BaseException | None) -> None:
        """Forgets a run with a claim, unless no store took what it came to; once it was answered.

        Harmless for a call that never began. `error` is what its answer raised.
        """
        digest = call.key.digest
        claimed = self._claimed.get(digest)
        if claimed is None or claimed[0] is not call:
            return
        run = claimed[1]
        if isinstance(error, OutcomeNotStored):
            # It has run in this process, and the next retry may come without a claim.
            self._end(call, run, *_unstored(call, error))
        elif error is not None and not isinstance(error, Exception):
            self._cut_off(digest, run)
        with self._lock:
            if self._claimed.get(digest) is claimed:
                del self._claimed[digest]

    # What is known of a key; the lock is held.

    def _known(self, digest: bytes) -> _Run | None:
        """The run of a key, unless its time is over."""
        run = self.running.get(digest)
        if run is not None:
            return run
        run = self.ended.get(digest)
        if run is None or run.ended_monotonic is None:
            return run
        if run.payload is None:
            is_over = self._monotonic() >= run.ended_monotonic + run.lease_seconds
        else:
            kept_from = max(run.ended_monotonic, self._breaker.failed_monotonic)
            is_over = self._monotonic() >= kept_from + KEPT_SECONDS
        if is_over:
            self._forget(digest)
            return None
        return run

    def _without_claim(self, digest: bytes) -> _Run | None:
        """The same without runs whose claim was cut off, of which the store knows better."""
        run = self._known(digest)
        return None if run is not None and run.has_claim and run.payload is None else run

    def _answer(self, run: _Run, call: Call, report: Reporter, run_times: RunTimes) -> Answer[Any]:
        if not is_same_request(call, run):
            report(EventKind.MISMATCHED, call, source="process")
            mismatch = reused(call, run.operation)
            mismatch.is_known_here = True
            raise mismatch
        if run.payload is None:
            report(EventKind.IN_FLIGHT, call, source="process")
            refusal = self._in_flight(run, call, run_times)
            refusal.is_known_here = True
            refusal.has_record = False
            raise refusal
        report(EventKind.REPLAYED, call, source="process")
        return Answer(replayed_value(call, run.payload), True, 1)

    def _in_flight(self, run: _Run, call: Call, run_times: RunTimes) -> OperationInFlight:
        elapsed = self._monotonic() - run.began_monotonic
        how = "with" if run.has_claim else "without"
        return in_flight(
            call,
            f"{call.key.text!r} runs in this process, {how} a claim",
            run_times.retry_after(call.operation, elapsed, run.lease_seconds),
        )

    # How runs end.

    def _run_of(self, call: Call) -> _Run:
        lease_seconds = call.policy.lease.total_seconds()
        return _Run(call.fingerprints, call.operation, self._monotonic(), lease_seconds)

    def _end(self, call: Call, run: _Run, ending: Ending, payload: Payload) -> None:
        """Notes how a run ended: what frees its key is forgotten, anything else is kept."""
        digest = call.key.digest
        with self._lock:
            self._stop(digest, run)
            if ending is Ending.RELEASED:
                return
            run.payload = payload
            self._keep(digest, run)
            self._bytes += payload.size_bytes
            while self._bytes > BYTES_LIMIT and self.ended:
                self._forget_oldest()

    def _cut_off(self, digest: bytes, run: _Run) -> None:
        with self._lock:
            self._stop(digest, run)
            self._keep(digest, run)

    def _keep(self, digest: bytes, run: _Run) -> None:
        """Puts a run behind those that ended before it. The lock is held."""
        if digest in self.ended:
            self._forget(digest)
        run.ended_monotonic = self._monotonic()
        self.ended[digest] = run
        if len(self.running) + len(self.ended) > RUNS_LIMIT:
            self._forget_oldest()

    def _withdraw(self, digest: bytes, run: _Run) -> None:
        """Takes back the note of a run that did not begin."""
        with self._lock:
            self._stop(digest, run)

    def _stop(self, digest: bytes, run: _Run) -> None:
        if self.running.get(digest) is run:
            del self.running[digest]

    def _make_room(self, call: Call) -> None:
        """Forgets what ended first; raises `StoreUnavailable` when all of them still run."""
        if len(self.running) + len(self.ended) < RUNS_LIMIT:
            return
        if not self.ended:
            raise StoreUnavailable(
                f"{RUNS_LIMIT:,} operations run without a claim: nothing was run",
                key=call.key.text,
            )
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._forget(next(iter(self.ended)))

    def _forget(self, digest: bytes) -> None:
        run = self.ended.pop(digest)
        if run.payload is not None:
            self._bytes -= run.payload.size_bytes


def _limit_of(call: Call) -> int:
    return call.policy.outcome_limit_bytes


def _outcome(call: Call, value: Any) -> tuple[Ending, Payload]:
    """How a run ended that returned this value, and what is kept of it, as with a claim."""
    ending = Ending.SUCCEEDED
    try:
        if call.judge is not None:
            ending = Ending(call.judge(value))
        payload = codec.bounded(call.codec.encode(value), _limit_of(call))
    except Exception as error:
        # Whatever is wrong with the value, it has run: it must not run again.
        payload = codec.withheld(codec.message_of(error))
    return ending, payload


def _unstored(call: Call, error: OutcomeNotStored) -> tuple[Ending, Payload]:
    """The same of a run that no store took."""
    cause = error.__cause__
    # Of an operation that raised, its exception is the cause; else the store's silence is.
    if isinstance(cause, Exception) and not isinstance(cause, StoreError):
        return call.policy.judge(cause), codec.encode_failure(cause, _limit_of(call))
    return _outcome(call, error.value)
