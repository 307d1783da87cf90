"""Where a request's key comes from: its client, its own fields, or a hash of all it asks for.

Owns the three ways, the one that joins two of them, and when each has no key to give. The header's
syntax is in `headers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from retrysafe.core.keys import canonical
from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.canonical import Part, frame, part_bytes
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import body_key, checked_secret, looks_derived, natural_key
from retrysafe.core.policy import Policy
from retrysafe.errors import KeyInvalid, PolicyInvalid
from retrysafe.http.bodies import Content, content_of, field_of
from retrysafe.http.durations import spoken
from retrysafe.http.field_values import TYPES, declared_part, plain_part
from retrysafe.http.fingerprints import request_fingerprints
from retrysafe.http.plain_parts import require_plain_parts
from retrysafe.http.request import Request


@dataclass(frozen=True, slots=True)
class HeaderKey:
    """The key that the client sends in `Idempotency-Key`.

    `otherwise=BodyKey(…)` makes the key of a request without that header, so that clients which
    cannot send one share the route. A request that comes once with a key and once without is two
    intents. Raises `PolicyInvalid` for anything else in its place.
    """

    otherwise: BodyKey | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.otherwise, BodyKey | None):
            raise PolicyInvalid(
                f"HeaderKey takes otherwise=BodyKey(…), got {self.otherwise!r}: a natural key "
                "counts whether or not a client sends another one, so use FieldsKey alone"
            )
        require_intent(self.otherwise)

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy for keys of this kind: the same."""
        return policy


