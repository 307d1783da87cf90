"""Resumable operations: registered by name, with what turns their arguments into bytes and back.

Owns the registry of one object. An operation is found by its name in a record, and by the function
itself in a call, so that declaring it once is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, get_type_hints

from retrysafe.core.call import Answer, Call
from retrysafe.core.model import Fingerprint, Payload, StoredKey
from retrysafe.core.policy import InFlight, Policy
from retrysafe.core.recovery import Resumer, key_of
from retrysafe.core.values.codec import OutcomeCodec, ValueCodec, classes_in, message_of
from retrysafe.core.values.trees import NotReadable, NotStorable
from retrysafe.errors import ArgumentsNotStorable, InvalidInput
from retrysafe.runtime.describe import shown_name

# Answers a call by running the function with these arguments.
Run = Callable[[Call, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Awaitable[Any]]


@dataclass(slots=True, eq=False)
class Resumable:
    """One resumable operation."""

    name: str
    function: Callable[..., Any]
    policy: Policy
    # Of what it returns, and of what it is called with.
    codec: OutcomeCodec
    run: Run
    _arguments_codec: ValueCodec = field(init=False)
    _signature: inspect.Signature = field(init=False)
    _policy_of_recovery: Policy = field(init=False)

    def __post_init__(self) -> None:
        self._signature = inspect.signature(self.function)
        self._arguments_codec = ValueCodec(_parameter_types(self.function))
        # A worker has other keys to go on with while somebody else runs this one.
        self._policy_of_recovery = self.policy.with_changes(in_flight=InFlight.FAIL)

    def payload(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit_bytes: int
    ) -> Payload:
        """The arguments of a call as they are stored; raises `ArgumentsNotStorable`."""
        try:
            payload = self._arguments_codec.encode([list(args), dict(kwargs)])
        except NotStorable as error:
            raise ArgumentsNotStorable(
                f"{shown_name(self.function)} is resumable, and its arguments cannot be stored: "
                f"{error}. Pass values, and make connections and the like inside the operation"
            ) from error
        if payload.size_bytes > limit_bytes:
            raise ArgumentsNotStorable(
                f"{shown_name(self.function)} is resumable, and its arguments have "
                f"{payload.size_bytes:,} bytes where the limit is {limit_bytes:,}: raise "
                "arguments_limit_bytes, or store the large part elsewhere and pass a reference"
            )
        return payload

    def prepare(self, stored: StoredKey) -> Callable[[], Awaitable[Answer[Any]]]:
        """What takes an abandoned claim over and runs the operation; raises `NotReadable`."""
        assert stored.arguments is not None  # Only such records are resumed.
        args, kwargs = self._read(stored.arguments)
        record = stored.record
        call = Call(
            key_of(record),
            # The record's own: the request is the one that it was made for, so it cannot be
            # mismatched, and the check that later callers meet stays as it was.
            (Fingerprint(record.rule, record.fingerprint),),
            self._policy_of_recovery,
            self.name,
            self.codec,
            recovers=record.token,
        )
        return partial(self.run, call, self.function, args, kwargs)

    def _read(self, payload: Payload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        value = self._arguments_codec.decode(payload)
        try:
            positional, kwargs = value
            args = tuple(positional)
            self._signature.bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise NotReadable(
                f"they no longer fit {shown_name(self.function)}: {message_of(error)}"
            ) from None
        return args, kwargs


class Resumables:
    """The resumable operations of one object."""

    __slots__ = ("by_function", "by_name")

    def __init__(self) -> None:
        # Functions by their names, and the routes of applications by theirs.
        self.by_name: dict[str, Resumer] = {}
        self.by_function: dict[Callable[..., Any], Resumable] = {}

    def register(self, resumable: Resumable) -> None:
        """Adds an operation; raises `InvalidInput` for one that no worker could find or call."""
        function, name = resumable.function, resumable.name
        _require_name(name)
        if name in self.by_name:
            raise InvalidInput(
                f"another resumable operation is called {name!r}: a worker could not tell them "
                "apart, so give one of them another name"
            )
        if next(iter(inspect.signature(function).parameters), "") in ("self", "cls"):
            raise InvalidInput(
                f"{shown_name(function)} is a method, and a worker has no object to call it on: "
                "make a function resumable"
            )
        self.by_name[name] = self.by_function[function] = resumable

    def register_route(self, name: str, resumer: Resumer) -> None:
        """Adds a route of an application; raises `InvalidInput` for the name of a function.

        An application may be made twice, and two of its mounts may have routes of one name: each
        request finds its own route again by its path.
        """
        _require_name(name)
        if isinstance(self.by_name.get(name), Resumable):
            raise InvalidInput(
                f"a resumable function is called {name!r}, too: give the rule or the function "
                "another name, or a worker could not tell them apart"
            )
        self.by_name[name] = resumer

    def of(
        self, operation: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Resumable, tuple[Any, ...], Mapping[str, Any]] | None:
        """The operation behind a callable and what it is called with; None if it is not one."""
        kwargs: Mapping[str, Any] = {}
        if isinstance(operation, partial):
            args, kwargs = (*operation.args, *args), operation.keywords
            operation = operation.func
        try:
            found = self.by_function.get(operation)
        except TypeError:
            return None  # Objects without a hash cannot have been registered.
        return None if found is None else (found, args, kwargs)


def _require_name(name: str) -> None:
    if not name:
        raise InvalidInput(
            "a resumable operation is found by its name, and this one has none: pass name=…"
        )
    if any(character == "\x00" or "\ud800" <= character <= "\udfff" for character in name):
        # A worker asks its store for all names at once; this one would spoil the question.
        raise InvalidInput(
            f"the name {name!r} has characters that not every store can keep: give the "
            "operation another one"
        )


@lru_cache(maxsize=512)
def _parameter_types(function: Callable[..., Any]) -> tuple[type, ...]:
    """The classes in the annotations of the parameters, for rebuilding stored arguments."""
    try:
        hints = get_type_hints(function)
    except Exception:
        return ()  # An annotation that cannot be resolved here is only a missing hint.
    hints.pop("return", None)
    return tuple(kind for hint in hints.values() for kind in classes_in(hint))
