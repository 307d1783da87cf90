"""retrysafe: an operation that is retried, redelivered or raced runs once."""

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer
from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import GLOBAL, Key, child_key, natural_key
from retrysafe.core.model import Ending
from retrysafe.core.policy import FOREVER, InFlight, Policy
from retrysafe.core.steps.history import StepRetry
from retrysafe.errors import (
    ClaimLost,
    InvalidInput,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OutcomeNotStored,
    OutcomeUnavailable,
    RetrysafeError,
    StoreUnavailable,
)
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.current import current_attempt
from retrysafe.runtime.steps import step

__version__ = "0.1.0"

__all__ = [
    "FOREVER",
    "GLOBAL",
    "Answer",
    "AsyncIdempotency",
    "AtomicAttempt",
    "Attempt",
    "BodyKey",
    "ClaimLost",
    "Ending",
    "FingerprintRule",
    "Idempotency",
    "InFlight",
    "InvalidInput",
    "Key",
    "KeyReused",
    "OperationFailed",
    "OperationInFlight",
    "OutcomeNotStored",
    "OutcomeUnavailable",
    "Policy",
    "RetrysafeError",
    "StepRetry",
    "StoreUnavailable",
    "child_key",
    "current_attempt",
    "natural_key",
    "step",
]
