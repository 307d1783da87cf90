"""Deadlines: how long the broker leaves a message to this consumer, and how that is prolonged.

Owns the broker's half of the upkeep; the store's half is the lease. A message has its deadline from
the moment it arrives until it is settled, so also while it waits in the buffer. What runs sees both
halves as one: `attempt.is_lost` is true when either is gone. They are renewed in lanes of their
own: a broker that does not answer must never keep a lease from being renewed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

from retrysafe.consumers.message import Message

_logger = logging.getLogger("retrysafe.consumers")

# As with leases: two renewals may fail before a deadline has passed.
RENEWALS_PER_DEADLINE: Final = 3

# Prolongs the deadlines of these messages; returns those that the broker has given away.
Extend = Callable[[Sequence[Message]], Awaitable[Collection[Message]]]


class Deadline:
    """One message's deadline by the local clock; an attempt holds it beside its leases."""

    __slots__ = (
        "ends_monotonic",
        "is_joined",
        "is_revoked",
        "may_be_settled",
        "renew_monotonic",
        "renew_seconds",
        "seconds",
        "stops_renewing",
    )

    def __init__(
        self, seconds: float, arrived_monotonic: float, renew_seconds: float | None = None
    ) -> None:
        self.seconds = seconds
        self.renew_seconds = renew_seconds or seconds / RENEWALS_PER_DEADLINE
        self.is_revoked = False
        # A lease has these; no transaction of the user's writes to a broker.
        self.is_joined = False
        self.may_be_settled = False
        # Asked before each renewal: a message whose claim is lost goes back by itself.
        self.stops_renewing: Callable[[], bool] | None = None
        self.renewed(arrived_monotonic)

    def renewed(self, asked_monotonic: float) -> None:
        """Starts anew, at the time when that was asked for."""
        self.ends_monotonic = asked_monotonic + self.seconds
        self.renew_monotonic = asked_monotonic + self.renew_seconds

    def put_off(self, monotonic: float) -> None:
        """Sets the next try after one that the broker did not answer."""
        self.renew_monotonic = monotonic + self.renew_seconds / 4

    def revoke(self) -> None:
        """Marks it as lost: the broker said so."""
        self.is_revoked = True

    def is_lost(self, monotonic: float) -> bool:
        """Whether the broker has, or may have, given the message to somebody else."""
        return self.is_revoked or monotonic >= self.ends_monotonic

    def seconds_left(self, monotonic: float) -> float:
        """What is left of it, never negative."""
        return 0.0 if self.is_revoked else max(0.0, self.ends_monotonic - monotonic)

    def may_renew(self, monotonic: float) -> bool:
        """Never by an attempt: no store can confirm it, and `Deadlines` looks after it."""
        return False


class Deadlines:
    """Prolongs the deadlines of all messages that this consumer holds."""

    def __init__(
        self,
        extend: Extend,
        seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
        renew_seconds: float | None = None,
    ) -> None:
        self._extend = extend
        self.seconds = seconds
        self._renew_seconds = renew_seconds or seconds / RENEWALS_PER_DEADLINE
        self._monotonic = monotonic
        self._held: dict[Message, Deadline] = {}

    def add(self, message: Message) -> Deadline:
        """Looks after a message that has just arrived."""
        made = Deadline(self.seconds, self._monotonic(), self._renew_seconds)
        self._held[message] = made
        return made

    def remove(self, message: Message) -> None:
        """Leaves a message alone; one that is not held is ignored."""
        self._held.pop(message, None)

    def of(self, message: Message) -> Deadline:
        """The deadline of a message that is held."""
        return self._held[message]

    def due(self) -> list[Message]:
        """The messages whose deadlines want to be prolonged now."""
        now = self._monotonic()
        # Where it is the connection that counts, no message goes back by itself, and the broker
        # hears of this consumer by this.
        is_asked = self.seconds != math.inf
        return [
            message
            for message, deadline in self._held.items()
            if deadline.renew_monotonic <= now
            and not deadline.is_lost(now)
            and not (is_asked and deadline.stops_renewing is not None and deadline.stops_renewing())
        ]

    async def renew(self) -> None:
        """Prolongs what is due, all in one call of the broker."""
        due = self.due()
        if not due:
            return
        asked = self._monotonic()
        try:
            # A call that hangs may cost one try, and never the rest of the deadline.
            async with asyncio.timeout(self._renew_seconds):
                lost = set(await self._extend(due))
        except Exception as error:
            _logger.warning("deadlines of %d messages were not prolonged: %r", len(due), error)
            lost = set()
            for message in due:
                if message in self._held:
                    self._held[message].put_off(self._monotonic())
            return
        for message in due:
            deadline = self._held.get(message)
            if deadline is None:
                continue  # Settled meanwhile.
            if message in lost:
                deadline.revoke()
            else:
                deadline.renewed(asked)

    async def run(self) -> None:
        """Prolongs deadlines until it is cancelled."""
        # Often enough that a message which has just arrived is seen long before its time.
        pause = self._renew_seconds / 4
        while True:
            await asyncio.sleep(pause)
            await self.renew()
