"""Signatures of webhooks: who sent it, and when, in three headers that many libraries can check.

The scheme is that of Standard Webhooks, version 1: an HMAC with SHA-256 over the message's id, the
instant and the body, with dots in between. The instant is part of it, so that a recorded request
cannot be played again for ever. An id with a dot in it would undo that: a recorded request could
move its instant into the id and take another one from its body. Such ids are neither signed nor
believed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from retrysafe.core.keys.key import DIGEST_TEXT_BYTES, SECRET_MINIMUM_BYTES
from retrysafe.errors import InvalidInput, SecretMissing

ID_HEADER: Final = "webhook-id"
TIMESTAMP_HEADER: Final = "webhook-timestamp"
SIGNATURE_HEADER: Final = "webhook-signature"
_ENCODED_SECRET: Final = "whsec_"
_VERSION: Final = "v1,"
# More secrets than anybody changes over between at a time.
_SIGNATURES_LIMIT: Final = 16

Secret = bytes | str


def webhook_id(key: str) -> str:
    """The message's id for an entry's key: the same for every try, and without a dot."""
    digest = hashlib.sha256(key.encode()).digest()[:DIGEST_TEXT_BYTES]
    return "msg_" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def secret_bytes(secret: Secret) -> bytes:
    """The bytes of a secret; `whsec_…` is base 64. Raises `SecretMissing` for one too short."""
    if isinstance(secret, str) and secret.startswith(_ENCODED_SECRET):
        try:
            made = base64.b64decode(secret.removeprefix(_ENCODED_SECRET), validate=True)
        except binascii.Error:
            raise SecretMissing("what follows whsec_ in the secret is not base 64") from None
    else:
        made = secret.encode() if isinstance(secret, str) else secret
    if len(made) < SECRET_MINIMUM_BYTES:
        raise SecretMissing(f"a webhook's secret has at least {SECRET_MINIMUM_BYTES} bytes")
    return made


def _signature(secret: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    if "." in message_id:
        raise InvalidInput("a webhook's id has no dot: nobody could tell where it ends")
    signed = b"%b.%b.%b" % (message_id.encode(), timestamp.encode(), body)
    mac = hmac.digest(secret, signed, "sha256")
    return _VERSION + base64.b64encode(mac).decode()


def signed_headers(
    secrets: Sequence[bytes], message_id: str, timestamp_seconds: int, body: bytes
) -> dict[str, str]:
    """The headers of a request: one signature for every secret, the current one first.

    Raises `InvalidInput` for an id with a dot.
    """
    timestamp = str(timestamp_seconds)
    signatures = [_signature(secret, message_id, timestamp, body) for secret in secrets]
    return {
        ID_HEADER: message_id,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: " ".join(signatures),
    }


def verify_webhook(
    headers: Mapping[str, str],
    body: bytes,
    secret: Secret,
    *,
    now_seconds: float,
    tolerance: timedelta = timedelta(minutes=5),
) -> str:
    """The id of a message that is genuine and fresh; raises `InvalidInput` otherwise.

    For receivers in Python. Every try of one entry has the same id, so it is the key to run your
    work under. `headers` may have any case; `body` is the raw bytes.
    """
    found = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, timestamp = found[ID_HEADER], found[TIMESTAMP_HEADER]
        signatures = found[SIGNATURE_HEADER]
    except KeyError as missing:
        raise InvalidInput(f"the webhook has no header {missing}") from None
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 15):
        raise InvalidInput("the webhook's timestamp is no number of seconds")
    if not (message_id.isascii() and signatures.isascii()):
        raise InvalidInput("the webhook's id and signature are ASCII")
    expected = _signature(secret_bytes(secret), message_id, timestamp, body).encode()
    # All of them are compared, each in constant time; a sender has one per secret, so a few.
    given = signatures.split(maxsplit=_SIGNATURES_LIMIT)[:_SIGNATURES_LIMIT]
    matches = [hmac.compare_digest(item.encode(), expected) for item in given]
    if not any(matches):
        raise InvalidInput("the webhook's signature is not of this secret, or the body was changed")
    # Written so that a time that is no number counts as too old.
    if not abs(now_seconds - int(timestamp)) <= tolerance.total_seconds():
        raise InvalidInput("the webhook is too old or its sender's clock is wrong")
    return message_id
