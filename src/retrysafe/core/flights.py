"""Flights: the keys that this process is busy with, so that a local duplicate asks no store.

The first local caller of a key leads its flight: it alone talks to the store, runs the operation
or polls for a foreign owner. The others follow. Owns who leads, who waits, and what a flight hands
to its followers; a follower that gets nothing starts over and may lead the next flight.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import Protocol

from retrysafe.core.lease import Lease
from retrysafe.core.machine import is_comparable
from retrysafe.core.model import Fingerprint, Payload, plain_members
from retrysafe.core.ports import Lock, Signal
from retrysafe.core.run_times import MINIMUM_SECONDS, RunTimes


@plain_members
class Phase(Enum):
    """Where a flight's leader is."""

    CLAIMING = "claiming"
    RUNNING = "running"
    AWAITING = "awaiting"
    LANDED = "landed"


class Flight:
    """One key's leader at work, and the followers who wait for news."""

    __slots__ = (
        "active_ms",
        "attempt",
        "began_monotonic",
        "conflict_ends_monotonic",
        "fingerprints",
        "first_operation",
        "is_atomic",
        "is_locked",
        "is_released",
        "leader",
        "lease",
        "operation",
        "outage",
        "payload",
        "phase",
        "trace",
        "waiters",
    )

    def __init__(
        self, fingerprints: tuple[Fingerprint, ...], operation: str, leader: object = None
    ) -> None:
        self.fingerprints = fingerprints
        self.operation = operation
        # Who leads it, where somebody could come to wait for itself.
        self.leader = leader
        self.phase = Phase.CLAIMING
        self.lease: Lease | None = None
        # When the run began by the local clock, here or elsewhere, once there is one.
        self.began_monotonic: float | None = None
        # When the foreign lease ends by the local clock, once it is known that there is one.
        self.conflict_ends_monotonic: float | None = None
        # Of which operation the key is, once it is known to be another request's.
        self.first_operation: str | None = None
        # Whether it runs in a transaction of the user's, which has no lease.
        self.is_atomic = False
        # Whether somebody else's open transaction holds the record, which frees it when it ends.
        self.is_locked = False
        self.is_released = False
        # What the store's silence was, when the leader could not even ask.
        self.outage: str | None = None
        self.attempt = 0
        self.payload: Payload | None = None
        # What is left of the payload's active window, where the leader was told of it.
        self.active_ms: int | None = None
        # The trace of the run that the payload is from.
        self.trace = ""
        self.waiters: list[Signal] | None = None

    def share(self, payload: Payload, attempt: int, *, is_released: bool = False) -> None:
        """Hands an ending to the followers, also one that frees the key.

        Those who waited for a run that failed are told of its failure. Were they to run the
        operation again, one after the other, they would repeat its failure within an instant.
        """
        self.payload = payload
        self.attempt = attempt
        self.is_released = is_released

    def seconds_run(self, monotonic: float) -> float:
        """How long ago the run began, as far as that is known here."""
        began = self.began_monotonic
        return 0.0 if began is None else max(0.0, monotonic - began)

    def seconds_left(self, monotonic: float) -> float:
        """How long the running attempt's lease lasts, as far as it is known here."""
        if self.lease is not None:
            return self.lease.seconds_left(monotonic)
        if self.conflict_ends_monotonic is not None:
            return max(0.0, self.conflict_ends_monotonic - monotonic)
        return 0.0

    def next_try(self, monotonic: float, operation: str, run_times: RunTimes) -> tuple[float, str]:
        """In how many seconds a refused call should come back, and what is known of the lease."""
        left = self.seconds_left(monotonic)
        if self.is_atomic and self.conflict_ends_monotonic is not None:
            # A run elsewhere, of which the leader was told when to ask again.
            return max(MINIMUM_SECONDS, left), ""
        elapsed = self.seconds_run(monotonic)
        if self.is_atomic or self.is_locked:
            return run_times.retry_after(operation, elapsed, None), ""
        lease = f"; its lease ends in {left:.1f} s unless it is renewed"
        return run_times.retry_after(operation, elapsed, left), lease


