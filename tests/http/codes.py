"""The codes of problems, as they were published."""

# What programs branch on. Published: a line may be added, and none may change.
CODES = {
    "attempts-exhausted": "idempotency_attempts_exhausted",
    "body-incomplete": "idempotency_body_incomplete",
    "body-too-large": "idempotency_body_too_large",
    "body-too-complex": "idempotency_body_too_complex",
    "header-too-long": "idempotency_header_too_long",
    "caller-unknown": "idempotency_caller_unknown",
    "claim-lost": "idempotency_claim_lost",
    "closing": "idempotency_closing",
    "in-flight": "idempotency_in_flight",
    "key-invalid": "idempotency_key_invalid",
    "key-unexpected": "idempotency_key_unexpected",
    "key-missing": "idempotency_key_required",
    "key-reused": "idempotency_conflict",
    "key-unknown": "idempotency_key_unknown",
    "operation-failed": "idempotency_operation_failed",
    "outcome-not-stored": "idempotency_outcome_not_stored",
    "outcome-unavailable": "idempotency_outcome_unavailable",
    "store-unavailable": "idempotency_store_unavailable",
    "store-unusable": "idempotency_store_unusable",
}
