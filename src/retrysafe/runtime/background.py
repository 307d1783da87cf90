"""Where the last writes of cancelled tasks are finished.

Owns the tasks that finish them, so that closing can wait for all. What is written, and how often it
is tried, the core says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

Abandon = Callable[[str], None]


def hidden_task(
    flow: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop
) -> asyncio.Task[None]:
    """A task for what has to be written whatever becomes of its callers.

    Whoever ends a loop cancels all tasks that it can find, as `asyncio.run` does. This one cannot
    be found, so that the row is written before the loop ends: see `LoopPorts`. It does not begin
    within this call either, as the loop's own factory may have it.
    """
    task = asyncio.Task(flow, loop=loop)
    asyncio._unregister_task(task)  # noqa: SLF001 — documented for those who extend asyncio.
    return task


class TaskBackground:
    """Finishes the last writes of cancelled tasks in tasks of their own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # A loop holds its tasks weakly: without this one could vanish before it has written.
        self._tasks: dict[asyncio.Task[None], Abandon] = {}

    def finish(self, flow: Coroutine[Any, Any, None], abandon: Abandon) -> None:
        """Runs the flow in the background; closing the face waits for it, and so does the loop.

        The garbage collector may end a lost caller in any thread, and after the loop itself.
        """
        if self._loop.is_closed():
            flow.close()
            abandon("the event loop has ended")
        elif self._loop.is_running() and not _is_running_here(self._loop):
            self._loop.call_soon_threadsafe(self._start, flow, abandon)
        else:
            try:
                self._start(flow, abandon)
            except BaseException as error:
                # Where the stack ends, for example: nobody is going to write it.
                flow.close()
                abandon(f"{error!r} came while it was being handed over")
                raise

    def _start(self, flow: Coroutine[Any, Any, None], abandon: Abandon) -> None:
        task = hidden_task(flow, self._loop)
        self._tasks[task] = abandon
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)

    async def settle(self) -> None:
        """Waits until every orphan is done."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def abandon_all(self, reason: str) -> None:
        """Tells of every orphan that is not done; nobody waits for it any more."""
        while self._tasks:
            with suppress(KeyError):
                task, abandon = self._tasks.popitem()
                if not task.done():
                    abandon(reason)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
