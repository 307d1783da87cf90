"""Which key a request is sent with, and how long that key is held.

A request gets a key of its own unless something says otherwise: an intent that is held over
several calls, or an attempt whose child key is due. Owns the header's form and the scope of keys;
knows no HTTP library.
"""

from __future__ import annotations

import re
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Final, Protocol
from uuid import uuid4

from retrysafe.core.attempt import Attempt
from retrysafe.core.keys.canonical import Part
from retrysafe.core.keys.key import KEY_LIMIT_CHARACTERS
from retrysafe.errors import InvalidInput, KeyInvalid

KEY_HEADER: Final = "Idempotency-Key"
# What the httpx extension of one request is called; its value is the key, or None for no key.
KEY_EXTENSION: Final = "idempotency_key"
# The characters of an RFC 8941 string.
_SENDABLE: Final = re.compile(r"[ -~]+")


def new_key() -> str:
    """A key that nobody has used before."""
    return str(uuid4())


def header_value(key: str) -> str:
    """The key as the header carries it: an RFC 8941 string, quoted and escaped.

    Raises `KeyInvalid` for a key that cannot be sent: 1 to 255 printable ASCII characters can.
    """
    if not isinstance(key, str) or not _SENDABLE.fullmatch(key):
        raise KeyInvalid(f"a key on the wire is printable ASCII text, got {key!r}")
    if len(key) > KEY_LIMIT_CHARACTERS:
        raise KeyInvalid(
            f"a key may have at most {KEY_LIMIT_CHARACTERS} characters, got {len(key)}: "
            "send a UUID, or a hash of long values",
            key=key[:KEY_LIMIT_CHARACTERS],
        )
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


class KeyScope(Protocol):
    """Where the key of a request comes from when its caller sent none."""

    def key_of(self, method: str, path: str) -> str:
        """The key of a request of this method and path."""

    def begin(self, key: str) -> None:
        """Called once per request, before it is sent for the first time."""

    def check(self) -> None:
        """Called before every try; what it raises stops the request."""

    def end(self, key: str, *, is_answered: bool) -> None:
        """Called once per request that began; it was answered, or given up."""


_scope: ContextVar[KeyScope | None] = ContextVar("retrysafe_key_scope", default=None)


def current_scope() -> KeyScope | None:
    """The innermost scope that the running code is in."""
    return _scope.get()


class Intent:
    """One key for every request inside; made by `one_intent` and `intent_key`."""

    __slots__ = ("_tokens", "key")

    def __init__(self, key: str) -> None:
        header_value(key)
        self.key = key
        # A list: the same intent may be entered again, for the next round of a caller's own loop.
        self._tokens: list[Token[KeyScope | None]] = []

    def key_of(self, _method: str, _path: str) -> str:
        """The key of the intent."""
        return self.key

    def begin(self, _key: str) -> None:
        """Nothing to note: repeating the request is what an intent is for."""

    def check(self) -> None:
        """An intent is never lost."""

    def end(self, _key: str, *, is_answered: bool) -> None:
        """Nothing to note."""

    def __enter__(self) -> str:
        self._tokens.append(_scope.set(self))
        return self.key

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _scope.reset(self._tokens.pop())


def one_intent() -> Intent:
    """Holds one new key for all requests inside the `with`, which gives the key.

    For a call that your own code repeats. Enter the same object again to go on with its key; call
    `one_intent()` again for a new intent.
    """
    return Intent(new_key())


def intent_key(key: str) -> Intent:
    """Holds the given key, such as one that was stored before the first call.

    Raises `KeyInvalid` for a key that cannot be sent.
    """
    return Intent(key)


class AttemptKeys:
    """The child keys of one attempt for the requests inside; made by `for_attempt`."""

    __slots__ = ("_attempt", "_element", "_name", "_service", "_taken", "_tokens")

    def __init__(
        self, attempt: Attempt, service: str, element: tuple[Part, ...], name: str | None
    ) -> None:
        self._attempt = attempt
        self._service = service
        self._element = element
        self._name = name
        self._taken: dict[str, object] = {}
        self._tokens: list[Token[KeyScope | None]] = []

    def key_of(self, method: str, path: str) -> str:
        """The attempt's child key for the named call, or for this method and path."""
        name = f"{method} {path}" if self._name is None else self._name
        return self._attempt.child_key(self._service, name, *self._element)

    def begin(self, key: str) -> None:
        """Raises `InvalidInput` when another call in here is, or was, sent with this key.

        The second of two equal calls would get the first one's answer, and its effect would be
        lost without a word.
        """
        mine = object()
        # One atomic look-up and write: two threads of a fan-out must not both pass.
        if self._taken.setdefault(key, mine) is not mine:
            raise InvalidInput(
                f"two calls to {self._service!r} in one attempt have the same child key: name "
                "each with for_attempt(…, name=…), or say which element of a fan-out it is for",
                key=key,
            )

    def check(self) -> None:
        """Raises `ClaimLost` when another owner has, or may have, the key of the operation."""
        self._attempt.raise_if_lost()

    def end(self, key: str, *, is_answered: bool) -> None:
        """A call that was given up may be made again, with the same key."""
        if not is_answered:
            self._taken.pop(key, None)

    def __enter__(self) -> AttemptKeys:
        self._tokens.append(_scope.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _scope.reset(self._tokens.pop())


def for_attempt(
    attempt: Attempt, service: str, *element: Part, name: str | None = None
) -> AttemptKeys:
    """Requests inside the `with` send the attempt's child keys.

    A takeover then repeats the same keys downstream. The key is
    `attempt.child_key(service, name, *element)`; without a name, the request's method and path
    stand for it. Requests inside raise `ClaimLost` once the attempt has lost its claim, and
    `InvalidInput` when two calls would share a key. Raises `SecretMissing` when the operation's
    `Idempotency` has no secret.
    """
    # Asked for at once: a missing secret should show here, not in the first request.
    attempt.child_key(service)
    return AttemptKeys(attempt, service, element, name)
