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
from retrysafe.core.events import EventKind
from retrysafe.core.policy import InFlight
from retrysafe.errors import StoreUnavailable
from retrysafe.http.asgi_run import AppRun

# A timer may ring a moment before its time, by the resolution of the loop's clock.
_EARLY_SECONDS: Final = 0.001
# Looked up once: members of an enum are dear to look up on every call.
_WAIT: Final = InFlight.WAIT


# Of a request whose application has not begun: its call, who hears when it takes too long, when
# that is, and whether the time that it may wait for another run is over by then, too. A tuple,
# because every request brings one.
_Waiting = tuple[Call, "asyncio.Future[Answer[Any]]", float, bool]


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
        is_last = call.policy.in_flight is not _WAIT
        self._waiting[run] = (call, waiter, loop.time() + self._seconds, is_last)
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
        for run, waiting in list(self._waiting.items()):
            if run.task is not None:
                del self._waiting[run]
                continue
            call, waiter, due, is_last = waiting
            if due <= now:
                if is_last or self._is_claiming(call):
                    self._give_up(run, call, waiter)
                    continue
                # The store has answered: the request waits for another run, as it was told to.
                due += call.policy.wait_seconds
                self._waiting[run] = (call, waiter, due, True)
            if next_due is None or due < next_due:
                next_due = due
        if next_due is not None:
            self._timer = loop.call_at(next_due, self._look, loop)

    def _give_up(self, run: AppRun, call: Call, waiter: asyncio.Future[Answer[Any]]) -> None:
        """Tells the client, and lets go of the claim.

        One that has not left for the store yet never does. One that has may still be granted, and
        is then given back: nothing runs on it, and a retry must not have to wait for its lease.
        """
        del self._waiting[run]
        error = StoreUnavailable(
            f"the store has not answered a claim for {self._seconds:g} s: nothing was run",
            key=call.key.text,
        )
        error.is_in_flight = not self._is_claiming(call)
        if not waiter.done():
            waiter.set_exception(error)
        # Not that it was cut off, as it is next.
        call.progress.note(EventKind.STORE_UNAVAILABLE)
        if self._let_go is not None:
            self._let_go(call)
        answering = run.answering
        if answering is not None:
            answering.cancel()
