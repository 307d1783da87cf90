"""What a target keeps open belongs to one event loop, of one process.

Owns when it is forgotten: another `asyncio.run` cannot use a connection, or even a lock, of the one
before, and a forked child must not touch its parent's. It must not know what is kept.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from retrysafe import forks

Held = TypeVar("Held")


class OfLoop(Generic[Held]):
    """Something that is opened once for each event loop, and the lock under which that is done."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock: asyncio.Lock | None = None
        self.held: Held | None = None
        forks.register(self)

    def opening(self) -> asyncio.Lock:
        """The running loop's lock; what another loop has opened is forgotten."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._loop is not loop:
            # That loop has ended: nobody can close it properly any more.
            self._loop, self._lock, self.held = loop, asyncio.Lock(), None
        return self._lock

    def taken(self) -> Held | None:
        """What is to be closed in the running loop, if anything is; it is held no more."""
        self.opening()
        held, self.held = self.held, None
        return held

    def after_fork_in_child(self) -> None:
        """Forgets it; its finalizer would end what the parent's loop waits for."""
        if self.held is not None:
            forks.park((self._loop, self.held))
        self._loop = self._lock = self.held = None
