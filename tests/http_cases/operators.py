"""What happens to a key outside of the server: an operator's command, another process's claim."""

from __future__ import annotations

import hashlib
from pathlib import Path

from retrysafe import Idempotency, Key, SqliteStore
from retrysafe.core.model import ClaimRequest, Decision, Fingerprint
from retrysafe.runtime.drive import run_sync


def _key(text: str, token: str) -> Key:
    # The caller that `bearer_token` makes of a token.
    return Key(text, caller="bearer:" + hashlib.sha256(token.encode()).hexdigest()[:40])


def operate(path: Path, command: str, text: str, token: str) -> None:
    """Gives an operator's command."""
    with Idempotency(f"sqlite:///{path}") as idempotency:
        key = _key(text, token)
        if command == "expire":
            idempotency.expire(key)
        else:
            idempotency.release(key, force=command == "force release")


def claim_elsewhere(path: Path, text: str, token: str, lease_seconds: int) -> None:
    """Claims the key as a process that then dies."""
    store = SqliteStore(path)
    try:
        request = ClaimRequest(
            _key(text, token),
            # A rule that the server does not know matches every request.
            (Fingerprint(999, b"made elsewhere"),),
            b"a token elsewhere"[:16],
            lease_seconds * 1000,
        )
        (answer,), _ = run_sync(store.commit([request], []))
        assert answer.decision is Decision.ADMIT
    finally:
        run_sync(store.close())
