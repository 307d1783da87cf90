"""What every client of an AWS service here shares: its time limits, its text, its errors.

Owns no client. It must not know what the messages are for.
"""

from __future__ import annotations

import base64
import binascii
import re
from importlib import import_module
from typing import Any, Final
from urllib.parse import urlsplit

ENCODING: Final = "Retrysafe-Encoding"
_BASE64: Final = "base64"
_EMPTY: Final = "empty"
# What SQS and SNS take as text; anything else they refuse.
_TEXT: Final = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def client_options(
    endpoint: str | None,
    *,
    has_credentials: bool,
    connect_seconds: float,
    read_seconds: float,
    attempts: int,
) -> dict[str, Any]:
    """How to make a client whose every call ends in time."""
    config = import_module("botocore.config").Config(
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        retries={"total_max_attempts": attempts},
    )
    options: dict[str, Any] = {"endpoint_url": endpoint, "config": config}
    if urlsplit(endpoint or "").hostname in _LOOPBACK and not has_credentials:
        # A service on this machine that imitates AWS asks for credentials and checks none.
        options |= {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
    return options


def error_code(error: BaseException) -> str:
    """What the service calls its refusal, without the prefix of its protocol; empty if it is none.

    Refusals of the same kind are spelled `QueueDoesNotExist`, `AWS.…NonExistentQueue` and
    `com.amazonaws.sqs#QueueDoesNotExist`.
    """
    response: dict[str, Any] = getattr(error, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    return re.split("[.#]", code)[-1]


def encoded(body: bytes) -> tuple[str, str | None]:
    """The body as text that the services take, and how it is encoded; None for plain text."""
    if not body:
        return " ", _EMPTY
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if _TEXT.fullmatch(text):
        return text, None
    return base64.b64encode(body).decode(), _BASE64


def decoded(text: str, encoding: str | None) -> bytes:
    """The body again; as it stands where it is not encoded as it says."""
    if encoding == _EMPTY:
        return b""
    if encoding == _BASE64:
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass  # Somebody else's message: the handler sees what was sent.
    # A half of a surrogate pair, which JSON can carry, is the handler's to refuse.
    return text.encode(errors="surrogatepass")