class Requested(Protocol):
    """What two requests are told apart by."""

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...]:
        """What is asked for, under each rule that is known."""

    @property
    def operation(self) -> str:
        """Of which operation."""


def is_same_request(first: Requested, second: Requested) -> bool:
    """Whether two requests agree under the first rule that both know, as the store decides it.

    Without such a rule, or with no secret in common, those of one operation count as equal.
    """
    for mine in first.fingerprints:
        for other in second.fingerprints:
            if mine.rule == other.rule and is_comparable(mine, other.digest):
                return mine.digest == other.digest
    return first.operation == second.operation


def _wake(waiters: list[Signal]) -> None:
    """Wakes all who wait, in the order in which they came.

    Each stays on the list until it is woken, so that after a signal in between the leader, who
    lands its flight in any case, goes on with those who were not.
    """
    while waiters:
        waiters[0].set()
        del waiters[0]


class Flights:
    """All flights of one engine.

    A leader joins and moves on without the lock; whoever waits, and whoever takes a flight away,
    holds it.
    """

    __slots__ = ("_by_digest", "_lock")

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._by_digest: dict[bytes, Flight] = {}

    def join(self, digest: bytes, mine: Flight, monotonic: float) -> Flight:
        """The key's flight: the caller's own when it leads.

        The caller brings the flight, marks it as landed in any case, which no signal can prevent,
        and lands it. Where signals prevented that, whoever comes next does it. A flight whose claim
        is given up is replaced: this process must be as free to take the key over as any other.
        """
        # One operation of a dictionary is atomic, so a leader takes no lock.
        flight = self._by_digest.setdefault(digest, mine)
        if flight is not mine and flight.phase is Phase.LANDED:
            self.land(digest, flight)
            return flight
        if flight is mine or flight.lease is None or not flight.lease.is_given_up(monotonic):
            return flight
        with self._lock:
            if self._by_digest.get(digest) is flight:
                self._by_digest.pop(digest, None)
        return self._by_digest.setdefault(digest, mine)

    def enter(self, flight: Flight, phase: Phase) -> None:
        """Moves a flight on and wakes everybody who waits for news of it."""
        # In this order: whoever signs up looks at the phase after that, so one of the two sees the
        # other.
        flight.phase = phase
        if flight.waiters:
            with self._lock:
                _wake(flight.waiters)

    def land(self, digest: bytes, flight: Flight) -> None:
        """Ends a flight; whoever comes next starts a new one. One that never flew is ignored.

        It is called again when it was interrupted, so every step is harmless to repeat.
        """
        with self._lock:
            if self._by_digest.get(digest) is flight:
                # Not `del`: the garbage collector may end a flight whose leader was lost at any
                # instruction of this thread, also here.
                self._by_digest.pop(digest, None)
            flight.phase = Phase.LANDED
            if flight.waiters:
                _wake(flight.waiters)

    def enlist(self, flight: Flight, phase: Phase, signal: Signal) -> bool:
        """Signs up for the next news, unless the flight has left that phase already."""
        with self._lock:
            if flight.waiters is None:
                flight.waiters = []
            flight.waiters.append(signal)
            if flight.phase is phase:
                return True
            # Moved on meanwhile. The leader may have looked for waiters before this one came, or
            # may have told it already.
            with suppress(ValueError):
                flight.waiters.remove(signal)
            return False

    def phase(self, digest: bytes) -> Phase | None:
        """Where the leader of a key is; None without one."""
        flight = self._by_digest.get(digest)
        return None if flight is None else flight.phase

    def revoke(self, digest: bytes) -> None:
        """Ends the hold of the flight on its key, after an operator took the key away."""
        with self._lock:
            flight = self._by_digest.get(digest)
        if flight is not None and flight.lease is not None:
            flight.lease.revoke()

    def __len__(self) -> int:
        return sum(flight.phase is not Phase.LANDED for flight in list(self._by_digest.values()))
