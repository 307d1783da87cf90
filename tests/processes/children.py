"""Starts real processes for the tests, with a limit on every wait, and leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# Children are forked from a clean server process: it has no threads and no retrysafe objects, and
# it has paid for the imports already.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("pytest", "retrysafe", "psycopg", "asyncpg"),
        *("tests.processes.boundaries", "tests.processes.children"),
    ]
)

# Far beyond what any child needs on a busy machine; reaching it is a hang.
PATIENCE_SECONDS = 60


def _child_main(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = function(pipe, *args)
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
        raise
    pipe.send(("returned", result))


class Child:
    """One process that runs `function(pipe, *args)`; the pipe leads back to the test."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=_child_main, args=(theirs, function, args), daemon=False
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def send(self, message: object) -> None:
        self._pipe.send(message)

    def receive(self, extra_seconds: float = 0) -> Any:
        """The next message of the child."""
        assert self._pipe.poll(PATIENCE_SECONDS + extra_seconds), "the child says nothing"
        return self._pipe.recv()

    def result(self, extra_seconds: float = 0) -> Any:
        """What the function returned, once the process has ended."""
        how, what = self.receive(extra_seconds)
        assert how == "returned", what
        assert self.exit_code() == 0
        return what

    def wait_for_end(self, extra_seconds: float) -> None:
        """Waits for a child that needs longer than others, such as for the end of a lease."""
        self._process.join(PATIENCE_SECONDS + extra_seconds)

    def exit_code(self) -> int:
        """How the process ended: a negative number is the signal that killed it."""
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        assert code is not None, "the child does not end"
        return code

    def end(self) -> None:
        """Makes sure that the process is gone, stopped or not."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(PATIENCE_SECONDS)
        self._process.close()
        self._pipe.close()
