"""What every adapter asks before a request is sent and after its head came back.

Which key, whether the request is retrysafe's to retry, how much of an answer to read at once.
"""

from __future__ import annotations

from typing import Final

from retrysafe.client.flow import ClientSettings, Sending
from retrysafe.client.intents import current_scope, header_value, new_key
from retrysafe.client.replies import CONFLICT, Headers, has_json
from retrysafe.client.retry_policy import SAFE_METHODS


class NotGiven:
    """The type of `NOT_GIVEN`: the caller did not say which key to send."""

    __slots__ = ()


NOT_GIVEN: Final = NotGiven()
PREFER_HEADER: Final = "Prefer"


def takes_key(method: str) -> bool:
    """Whether a key on such a request can mean anything.

    A redirect that turns a POST into a GET brings the headers of the POST along: the adapter takes
    the key off, because a key belongs to one request and this is another one.
    """
    return method not in SAFE_METHODS


def begin(
    settings: ClientSettings,
    *,
    method: str,
    path: str,
    header: str | None,
    given: str | NotGiven | None = NOT_GIVEN,
) -> Sending | None:
    """The delivery of a request; None when it is to be sent once, as it is.

    The key is, in this order: the header that the caller set; the key that the caller gave, where
    None asks for no key; the key of the scope that the caller is in; a new one. A safe method has
    none.
    """
    policy = settings.policy
    if not takes_key(method):
        return Sending(settings, key=None) if policy.retries_safe_methods else None
    if header is not None:
        return Sending(settings, key=header)
    if given is None:
        return None
    if not isinstance(given, NotGiven):
        return Sending(settings, key=header_value(given))
    if method not in policy.methods:
        return None
    scope = current_scope()
    if scope is None:
        return Sending(settings, key=header_value(new_key()))
    text = scope.key_of(method, path)
    return Sending(settings, key=header_value(text), scope=scope, key_text=text)


def prefer_of(settings: ClientSettings, delivery: Sending | None, given: object) -> str | None:
    """The `Prefer` header to add; None without a key, or when the caller has its own."""
    if delivery is None or delivery.key is None or given is not None:
        return None
    return settings.policy.prefer


def is_read_at_once(status: int, headers: Headers, limit_bytes: int) -> bool:
    """Whether the body is read before the answer counts as received.

    A stated length within the limit is no stream that somebody wants to watch. A conflict is read
    in any case, as far as the limit: its problem says whether a retry can help.
    """
    length = headers.get("Content-Length")
    if length is None:
        return status == CONFLICT and has_json(headers)
    return length.isascii() and length.isdigit() and len(length) < 16 and int(length) <= limit_bytes
