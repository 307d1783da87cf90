"""The flow of one logical operation: send, judge what came back, give up or wait and send again.

Written once. Threads drive it with `run_sync` over a wire that blocks, tasks await it. Owns every
decision between two tries; it knows neither sockets nor an HTTP library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from retrysafe.client.budget import RetryBudget
from retrysafe.client.intents import KeyScope
from retrysafe.client.replies import Headers, is_retryable, retry_after_seconds
from retrysafe.client.retry_policy import RetryPolicy

_logger = logging.getLogger("retrysafe.client")
# Where a response carries its `Tries`.
TRIES_EXTENSION: Final = "retrysafe_tries"
# Doubling the bound more often than this changes nothing: it is past every limit.
_DOUBLINGS_MOST: Final = 40

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Stopped(Enum):
    """Why a request was not sent once more."""

    ANSWERED = "the answer is final"
    FAILED = "the error is not one that a retry can help with"
    TRIES = "the tries are used up"
    TIME = "the time is used up, or the server asks for a longer wait than is left"
    BUDGET = "the retry budget of the client is used up"
    BODY = "the body can be read only once"


@dataclass(frozen=True, slots=True)
class Tries:
    """How a request fared: how often it was sent, with which header, and why no more."""

    count: int
    # The value of the header; None for a request without a key.
    key: str | None
    waited_seconds: float
    stopped: Stopped


def tries_of(response: object) -> Tries | None:
    """How often the request of this response was sent; None if it was not retrysafe's to retry."""
    extensions = getattr(response, "extensions", None)
    found = (
        extensions.get(TRIES_EXTENSION)
        if isinstance(extensions, dict)
        else getattr(response, TRIES_EXTENSION, None)
    )
    return found if isinstance(found, Tries) else None


class Timing(Protocol):
    """Two clocks and a way to wait. A blocking one never suspends."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""

    def now(self) -> float:
        """Seconds since the epoch."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""


@dataclass(slots=True)
class Reply(Generic[R_co]):
    """A response, with what is needed to judge it; `body` is None when it was not read."""

    response: R_co
    status: int
    headers: Headers
    body: bytes | None


class Wire(Protocol[R]):
    """One request of an HTTP library, which can be sent several times."""

    async def send(self) -> Reply[R]:
        """Sends it. Whatever it raises after a response came, it has closed that response."""

    async def discard(self, response: R) -> None:
        """Frees what a response holds that nobody will see."""

    def is_transient(self, error: Exception) -> bool:
        """Whether the error is one of the connection, not of the request."""

    @property
    def label(self) -> str:
        """Method and target for the log, without secrets."""


class ClientSettings:
    """What all requests of a client share."""

    __slots__ = ("budget", "policy", "random", "timing")

    def __init__(
        self,
        policy: RetryPolicy | None,
        budget: RetryBudget | None,
        timing: Timing,
        random: Callable[[], float],
    ) -> None:
        self.policy = RetryPolicy() if policy is None else policy
        self.budget = RetryBudget() if budget is None else budget
        self.timing = timing
        self.random = random


class Sending:
    """One logical operation on its way; decides after every try, and counts."""

    __slots__ = (
        "_settings",
        "_started_at",
        "is_repeatable",
        "key",
        "key_text",
        "scope",
        "stopped",
        "tries",
        "waited_seconds",
    )

    def __init__(
        self,
        settings: ClientSettings,
        *,
        key: str | None,
        scope: KeyScope | None = None,
        key_text: str = "",
    ) -> None:
        self._settings = settings
        self._started_at = 0.0
        # Whether the request's body can be sent a second time; the adapter knows.
        self.is_repeatable = True
        # The header's value, and the text that a scope knows it by.
        self.key = key
        self.key_text = key_text
        self.scope = scope
        self.tries = 0
        self.waited_seconds = 0.0
        self.stopped = Stopped.FAILED

    @property
    def ends_at(self) -> float:
        """When the time for all tries is over, by the monotonic clock; known from the first on."""
        return self._started_at + self._settings.policy.time_seconds

    def begin_try(self) -> None:
        """Counts a try; raises what the key's scope raises when it must not be made."""
        if self.scope is not None:
            self.scope.check()
        if not self.tries:
            self._started_at = self._settings.timing.monotonic()
            self._settings.budget.note_request()
        self.tries += 1

    def after_reply(self, reply: Reply[object]) -> float | None:
        """The seconds to wait before the next try; None when this answer is to be kept."""
        if reply.status < 400:
            self.stopped = Stopped.ANSWERED
            return None
        settings = self._settings
        if not is_retryable(
            reply.status,
            reply.headers,
            reply.body,
            policy=settings.policy,
            has_key=self.key is not None,
        ):
            self.stopped = Stopped.ANSWERED
            return None
        return self._wait(retry_after_seconds(reply.headers, settings.timing.now()))

    def after_failure(self, *, is_transient: bool) -> float | None:
        """The seconds to wait before the next try; None when the error is to be raised."""
        if not is_transient:
            self.stopped = Stopped.FAILED
            return None
        return self._wait(0.0)

    def _wait(self, least_seconds: float) -> float | None:
        """At least what the server asks for, plus a random part that keeps clients apart."""
        settings = self._settings
        policy = settings.policy
        now = settings.timing.monotonic()
        left_seconds = self.ends_at - now
        if not self.is_repeatable:
            self.stopped = Stopped.BODY
        elif self.tries >= policy.tries_limit:
            self.stopped = Stopped.TRIES
        elif left_seconds <= 0 or least_seconds > left_seconds:
            # A shorter wait than the server asks for would only cost it another refusal.
            self.stopped = Stopped.TIME
        elif not settings.budget.take(now):
            # Asked last: a retry that is not made must not cost the others a token.
            self.stopped = Stopped.BUDGET
        else:
            doubled = policy.backoff_seconds * 2.0 ** min(self.tries - 1, _DOUBLINGS_MOST)
            bound: float = min(policy.backoff_limit_seconds, doubled)
            wait: float = min(least_seconds + settings.random() * bound, left_seconds)
            self.waited_seconds += wait
            return wait
        return None

    def report(self) -> Tries:
        """What the response will carry."""
        return Tries(self.tries, self.key, self.waited_seconds, self.stopped)


async def deliver(wire: Wire[R], delivery: Sending, timing: Timing) -> R:
    """The response to keep. Raises the last try's error when there is none."""
    scope = delivery.scope
    if scope is None:
        return await _tried(wire, delivery, timing)
    scope.begin(delivery.key_text)
    try:
        return await _tried(wire, delivery, timing)
    finally:
        scope.end(delivery.key_text, is_answered=delivery.stopped is Stopped.ANSWERED)


async def _tried(wire: Wire[R], delivery: Sending, timing: Timing) -> R:
    while True:
        delivery.begin_try()
        try:
            reply = await wire.send()
        except Exception as error:
            wait = delivery.after_failure(is_transient=wire.is_transient(error))
            if wait is None:
                error.add_note(_note(delivery))
                raise
            why = type(error).__name__
        else:
            wait = delivery.after_reply(reply)
            if wait is None:
                return reply.response
            await wire.discard(reply.response)
            why = str(reply.status)
        _logger.info("%s: try %d got %s, next in %.3f s", wire.label, delivery.tries, why, wait)
        await timing.sleep(wait)


def _note(delivery: Sending) -> str:
    tries = "1 try" if delivery.tries == 1 else f"{delivery.tries} tries"
    key = "" if delivery.key is None else f" with the key {delivery.key}"
    return f"retrysafe gave up after {tries}{key}: {delivery.stopped.value}"
