"""Outcomes as versioned bytes, and back.

Owns the forms in which values and failures are stored. Every form carries its version, so that a
later release can write a new one and still read the old. A value that cannot be stored becomes a
`withheld` outcome: the operation is known to be done, and it is never run again for that reason.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache, partial
from typing import Any, Final, Protocol

from retrysafe.core.handlers import is_of_handler
from retrysafe.core.model import Payload
from retrysafe.core.stop_iteration import own_error, raisable
from retrysafe.core.values import trees
from retrysafe.core.values.compare import difference
from retrysafe.core.values.models import is_dataclass, is_msgspec, is_pydantic
from retrysafe.core.values.trees import NotReadable, NotStorable, Types, Walk
from retrysafe.core.values.zones import held_in
from retrysafe.errors import AttemptsExhausted, OperationFailed, OutcomeUnavailable

JSON: Final = "json.1"
TAGGED: Final = "tagged.1"
BYTES: Final = "bytes.1"
DATACLASS: Final = "dataclass.1"
MSGSPEC: Final = "msgspec.1"
PYDANTIC: Final = "pydantic.1"
FAILURE: Final = "failure.1"
EXHAUSTED: Final = "exhausted.1"
WITHHELD: Final = "withheld.1"

# What is raised when it is replayed.
FAILURE_FORMS: Final = frozenset({FAILURE, EXHAUSTED})
# The forms whose body is a JSON text, for stores that let people query it.
JSON_FORMS: Final = (JSON, TAGGED, DATACLASS, MSGSPEC, PYDANTIC, FAILURE, EXHAUSTED, WITHHELD)

# A failure's message is for people; a whole response body in it would only fill the store.
MESSAGE_LIMIT_CHARACTERS: Final = 2_000
# How often an exception is encoded while signals' handlers raise in that.
ENCODE_TRIES: Final = 2


class OutcomeCodec(Protocol):
    """Turns what an operation returns into a payload and back."""

    def encode(self, value: Any) -> Payload:
        """The payload; raises `NotStorable` when the value has none."""

    def decode(self, payload: Payload) -> Any:
        """The value; raises `NotReadable` when it cannot be made here."""


class ValueCodec:
    """The codec of Python values."""

    __slots__ = ("_types",)

    def __init__(self, returns: Iterable[type] = ()) -> None:
        self._types = Types(returns)

    def encode(self, value: Any) -> Payload:
        """The payload in the plainest form that gives an equal value back."""
        kind = type(value)
        if kind is bytes:
            return Payload(BYTES, b"", value)
        try:
            if kind is str or trees.is_plain(value):
                return Payload(JSON, b"", trees.json_bytes(value))
            return _written(value)
        except NotStorable:
            raise
        except NotReadable as error:
            raise NotStorable(
                f"the value could not be made again from what would be stored of it: {error}"
            ) from error
        except Exception as error:
            raise NotStorable(f"the result could not be encoded: {message_of(error)}") from error

    def decode(self, payload: Payload) -> Any:
        """The value that `encode` was given."""
        read = _READERS.get(payload.form)
        if read is None:
            raise NotReadable(
                f"the outcome is stored in the form {payload.form!r}, which this release does "
                "not know"
            )
        try:
            return read(payload, self._types)
        except NotReadable:
            raise
        except Exception as error:
            # Damaged bytes, or a class that refuses today what it returned then. Whatever it
            # raises is not the outcome, and the caller must not take it for one.
            raise NotReadable(
                f"the stored outcome could not be read: {message_of(error)}"
            ) from error


def _written(value: Any) -> Payload:
    """The payload of a value that is no plain JSON; raises `NotStorable` if it would change."""
    if (is_pydantic(value) or is_msgspec(value)) and held_in(value):
        # Their libraries write no time zones; the tree does.
        return Payload(TAGGED, b"", trees.json_bytes(_tree_that_comes_back(value)))
    if is_pydantic(value):
        text: str = value.model_dump_json(**trees.PYDANTIC_OPTIONS)
        return _comes_back(value, Payload(PYDANTIC, _head(value), text.encode()))
    if is_msgspec(value):
        body = sys.modules["msgspec"].json.encode(value)
        return _comes_back(value, Payload(MSGSPEC, _head(value), body))
    tree = _tree_that_comes_back(value)
    if is_dataclass(value) and not isinstance(value, Enum):
        return Payload(DATACLASS, _head(value), trees.json_bytes(tree["v"]))
    return Payload(TAGGED, b"", trees.json_bytes(tree))


def _head(value: Any) -> bytes:
    return trees.type_name(type(value)).encode()


def _comes_back(model: Any, payload: Payload) -> Payload:
    """The payload of a model, once it has been read; raises `NotStorable` for another model."""
    _require_same(model, _READERS[payload.form](payload, Types((type(model),))))
    return payload


# These are found by name or made of their items alone: they need not be tried.
_MADE_OF_WHAT_IS_STORED: Final = (Enum, tuple)


def _tree_that_comes_back(value: Any) -> Any:
    """The tree of a value; raises `NotStorable` when a model or dataclass in it would change."""
    met: set[type] = set()
    tree = trees.to_tree(value, walk=Walk(met))
    if not all(issubclass(kind, _MADE_OF_WHAT_IS_STORED) for kind in met):
        _require_same(value, trees.from_tree(tree, Types(met)))
    return tree


def _require_same(value: Any, back: Any) -> None:
    """Raises `NotStorable` when what was read back is not the value.

    A class writes what it likes: a mask, some of its fields, texts where there were dates. Better
    no replay than one that differs from the first answer, so each is tried when it is written.
    """
    found = difference(value, back)
    if found is not None:
        where, what = found
        raise NotStorable(
            f"the value{where} {what}: declare the type that the field really holds, leave secrets "
            "and excluded fields out, or use a plain value instead"
        )


_READERS: Final[dict[str, Callable[[Payload, Types], Any]]] = {
    BYTES: lambda payload, types: payload.body,
    JSON: lambda payload, types: json.loads(payload.body),
    TAGGED: lambda payload, types: trees.from_tree(json.loads(payload.body), types),
    DATACLASS: lambda payload, types: trees.read_dataclass(
        types.find(payload.head.decode()), json.loads(payload.body), types
    ),
    PYDANTIC: lambda payload, types: trees.read_pydantic(
        types.find(payload.head.decode()), payload.body
    ),
    MSGSPEC: lambda payload, types: trees.read_msgspec(
        types.find(payload.head.decode()), payload.body
    ),
}


def withheld(reason: str) -> Payload:
    """The outcome of an operation that is done and whose result could not be stored."""
    return Payload(WITHHELD, b"", trees.json_bytes({"reason": reason[:MESSAGE_LIMIT_CHARACTERS]}))


def bounded(payload: Payload, limit_bytes: int) -> Payload:
    """The payload itself, or a withheld one when it is over the limit."""
    if payload.size_bytes <= limit_bytes:
        return payload
    return withheld(
        f"the outcome has {payload.size_bytes:,} bytes and the limit is {limit_bytes:,}: raise "
        "outcome_limit_bytes, or store the large part elsewhere and return a reference"
    )


# What attempts did that count against a limit of the policy.
_COUNTED: Final = {"attempt_limit": "crashed", "release_limit": "failed and freed the key"}


def exhausted(limit: str, count: int, ending: str = "") -> Payload:
    """The failure of an operation that reached the limit of that name, and how it last ended."""
    message = (
        f"{limit}={count} is reached: so many attempts {_COUNTED[limit]}; the operation is not "
        "run again"
    )
    if ending:
        message = f"{message}; {ending}"[:MESSAGE_LIMIT_CHARACTERS]
    return Payload(EXHAUSTED, b"", trees.json_bytes({"message": message}))


def freed_by(payload: Payload) -> str:
    """What is stored of an ending that freed its key, in words."""
    if payload.form == FAILURE:
        return str(decode_failure(payload, (), ""))
    if payload.form == WITHHELD:
        return f"not kept: {withheld_reason(payload)}"
    # A value that was judged to free the key. What it says, its own codec knows; people find it
    # in the audit.
    return f"a result in the form {payload.form!r}"


def encode_failure(error: BaseException, limit_bytes: int) -> Payload:
    """The stored form of an exception: type name, message, and what rebuilds it if possible."""
    error = own_error(error)
    head = trees.type_name(type(error)).encode()
    message = {"message": message_of(error)}
    for _ in range(ENCODE_TRIES):
        try:
            rebuild = _tree_that_comes_back({"args": list(error.args), "state": _state(error)})
            payload = Payload(FAILURE, head, trees.json_bytes(message | rebuild))
            if payload.size_bytes <= limit_bytes:
                return payload
            break
        except Exception as problem:
            # The exception cannot be rebuilt from JSON. Whatever its attributes do when they are
            # read, its failure must be stored: name and message can still be told.
            if not is_of_handler(problem):
                break
    return Payload(FAILURE, head, trees.json_bytes(message))


def _state(error: BaseException) -> dict[str, Any]:
    """The attributes of an exception, those in slots included."""
    names = {
        name
        for ancestor in type(error).__mro__
        for name in _slots_of(ancestor)
        if hasattr(error, name)
    }
    return vars(error) | {name: getattr(error, name) for name in sorted(names)}


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [
        name
        for name in ((slots,) if isinstance(slots, str) else slots)
        if name not in ("__dict__", "__weakref__")
    ]


def require_again(error: Exception, encode: Callable[[], object]) -> None:
    """Raises the error of an encoding if a signal's handler raised it.

    Then nothing is wrong with the value, and the exception is not to be swallowed as if it were
    about it. A handler that cannot be told by its frame is told by an encoding that succeeds when
    it is asked again.
    """
    # Here only what is wrong with a value is wrapped.
    is_wrapped = isinstance(error, NotStorable) and error.__cause__ is not None
    raised = error.__cause__ or error if is_wrapped else error
    if not is_of_handler(raised):
        try:
            encode()
        except Exception:
            return
    raise raised


def message_of(error: BaseException) -> str:
    """The text of an exception, bounded; never raises, whatever the exception's class does."""
    try:
        return str(error)[:MESSAGE_LIMIT_CHARACTERS]
    except Exception:
        # A broken __str__ must not turn a stored failure into a re-run.
        return "(the exception has no readable message)"


