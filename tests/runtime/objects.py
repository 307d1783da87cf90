"""Both faces behind one plain interface, so that one test holds for both."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

from retrysafe import FOREVER, Answer, AsyncIdempotency, BodyKey, Idempotency


def windowed(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `once`, whose keys are remembered for ever unless they say otherwise."""
    own = isinstance(options.get("key"), BodyKey) or "key" not in options
    return options if own else {"window": FOREVER, **options}


def asked(
    operation: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The options of `run`, which would refuse a closure without arguments otherwise."""
    hides = not args and not isinstance(operation, functools.partial)
    return {"request": [], **options} if hides else options


class BlockingSubject:
    """`Idempotency` as it is."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.idem = Idempotency(store, **options)

    def answer(self, key: Any, operation: Callable[..., Any], *args: Any, **options: Any) -> Answer:
        return self.idem.answer(key, operation, *args, **asked(operation, args, options))

    def run(self, key: Any, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.idem.run(key, operation, *args, **asked(operation, args, options))

    def once(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Decorates the function; the result is called plainly."""
        return self.idem.once(**windowed(options))(function)

    def answer_of(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Answer:
        return self.idem.answer_of(function, *args, **kwargs)

    def plain_or_async(self, plain: Callable[..., Any], _: Callable[..., Any]) -> Any:
        """The function that this face takes as it is."""
        return plain

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Calls any other method."""
        return getattr(self.idem, name)(*args, **options)

    def close(self) -> bool:
        return self.idem.close()


class AsyncSubject:
    """`AsyncIdempotency`, with plain functions made async on the way in and out."""

    def __init__(self, runner: asyncio.Runner, store: Any, **options: Any) -> None:
        self._runner = runner
        self.idem = AsyncIdempotency(store, **options)

    @staticmethod
    def _as_async(function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):
            return function

        async def operation(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            return function(*args, **kwargs)

        return functools.update_wrapper(operation, function)

    def answer(self, key: Any, operation: Callable[..., Any], *args: Any, **options: Any) -> Answer:
        options = asked(operation, args, options)
        return self._runner.run(self.idem.answer(key, self._as_async(operation), *args, **options))

    def run(self, key: Any, operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
        options = asked(operation, args, options)
        return self._runner.run(self.idem.run(key, self._as_async(operation), *args, **options))

    def once(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        decorated = self.idem.once(**windowed(options))(self._as_async(function))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._runner.run(decorated(*args, **kwargs))

        call.decorated = decorated
        return call

    def answer_of(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Answer:
        decorated = getattr(function, "decorated", function)
        return self._runner.run(self.idem.answer_of(decorated, *args, **kwargs))

    def plain_or_async(self, _: Callable[..., Any], suspending: Callable[..., Any]) -> Any:
        return suspending

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        return self._runner.run(getattr(self.idem, name)(*args, **options))

    def close(self) -> bool:
        return self._runner.run(self.idem.close())


Subject = BlockingSubject | AsyncSubject