@dataclass(frozen=True, slots=True, init=False)
class FieldsKey:
    """A natural key: what the request is about, such as one order of one customer.

    `FieldsKey("/customer", "/order_id")` takes values from the body by JSON Pointer, or fields of
    a form by `/name`; `"{id}"` takes a parameter of the rule's path. A type after a colon, as in
    `"{id:int}"` and `"/order_id:uuid"`, says what a value is: text, int, decimal, uuid, date,
    datetime, time, ip or bool. Without one it is what the framework has converted it to, a number
    also where that is sent as text, else text; what can be written in several ways is refused. The
    key is `natural_key(operation, *values)` with the rule's operation name and the values in the
    order given; a UUID, a time and an address as their text. `window` is how long the key is
    remembered after the run: a timedelta, or FOREVER. Raises `PolicyInvalid` for fields that cannot
    be any of these, and without a window.
    """

    fields: tuple[str, ...]
    window: timedelta
    _parsed: tuple[_Field, ...] = field(repr=False, compare=False)

    def __init__(self, *fields: str, window: timedelta | None = None) -> None:
        if not fields:
            raise PolicyInvalid("FieldsKey needs at least one field that tells requests apart")
        if window is None:
            raise PolicyInvalid(
                "FieldsKey needs to know how long the key is remembered: write window=FOREVER "
                "for what happens once and never again, such as the payment of an invoice, or "
                "window=timedelta(days=30) for what may come again after that"
            )
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "fields", fields)
        object.__setattr__(self, "_parsed", tuple(map(_field_of, fields)))

    @property
    def shown(self) -> str:
        """The fields in a sentence, each with its type."""
        return ", ".join(map(str, self._parsed))

    def checked(self, policy: Policy, secret: bytes | None) -> Policy:
        """The policy with this window; raises `PolicyInvalid`."""
        return policy.with_window(self.window, of="FieldsKey")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of the path that are part of the key."""
        return tuple(item.parameter for item in self._parsed if item.parameter)

    @property
    def converted_parameters(self) -> tuple[str, ...]:
        """The parameters of the path that are what the framework has converted them to."""
        return tuple(
            item.parameter for item in self._parsed if item.parameter and item.kind is None
        )

    def key(self, request: Request, *, operation: str) -> str:
        """The key; raises `KeyInvalid` when a field is missing or not written plainly."""
        content: Content | None = None
        parts: list[Part] = []
        for item in self._parsed:
            if item.parameter:
                value: Any = request.parameters.get(item.parameter, canonical.ABSENT)
            else:
                if content is None:
                    content = _content_with_fields(request)
                value = field_of(content, item.tokens)
            parts.append(item.part(value))
        return natural_key(_without_slash(operation), *parts)


def _content_with_fields(request: Request) -> Content:
    """What the body says, for a key to be made from its fields; raises `KeyInvalid`."""
    content = content_of(request)
    # Else the key is of one order, and a framework that reads the form differently runs another.
    require_plain_parts(request, content)
    return content


KeySource = HeaderKey | FieldsKey | BodyKey


def described(source: KeySource) -> str:
    """Where keys come from, in words for people who know no Python."""
    if isinstance(source, FieldsKey):
        return f"these fields: {source.shown}"
    if isinstance(source, HeaderKey):
        header = "the Idempotency-Key header"
        return (
            header
            if source.otherwise is None
            else f"{header}, or else by " + described(source.otherwise)
        )
    asked = f"all that they ask for, within {spoken(source.window)}"
    intent = _intent_of(source.intent)
    if intent is None:
        return asked
    return f"{asked}, and by {intent if isinstance(intent, _Field) else source.intent}"


def made_key(
    source: FieldsKey | BodyKey,
    request: Request,
    *,
    operation: str,
    rule: FingerprintRule,
    secret: bytes | None,
) -> str:
    """The key that a request itself makes; raises `KeyInvalid`, or `SecretMissing`."""
    if isinstance(source, FieldsKey):
        return source.key(request, operation=operation)
    asked = request_fingerprints(request, rule)[0].digest
    intent = _told_intent(source, request)
    if intent:
        asked = frame(asked, *intent)
    return body_key(checked_secret(secret), _without_slash(operation), asked)


def _told_intent(source: BodyKey, request: Request) -> list[bytes]:
    """What the request says of its intent; nothing when it says nothing."""
    intent = _intent_of(source.intent)
    if intent is None:
        return []
    if isinstance(intent, bytes):
        lines = request.header_lines(intent)
        # An empty line says something. Several are one list, as a proxy may write them.
        return [b", ".join(line.strip(b" \t") for line in lines)] if lines else []
    value = field_of(_content_with_fields(request), intent.tokens)
    # Many clients write null where they have nothing to say.
    has_none = value is canonical.ABSENT or value is None
    return [] if has_none else [part_bytes(intent.part(value))]


def require_intent(source: KeySource | None) -> None:
    """Raises `PolicyInvalid` for a body key whose intent no request could name."""
    if isinstance(source, BodyKey):
        _intent_of(source.intent)


def require_own_key(text: str) -> None:
    """Raises `KeyInvalid` for a client's key that looks like one that is made from its request.

    The two would meet, and two intents be one.
    """
    if looks_derived(text):
        raise KeyInvalid(
            "a key that begins with natural: or body: and ends with a digest is made by the server "
            "alone: send another one, such as a UUID"
        )


_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


# Every request of such a route asks, and a process has few routes.
@lru_cache(maxsize=512)
def _intent_of(given: str | None) -> _Field | bytes | None:
    """What names an intent: a field of the body, or a header's name; raises `PolicyInvalid`."""
    if given is None:
        return None
    if _HEADER_NAME.fullmatch(given):
        if given.lower() == "idempotency-key":
            raise PolicyInvalid(
                "the intent of BodyKey cannot be the key's own header: use "
                "HeaderKey(otherwise=BodyKey(…))"
            )
        return given.lower().encode("ascii")
    found = _pointed_field(given)
    if found is None:
        raise PolicyInvalid(
            "over HTTP the intent of BodyKey is a field such as /intent or a header such as "
            f"X-Order-Number, got {given!r}"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a natural key, or of an intent, read once."""

    # As it is written, without its type.
    name: str
    # None: what the value itself says.
    kind: str | None
    # The name of a path parameter, or else the steps of a pointer.
    parameter: str
    tokens: tuple[str, ...]

    def __str__(self) -> str:
        return self.name if self.kind is None else f"{self.name} ({self.kind})"

    def part(self, value: Any) -> Part:
        """What a value of this field is in a key; raises `KeyInvalid` or `InvalidInput`."""
        if self.kind is None:
            return plain_part(self.name, value)
        return declared_part(self.name, self.kind, value)


def _field_of(given: object) -> _Field:
    """A field as it is written; raises `PolicyInvalid` for what is none."""
    if isinstance(given, str) and given.startswith("{") and given.endswith("}"):
        name, kind = _split_type(given)
        found = _Field(name, kind, name[1:-1], ()) if len(name) > 2 else None
    else:
        found = _pointed_field(given)
    if found is None:
        raise PolicyInvalid(
            f"FieldsKey takes JSON Pointers such as /order_id and path parameters such as {{id}}, "
            f"got {given!r}"
        )
    return found


def _pointed_field(given: object) -> _Field | None:
    """A field of the body by its JSON Pointer; None for what is no pointer."""
    if not isinstance(given, str):
        return None
    name, kind = _split_type(given)
    try:
        tokens = canonical.pointer_tokens(name)
    except ValueError:
        return None
    return _Field(name, kind, "", tokens) if tokens else None


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
            f"there is no type {kind!r}, as in {given!r}: a type is one of "
            f"{', '.join(TYPES)}; after a name with a colon write one too, as in /a:b:text"
        )
    return (f"{{{name}}}" if is_parameter else name), kind


def _without_slash(operation: str) -> str:
    """The operation's name for a key: an endpoint is often served with a slash at its end, too.

    Two routes to it have two names then, and one request by both must not run twice.
    """
    bare = operation.rstrip("/")
    return operation if bare.endswith(" ") else bare
