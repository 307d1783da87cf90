"""Observers: who is told what happens, and how.

Owns that no observer can hurt an operation. What is told, the core says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from retrysafe.core.events import ALL_KINDS, Emit, Event, EventKind, Reporter
from retrysafe.errors import InvalidInput
from retrysafe.observe.gauges import Watched
from retrysafe.observe.logs import EventLog

_logger = logging.getLogger("retrysafe")


def checked_observers(observers: object) -> tuple[Emit, ...]:
    """The observers; raises `InvalidInput` for one that stands alone, and for what is none."""
    if not isinstance(observers, Iterable):
        raise InvalidInput(
            "observers takes a list of functions of an Event: write observers=[…], got "
            f"{observers!r}"
        )
    found = tuple(observers)
    for observer in found:
        if not callable(observer):
            raise InvalidInput(
                f"observers takes a list of functions of an Event, and {observer!r} is none"
            )
    return found


def watch_all(observers: Iterable[Emit], watched: Watched) -> None:
    """Gives those observers the object that have a method `watch`: for gauges of its store."""
    for observer in observers:
        watch = getattr(observer, "watch", None)
        if callable(watch):
            watch(watched)


def reporter(observers: Iterable[Emit]) -> Reporter:
    """One listener for many, the log among them; what they raise never reaches the operation.

    A listener that has `kinds` hears those only. Nobody pays for events that nobody wants.
    """
    listeners = tuple(observers)
    if not any(isinstance(listener, EventLog) for listener in listeners):
        # First: what the others do of it is told after that.
        listeners = (EventLog(), *listeners)
    wanting: dict[EventKind, list[Emit]] = {}
    for listener in listeners:
        for kind in getattr(listener, "kinds", ALL_KINDS):
            wanting.setdefault(kind, []).append(listener)

    def tell(event: Event) -> None:
        for listener in wanting[event.kind]:
            try:
                listener(event)
            except Exception:
                _logger.exception("an observer of retrysafe failed")

    return Reporter(tell, frozenset(wanting))
