"""Log lines for the events that somebody should look at; the ordinary ones are for DEBUG.

Owns the levels, the fields of a line, and how often the same thing is said. Each line has its
fields in `extra`, where JSON formatters and structlog find them; their names begin with
`retrysafe_`, so that they meet nobody else's.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from retrysafe.core.events import ALL_KINDS, Event, EventKind

logger = logging.getLogger("retrysafe")

# What an operator must see at the default level; everything else is logged at DEBUG.
LEVELS: Final = {
    EventKind.TAKEN_OVER: logging.WARNING,
    EventKind.MISMATCHED: logging.WARNING,
    EventKind.EXHAUSTED: logging.ERROR,
    EventKind.WITHHELD: logging.ERROR,
    EventKind.LOST: logging.WARNING,
    EventKind.RENEWAL_FAILED: logging.WARNING,
    EventKind.SETTLE_FAILED: logging.ERROR,
    EventKind.STORE_UNAVAILABLE: logging.WARNING,
    EventKind.UNPROTECTED: logging.WARNING,
    EventKind.ABANDONED: logging.WARNING,
    EventKind.POSTPONED: logging.WARNING,
}
# What comes again and again while one thing is wrong, and what tells two such things apart: a store
# that is down is one incident for all keys, a client that reuses keys one for its operation.
_INCIDENTS: Final[dict[EventKind, Callable[[Event], object]]] = {
    EventKind.STORE_UNAVAILABLE: lambda event: None,
    EventKind.MISMATCHED: lambda event: event.operation,
    EventKind.RENEWAL_FAILED: lambda event: event.key.digest,
}
# An incident that goes on is logged again after this, with how often it came meanwhile.
INCIDENT_SECONDS: Final = 60.0
# Clients choose keys, and code the operations: what is remembered of them is bounded.
INCIDENTS_LIMIT: Final = 1000


class EventLog:
    """Logs events; it asks for the ordinary ones only when DEBUG was on as it was made.

    Every object has one. Pass your own in `observers` to have callers shown by their names.
    """

    def __init__(
        self, *, shows_callers: bool = False, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        is_debug = logger.isEnabledFor(logging.DEBUG)
        self.kinds = ALL_KINDS if is_debug else frozenset(LEVELS)
        self._shows_callers = shows_callers
        self._monotonic = monotonic
        # When each incident was logged last, and how often it came since.
        self._incidents: OrderedDict[object, tuple[float, int]] = OrderedDict()

    def __call__(self, event: Event) -> None:
        """Logs one event, unless its incident was logged just now."""
        more = self._more(event)
        if more is None:
            return
        logger.log(
            LEVELS.get(event.kind, logging.DEBUG),
            "%s: key %r, operation %s, attempt %d%s%s",
            event.kind.value,
            event.key.text,
            event.operation or "-",
            event.attempt,
            f": {event.detail}" if event.detail else "",
            f" ({more} more like it since the last line)" if more else "",
            extra=self._fields(event, more),
        )

    def _more(self, event: Event) -> int | None:
        """How many lines were left out before this one; None when it is left out itself."""
        tells_apart = _INCIDENTS.get(event.kind)
        if tells_apart is None:
            return 0
        name = (event.kind, tells_apart(event))
        now, incidents = self._monotonic(), self._incidents
        logged_at, count = incidents.get(name, (now - INCIDENT_SECONDS, 0))
        if now - logged_at < INCIDENT_SECONDS:
            incidents[name] = logged_at, count + 1
            return None
        incidents[name] = now, 0
        if len(incidents) > INCIDENTS_LIMIT:
            incidents.popitem(last=False)
        return count

    def _fields(self, event: Event, more: int) -> dict[str, Any]:
        call = event.call
        fields: dict[str, Any] = {
            "kind": event.kind.value,
            "key": event.key.text,
            "caller": event.key.caller if self._shows_callers else event.caller,
            "operation": event.operation,
            "attempt": event.attempt,
            "source": event.source,
            "detail": event.detail,
            "more": more,
        }
        if call.is_ended and event.result is not None:
            fields |= {
                "result": event.result.value,
                "ending": call.ending,
                "error": call.error,
                "seconds": round(call.seconds, 6),
            }
        return {f"retrysafe_{name}": value for name, value in fields.items()}
