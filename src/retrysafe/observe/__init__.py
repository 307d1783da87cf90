"""Listeners for what the engine reports, and the events that they get."""

from retrysafe.core.events import Event, EventKind, Progress, Result
from retrysafe.observe.logs import EventLog

__all__ = ["Event", "EventKind", "EventLog", "Progress", "Result"]
