"""A step that is being taken: its call, and what is left to do once that has returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrysafe.core.model import Step
from retrysafe.core.one_call import OneCall
from retrysafe.core.steps.history import StepOptions, StepRetry
from retrysafe.core.values.codec import OutcomeCodec


class TakenStep:
    """One step of an attempt, from being asked for until its result is stored.

    It is noted before its call is made. A signal's handler may raise between any two of our lines
    after that, and what has returned must not run again for it.
    """

    __slots__ = ("args", "call", "made", "name", "options", "outcome_codec", "position", "step")

    def __init__(
        self, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: StepOptions
    ) -> None:
        self.name = name
        self.call = call
        self.args = args
        self.options = options
        self.position = 0
        self.outcome_codec: OutcomeCodec | None = None
        # The last try of its call; None before the first.
        self.made: OneCall | None = None
        # What is stored of its result, once that is encoded.
        self.step: Step | None = None

    @property
    def has_returned(self) -> bool:
        """Whether its call came to its end."""
        return self.made is not None and self.made.has_returned

    @property
    def is_doubtful(self) -> bool:
        """Whether it was called, and nobody knows how that ended."""
        return self.made is not None and self.made.is_doubtful

    @property
    def value(self) -> Any:
        """What its call returned."""
        assert self.made is not None
        return self.made.value

    def is_of(self, call: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether this call is the same; what cannot be compared is not."""
        try:
            return bool((self.call, self.args) == (call, args))
        except Exception:
            return False


def undoing(name: str, call: Callable[..., Any], value: Any, retry: StepRetry) -> TakenStep:
    """The taking back of a step."""
    return TakenStep(name, call, (value,), StepOptions(retry))
