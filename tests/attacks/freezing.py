"""Processes that stop themselves at a boundary of their own, as SIGSTOP from outside would."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.processes.children import PATIENCE_SECONDS, Child
from tests.processes.ledger import note


class Freezer:
    """Stops this process the first time that it comes to the boundary of that name."""

    def __init__(self, ledger: str, boundary: str) -> None:
        self._ledger = ledger
        self._boundary = boundary
        self._lock = threading.Lock()

    def cross(self, boundary: str) -> None:
        with self._lock:
            if boundary != self._boundary:
                return
            self._boundary = ""
        note(self._ledger, "frozen", boundary)
        # To this very thread: one that is told to another lets this one go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def around(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The method, with a boundary on either side."""

        async def crossing(*args: Any, **options: Any) -> Any:
            self.cross(f"{name}:before")
            answer = await method(*args, **options)
            self.cross(f"{name}:after")
            return answer

        return crossing


def wait_until_frozen(child: Child) -> None:
    """Waits until the whole process stands still."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return
        time.sleep(0.01)
    raise AssertionError("the process does not stop")
