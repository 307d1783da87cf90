"""A deterministic scheduler: many coroutines, one seed, and no event loop.

Owns who goes on next, simulated time, and the detection of callers that hang. It must not know
what the coroutines do. Each of them suspends by yielding the instant at which it may go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from random import Random
from types import coroutine
from typing import Any

READY = -math.inf
NEVER = math.inf
# A scenario takes about a hundred steps; one that takes this many goes round in circles.
STEP_LIMIT = 5_000


class Interrupted(BaseException):
    """What a cancelled caller feels; as asyncio's own, it is not an `Exception`."""


class Crashed(BaseException):
    """What code of a dead process meets at its next port call."""


class Hung(Exception):
    """Somebody waits for something that never comes."""


@coroutine
def suspend(until_ms: float) -> Generator[float, None, None]:
    """Lets others go on; comes back at that instant or later."""
    yield until_ms


class Process:
    """A simulated operating system process, with a clock of its own."""

    __slots__ = ("is_dead", "name", "offset_seconds", "rate")

    def __init__(self, name: str, rate: float, offset_seconds: float) -> None:
        self.name = name
        self.rate = rate
        self.offset_seconds = offset_seconds
        self.is_dead = False

    def check_alive(self) -> None:
        """A dead process must not get through to any port."""
        if self.is_dead:
            raise Crashed(self.name)


class Task:
    """One coroutine, and the instant from which it may go on."""

    __slots__ = ("context", "flow", "is_caller", "name", "process", "wakes_at_ms")

    def __init__(
        self,
        flow: Coroutine[Any, Any, None],
        process: Process | None,
        name: str,
        is_caller: bool,
    ) -> None:
        self.flow = flow
        # As a task of a loop has: what one sets, the others do not see.
        self.context: Context = copy_context()
        self.process = process
        self.name = name
        # Only callers can be cancelled; what works in the background ends with its process.
        self.is_caller = is_caller
        self.wakes_at_ms: float = READY


class Scheduler:
    """Runs tasks one step at a time in the order that the seed gives."""

    def __init__(self, random: Random, tick_ms: float) -> None:
        self._random = random.random
        self._tick_ms = tick_ms * 2
        self.now_ms = 0.0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        # A laggard goes on only when nobody else can, or rarely: this is how a zombie is born.
        self.laggard: Process | None = None
        self.is_over = False

    def spawn(
        self,
        flow: Coroutine[Any, Any, None],
        process: Process | None,
        name: str,
        is_caller: bool = False,
    ) -> None:
        """Adds a task; it starts when the seed says so."""
        self.tasks.append(Task(flow, process, name, is_caller))

    def run(self, before_step: Callable[[Task], BaseException | None]) -> None:
        """Runs until every task has ended; raises `Hung` when one never does.

        `before_step` may kill processes, and returns what to throw into the task, if anything.
        """
        random, tasks = self._random, self.tasks
        for _ in range(STEP_LIMIT):
            if not tasks or self.is_over:
                return
            now_ms = self.now_ms
            ready = [task for task in tasks if task.wakes_at_ms <= now_ms]
            if not ready:
                self._skip_ahead()
                continue
            task = ready[int(random() * len(ready))]
            if task.process is self.laggard and task.process is not None and random() < 0.9:
                task = ready[int(random() * len(ready))]
            self.now_ms = now_ms + random() * self._tick_ms
            thrown = before_step(task)
            if task.process is None or not task.process.is_dead:
                self._resume(task, thrown)
        raise Hung(f"no end after {STEP_LIMIT} steps: {[task.name for task in tasks]}")

    def _skip_ahead(self) -> None:
        earliest_ms = min(task.wakes_at_ms for task in self.tasks)
        if earliest_ms == NEVER:
            raise Hung(f"waiting for ever: {[task.name for task in self.tasks]}")
        self.now_ms = earliest_ms

    def _resume(self, task: Task, thrown: BaseException | None) -> None:
        self.current = task
        try:
            resume, what = (task.flow.send, None) if thrown is None else (task.flow.throw, thrown)
            task.wakes_at_ms = task.context.run(resume, what)
        except (StopIteration, Interrupted, Crashed):
            self.tasks.remove(task)

    def kill(self, process: Process) -> None:
        """Ends a process on the spot: its tasks never go on, its ports let nobody through."""
        process.is_dead = True
        for task in [task for task in self.tasks if task.process is process]:
            self.tasks.remove(task)
            close(task.flow)

    def close(self) -> None:
        """Ends everything that is left, without effect on the world."""
        self.is_over = True
        while self.tasks:
            close(self.tasks.pop().flow)


def close(flow: Coroutine[Any, Any, None]) -> None:
    """Ends a flow; code that goes on regardless meets a dead port, which is how it ends too."""
    try:
        flow.close()
    except (Crashed, RuntimeError):
        pass  # A flow that wants to wait once more while it is closed has nobody to wait for.
