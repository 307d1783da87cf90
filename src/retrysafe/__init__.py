"""retrysafe: an operation that is retried, redelivered or raced runs once."""

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer
from retrysafe.core.events import Event, EventKind
from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import GLOBAL, Key, child_key, natural_key
from retrysafe.core.model import Condition, Ending
from retrysafe.core.policy import FOREVER, InFlight, Policy
from retrysafe.core.steps.history import StepRetry
from retrysafe.errors import (
    ArgumentsNotStorable,
    AttemptsExhausted,
    AwaitForgotten,
    CallerMissing,
    ClaimLost,
    Closed,
    CommitHookFailed,
    CompensationFailed,
    DeliveryFailed,
    DigestCollision,
    FingerprintImpossible,
    FlowSuspended,
    InvalidInput,
    KeyInvalid,
    KeyReused,
    OperationFailed,
    OperationInFlight,
    OperationUndone,
    OperatorRefused,
    OutcomeMissing,
    OutcomeNotStored,
    OutcomeUnavailable,
    PolicyInvalid,
    RetrysafeError,
    SchemaChanged,
    SchemaMissing,
    SchemaTooNew,
    SecretMissing,
    StepNotStored,
    StepReused,
    StepsChanged,
    StepUnavailable,
    StoreError,
    StoreMissing,
    StoreNotWritable,
    StoreRejected,
    StoreUnavailable,
    StoreUrlInvalid,
    TransactionMissing,
)
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.atomic import AsyncAtomicRun, AtomicRun
from retrysafe.runtime.current import current_attempt
from retrysafe.runtime.steps import step
from retrysafe.stores.memory.store import MemoryStore
from retrysafe.stores.opening import open_store
from retrysafe.stores.sqlite import SqliteStore
from retrysafe.transactions import is_conflict, retry_serialization
from retrysafe.workers.duties import WorkerPolicy
from retrysafe.workers.worker import AsyncWorker, Worker

__version__ = "0.1.0"

__all__ = [
    "FOREVER",
    "GLOBAL",
    "Answer",
    "ArgumentsNotStorable",
    "AsyncAtomicRun",
    "AsyncIdempotency",
    "AsyncWorker",
    "AtomicAttempt",
    "AtomicRun",
    "Attempt",
    "AttemptsExhausted",
    "AwaitForgotten",
    "BodyKey",
    "CallerMissing",
    "ClaimLost",
    "Closed",
    "CommitHookFailed",
    "CompensationFailed",
    "Condition",
    "DeliveryFailed",
    "DigestCollision",
    "Ending",
    "Event",
    "EventKind",
    "FingerprintImpossible",
    "FingerprintRule",
    "FlowSuspended",
    "Idempotency",
    "InFlight",
    "InvalidInput",
    "Key",
    "KeyInvalid",
    "KeyReused",
    "MemoryStore",
    "OperationFailed",
    "OperationInFlight",
    "OperationUndone",
    "OperatorRefused",
    "OutcomeMissing",
    "OutcomeNotStored",
    "OutcomeUnavailable",
    "Policy",
    "PolicyInvalid",
    "RetrysafeError",
    "SchemaChanged",
    "SchemaMissing",
    "SchemaTooNew",
    "SecretMissing",
    "SqliteStore",
    "StepNotStored",
    "StepRetry",
    "StepReused",
    "StepUnavailable",
    "StepsChanged",
    "StoreError",
    "StoreMissing",
    "StoreNotWritable",
    "StoreRejected",
    "StoreUnavailable",
    "StoreUrlInvalid",
    "TransactionMissing",
    "Worker",
    "WorkerPolicy",
    "child_key",
    "current_attempt",
    "is_conflict",
    "natural_key",
    "open_store",
    "retry_serialization",
    "step",
]
