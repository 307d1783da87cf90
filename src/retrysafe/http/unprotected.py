"""Runs without a claim, of a service that fails open: one at a time for each key of this process.

Owns what this process knows of such runs: which are under way, and what the last ones came to. No
store can tell, so it is all that keeps a key from running beside itself, and a retry from running
again, while the store is down. Other processes know nothing of it. Everything is bounded: in
number, in bytes and in time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from retrysafe.core import codec
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import EventKind
from retrysafe.core.flights import is_same_request
from retrysafe.core.keys import Key
from retrysafe.core.model import Ending, Fingerprint, Payload
from retrysafe.core.replaying import in_flight, replayed_value, reused
from retrysafe.core.run_times import RunTimes
from retrysafe.errors import OutcomeNotStored, StoreError, StoreUnavailable
from retrysafe.http.breaker import Breaker

# More keys than a process runs and ends while a store is down for minutes.
RUNS_LIMIT: Final = 10_000
BYTES_LIMIT: Final = 32 * 1024 * 1024
# Counted from the last silence of the store, so for as long as the outage lasts and then some. The
# store knows nothing of these runs: a retry that comes later runs again.
KEPT_SECONDS: Final = 600.0

Invoke = Callable[[None], Awaitable[Any]]
Report = Callable[[EventKind, Key, str], None]


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


class UnprotectedRuns:
    """The runs of one application without a claim, in one process; for threads and for tasks."""

    __slots__ = ("_breaker", "_bytes", "_lock", "_monotonic", "runs")

    def __init__(self, breaker: Breaker, monotonic: Callable[[], float]) -> None:
        self._breaker = breaker
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._bytes = 0
        # By the digest of the key; the oldest first.
        self.runs: OrderedDict[bytes, _Run] = OrderedDict()

    def recall(self, call: Call, report: Report, run_times: RunTimes) -> Answer[Any] | None:
        """What this process knows of the key; None when nothing, or no longer.

        Raises `OperationInFlight`, `KeyReused`, the failure or `OutcomeUnavailable`.
        """
        with self._lock:
            run = self._known(call.key.digest)
        return None if run is None else self._told(run, call, report, run_times)

    async def answer(
        self, call: Call, invoke: Invoke, report: Report, run_times: RunTimes
    ) -> Answer[Any]:
        """Runs it without a claim, unless it runs or has run here; raises what the run raises.

        Also raises as `recall` does, and `StoreUnavailable` when there is no room to note the run.
        """
        digest = call.key.digest
        run = _Run(
            call.fingerprints,
            call.operation,
            self._monotonic(),
            call.policy.lease.total_seconds(),
        )
        with self._lock:
            # Looked up and noted in one piece, else two could both be the first.
            known = self._known(digest)
            if known is None:
                self._make_room(call)
                self.runs[digest] = run
        if known is not None:
            return self._told(known, call, report, run_times)
        try:
            report(EventKind.UNPROTECTED, call.key, call.operation)
            value = await invoke(None)
        except Exception as error:
            ending = call.policy.judge(error)
            self._end(call, run, ending, codec.encode_failure(error, _limit_of(call)))
            raise
        except BaseException:
            # Cancelled or interrupted: nobody knows how far it got, so it is left alone for as long
            # as a lease would leave it.
            with self._lock:
                run.ended_monotonic = self._monotonic()
            raise
        run_times.add(call.operation, self._monotonic() - run.began_monotonic)
        self._end(call, run, *_outcome(call, value))
        return Answer(value, False, 1)

    def note(self, call: Call, error: OutcomeNotStored) -> None:
        """Keeps what a run with a claim came to, and no store took: it has run in this process."""
        cause = error.__cause__
        # Of an operation that raised, its exception is the cause; else the store's silence is.
        if isinstance(cause, Exception) and not isinstance(cause, StoreError):
            ending = call.policy.judge(cause)
            payload = codec.encode_failure(cause, _limit_of(call))
        else:
            ending, payload = _outcome(call, error.value)
        now = self._monotonic()
        run = _Run(call.fingerprints, call.operation, now, call.policy.lease.total_seconds())
        with self._lock:
            if call.key.digest in self.runs or len(self.runs) >= RUNS_LIMIT:
                return
            self.runs[call.key.digest] = run
        self._end(call, run, ending, payload)

    def _known(self, digest: bytes) -> _Run | None:
        """The run of a key, unless its time is over. The lock is held."""
        run = self.runs.get(digest)
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

    def _told(self, run: _Run, call: Call, report: Report, run_times: RunTimes) -> Answer[Any]:
        if not is_same_request(call, run):
            report(EventKind.MISMATCHED, call.key, call.operation)
            mismatch = reused(call, run.operation)
            mismatch.is_known_here = True
            raise mismatch
        if run.payload is None:
            report(EventKind.CONFLICTED, call.key, call.operation)
            elapsed = self._monotonic() - run.began_monotonic
            conflict = in_flight(
                call,
                f"{call.key.text!r} runs in this process, without a claim",
                run_times.retry_after(call.operation, elapsed, run.lease_seconds),
            )
            conflict.is_known_here = True
            conflict.has_record = False
            raise conflict
        report(EventKind.REPLAYED, call.key, call.operation)
        return Answer(replayed_value(call, run.payload), True, 1)

    def _end(self, call: Call, run: _Run, ending: Ending, payload: Payload) -> None:
        """Notes how a run ended: what frees its key is forgotten, anything else is kept."""
        digest = call.key.digest
        with self._lock:
            if self.runs.get(digest) is not run:
                return  # Its time was over before it ended, or nobody could have known it.
            if ending is Ending.RELEASED:
                self._forget(digest)
                return
            run.payload = payload
            run.ended_monotonic = self._monotonic()
            self._bytes += payload.size_bytes
            # Behind those that ended before it; what runs is never in the way of what has ended.
            self.runs.move_to_end(digest)
            while self._bytes > BYTES_LIMIT and self._forget_oldest():
                pass

    def _make_room(self, call: Call) -> None:
        """Forgets what ended first; raises `StoreUnavailable` when all of them still run."""
        if len(self.runs) >= RUNS_LIMIT and not self._forget_oldest():
            raise StoreUnavailable(
                f"{RUNS_LIMIT:,} operations run without a claim: nothing was run",
                key=call.key.text,
            )

    def _forget_oldest(self) -> bool:
        for digest, run in self.runs.items():
            if run.ended_monotonic is not None:
                self._forget(digest)
                return True
        return False

    def _forget(self, digest: bytes) -> None:
        run = self.runs.pop(digest)
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
