"""From a function and its arguments to a call: key, caller, fingerprint, codec.

Owns what both objects have in common before the engine is asked. It does no I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any, Final

from retrysafe.core.call import Call
from retrysafe.core.callables import require_function
from retrysafe.core.events import UNNAMED
from retrysafe.core.keys.body_key import BodyKey
from retrysafe.core.keys.canonical import Part, frame, part_bytes
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import (
    Key,
    body_key,
    checked_secret,
    natural_key,
)
from retrysafe.core.model import Fingerprint, Payload
from retrysafe.core.nested_claims import nested
from retrysafe.core.policy import Policy
from retrysafe.core.settings import CallerSource, Settings
from retrysafe.core.values.codec import ValueCodec
from retrysafe.errors import (
    InvalidInput,
    KeyInvalid,
    PolicyInvalid,
)


class Unset:
    """The type of `UNSET`: nothing was passed, which is not the same as None."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


KeySource = str | tuple[str, ...] | BodyKey | Callable[..., str | Key | tuple[Part, ...]]


def unpacked(
    operation: Callable[..., Any],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function in a `functools.partial`, and what it holds; partials may hold partials.

    Python makes one of two, unless the inner one has attributes, such as a name.
    """
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    while isinstance(operation, partial):
        args = (*operation.args, *args)
        keywords = {**operation.keywords, **keywords}
        operation = operation.func
    return operation, args, keywords


def asked_for(operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a call asks for: its arguments, with those that a `functools.partial` holds."""
    if not isinstance(operation, partial):
        return list(args)
    _, held, keywords = unpacked(operation)
    return {"args": [*held, *args], "kwargs": keywords}


def operation_name(operation: Callable[..., Any]) -> str:
    """The name that tells operations apart; nameless ones share the empty name."""
    operation = unpacked(operation)[0]
    name: str = getattr(operation, "__qualname__", "")
    if not name or name.endswith("<lambda>"):
        return ""
    return f"{operation.__module__}.{name}"[:255]


def shown_name(operation: Callable[..., Any]) -> str:
    """The operation in a message: by its name, never by its address in memory."""
    name = operation_name(operation)
    if not name and not isinstance(operation, FunctionType | partial):
        name = type(operation).__qualname__
    return f"the operation {name or UNNAMED}"


@dataclass(slots=True)
class Once:
    """A decorated function: how its calls become keys and requests."""

    function: Callable[..., Any]
    settings: Settings
    key_source: KeySource
    name: str
    caller: CallerSource | None
    policy: Policy
    fingerprint: FingerprintRule | None
    codec: ValueCodec
    ignore: frozenset[str]
    # How long the key is remembered; None for a `BodyKey`, which has a window of its own.
    window: timedelta | None
    # Turns the arguments of a resumable operation into what is stored of them.
    keep: Callable[[tuple[Any, ...], Mapping[str, Any], int], Payload] | None = None
    signature: inspect.Signature = field(init=False)
    # What a `functools.partial` brings along, which is asked for as the arguments of a call are.
    held: tuple[tuple[Any, ...], dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        function, args, keywords = unpacked(self.function)
        self.signature = inspect.signature(function)
        self.held = args, keywords
        names = list(self.signature.parameters)
        if names and names[0] in ("self", "cls"):
            # The object is where the method lives, not part of what is asked for.
            self.ignore |= {names[0]}
        source = self.key_source
        given = source if isinstance(source, tuple) else (source,)
        is_names = bool(given) and all(isinstance(item, str) for item in given)
        if not (is_names or isinstance(source, BodyKey) or callable(source)):
            raise KeyInvalid(
                "key= takes the name of a parameter, a tuple of names as in key=('invoice_id',), a "
                f"function of the arguments or a BodyKey, got {source!r}"
            )
        named = source.intent if isinstance(source, BodyKey) else source
        for item in (*(named if isinstance(named, tuple) else (named,)), *sorted(self.ignore)):
            if isinstance(item, str) and item not in names:
                raise KeyInvalid(
                    f"{shown_name(self.function)} has no parameter {item!r}: key=, ignore= and the "
                    f"intent of a BodyKey take names of its parameters ({', '.join(names)}), key= "
                    "also takes a function of its arguments"
                )
        if isinstance(self.key_source, BodyKey):
            if self.window is not None:
                raise PolicyInvalid("a BodyKey has its own window: BodyKey(window=…)")
            # The policy of all operations may list it for those with other keys.
            if self.policy.nothing_happened and self.policy is not self.settings.policy:
                raise PolicyInvalid(
                    "nothing_happened is for keys that several requests may have: under a BodyKey "
                    "a corrected request has another key anyway"
                )
            self.policy = self.key_source.checked(self.policy, self.settings.secrets.value)
        elif self.window is None:
            raise PolicyInvalid(
                "once() needs to know how long the key is remembered: write window=FOREVER for "
                "what happens once and never again, such as the payment of an invoice, or "
                "window=timedelta(days=30) for what may come again after that"
            )
        else:
            self.policy = self.policy.with_window(self.window, of="once()")
        if not self.name:
            # All of them would be one operation: the refund of order 7 would get the outcome of
            # its charge.
            raise InvalidInput(
                f"{shown_name(self.function)} has no name of its own, and its name is a part of "
                "its keys: pass name=… to once()"
            )

    def argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value of one parameter in a call."""
        return self._bound(args, kwargs).arguments[name]

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """All parameters of the function with their values; raises TypeError as it would itself."""
        held, keywords = self.held
        bound = self.signature.bind(*held, *args, **{**keywords, **kwargs})
        bound.apply_defaults()
        return bound

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call for these arguments; raises TypeError as the function itself would."""
        try:
            bound = self._bound(args, kwargs)
        except TypeError as error:
            # The signature does not know whose it is; and a partial has no name.
            name = getattr(self.function, "__qualname__", self.name or UNNAMED)
            raise TypeError(f"{name}() {error}") from None
        request = {
            name: value for name, value in bound.arguments.items() if name not in self.ignore
        }
        rule = self.fingerprint or self.settings.fingerprint
        plain = rule.fingerprints_of_value(self.name, request)
        fingerprints = self.settings.secrets.fingerprints(plain)
        key, is_derived = self._key(bound, args, kwargs, plain[0])
        takes_corrections = is_derived and bool(self.policy.nothing_happened)
        scoped = self.settings.call_key(key, None if isinstance(key, Key) else self.caller)
        call = Call(
            scoped,
            fingerprints,
            self.policy,
            self.name,
            self.codec,
            arguments=(
                None
                if self.keep is None
                else self.keep(args, kwargs, self.policy.arguments_limit_bytes)
            ),
            nothing_happened=self.policy.is_nothing_happened if takes_corrections else None,
        )
        secrets = self.settings.secrets
        if not isinstance(self.key_source, BodyKey) or len(secrets.listed) < 2:
            return call
        asked = _hashed(self.key_source, bound, plain[0])
        return nested(
            call,
            (
                (secret.tag, scoped.renamed(body_key(secret.value, self.name, asked)))
                for secret in secrets.listed
            ),
        )

    def _key(
        self,
        bound: inspect.BoundArguments,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fingerprint: Fingerprint,
    ) -> tuple[str | Key, bool]:
        """The key, and whether it was made here from values that several requests may have.

        A text that a function gives may be a client's own key, which belongs to one request.
        """
        source = self.key_source
        if isinstance(source, str):
            source = (source,)
        if isinstance(source, tuple):
            named = {name: bound.arguments[name] for name in source}
            self._require_telling(named.values(), ", ".join(source))
            return natural_key(self.name, **named), True
        if isinstance(source, BodyKey):
            # What the rule leaves out does not count here either: a retry that differs in nothing
            # else would get a key of its own, and run again.
            secret = checked_secret(self.settings.secrets.value)
            return body_key(secret, self.name, _hashed(source, bound, fingerprint)), False
        made = source(*args, **kwargs)
        if isinstance(made, tuple):
            self._require_telling(made, "the values of its key")
            return natural_key(self.name, *made), True
        return made, False

    def _require_telling(self, values: Iterable[Any], named: str) -> None:
        """Raises `KeyInvalid` for values that tell nothing, such as the id of what is not saved."""
        if all(value is None or (isinstance(value, str | bytes) and not value) for value in values):
            raise KeyInvalid(
                f"all of {named} are None or empty, so all such calls of {self.name} would be one: "
                "pass what identifies the operation, or another key"
            )


def _hashed(source: BodyKey, bound: inspect.BoundArguments, fingerprint: Fingerprint) -> bytes:
    """What a body key is a hash of: all that is asked for, and the intent of those that have one.

    Raises `FingerprintImpossible` for an intent without a stable form.
    """
    intent = None if source.intent is None else bound.arguments[source.intent]
    return fingerprint.digest if intent is None else frame(fingerprint.digest, part_bytes(intent))


ONCE_ATTRIBUTE: Final = "__retrysafe_once__"


def once_of(function: Callable[..., Any]) -> tuple[Once, tuple[Any, ...]]:
    """The decoration of a function or bound method, and the arguments that it is bound to."""
    once = getattr(function, ONCE_ATTRIBUTE, None)
    if not isinstance(once, Once):
        require_function(function, "pass the function and its arguments, not its result")
        raise InvalidInput(f"{shown_name(function)} is not decorated with once()")
    owner = getattr(function, "__self__", None)
    return once, () if owner is None else (owner,)
