"""Where the last writes of cancelled tasks are finished.

Owns the tasks that finish them, so that closing can wait for all. What is written, and how often it
is tried, the core says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskOrphanage:
    """Finishes the last writes of cancelled tasks in tasks of their own."""

    def __init__(self) -> None:
        # A loop holds its tasks weakly: without this one could vanish before it has written.
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, flow: Coroutine[Any, Any, None]) -> None:
        """Runs the flow in the background; closing the face waits for it."""
        task = asyncio.get_running_loop().create_task(flow)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Waits until every orphan is done."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
