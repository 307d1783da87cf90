"""Children made by `fork`: one that hangs fails its test and shows where it stands."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

LIMIT_SECONDS = 30


def fork(work: Callable[[], object]) -> int:
    """Runs the work in a forked child, which exits with 0 if it did not raise."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """Waits for the child, and ends one that hangs."""
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    # pytest has Python show every thread's place at this signal, on the run's standard error.
    os.kill(child, signal.SIGABRT)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def answer_of_child(work: Callable[[], str]) -> str:
    """What the work returns in a forked child; the empty text if it raised or hung."""
    reading, writing = os.pipe()
    child = fork(lambda: os.write(writing, work().encode()))
    os.close(writing)
    exit_code(child)
    with os.fdopen(reading) as answer:
        return answer.read()
