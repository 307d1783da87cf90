"""The refusals of a call, told to observers as they are made: another request, and a run under way.

Owns what the caller is told. Who is refused, the engine decides.
"""

from __future__ import annotations

from retrysafe.core import replay
from retrysafe.core.call import Call
from retrysafe.core.events import EventKind
from retrysafe.core.flights import Flight, Requested, is_same_request
from retrysafe.core.ports import Ports
from retrysafe.errors import KeyReused, OperationInFlight


class Refusals:
    """What a process tells those who may not run."""

    def __init__(self, ports: Ports) -> None:
        self._report = ports.report
        self._run_times = ports.run_times
        self._monotonic = ports.clock.monotonic
        self._current = ports.executor.current

    def check_same(self, call: Call, other: Requested, source: str) -> None:
        """Raises `KeyReused` for a request that is not the one of the key."""
        if not is_same_request(call, other):
            raise self.reused(call, other.operation, source)

    def reused(self, call: Call, operation: str, source: str) -> KeyReused:
        """Another request came under the key."""
        self._report(EventKind.MISMATCHED, call, source=source)
        error = replay.reused(call, operation)
        error.is_known_here = source == "process"
        return error

    def is_inside(self, call: Call) -> bool:
        """Whether the caller is the very operation that it would wait for."""
        key = getattr(self._current(), "key", None)
        return key is not None and key.digest == call.key.digest

    def in_flight(
        self, call: Call, flight: Flight, source: str, *, has_waited: bool = False
    ) -> OperationInFlight:
        """The first run has not ended; says when to come back."""
        seconds, lease = flight.next_try(self._monotonic(), call.operation, self._run_times)
        if self.is_inside(call):
            lease = (
                ": this call is inside of it. Give it a key of its own, such as "
                "current_attempt().child_key('part')"
            )
        kind = EventKind.WAIT_TIMED_OUT if has_waited else EventKind.IN_FLIGHT
        self._report(kind, call, source=source)
        waited = f" after a wait of {call.policy.wait_seconds:g} s" if has_waited else ""
        error = replay.in_flight(
            call,
            f"the first run of {call.key.text!r} has not ended{waited}{lease}",
            seconds,
            is_locked=flight.is_atomic or flight.is_locked,
        )
        error.has_waited = has_waited
        error.is_known_here = source == "process"
        return error
