"""What endpoints are given: the ledger, and their attempt at the request."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from retrysafe import Attempt
from retrysafe.demo.ledger import Ledger
from retrysafe.http import AtomicAttempt

# All are checked by retrysafe before an endpoint is reached; here they are for the description.
Token = Annotated[
    HTTPAuthorizationCredentials,
    Depends(HTTPBearer(description="Any token: whoever sends it is the caller.")),
]
IdempotencyKey = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        description="A key that is new for every operation and the same for its retries.",
        examples=['"8e03978e-40d5-43e8-bc93-6894a57f9324"'],
    ),
]


Prefer = Annotated[
    str | None,
    Header(
        alias="Prefer",
        description="`wait=10`: a duplicate of a request that still runs waits for it up to ten "
        "seconds. `respond-async`, where 202 is listed: 202 with a status URL, while the request "
        "runs.",
        examples=["wait=10"],
    ),
]


def _ledger(request: Request) -> Ledger:
    ledger: Ledger = request.app.state.ledger
    return ledger


def _leased(request: Request, key: IdempotencyKey, token: Token, prefer: Prefer = None) -> Attempt:
    attempt: Attempt = request.state.idempotency
    return attempt


def _atomic(
    request: Request, key: IdempotencyKey, token: Token, prefer: Prefer = None
) -> AtomicAttempt[Any]:
    attempt: AtomicAttempt[Any] = request.state.idempotency
    return attempt


TheLedger = Annotated[Ledger, Depends(_ledger)]
LeasedAttempt = Annotated[Attempt, Depends(_leased)]
TheAtomicAttempt = Annotated[AtomicAttempt[Any], Depends(_atomic)]
