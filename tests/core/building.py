"""Records, requests and calls with sensible defaults, so that a test names only what matters."""

from __future__ import annotations

from typing import Any

from retrysafe.core.call import Call
from retrysafe.core.keys.key import Key
from retrysafe.core.model import (
    ClaimRequest,
    Fingerprint,
    Payload,
    Record,
    SettleKind,
    Settlement,
    State,
)
from retrysafe.core.policy import Policy
from retrysafe.core.values.codec import ValueCodec

KEY = Key("order-1", caller="tenant-1")
TOKEN, OTHER_TOKEN = b"T" * 16, b"U" * 16
MARK, OTHER_MARK = Fingerprint(1, b"F" * 16), Fingerprint(1, b"G" * 16)
NOW = 1_000_000
LEASE_MS = 30_000
ACTIVE_MS = 60_000


def record(state: State = State.PENDING, **changes: Any) -> Record:
    """A record that was claimed just now; a settled one is also settled just now."""
    is_settled = state is not State.PENDING
    fields: dict[str, Any] = {
        "digest": KEY.digest,
        "caller": KEY.caller,
        "text": KEY.text,
        "operation": "shop.pay",
        "rule": MARK.rule,
        "fingerprint": MARK.digest,
        "state": state,
        "token": TOKEN,
        "attempt": 1,
        "first_claimed_at_ms": NOW,
        "claimed_at_ms": NOW,
        "lease_ends_at_ms": NOW + LEASE_MS,
        "settled_at_ms": NOW if is_settled else None,
        "expires_at_ms": NOW + ACTIVE_MS if is_settled else None,
        "owner": "host:1",
    }
    return Record(**{**fields, **changes})


def request(token: bytes = TOKEN, *marks: Fingerprint, key: Key = KEY) -> ClaimRequest:
    return ClaimRequest(key, marks or (MARK,), token, LEASE_MS, "shop.pay", "host:1")


def settlement(kind: SettleKind, token: bytes = TOKEN, **changes: Any) -> Settlement:
    fields = {
        "payload": Payload("json.1", b"", b"1"),
        "active_ms": ACTIVE_MS,
        "audit_ms": 2 * ACTIVE_MS,
    }
    return Settlement(kind, KEY, token, **{**fields, **changes})


def call(*marks: Fingerprint, key: Key = KEY, policy: Policy | None = None, **changes: Any) -> Call:
    fields: dict[str, Any] = {"operation": "shop.pay", "codec": ValueCodec()}
    return Call(key, marks or (MARK,), policy or Policy(), **{**fields, **changes})
