"""The relay: delivers outbox entries to webhooks, brokers or any function.

Owns what happens between a committed entry and its receiver. It must not know operations: entries
come from the outbox port. Targets that need a library are imported when they are used.
"""

from retrysafe.relay.engine import RelayReport
from retrysafe.relay.faces import AsyncRelay, Relay
from retrysafe.relay.policy import RelayPolicy
from retrysafe.relay.ports import Deliver, Delivery, Target

__all__ = [
    "AsyncRelay",
    "Deliver",
    "Delivery",
    "Relay",
    "RelayPolicy",
    "RelayReport",
    "Target",
]
