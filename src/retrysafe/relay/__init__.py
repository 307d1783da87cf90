"""The relay: delivers outbox entries to webhooks, brokers or any function.

Owns what happens between a committed entry and its receiver. It must not know operations: entries
come from the outbox port. Targets that need a library are imported when they are used.
"""

from retrysafe.core.outbox.entries import BackOff
from retrysafe.relay.delivery_loop import RelayReport
from retrysafe.relay.policy import RelayPolicy
from retrysafe.relay.ports import Deliver, Delivery, Target
from retrysafe.relay.relay import AsyncRelay, Relay
from retrysafe.relay.signing import verify_webhook

__all__ = [
    "AsyncRelay",
    "BackOff",
    "Deliver",
    "Delivery",
    "Relay",
    "RelayPolicy",
    "RelayReport",
    "Target",
    "verify_webhook",
]
