"""Queue consumers: each message is handled once, however often it is delivered."""

from __future__ import annotations

from retrysafe.consumers.consumer import Consumer
from retrysafe.consumers.handler import Handler, consumer_name
from retrysafe.consumers.loop import Counts
from retrysafe.consumers.message import Message, PayloadInvalid
from retrysafe.consumers.verdict import Action, BackOff, Verdict

__all__ = (
    "Action",
    "BackOff",
    "Consumer",
    "Counts",
    "Handler",
    "Message",
    "PayloadInvalid",
    "Verdict",
    "consumer_name",
)