def decode_failure(payload: Payload, declared: Iterable[type[Exception]], key: str) -> Exception:
    """The exception to raise for a stored failure: the declared type where it can be rebuilt."""
    if payload.form == WITHHELD:
        return unavailable(payload, key)
    try:
        tree = json.loads(payload.body)
        message = str(tree["message"])
        name = payload.head.decode()
    except (ValueError, KeyError, TypeError) as error:
        return OutcomeUnavailable(
            f"the operation failed and will not run again, but its failure cannot be read: {error}",
            key=key,
        )
    if payload.form == EXHAUSTED:
        return AttemptsExhausted(message, key=key, type_name="AttemptsExhausted")
    kind = _declared_type(name, declared)
    if kind is not None and "args" in tree:
        try:
            rebuilt = _rebuilt(kind, tree)
        except Exception:
            rebuilt = None  # Its class has changed, or does more than hold what it is given.
        # A class that keeps what it says elsewhere comes back mute; then the message is worth more.
        if rebuilt is not None and message_of(rebuilt) == message:
            return raisable(rebuilt)
    # The failure stands, only its shape is lost.
    return OperationFailed(f"{name.partition(':')[2]}: {message}", key=key, type_name=name)


def _rebuilt(kind: type[Exception], tree: Any) -> Exception:
    types = Types((kind,))
    args = trees.from_tree(tree["args"], types)
    # Not through __init__: its parameters need not be the args that it passed on.
    error = kind.__new__(kind, *args)
    error.args = tuple(args)
    for name, item in trees.from_tree(tree["state"], types).items():
        object.__setattr__(error, name, item)
    return error


