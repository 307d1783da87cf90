"""The client side: one key per logical operation, the same key over its retries.

`retrysafe.client.httpx` and `retrysafe.client.requests` put it into those libraries; what is here
needs neither.
"""

from retrysafe.client.budget import RetryBudget
from retrysafe.client.flow import Stopped, Timing, Tries, tries_of
from retrysafe.client.intents import for_attempt, header_value, intent_key, one_intent
from retrysafe.client.replies import was_replayed
from retrysafe.client.retry_policy import RetryPolicy

__all__ = [
    "RetryBudget",
    "RetryPolicy",
    "Stopped",
    "Timing",
    "Tries",
    "for_attempt",
    "header_value",
    "intent_key",
    "one_intent",
    "tries_of",
    "was_replayed",
]
