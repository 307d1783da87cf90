"""A step between being asked for and being awaited, so that a forgotten `await` is found out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

from retrysafe.errors import AwaitForgotten


class PendingStep(Coroutine[Any, Any, Any]):
    """A step as the operation holds it until it is awaited; nothing of it has run before that.

    A plain coroutine that is forgotten makes Python warn of a function that nobody knows, and tells
    nobody else.
    """

    __slots__ = ("_flow", "_make", "_not_begun", "name")

    def __init__(
        self,
        name: str,
        make: Callable[[], Coroutine[Any, Any, Any]],
        not_begun: dict[PendingStep, None],
    ) -> None:
        self.name = name
        self._make = make
        self._flow: Coroutine[Any, Any, Any] | None = None
        self._not_begun = not_begun
        not_begun[self] = None

    def _begun(self) -> Coroutine[Any, Any, Any]:
        if self._flow is None:
            self._not_begun.pop(self, None)
            self._flow = self._make()
        return self._flow

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._begun().__await__()

    def __iter__(self) -> Iterator[Any]:
        """Raises `AwaitForgotten`: whoever wants its result has it not yet."""
        raise AwaitForgotten(
            f"the step {self.name!r} was not awaited, so it has no result: write 'await "
            "attempt.step(…)' in an 'async def' function. Plain functions under AsyncIdempotency, "
            "such as 'def' endpoints of FastAPI, take no steps"
        )

    def send(self, value: Any) -> Any:
        """Goes on, as a task does."""
        return self._begun().send(value)

    def throw(self, *exception: Any) -> Any:
        """Ends it or has it go on, as a cancelled task does."""
        return self._begun().throw(*exception)

    def close(self) -> None:
        """Ends it; then it is not missed any more."""
        self._begun().close()
