"""From a function and its arguments to a call: key, caller, fingerprint, codec.

Owns what the faces have in common before the engine is asked. It does no I/O.
"""

from __future__ import annotations

import inspect
import os
import socket
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Final

from retrysafe.core.call import Call
from retrysafe.core.checks import require_function
from retrysafe.core.events import UNNAMED
from retrysafe.core.keys.fingerprint import FingerprintRule, fingerprint_tree
from retrysafe.core.keys.framing import Part
from retrysafe.core.keys.key import (
    Caller,
    GlobalCaller,
    Key,
    body_key,
    checked_secret,
    looks_derived,
    natural_key,
    scoped_key,
)
from retrysafe.core.keys.secret import Secrets
from retrysafe.core.model import Fingerprint, Payload
from retrysafe.core.nested_claims import nested
from retrysafe.core.policy import Policy
from retrysafe.core.values.codec import ValueCodec
from retrysafe.core.values.trees import NotStorable
from retrysafe.errors import (
    CallerMissing,
    FingerprintImpossible,
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

CallerSource = Caller | Callable[[], Caller]
_NO_TYPES = ValueCodec()


@dataclass(frozen=True, slots=True)
class BodyKey:
    """A key made from the arguments themselves, for calls that have none.

    Equal calls within the window count as one; the window starts when the first one ends. Fields
    that the fingerprint's rule leaves out do not count here, either, so a change of that rule is a
    change of the keys.
    """

    window: timedelta = timedelta(minutes=5)


KeySource = str | tuple[str, ...] | BodyKey | Callable[..., str | Key | tuple[Part, ...]]


def _no_caller(given: object) -> InvalidInput:
    return InvalidInput(
        f"caller is a text, a plain function that returns it, or GLOBAL, got {given!r}: write "
        "str(…) around a number such as the user's id"
    )


def checked_caller(caller: CallerSource | None) -> CallerSource | None:
    """Whose keys they are, for many calls to come; raises `InvalidInput`.

    Also for an async function: nobody would await it.
    """
    if caller is None or isinstance(caller, str | GlobalCaller):
        return caller
    if not callable(caller) or inspect.iscoroutinefunction(caller):
        raise _no_caller(caller)
    return caller


@dataclass(slots=True)
class Settings:
    """What a face was made with."""

    caller: CallerSource | None
    policy: Policy
    rule: FingerprintRule
    secrets: Secrets

    def fingerprints(
        self, rule: FingerprintRule | None, name: str, request: object
    ) -> tuple[Fingerprint, ...]:
        """What tells this request from others under its key; raises `FingerprintImpossible`."""
        return self.secrets.fingerprints(
            fingerprints_of(self.rule if rule is None else rule, name, request)
        )

    def key(self, key: str | Key, caller: CallerSource | None) -> Key:
        """The scoped key; raises `CallerMissing` when nobody said whose it is."""
        if isinstance(key, Key):
            if caller is not None:
                raise InvalidInput("pass a Key or a caller, not both: the Key has its caller")
            return key
        source = self.caller if caller is None else caller
        if source is None:
            raise CallerMissing(
                "whose key is it? Pass caller=… with the authenticated account (a text, or a "
                "function that returns it), or caller=GLOBAL for one namespace shared by everybody"
            )
        # Spelled out: the type `str | GlobalCaller` would be made anew for every call.
        if (
            type(source) is not str
            and not isinstance(source, GlobalCaller)
            and not isinstance(source, str)
        ):
            if not callable(source):
                raise _no_caller(source)
            source = source()
        return scoped_key(key, source)

    def call_key(self, key: str | Key, caller: CallerSource | None) -> Key:
        """The same for a key to run under; raises `KeyInvalid` for a copy of a derived key."""
        scoped = self.key(key, caller)
        if looks_derived(scoped.text):
            raise KeyInvalid(
                "a text of this form is a copy of a key that is made from values, and whoever "
                "chooses keys could take such a key in advance: pass what natural_key(…) returns, "
                "or another key",
                key=scoped.text,
            )
        return scoped


def owner_name() -> str:
    """Who holds a claim, for operators: host and process id."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}"


def asked_for(operation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a call asks for: its arguments, with those that a `functools.partial` holds."""
    if not isinstance(operation, partial):
        return list(args)
    return {"args": [*operation.args, *args], "kwargs": operation.keywords}


def operation_name(operation: Callable[..., Any]) -> str:
    """The name that tells operations apart; nameless ones share the empty name."""
    if isinstance(operation, partial):
        operation = operation.func
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


def classes_in(annotation: Any) -> Iterable[type]:
    """The classes that an annotation mentions."""
    arguments = typing.get_args(annotation)
    for argument in arguments:
        yield from classes_in(argument)
    if not arguments and isinstance(annotation, type):
        yield annotation


def codec_for(operation: Callable[..., Any], returns: type | tuple[type, ...] | None) -> ValueCodec:
    """The codec that can rebuild what the operation returns."""
    if returns is not None:
        return codec_of(returns)
    if "return" not in getattr(operation, "__annotations__", {}):
        return _NO_TYPES
    return _annotated_codec(operation)


@lru_cache(maxsize=512)
def _annotated_codec(operation: Callable[..., Any]) -> ValueCodec:
    """The codec of the classes in an operation's return annotation, made once."""
    try:
        annotation = typing.get_type_hints(operation).get("return")
    except Exception:
        return _NO_TYPES  # An annotation that cannot be resolved here is only a missing hint.
    types = tuple(classes_in(annotation))
    return ValueCodec(types) if types else _NO_TYPES


def codec_of(returns: type | tuple[type, ...] | None) -> ValueCodec:
    """The codec that can rebuild values of the declared types."""
    if returns is None:
        return _NO_TYPES
    return ValueCodec(returns if isinstance(returns, tuple) else tuple(classes_in(returns)))


def request_tree(request: object) -> Any:
    """What is asked for as a JSON tree; raises `FingerprintImpossible`."""
    try:
        return fingerprint_tree(request)
    except (NotStorable, RecursionError) as error:
        raise FingerprintImpossible(
            f"two requests can only be told apart by values with a stable form: {error}. Leave it "
            "out with ignore=…, or pass request=… with what identifies the request"
        ) from None


# What calls without arguments ask for, by rule and name. A closure brings its arguments along, so
# these are many calls of few operations.
_EMPTY_LIMIT: Final = 512
_empty: dict[tuple[int, str], tuple[FingerprintRule, tuple[Fingerprint, ...]]] = {}


def fingerprints_of(rule: FingerprintRule, name: str, request: object) -> tuple[Fingerprint, ...]:
    """The same without a secret."""
    if type(request) is list and not request:
        known = _empty.get((id(rule), name))
        # The rule is held with it, so that its id is nobody else's.
        if known is None:
            known = (rule, rule.fingerprints_of_value(name.encode(), tree=request))
            if len(_empty) < _EMPTY_LIMIT:
                _empty[id(rule), name] = known
        return known[1]
    tree = request_tree(request)
    try:
        return rule.fingerprints_of_value(name.encode(), tree=tree)
    except ValueError as error:
        raise FingerprintImpossible(
            f"the request has no canonical form: {error}. Leave it out with ignore=…, or pass "
            "request=… with what identifies the request"
        ) from None


@dataclass(slots=True)
class Once:
    """A decorated function: how its calls become keys and requests."""

    function: Callable[..., Any]
    settings: Settings
    key_source: KeySource
    name: str
    caller: CallerSource | None
    policy: Policy
    rule: FingerprintRule | None
    codec: ValueCodec
    ignore: frozenset[str]
    # How long the key is remembered; None for a `BodyKey`, which has a window of its own.
    window: timedelta | None
    # Turns the arguments of a resumable operation into what is stored of them.
    keep: Callable[[tuple[Any, ...], Mapping[str, Any], int], Payload] | None = None
    signature: inspect.Signature = field(init=False)

    def __post_init__(self) -> None:
        self.signature = inspect.signature(self.function)
        names = list(self.signature.parameters)
        if names and names[0] in ("self", "cls"):
            # The object is where the method lives, not part of what is asked for.
            self.ignore |= {names[0]}
        named = self.key_source if isinstance(self.key_source, tuple) else (self.key_source,)
        for item in (*named, *sorted(self.ignore)):
            if isinstance(item, str) and item not in names:
                raise KeyInvalid(
                    f"{shown_name(self.function)} has no parameter {item!r}: key= and ignore= take "
                    f"names of its parameters ({', '.join(names)}), key= also takes a function of "
                    "its arguments"
                )
        if isinstance(self.key_source, BodyKey):
            checked_secret(self.settings.secrets.value)
            if self.window is not None:
                raise PolicyInvalid("a BodyKey has its own window: BodyKey(window=…)")
            # The policy of all operations may list it for those with other keys.
            if self.policy.nothing_happened and self.policy is not self.settings.policy:
                raise PolicyInvalid(
                    "nothing_happened is for keys that several requests may have: under a BodyKey "
                    "a corrected request has another key anyway"
                )
            self.policy = self.policy.with_window(self.key_source.window, of="a BodyKey")
        elif self.window is None:
            raise PolicyInvalid(
                "once() needs to know how long the key is remembered: write window=FOREVER for "
                "what happens once and never again, such as the payment of an invoice, or "
                "window=timedelta(days=30) for what may come again after that"
            )
        else:
            self.policy = self.policy.with_window(self.window, of="once()")

    def argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value of one parameter in a call."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments[name]

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call for these arguments; raises TypeError as the function itself would."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            # The signature does not know whose it is; and a partial has no name.
            name = getattr(self.function, "__qualname__", self.name or UNNAMED)
            raise TypeError(f"{name}() {error}") from None
        bound.apply_defaults()
        request = {
            name: value for name, value in bound.arguments.items() if name not in self.ignore
        }
        plain = fingerprints_of(self.rule or self.settings.rule, self.name, request)
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
        return nested(
            call,
            (
                (secret.tag, scoped.renamed(body_key(secret.value, self.name, plain[0].digest)))
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
            return natural_key(self.name, **named), True
        if isinstance(source, BodyKey):
            # What the rule leaves out does not count here either: a retry that differs in nothing
            # else would get a key of its own, and run again.
            secret = checked_secret(self.settings.secrets.value)
            return body_key(secret, self.name, fingerprint.digest), False
        made = source(*args, **kwargs)
        if isinstance(made, tuple):
            return natural_key(self.name, *made), True
        return made, False


ONCE_ATTRIBUTE: Final = "__retrysafe_once__"


def once_of(function: Callable[..., Any]) -> tuple[Once, tuple[Any, ...]]:
    """The decoration of a function or bound method, and the arguments that it is bound to."""
    once = getattr(function, ONCE_ATTRIBUTE, None)
    if not isinstance(once, Once):
        require_function(function, "pass the function and its arguments, not its result")
        raise InvalidInput(f"{shown_name(function)} is not decorated with once()")
    owner = getattr(function, "__self__", None)
    return once, () if owner is None else (owner,)