def _declared_type(name: str, declared: Iterable[type[Exception]]) -> type[Exception] | None:
    """The type of that name among the declared ones and the subclasses loaded here."""
    waiting = list(declared)
    seen = set(waiting)
    while waiting:
        kind = waiting.pop()
        if trees.type_name(kind) == name:
            return kind
        fresh = [child for child in kind.__subclasses__() if child not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return None


def withheld_reason(payload: Payload) -> str:
    """Why a result was not kept."""
    try:
        return str(json.loads(payload.body)["reason"])
    except (ValueError, KeyError, TypeError) as error:
        return f"the reason cannot be read ({error})"


def unavailable(payload: Payload, key: str) -> OutcomeUnavailable:
    """The error for a withheld outcome."""
    return OutcomeUnavailable(
        f"the operation is done and will not run again, but its outcome was not kept: "
        f"{withheld_reason(payload)}",
        key=key,
    )


# Which codec an outcome needs: by the annotation of its operation, or by what is declared.

_NO_TYPES: Final = ValueCodec()


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


def codec_of_step(call: Callable[..., Any], returns: type | tuple[type, ...] | None) -> ValueCodec:
    """The codec that can rebuild what the call of a step returns, seen through a partial."""
    while isinstance(call, partial):
        call = call.func
    return codec_for(call, returns)
