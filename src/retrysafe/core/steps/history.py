"""Steps: the parts of an operation whose results are remembered, and the order they came in.

Owns what one attempt knows about its steps: which ones earlier attempts finished, which ones it
has asked for itself, and whether the two fit together. It does no I/O; `run` does.

The position of a step is how many steps lie behind it on its own way, counted from 1. Ways are
told apart by context: a task of its own, or a thread with a copied context, goes on counting from
where it was started. Steps that run side by side have equal positions, so their order does not
matter, and no position depends on who was faster.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from retrysafe.core.callables import require_function
from retrysafe.core.model import Payload, Step
from retrysafe.core.stop_iteration import is_listed
from retrysafe.errors import InvalidInput, OperationUndone, PolicyInvalid, StepReused, StepsChanged

# Names are shown to people and stored with every step; longer ones are mistakes.
NAME_LIMIT_CHARACTERS: Final = 255
# What retrysafe itself remembers as steps begins with this; no user's step can have such a name.
RESERVED_PREFIX: Final = "!"
FAILURE_NAME: Final = "!failed"
UNDO_PREFIX: Final = "!undo "
# A thread without a copied context: nobody can say where on the way it is.
NOWHERE: Final = 0
_INSIDE: Final = -1
_ZERO: Final = timedelta(0)


def checked_name(name: object) -> str:
    """The name of a step; raises `InvalidInput` before anything ran that could not be recorded."""
    if not isinstance(name, str) or not name or len(name) > NAME_LIMIT_CHARACTERS:
        raise InvalidInput(
            f"a step's name is text of 1 to {NAME_LIMIT_CHARACTERS} characters, got {name!r}"
        )
    if name.startswith(RESERVED_PREFIX):
        raise InvalidInput(f"names that begin with {RESERVED_PREFIX!r} are reserved, got {name!r}")
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"the name {name!r} of a step is not valid Unicode text") from None
    if b"\x00" in encoded:
        # PostgreSQL cannot store it, and a step must mean the same on every store.
        raise InvalidInput("the name of a step must not contain the NUL character")
    return name


Exceptions = type[Exception] | Iterable[type[Exception]]


def checked_exceptions(name: str, types: Exceptions) -> tuple[type[Exception], ...]:
    """The classes as a tuple; raises `PolicyInvalid` for anything that is no exception."""
    # One class alone is what people write first; anything else is refused below.
    alone = isinstance(types, str) or not isinstance(types, Iterable)
    given: tuple[Any, ...] = (types,) if alone else tuple(types)  # type: ignore[arg-type]
    for item in given:
        if not (isinstance(item, type) and issubclass(item, Exception)):
            raise PolicyInvalid(
                f"{name} takes classes of exceptions, such as {name}=(ValueError,), got {item!r}: "
                "no texts, and no cancellation or process exit, which are never an outcome"
            )
    return given


@dataclass(frozen=True, slots=True)
class StepRetry:
    """How often a step is tried within one attempt; raises `PolicyInvalid`.

    `on` says after which exceptions. What is terminal for the operation is never tried again.
    """

    tries: int = 3
    pause: timedelta = timedelta(milliseconds=100)
    # Each pause is this many times as long as the one before it, up to the limit.
    growth: float = 2.0
    pause_limit: timedelta = timedelta(seconds=10)
    on: Exceptions = (Exception,)

    def __post_init__(self) -> None:
        if not isinstance(self.tries, int) or isinstance(self.tries, bool) or self.tries < 1:
            raise PolicyInvalid(f"tries must be a whole number from 1 up, got {self.tries!r}")
        for name in ("pause", "pause_limit"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or value < _ZERO:
                raise PolicyInvalid(f"{name} must be a timedelta and not negative, got {value!r}")
        if not isinstance(self.growth, int | float) or self.growth < 1:
            raise PolicyInvalid(f"growth must be a number from 1 up, got {self.growth!r}")
        object.__setattr__(self, "on", checked_exceptions("on", self.on))

    def allows(self, error: Exception, tried: int) -> bool:
        """Whether there is another try after this exception."""
        return tried < self.tries and is_listed(error, self.on)  # type: ignore[arg-type]

    def pause_seconds(self, tried: int) -> float:
        """How long to wait after so many tries."""
        limit = self.pause_limit.total_seconds()
        try:
            return min(limit, self.pause.total_seconds() * self.growth ** (tried - 1))
        except OverflowError:
            return limit


ONE_TRY: Final = StepRetry(tries=1)


def require_undo(compensate: object) -> None:
    """Raises `InvalidInput` for what could not take a step back, before the step has run."""
    if compensate is not None:
        require_function(
            compensate, "compensate takes the function that undoes the step, not its result"
        )


@dataclass(slots=True)
class StepOptions:
    """How one step is run, as it was asked for."""

    retry: StepRetry = ONE_TRY
    terminal: tuple[type[Exception], ...] = ()
    returns: type | tuple[type, ...] | None = None
    compensate: Callable[[Any], Any] | None = None
    connection: object = None

    def __post_init__(self) -> None:
        if not isinstance(self.retry, StepRetry):
            raise PolicyInvalid(f"retry takes a StepRetry, got {self.retry!r}")
        require_undo(self.compensate)


@dataclass(slots=True)
class Undo:
    """What takes a finished step back, and what it is given."""

    name: str
    call: Callable[[Any], Any]
    retry: StepRetry
    value: Any = None
    # Why the step's result is not there to be given.
    error: Exception | None = None


# Where the running code is on the way of each attempt that it belongs to, outermost first. An
# attempt inside another one must not move the place of the outer one.
_trail: ContextVar[tuple[tuple[weakref.ref[StepHistory], int], ...]] = ContextVar(
    "retrysafe_steps", default=()
)


class StepHistory:
    """The steps of one attempt; its methods are called under the engine's lock where they race."""

    __slots__ = (
        "__weakref__",
        "_asked",
        "_finished",
        "_former_positions",
        "_key_text",
        "committed",
        "is_over",
        "stored",
        "under_way",
        "undos",
    )

    def __init__(self, key_text: str, *, is_first: bool) -> None:
        self._key_text = key_text
        # What earlier attempts recorded; None until it was read. A first attempt has nothing.
        self.stored: dict[str, Step] | None = {} if is_first else None
        self._asked: set[str] = set()
        self._finished: dict[str, int] = {}
        # Where steps were whose transaction was rolled back: they may come again at that place.
        self._former_positions: dict[str, int] = {}
        # The steps of this attempt whose transaction is known to have committed.
        self.committed: set[str] = set()
        self.undos: dict[str, Undo] = {}
        self.is_over = False
        # The steps that were begun and are neither recorded nor given up yet, with their names. By
        # tokens and not a number: one dictionary operation cannot be interrupted.
        self.under_way: dict[object, str] = {}

    def is_read(self) -> bool:
        """Whether it is known what earlier attempts recorded."""
        return self.stored is not None

    @property
    def failure(self) -> Payload | None:
        """How an earlier attempt failed for good before all its steps were undone."""
        marker = (self.stored or {}).get(FAILURE_NAME)
        return None if marker is None else marker.payload

    # The way.

    def place(self, *, is_known: bool) -> int | None:
        """How many steps lie behind the running code; None when nobody can say."""
        for book, steps in _trail.get():
            if book() is self:
                return steps
        # The code belongs to this attempt, and no step lies behind it yet.
        return 0 if is_known else None

    def is_inside(self) -> bool:
        """Whether the running code is inside a step of this attempt."""
        return self.place(is_known=False) == _INSIDE

    # Where the running code is on all its ways, and what puts it back there.
    trail = staticmethod(_trail.get)
    leave = staticmethod(_trail.set)

    def enter(self) -> None:
        """Marks the running code as being inside a step."""
        self._move(_INSIDE)

    def advance(self, position: int) -> None:
        """Puts the running code behind the step with this position."""
        if position != NOWHERE:
            self._move(position)

    def _move(self, steps: int) -> None:
        # Attempts that are over are dropped here, so a thread that runs for years keeps none. Not
        # only those that are gone: that may wait for the garbage collector.
        others = [
            entry
            for entry in _trail.get()
            if (book := entry[0]()) is not None and book is not self and not book.is_over
        ]
        _trail.set((*others, (weakref.ref(self), steps)))

    # The steps.

    def begin(self, name: str, place: int | None, token: object) -> tuple[int, Step | None]:
        """The step's position, and its record if an earlier attempt finished it.

        It is under way from now on, until its token is taken out. Raises `StepReused`,
        `StepsChanged`, `OperationUndone` or `InvalidInput`.
        """
        text = self._key_text
        self.require_open(name, place)
        if name in self.committed:
            raise StepReused(
                f"step {name!r} of {text!r} is done: the transaction that it was recorded in has "
                "committed, also if the answer to that was lost. It does not run again; let this "
                "attempt end, and the next one gets its result. If this is another step, give it "
                "a name of its own",
                key=text,
            )
        if name in self.under_way.values() or name in self._finished:
            raise StepReused(
                f"the operation of {text!r} has two steps named {name!r}: give each step a name of "
                "its own, such as one with the item's number",
                key=text,
            )
        self._asked.add(name)
        position = NOWHERE if place is None else place + 1
        position = self._former_positions.pop(name, position)
        stored = (self.stored or {}).get(name)
        if stored is not None:
            if NOWHERE not in (stored.position, position) and stored.position != position:
                raise StepsChanged(
                    f"step {name!r} of {text!r} was recorded at position {stored.position}, and "
                    f"now it comes at position {position}: the code of an operation that is under "
                    "way must ask for the same steps in the same order",
                    key=text,
                )
            self._finished[name] = position
            self.under_way[token] = name
            return position, stored
        if self.failure is not None:
            raise self.undone(f"step {name!r}")
        self.under_way[token] = name
        return position, None

    def require_open(self, name: str, place: int | None) -> None:
        """Raises `InvalidInput` where no step can be asked for."""
        text = self._key_text
        if self.is_over:
            raise InvalidInput(f"the operation of {text!r} has ended: it takes no steps", key=text)
        if place == _INSIDE:
            raise InvalidInput(
                f"step {name!r} was asked for inside another step: a step is one thing that is "
                "done or not done; put the two one after the other",
                key=text,
            )

    def finish(self, name: str, position: int) -> None:
        """Takes note that the step has run."""
        self._finished[name] = position

    def take_back(self, name: str) -> None:
        """Takes note that the transaction in which the step was recorded was rolled back."""
        self._former_positions[name] = self._finished.pop(name)
        self.undos.pop(name, None)

    def missing(self) -> list[str]:
        """The recorded steps that this attempt has not asked for, in their order."""
        return [
            step.name
            for step in (self.stored or {}).values()
            if step.name not in self._asked and not step.name.startswith(RESERVED_PREFIX)
        ]

    def changed(self, missing: list[str]) -> StepsChanged:
        """The refusal of an ending that leaves recorded steps out."""
        names = ", ".join(repr(name) for name in missing)
        return StepsChanged(
            f"the operation of {self._key_text!r} ended without asking for {names}, which an "
            "earlier attempt has done: the code of an operation that is under way must ask for "
            "the same steps",
            key=self._key_text,
        )

    def undone(self, what: str) -> OperationUndone:
        """The refusal to go on where an earlier attempt has failed for good."""
        return OperationUndone(
            f"an earlier attempt of {self._key_text!r} failed for good, and its finished steps are "
            f"being undone: {what} does not go on",
            key=self._key_text,
        )

    def is_recorded(self, name: str) -> bool:
        """Whether an earlier attempt has done it."""
        return name in (self.stored or {})

    def next_position(self) -> int:
        """A position after every other, for what retrysafe itself remembers."""
        taken = [step.position for step in (self.stored or {}).values()]
        return 1 + max((*taken, *self._finished.values()), default=0)
