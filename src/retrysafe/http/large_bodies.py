"""Large bodies and queries are compared beside the event loop, in one worker thread of the process.

Owns from which size on that is worth a hop, and the thread. While a loop reads a body it renews no
lease and answers nobody, and a client could hold it for as long as it likes with bodies that are
dear to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from retrysafe import forks

T = TypeVar("T")

# The dearest JSON, numbers with a fraction, takes 0.35 s a megabyte: this much of it takes 11 ms.
# A hop takes about 0.1 ms, and such a body a millisecond at the least.
LARGE_BODY_BYTES: Final = 32 * 1024


class LargeBodyWorker:
    """One thread: reading holds Python's own lock, and a second one would only slow the loop."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        forks.register(self)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """What the work returns, or raises."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="retrysafe-large-bodies")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def after_fork_in_child(self) -> None:
        """The thread stayed in the parent: a pool that waits for it would wait for ever."""
        if self._pool is not None:
            forks.park(self._pool)
            self._pool = None


LARGE_BODIES: Final = LargeBodyWorker()
