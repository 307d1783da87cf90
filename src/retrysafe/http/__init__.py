"""HTTP: protects the routes of any ASGI or WSGI application, without knowing any framework."""

from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.http.asgi import IdempotencyMiddleware
from retrysafe.http.breaker import Breaker
from retrysafe.http.callers import (
    CallerOf,
    Credential,
    api_key,
    basic_user,
    bearer_token,
    gateway_header,
)
from retrysafe.http.key_sources import FieldsKey, HeaderKey
from retrysafe.http.limits import Limits
from retrysafe.http.plan import Plan
from retrysafe.http.protection import Protection
from retrysafe.http.request import Headers, Request
from retrysafe.http.responses import Response
from retrysafe.http.resumption import resumed_caller
from retrysafe.http.rules import ACCEPT, Rule, StatusRule, Streaming
from retrysafe.http.stored_request import Resumable
from retrysafe.http.wsgi import WSGIIdempotencyMiddleware

__all__ = [
    "ACCEPT",
    "AtomicAttempt",
    "Breaker",
    "CallerOf",
    "Credential",
    "FieldsKey",
    "HeaderKey",
    "Headers",
    "IdempotencyMiddleware",
    "Limits",
    "Plan",
    "Protection",
    "Request",
    "Response",
    "Resumable",
    "Rule",
    "StatusRule",
    "Streaming",
    "WSGIIdempotencyMiddleware",
    "api_key",
    "basic_user",
    "bearer_token",
    "gateway_header",
    "resumed_caller",
]
