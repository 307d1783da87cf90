"""The ports of a relay: a target that takes deliveries, and a pool that carries them out.

As everywhere, they are `async def` and come in two kinds: blocking ones never suspend.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from retrysafe.core.outbox.entries import Entry
from retrysafe.core.ports import Waits


@dataclass(frozen=True, slots=True)
class Delivery:
    """One entry on its way to a target.

    `key` is the same for every repetition, and different for every other entry: receivers that
    must not act twice remember it.
    """

    key: str
    topic: str
    body: bytes
    content_type: str
    aggregate: str | None
    # Which try this is, from 1.
    attempt: int
    staged_at: datetime

    def json(self) -> Any:
        """The body as a JSON document; raises `ValueError` when it is none."""
        return json.loads(self.body)


def delivery_of(entry: Entry) -> Delivery:
    """What a target sees of an entry: no token, and nothing that only the store needs."""
    return Delivery(
        entry.key,
        entry.topic,
        entry.body,
        entry.content_type,
        entry.aggregate,
        entry.attempts,
        datetime.fromtimestamp(entry.staged_at_ms / 1000, UTC),
    )


class Deliver(Protocol):
    """A target.

    `deliver` returns when the other side has it for good, and raises otherwise: `DeliveryFailed`
    to say when to try again or that trying is of no use, anything else for another try.
    """

    @property
    def waits(self) -> Waits:
        """Whether its methods block or suspend."""

    async def deliver(self, delivery: Delivery) -> None:
        """Hands one entry over."""

    async def close(self) -> None:
        """Gives back what the target holds; closing twice is harmless."""


# What a relay takes: a target, or any function of one delivery.
Target = Deliver | Callable[[Delivery], Any] | Callable[[Delivery], Awaitable[Any]]


@dataclass(slots=True)
class Finished:
    """A delivery that has ended: well, with an error, or before it began."""

    entry: Entry
    error: BaseException | None = None
    # False when the look before it said that the entry may be somebody else's by now.
    is_begun: bool = True


# The look at an entry's lease right before its delivery begins.
MayBegin = Callable[[Entry], bool]


class NotBegun(Exception):
    """The delivery waited once more before it began, and the entry may be somebody else's now."""


# The same look, for a target that has to hand the delivery on to a thread.
look: ContextVar[Callable[[], bool]] = ContextVar("look")


def require_begun() -> None:
    """Raises `NotBegun` when the delivery of this context may no longer begin."""
    may_begin = look.get(None)
    if may_begin is not None and not may_begin():
        raise NotBegun


class DeliveryPool(Protocol):
    """Carries out deliveries, several at a time."""

    @property
    def size(self) -> int:
        """How many deliveries it can carry out at once."""

    def start(self, entry: Entry, may_begin: MayBegin) -> None:
        """Takes an entry on; it is delivered when somebody is free, if it may still begin then."""

    def finished(self) -> list[Finished]:
        """The deliveries that have ended since the last question."""

    def withdraw(self) -> list[Entry]:
        """Takes back the entries that nobody has begun to deliver."""

    async def wait(self, seconds: float) -> None:
        """Rests until a delivery ends, somebody wakes the relay, or the time is over."""

    def wake(self) -> None:
        """Ends the rest, from any thread; a wake before the rest counts too."""

    async def close(self) -> None:
        """Ends the pool once its deliveries have ended."""
