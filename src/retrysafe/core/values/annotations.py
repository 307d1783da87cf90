"""Which codec an operation's outcome needs: by its annotation, or by what its caller declares."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

from retrysafe.core.values.codec import ValueCodec

_NO_TYPES = ValueCodec()


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
