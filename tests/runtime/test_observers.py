"""Observers: who hears what."""

from __future__ import annotations

from retrysafe import GLOBAL, Idempotency
from retrysafe.observe import EventKind
from retrysafe.stores import MemoryStore


class Listener:
    """Hears what it has in `kinds`."""

    def __init__(self, *kinds: EventKind) -> None:
        self.kinds = frozenset(kinds)
        self.heard: list[EventKind] = []

    def __call__(self, event) -> None:
        self.heard.append(event.kind)


def test_an_observer_hears_its_own_kinds_only():
    """Whatever others want to hear."""
    lost, completed, everything = Listener(EventKind.LOST), Listener(EventKind.COMPLETED), []
    observers = [lost, completed, lambda event: everything.append(event.kind)]
    with Idempotency(MemoryStore(), caller=GLOBAL, observers=observers) as idem:
        idem.run("k", int)
    assert lost.heard == []
    assert completed.heard == [EventKind.COMPLETED]
    assert everything == [
        EventKind.CALLED,
        EventKind.CLAIMED,
        EventKind.COMPLETED,
        EventKind.ANSWERED,
    ]
