"""The engine as consumers use it: the one place that knows how it is reached.

Owns the two ways to ask it, from threads and from an event loop, behind one port. Nothing else in
this package imports the engine's own modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Protocol, cast

from retrysafe.async_idempotency import AsyncIdempotency
from retrysafe.consumers.deadlines import Deadline
from retrysafe.core.atomic.run import AtomicAttempt
from retrysafe.core.attempt import Attempt
from retrysafe.core.call import Answer, Call
from retrysafe.core.events import MessageFacts
from retrysafe.core.keys.fingerprint import FingerprintRule
from retrysafe.core.keys.key import Key
from retrysafe.core.model import Ending
from retrysafe.core.nested_claims import nested
from retrysafe.core.policy import FOREVER, Policy
from retrysafe.core.values.codec import codec_for
from retrysafe.errors import InvalidInput
from retrysafe.idempotency import Idempotency as BlockingIdempotency
from retrysafe.runtime.calls import calls_of
from retrysafe.runtime.describe import operation_name
from retrysafe.runtime.drive import run_sync

__all__ = (
    "FOREVER",
    "Answer",
    "AsyncEngine",
    "AtomicAttempt",
    "Attempt",
    "Call",
    "Ending",
    "Engine",
    "FingerprintRule",
    "Idempotency",
    "Key",
    "MessageFacts",
    "Policy",
    "ThreadEngine",
    "engine_of",
    "hold_deadline",
    "make_call",
    "operation_name",
    "run_sync",
)

Idempotency = BlockingIdempotency | AsyncIdempotency

# What all fingerprints of messages begin with. Not the handler's name: a handler that is renamed
# must still recognise what it has handled.
_MESSAGE: Final = b"message"


class Engine(Protocol):
    """As much of the engine as a consumer needs."""

    @property
    def policy(self) -> Policy:
        """The policy of calls that bring none of their own."""

    async def answer(self, call: Call, invoke: Callable[[Any], Awaitable[Any]]) -> Answer[Any]:
        """Runs a call once, under a lease; raises as `Idempotency.run` does."""

    async def answer_atomic(
        self, call: Call, transaction: Callable[[], Any], invoke: Callable[[Any], Awaitable[Any]]
    ) -> Answer[Any]:
        """Runs a call once, in a transaction of the user's."""


class ThreadEngine:
    """The engine for threads. Its flows never suspend: `run_sync` drives them."""

    def __init__(self, idempotency: BlockingIdempotency) -> None:
        self.calls = calls_of(idempotency)
        self.policy = idempotency.policy

    async def answer(self, call: Call, invoke: Callable[[Any], Awaitable[Any]]) -> Answer[Any]:
        """Runs a call in this thread."""

        def operation(attempt: Attempt) -> Any:
            return run_sync(invoke(attempt))  # type: ignore[arg-type]  # A coroutine, by the port.

        return self.calls.answer_call(call, operation)

    async def answer_atomic(
        self, call: Call, transaction: Callable[[], Any], invoke: Callable[[Any], Awaitable[Any]]
    ) -> Answer[Any]:
        """Runs a call in this thread, in a transaction."""

        def operation(attempt: AtomicAttempt[Any]) -> Any:
            return run_sync(invoke(attempt))  # type: ignore[arg-type]  # A coroutine, by the port.

        return self.calls.answer_atomic(call, transaction, operation)


class AsyncEngine:
    """The engine for the tasks of an event loop."""

    def __init__(self, idempotency: AsyncIdempotency) -> None:
        self.calls = calls_of(idempotency)
        self.policy = idempotency.policy

    async def answer(self, call: Call, invoke: Callable[[Any], Awaitable[Any]]) -> Answer[Any]:
        """Runs a call in this task."""
        return await self.calls.answer_call(call, invoke)

    async def answer_atomic(
        self, call: Call, transaction: Callable[[], Any], invoke: Callable[[Any], Awaitable[Any]]
    ) -> Answer[Any]:
        """Runs a call in this task, in a transaction."""
        return await self.calls.answer_atomic(call, transaction, invoke)


def engine_of(idempotency: object, handler: Callable[..., Any]) -> ThreadEngine | AsyncEngine:
    """The engine of an object; raises `InvalidInput` for a handler of the other kind."""
    is_async = inspect.iscoroutinefunction(handler)
    if isinstance(idempotency, BlockingIdempotency):
        if is_async:
            raise InvalidInput("an async handler needs AsyncIdempotency")
        return ThreadEngine(idempotency)
    if isinstance(idempotency, AsyncIdempotency):
        if not is_async:
            raise InvalidInput(
                "a plain handler would block the event loop: use Idempotency, which runs it in "
                "threads, or make it async"
            )
        return AsyncEngine(idempotency)
    raise InvalidInput(
        f"a consumer takes an Idempotency or AsyncIdempotency object, got {idempotency!r}"
    )


def make_call(
    engine: ThreadEngine | AsyncEngine,
    *,
    text: str,
    callers: Sequence[str],
    body: bytes,
    operation: str,
    handler: Callable[..., Any],
    policy: Policy,
    rule: FingerprintRule | None,
) -> Call:
    """The call of a message, under the key of each of its consumer's names.

    The newest name's is claimed first and the oldest's last, so that a process which knows only
    some of the names meets every other one. Raises `KeyInvalid` and `CallerMissing`.
    """
    settings = engine.calls.settings
    plain = (settings.fingerprint if rule is None else rule).fingerprints(_MESSAGE, body=body)
    keys = [Key(text, caller=caller) for caller in callers]
    call = Call(
        keys[0],
        settings.secrets.fingerprints(plain),
        policy,
        operation,
        codec_for(handler, None),
        # A message that failed for good is recognised by `OperationFailed`, whatever it raised.
        rebuilds_failures=False,
    )
    return nested(call, ((bytes([place]), key) for place, key in enumerate(keys)))


def hold_deadline(attempt: object, deadline: Deadline) -> None:
    """Has the attempt tell of the broker's deadline as it tells of its lease."""
    if isinstance(attempt, Attempt):
        attempt.held = (*attempt.held, cast("Any", deadline))  # Read as a lease is read.
        deadline.stops_renewing = lambda: attempt.is_lost


def covering(policy: Policy, window: timedelta | None) -> Policy:
    """The policy with an active window of at least that long; None for a window without an end."""
    needed = FOREVER if window is None else window
    if policy.active_window >= needed:
        return policy
    kept = policy.audit_window if needed == FOREVER else max(needed, policy.audit_window)
    return replace(policy, active_window=needed, audit_window=kept)
