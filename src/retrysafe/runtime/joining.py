"""Completing attempts of an event loop from anywhere: its own tasks, or threads that work for it.

An application on an event loop runs its blocking endpoints in threads, on blocking connections.
Owns what such a thread may do to the loop's parts, and how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from retrysafe.core.lease import Lease
from retrysafe.core.ports import Waits
from retrysafe.runtime.drive import run_sync
from retrysafe.runtime.heartbeat import TaskHeartbeat


def drive_either(waits: Waits, flow: Coroutine[Any, Any, None]) -> Any:
    """Runs the flow here over a blocking connection; gives it to be awaited over an async one."""
    return flow if waits is Waits.SUSPENDING else run_sync(flow)


class ThreadRenewals:
    """The loop's renewals, for the loop and for threads."""

    def __init__(self, heartbeat: TaskHeartbeat, loop: asyncio.AbstractEventLoop) -> None:
        self._heartbeat = heartbeat
        self._loop = loop

    def add(self, lease: Lease) -> None:
        """Starts renewing; from a thread as soon as the loop has a turn, since it sets a timer."""
        try:
            is_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_loop = False
        if is_loop:
            self._heartbeat.add(lease)
        else:
            self._loop.call_soon_threadsafe(self._add_unless_over, lease)

    def _add_unless_over(self, lease: Lease) -> None:
        # A run that was cancelled leaves its thread behind, and never takes a lease away again.
        if not lease.is_over:
            self._heartbeat.add(lease)

    def remove(self, lease: Lease) -> None:
        """Stops renewing at once; one change of a dictionary is safe from any thread."""
        self._heartbeat.remove(lease)
