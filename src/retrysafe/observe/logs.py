"""Log lines for the events that somebody should look at; the ordinary ones are for DEBUG."""

from __future__ import annotations

import logging
from typing import Final

from retrysafe.core.events import ALL_KINDS, Event, EventKind

logger = logging.getLogger("retrysafe")

# What an operator must see at the default level; everything else is logged at DEBUG.
LEVELS: Final = {
    EventKind.TAKEN_OVER: logging.WARNING,
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


class EventLog:
    """Logs events; it asks for the ordinary ones only when DEBUG was on as it was made."""

    def __init__(self) -> None:
        is_debug = logger.isEnabledFor(logging.DEBUG)
        self.kinds = ALL_KINDS if is_debug else frozenset(LEVELS)

    def __call__(self, event: Event) -> None:
        """Logs one event."""
        logger.log(
            LEVELS.get(event.kind, logging.DEBUG),
            "%s: key %r, operation %s, attempt %d%s",
            event.kind.value,
            event.key.text,
            event.operation or "-",
            event.attempt,
            f": {event.detail}" if event.detail else "",
        )
