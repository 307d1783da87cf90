"""A worker in two forms: one for threads, one for an event loop, with the same methods.

A worker is a list of duties by name. Anything with `run`, `drain`, `stop` and `report` is one; a
relay is.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self

from retrysafe.runtime.background_thread import BackgroundThread, log_end
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.task_ports import TaskSignal
from retrysafe.runtime.thread_ports import ThreadSignal
from retrysafe.workers.duties import Flow

# A signal that the system gives to another thread does not wake the main one, and only that runs
# the signal's function; so whoever may be the main thread never waits longer than this at a time.
_TURN_SECONDS: Final = 0.5


class Duty(Protocol):
    """What a worker does beside its other duties, in a thread of its own."""

    @property
    def report(self) -> Any:
        """What it has done so far, as a dataclass."""

    def run(self) -> Any:
        """Works until `stop`."""

    def drain(self) -> Any:
        """Does what there is to do now."""

    def stop(self) -> None:
        """Ends `run` once what is under way has ended; safe in a signal's function."""


class AsyncDuty(Protocol):
    """The same in a task."""

    @property
    def report(self) -> Any:
        """What it has done so far, as a dataclass."""

    def run(self) -> Awaitable[Any]:
        """Works until `stop`."""

    def drain(self) -> Awaitable[Any]:
        """Does what there is to do now."""

    def stop(self) -> None:
        """Ends `run` once what is under way has ended."""


class ThreadDuty:
    """A flow in a thread."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._stopping = ThreadSignal()

    @property
    def report(self) -> Any:
        """What it has done so far."""
        return self._flow.report

    def run(self) -> None:
        """Works until `stop`."""
        run_sync(self._flow.run(self._stopping))

    def drain(self) -> None:
        """Does what there is to do now."""
        run_sync(self._flow.drain())

    def stop(self) -> None:
        """Ends `run`."""
        self._flow.stop()
        self._stopping.set()


class TaskDuty:
    """A flow in a task."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._stopping: TaskSignal | None = None
        self._is_stopped = False

    @property
    def report(self) -> Any:
        """What it has done so far."""
        return self._flow.report

    async def run(self) -> None:
        """Works until `stop`, which may have come before."""
        if not self._is_stopped:
            self._stopping = TaskSignal()
            await self._flow.run(self._stopping)

    async def drain(self) -> None:
        """Does what there is to do now."""
        await self._flow.drain()

    def stop(self) -> None:
        """Ends `run`."""
        self._is_stopped = True
        self._flow.stop()
        if self._stopping is not None:
            self._stopping.set()


class Worker(BackgroundThread):
    """Recovers, reports and sweeps from threads; any number of workers may share a store."""

    _ROLE = "worker"

    def __init__(self, duties: Mapping[str, Duty]) -> None:
        super().__init__()
        self.duties = dict(duties)
        self._is_stopped = False

    @property
    def reports(self) -> dict[str, Any]:
        """What each duty has done so far, by its name."""
        return {name: duty.report for name, duty in self.duties.items()}

    def run(self) -> dict[str, Any]:
        """Works until `stop`, in this thread and one for each duty; gives the reports.

        An outage of the store is waited for. Any other error ends the worker and is raised.
        """
        self._begin()
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def work(duty: Duty) -> None:
            try:
                duty.run()
                ended.put(None)
            except BaseException as error:
                ended.put(error)

        if self._is_stopped:
            return self.reports
        threads = [
            threading.Thread(
                target=work, args=(duty,), name=f"retrysafe-worker-{name}", daemon=True
            )
            for name, duty in self.duties.items()
        ]
        error: BaseException | None = None
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                # A duty that ends, ends all: a worker without its recovery only looks alive.
                error = _next_of(ended) or error
                self.stop()
        finally:
            self.stop()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_TURN_SECONDS)
        if error is not None:
            raise error
        return self.reports

    def run_once(self) -> dict[str, Any]:
        """Does what there is to do now, one duty after the other; gives the reports.

        Raises `StoreUnavailable` when the store does not answer.
        """
        self._begin()
        for duty in self.duties.values():
            duty.drain()
        return self.reports

    def stop(self) -> None:
        """Ends `run` once what is under way has ended; safe in a signal's function."""
        self._is_stopped = True
        for duty in self.duties.values():
            duty.stop()


def _next_of(ended: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    """How the next duty ended."""
    while True:
        try:
            return ended.get(timeout=_TURN_SECONDS)
        except queue.Empty:
            continue


class AsyncWorker:
    """Recovers, reports and sweeps from tasks of an event loop."""

    def __init__(self, duties: Mapping[str, AsyncDuty]) -> None:
        self.duties = dict(duties)
        self._is_stopped = False
        self._task: asyncio.Task[dict[str, Any]] | None = None

    @property
    def reports(self) -> dict[str, Any]:
        """What each duty has done so far, by its name."""
        return {name: duty.report for name, duty in self.duties.items()}

    async def run(self) -> dict[str, Any]:
        """Works until `stop`; gives the reports.

        An outage of the store is waited for. Any other error ends the worker and is raised.
        """
        if self._is_stopped:
            return self.reports
        tasks = [asyncio.ensure_future(_worked(duty)) for duty in self.duties.values()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # A duty that ends, ends all: a worker without its recovery only looks alive.
            self.stop()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return self.reports

    async def run_once(self) -> dict[str, Any]:
        """Does what there is to do now, one duty after the other; gives the reports.

        Raises `StoreUnavailable` when the store does not answer.
        """
        for duty in self.duties.values():
            await duty.drain()
        return self.reports

    def stop(self) -> None:
        """Ends `run` once what is under way has ended; call it in the worker's loop."""
        self._is_stopped = True
        for duty in self.duties.values():
            duty.stop()

    async def __aenter__(self) -> Self:
        """Works in tasks of its own until the block ends."""
        self._task = asyncio.ensure_future(self.run())
        self._task.add_done_callback(_log_end_of)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops, waits, and raises what ended the worker early."""
        assert self._task is not None  # Entered before it is left.
        self.stop()
        await asyncio.wait({self._task})
        if error is None:
            self._task.result()


def _log_end_of(task: asyncio.Task[dict[str, Any]]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log_end("worker", error)


async def _worked(duty: AsyncDuty) -> None:
    await duty.run()
