"""What a broker must do for a consumer: the port that each broker's module implements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Final, Protocol, TypeVar, runtime_checkable

from retrysafe.consumers.message import Message
from retrysafe.consumers.verdict import Verdict

_logger = logging.getLogger("retrysafe.consumers")

# Anybody may write a header. Python refuses to read thousands of digits, and brokers to carry
# numbers of more than 64 bits; no message is delivered a billion times.
_COUNT_LIMIT_DIGITS: Final = 9
_Found = TypeVar("_Found")


def count_of(text: str) -> int:
    """The number in a header that counts deliveries; 0 for what is no such number."""
    return int(text) if text.isdecimal() and len(text) <= _COUNT_LIMIT_DIGITS else 0


def readable(found: Sequence[_Found], read: Callable[[_Found], Message]) -> list[Message]:
    """Reads them one by one: one that cannot be read stays at the broker, and takes none along."""
    messages = []
    for each in found:
        try:
            messages.append(read(each))
        except Exception:
            _logger.exception("a message cannot be read, and stays at the broker")
    return messages


def not_buried(message: Message, error: Exception) -> None:
    """Says that a dead letter could not be put away: its message stays, and comes again."""
    _logger.error("the dead letter of %s was not taken: %r", message.identity, error)


class Buffer(Protocol):
    """What a consumer holds and has not begun."""

    def withdraw(self, is_meant: Callable[[Message], bool]) -> None:
        """Gives back what has not begun; comes from the loop's own thread."""


class Broker(Protocol):
    """One queue of one broker, as one consumer of one group sees it."""

    # The queue's name and the consumer's group; together the caller of its keys.
    queue: str
    group: str
    # How long a message is this consumer's without a word; what `extend` prolongs. Infinite where
    # it is the connection that counts, and no time.
    deadline_seconds: float
    # How often `extend` is asked.
    renew_seconds: float
    # Whether a message can be given back alone, to be delivered again after a delay. Where it
    # cannot, as in a log, the consumer holds it and tries again itself.
    gives_back: bool

    def bind(self, buffer: Buffer) -> None:
        """Gives the broker what it may take messages back from, before the first is received."""

    async def open(self) -> None:
        """Connects; raises `InvalidInput` for a queue that is not there."""

    async def redelivery_window(self) -> timedelta | None:
        """How long after its first delivery a message may come again; None without an end."""

    async def receive(self, limit: int) -> list[Message]:
        """Waits a moment for messages, at most `limit`; raises when the broker is away."""

    async def extend(self, messages: Sequence[Message]) -> Collection[Message]:
        """Prolongs the deadlines; returns the messages that are lost."""

    async def settle(self, settled: Sequence[tuple[Message, Verdict]]) -> Collection[Message]:
        """Carries verdicts out, in their order; returns the messages that could not be settled.

        A dead letter is safely elsewhere before its message is gone from here.
        """

    async def close(self) -> None:
        """Ends the connection."""


@runtime_checkable
class Pushing(Protocol):
    """A broker that sends messages without being asked for each."""

    def stop(self) -> None:
        """Has it send no more; comes from the loop's own thread, before the last is settled."""
