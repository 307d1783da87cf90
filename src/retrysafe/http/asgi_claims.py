"""Requests whose claim the store does not answer are told so in time.

Owns how long a request waits for its claim, and nothing else of it: once the application has begun
no clock of this module ends anything. One timer looks after all requests of a middleware, because
nearly all of them have begun long before it is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from retrysafe.core.call import Answer, Call
from retrysafe.core.policy import InFlight
from retrysafe.errors import StoreUnavailable
from retrysafe.http.asgi_run import AppRun

# A timer may ring a moment before its time, by the resolution of the loop's clock.
_EARLY_SECONDS: Final = 0.001


class _Waiting:
    """A request whose application has not begun."""

    __slots__ = ("call", "due", "is_last", "run", "waiter")

    def __init__(
        self, run: AppRun, call: Call, waiter: asyncio.Future[Answer[Any]], due: float
    ) -> None:
        self.run = run
        self.call = call
        self.waiter = waiter
        self.due = due
        # Whether the time that it may wait for another run is over, too, when it is due.
        self.is_last = call.policy.in_flight is not InFlight.WAIT


class ClaimLookout:
    """Gives up the claims that take longer than the limit; for the requests of one loop."""

    __slots__ = ("_is_claiming", "_let_go", "_loop", "_seconds", "_timer", "_waiting")

    def __init__(
        self,
        seconds: float,
        is_claiming: Callable[[Call], bool],
        let_go: Callable[[Call], None] | None = None,
    ) -> None:
        self._seconds = seconds
        # Has a claim given back that is granted too late. None where the application runs all the
        # same, and the claim keeps duplicates away from it as long as its lease lasts.
        self._let_go = let_go
        # Whether the store has not even said yet what the key is.
        self._is_claiming = is_claiming
        self._waiting: dict[AppRun, _Waiting] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(
        self,
        run: AppRun,
        call: Call,
        waiter: asyncio.Future[Answer[Any]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Looks after a run that is about to claim its key; `waiter` hears when it takes long."""
        self._waiting[run] = _Waiting(run, call, waiter, loop.time() + self._seconds)
        if self._timer is None or self._loop is not loop:
            self._loop = loop
            self._timer = loop.call_later(self._seconds, self._look, loop)

    def forget(self, run: AppRun) -> None:
        """The run has ended, or was refused."""
        self._waiting.pop(run, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time() + _EARLY_SECONDS
        next_due: float | None = None
        for waiting in list(self._waiting.values()):
            if waiting.run.task is not None:
                del self._waiting[waiting.run]
                continue
            if waiting.due <= now:
                if waiting.is_last or self._is_claiming(waiting.call):
                    self._give_up(waiting)
                    continue
                # The store has answered: the request waits for another run, as it was told to.
                waiting.is_last = True
                waiting.due += waiting.call.policy.wait_seconds
            if next_due is None or waiting.due < next_due:
                next_due = waiting.due
        if next_due is not None:
            self._timer = loop.call_at(next_due, self._look, loop)

    def _give_up(self, waiting: _Waiting) -> None:
        """Tells the client, and lets go of the claim.

        One that has not left for the store yet never does. One that has may still be granted, and
        is then given back: nothing runs on it, and a retry must not have to wait for its lease.
        """
        del self._waiting[waiting.run]
        error = StoreUnavailable(
            f"the store has not answered a claim for {self._seconds:g} s: nothing was run",
            key=waiting.call.key.text,
        )
        error.is_in_flight = not self._is_claiming(waiting.call)
        if not waiting.waiter.done():
            waiting.waiter.set_exception(error)
        if self._let_go is not None:
            self._let_go(waiting.call)
        settling = waiting.run.settling
        if settling is not None:
            settling.cancel()
