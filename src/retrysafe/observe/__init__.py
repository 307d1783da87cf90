"""Listeners for what the engine reports, and the events that they get."""

from retrysafe.core.events import Event, EventKind, Progress, Result

__all__ = ["Event", "EventKind", "Progress", "Result"]
