"""What happens to a key outside of the server: an operator's command, another process's claim."""

from __future__ import annotations

from pathlib import Path

from retrysafe import FingerprintRule, Idempotency, Key
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.model import ClaimRequest, Decision
from retrysafe.http import Request
from retrysafe.http.callers import Credential, caller_of_credential
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore
from tests.http_cases.cases import Ask
from tests.http_cases.configuration import SECRET


def _key(text: str, token: str) -> Key:
    # The caller that the servers store for the holder of a token.
    return Key(text, caller=caller_of_credential(Credential("bearer", token), SECRET))


def operate(path: Path, command: str, text: str, token: str) -> None:
    """Gives an operator's command."""
    with Idempotency(f"sqlite:///{path}") as idempotency:
        key = _key(text, token)
        if command == "expire":
            idempotency.expire(key)
        else:
            idempotency.release(key, force=command == "force release")


def claim_elsewhere(path: Path, ask: Ask, text: str, token: str, lease_seconds: int) -> None:
    """Claims the key for this request, as a process that then dies."""
    store = SqliteStore(path)
    content_type = (b"content-type", (ask.content_type or "").encode())
    asked = Request(ask.method, ask.path, b"", [content_type], ask.body)
    try:
        request = ClaimRequest(
            _key(text, token),
            Secrets(SECRET).fingerprints(request_fingerprints(asked, FingerprintRule())),
            b"a token elsewhere"[:16],
            lease_seconds * 1000,
        )
        (answer,), _ = run_sync(store.commit([request], []))
        assert answer.decision is Decision.ADMIT
    finally:
        run_sync(store.close())
