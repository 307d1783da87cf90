"""The clocks and the sleep of clients that block."""

from __future__ import annotations

import time

from retrysafe.runtime.thread_ports import ThreadClock


class ThreadTiming(ThreadClock):
    """The system's clocks; `sleep` blocks the calling thread."""

    now = staticmethod(time.time)
