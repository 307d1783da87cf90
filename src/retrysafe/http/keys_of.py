"""Where a request's key comes from: its client, its own fields, or a hash of all it asks for.

Owns the three ways and when each has no key to give. The header's syntax is in `headers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from retrysafe.core import canonical
from retrysafe.core.fingerprint import FingerprintRule
from retrysafe.core.framing import Part
from retrysafe.core.keys import body_key, checked_secret, natural_key
from retrysafe.core.policy import Policy
from retrysafe.errors import PolicyInvalid
from retrysafe.http.bodies import Content, content_of, field_of
from retrysafe.http.durations import spoken
from retrysafe.http.field_values import TYPES, declared_part, plain_part
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.request import Request


@dataclass(frozen=True, slots=True)
class FromHeader:
    """The key that the client sends in `Idempotency-Key`."""

    def __str__(self) -> str:
        return "the Idempotency-Key header"

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy for keys of this kind: the same."""
        return policy


@dataclass(frozen=True, slots=True, init=False)
class FromFields:
    """A natural key: what the request is about, such as one order of one customer.

    `FromFields("/customer", "/order_id")` takes values from the body by JSON Pointer, or fields of
    a form by `/name`; `"{id}"` takes a parameter of the rule's path. A type after a colon, as in
    `"{id:int}"` and `"/order_id:uuid"`, says what a value is: text, int, decimal, uuid, date,
    datetime or bool. Without one it is what the framework has converted it to, a number also where
    that is sent as text, else text; what can be written in several ways is refused. The key is
    `natural_key(operation, *values)` with the rule's operation name and the values in the order
    given. `window` is how long the key is remembered after the run: a timedelta, or FOREVER. Raises
    `PolicyInvalid` for fields that cannot be any of these, and without a window.
    """

    fields: tuple[str, ...]
    window: timedelta
    _parsed: tuple[_Field, ...] = field(repr=False, compare=False)

    def __init__(self, *fields: str, window: timedelta | None = None) -> None:
        if not fields:
            raise PolicyInvalid("FromFields needs at least one field that tells requests apart")
        if window is None:
            raise PolicyInvalid(
                "FromFields needs to know how long the key is remembered: write window=FOREVER "
                "for what happens once and never again, such as the payment of an invoice, or "
                "window=timedelta(days=30) for what may come again after that"
            )
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "_parsed", tuple(map(_field_of, fields)))

    def __str__(self) -> str:
        return f"these fields: {', '.join(map(str, self._parsed))}"

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy with this window; raises `PolicyInvalid`."""
        return policy.with_window(self.window, of="FromFields")

    @property
    def converted_parameters(self) -> tuple[str, ...]:
        """The parameters of the path that are what the framework has converted them to."""
        return tuple(
            item.parameter for item in self._parsed if item.parameter and item.kind is None
        )

    def key(
        self, request: Request, *, operation: str, rule: FingerprintRule, secret: bytes | None
    ) -> str:
        """The key; raises `KeyInvalid` when a field is missing or not written plainly."""
        content: Content | None = None
        parts: list[Part] = []
        for item in self._parsed:
            if item.parameter:
                value: Any = request.parameters.get(item.parameter, canonical.ABSENT)
            else:
                if content is None:
                    content = content_of(request)
                value = field_of(content, item.tokens)
            parts.append(
                plain_part(item.name, value)
                if item.kind is None
                else declared_part(item.name, item.kind, value)
            )
        return natural_key(operation, *parts)


@dataclass(frozen=True, slots=True)
class FromBody:
    """A keyed hash of the whole request, for clients that cannot send a key.

    Equal requests of one caller within the window count as one; the window starts when the first
    one ends. Needs a secret. Fields that the fingerprint's rule leaves out do not count here,
    either, so a change of that rule is a change of the keys.
    """

    window: timedelta = timedelta(minutes=5)

    def __str__(self) -> str:
        return f"all that they ask for, within {spoken(self.window)}"

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy with this window; raises `PolicyInvalid` or `SecretMissing`."""
        checked_secret(secret)
        return policy.with_window(self.window, of="FromBody")

    def key(
        self, request: Request, *, operation: str, rule: FingerprintRule, secret: bytes | None
    ) -> str:
        """The key; raises `SecretMissing` without a secret."""
        fingerprint = request_fingerprints(request, rule)[0]
        return body_key(checked_secret(secret), operation, fingerprint.digest)


KeySource = FromHeader | FromFields | FromBody


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a natural key, read once."""

    # As it is written, without its type.
    name: str
    # None: what the value itself says.
    kind: str | None
    # The name of a path parameter, or else the steps of a pointer.
    parameter: str
    tokens: tuple[str, ...]

    def __str__(self) -> str:
        return self.name if self.kind is None else f"{self.name} ({self.kind})"


def _field_of(given: object) -> _Field:
    """A field as it is written; raises `PolicyInvalid` for what is none."""
    name, kind = (given, None) if not isinstance(given, str) else _split_type(given)
    if isinstance(name, str) and name.startswith("{") and name.endswith("}") and len(name) > 2:
        return _Field(name, kind, name[1:-1], ())
    try:
        tokens = canonical.pointer_tokens(name)  # type: ignore[arg-type]
    except (ValueError, TypeError, AttributeError):
        tokens = ()
    if not isinstance(name, str) or not tokens:
        raise PolicyInvalid(
            f"FromFields takes JSON Pointers such as /order_id and path parameters such as {{id}}, "
            f"got {given!r}"
        )
    return _Field(name, kind, "", tokens)


def _split_type(given: str) -> tuple[str, str | None]:
    """A field and its declared type: `{id:int}` and `/order:int` have one."""
    is_parameter = given.startswith("{") and given.endswith("}")
    inner = given[1:-1] if is_parameter else given
    name, colon, kind = inner.rpartition(":")
    if not colon:
        return given, None
    if kind not in TYPES:
        # As a part of the name it would be looked for in vain, in every request.
        raise PolicyInvalid(
            f"FromFields knows no type {kind!r} in {given!r}: a type is one of "
            f"{', '.join(TYPES)}; after a name with a colon write one too, as in /a:b:text"
        )
    return (f"{{{name}}}" if is_parameter else name), kind
