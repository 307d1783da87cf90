"""Where a request's key comes from: its client, its own fields, or a hash of all it asks for.

Owns the three ways and when each has no key to give. The header's syntax is in `headers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from retrysafe.core import canonical
from retrysafe.core.fingerprint import FingerprintRule
from retrysafe.core.framing import Part
from retrysafe.core.keys import body_key, checked_secret, natural_key
from retrysafe.core.numerals import Number
from retrysafe.core.policy import Policy
from retrysafe.errors import KeyInvalid, PolicyInvalid
from retrysafe.http.bodies import Content, content_of, field_of
from retrysafe.http.durations import spoken
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
    a form by `/name`; `"{id}"` takes a parameter of the rule's path. The key is
    `natural_key(operation, *values)` with the rule's operation name, the values in the order given
    and numbers as int or Decimal. `window` is how long the key is remembered after the run: a
    timedelta, or FOREVER. Raises `PolicyInvalid` for fields that cannot be any of these, and
    without a window.
    """

    fields: tuple[str, ...]
    window: timedelta
    _tokens: tuple[tuple[str, ...] | str, ...] = field(repr=False, compare=False)

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
        object.__setattr__(self, "_tokens", tuple(map(_tokens_of, fields)))

    def __str__(self) -> str:
        return f"these fields: {', '.join(self.fields)}"

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy with this window; raises `PolicyInvalid`."""
        return policy.with_window(self.window, of="FromFields")

    def key(
        self, request: Request, *, operation: str, rule: FingerprintRule, secret: bytes | None
    ) -> str:
        """The key; raises `KeyInvalid` when a field is missing or is no plain value."""
        content: Content | None = None
        parts: list[Part] = []
        for name, tokens in zip(self.fields, self._tokens, strict=True):
            if isinstance(tokens, str):
                value: Any = request.parameters.get(tokens, canonical.ABSENT)
            else:
                if content is None:
                    content = content_of(request)
                value = field_of(content, tokens)
            parts.append(_part_of(name, value))
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


def _tokens_of(name: str) -> tuple[str, ...] | str:
    """The steps of a pointer, or the name of a path parameter."""
    if isinstance(name, str) and name.startswith("{") and name.endswith("}") and len(name) > 2:
        return name[1:-1]
    try:
        tokens = canonical.pointer_tokens(name)
    except (ValueError, TypeError, AttributeError):
        tokens = ()
    if not tokens:
        raise PolicyInvalid(
            f"FromFields takes JSON Pointers such as /order_id and path parameters such as {{id}}, "
            f"got {name!r}"
        )
    return tokens


# More digits than any id has. Longer numbers are Decimals, however they were written: 1e999999999
# as an int would take all memory.
_INT_LIMIT: Final = 10**40


def _part_of(name: str, value: Any) -> Part:
    if isinstance(value, Number):
        return _number(name, value.text)
    if isinstance(value, int):
        return value if isinstance(value, bool) or abs(value) < _INT_LIMIT else Decimal(value)
    # The empty text is what a form sends for a field that nobody filled in.
    if isinstance(value, str) and value:
        return value
    raise KeyInvalid(
        f"the key is made from {name}, which must be sent once, as a text, a number or a boolean"
    )


def _number(name: str, text: str) -> Part:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise KeyInvalid(f"the key is made from {name}, whose number is out of range") from None
    # `Number` writes no zeros at the end, so a negative exponent means a fraction.
    is_whole = "e-" not in text and number.adjusted() < 40
    return int(number) if is_whole else number
