"""Completing attempts of an event loop from anywhere: its own tasks, or threads that work for it.

An application on an event loop runs its blocking endpoints in threads, on blocking connections.
Owns how the completion is driven in either.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from retrysafe.core.ports import Waits
from retrysafe.runtime.drive import run_sync


def drive_either(waits: Waits, flow: Coroutine[Any, Any, None]) -> Any:
    """Runs the flow here over a blocking connection; gives it to be awaited over an async one."""
    return flow if waits is Waits.SUSPENDING else run_sync(flow)
