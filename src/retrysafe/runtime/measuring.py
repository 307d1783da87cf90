"""Asking a store for its size without keeping anybody waiting.

Owns where the question is asked: in a thread of its own, or on the loop that the store belongs to.
Whoever asks is told when there is an answer, or that there is none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from retrysafe.core.ports import Store
from retrysafe.core.size import Measurable, StoreSize
from retrysafe.runtime.drive import run_sync

# Is told the size, or None for none.
Tell = Callable[[StoreSize | None], None]

_logger = logging.getLogger("retrysafe")


def measure_in_thread(store: Store, tell: Tell) -> None:
    """Asks a store that never suspends; returns at once."""

    def ask() -> None:
        size: StoreSize | None = None
        try:
            if isinstance(store, Measurable):
                size = run_sync(store.measure())
        except Exception as error:
            _not_measured(error)
        finally:
            tell(size)

    threading.Thread(target=ask, name="retrysafe-size", daemon=True).start()


def measure_on_loop(store: Store, loop: asyncio.AbstractEventLoop, tell: Tell) -> None:
    """Asks a store that suspends, on its own loop, from any thread; returns at once."""
    tasks: set[asyncio.Task[None]] = set()

    async def ask() -> None:
        size: StoreSize | None = None
        try:
            if isinstance(store, Measurable):
                size = await store.measure()
        except Exception as error:
            _not_measured(error)
        finally:
            tasks.clear()  # The loop itself holds tasks weakly.
            tell(size)

    try:
        loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(ask())))
    except RuntimeError:  # The loop has ended.
        tell(None)


def _not_measured(error: Exception) -> None:
    _logger.debug("the size of the store is not known: %s", error)
