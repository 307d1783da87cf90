"""A store for event loops, for commands, which block: where asyncpg is the only driver installed.

Owns one loop in a thread. Each call runs there, and the caller waits for it, so that a command can
be driven as over any blocking store.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from retrysafe.core.outbox.port import Outbox
from retrysafe.core.ports import Capabilities, Store, Waits


class _Loop:
    """A loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="retrysafe-command-loop", daemon=True
        )
        self._thread.start()
        self.is_ended = False

    def run(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a coroutine method, which ran in the loop."""
        future = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C: nobody waits for it any more.
            raise

    def end(self) -> None:
        """Stops the loop, and waits for its thread."""
        self.is_ended = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _InLoop:
    """An object whose coroutine methods run in the loop; everything else is its own."""

    def __init__(self, loop: _Loop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(found):
            return found
        loop = self._loop

        async def call(*args: Any, **kwargs: Any) -> Any:
            return loop.run(found, args, kwargs)

        return call


class LoopStore(_InLoop):
    """A suspending store that blocks; closing it ends the loop."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of the store, but blocking."""
        capabilities: Capabilities = self._inner.capabilities
        return replace(capabilities, waits=Waits.BLOCKING)

    @property
    def outbox(self) -> Outbox:
        """The store's entries."""
        return cast("Outbox", _InLoop(self._loop, self._inner.outbox))

    async def close(self) -> None:
        """Closes the store and ends the loop; a command closes once."""
        if self._loop.is_ended:
            return
        try:
            self._loop.run(self._inner.close, (), {})
        finally:
            self._loop.end()


def blocking(store: Store) -> Store:
    """The store as commands use it."""
    return cast("Store", LoopStore(_Loop(), store))
