"""The attempt that the running code belongs to."""

from __future__ import annotations

from contextvars import ContextVar

from retrysafe.core.attempt import Attempt
from retrysafe.errors import RetrysafeError

current: ContextVar[Attempt | None] = ContextVar("retrysafe_attempt", default=None)


def current_attempt() -> Attempt:
    """The attempt of the operation that is running here; raises when none is."""
    attempt = current.get()
    if attempt is None:
        raise RetrysafeError(
            "no operation is running here: current_attempt() works inside an operation run by "
            "Idempotency or AsyncIdempotency (a new thread must copy the context)"
        )
    return attempt
