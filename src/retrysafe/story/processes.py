"""The worker processes: started, heard, killed and frozen by their own ids, and always ended."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Final, Self

from retrysafe.story.worker import Job

# A worker that is silent for so long is stuck; the demonstration must end on its own.
PATIENCE_SECONDS: Final = 60.0


class WorkerSilent(Exception):
    """A worker ended or got stuck where it should have spoken."""


class WorkerProcess:
    """One worker, seen from outside."""

    def __init__(self, job: Job) -> None:
        # A session of its own: Ctrl-C is for the demonstration, which then ends its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "retrysafe.story.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._send(job.line())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(line)
        self._heard.put("")

    def hear(self, word: str) -> Any:
        """What the worker says next about this; raises `WorkerSilent`."""
        return self.hear_message(word)[word]

    def hear_message(self, word: str) -> dict[str, Any]:
        """The worker's next message, which must have this word; raises `WorkerSilent`."""
        try:
            line = self._heard.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise WorkerSilent(f"process {self.pid} is stuck, {word!r} was awaited") from None
        message: dict[str, Any] = json.loads(line) if line else {}
        if word not in message:
            raise WorkerSilent(f"process {self.pid} said {line!r} where {word!r} was awaited")
        return message

    def go(self) -> None:
        """Lets the worker go on."""
        self._send("go")

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerSilent(f"process {self.pid} ended early") from None

    def kill(self) -> int:
        """Ends the worker with SIGKILL; returns how it ended, which is minus the signal."""
        self._process.kill()
        return self._process.wait()

    def freeze(self) -> None:
        """Stops the worker in the middle of whatever it does."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen worker run on."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Ends the worker if it still runs, frozen or not, and gives everything back."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # What was not sent has no reader any more.


class Processes:
    """All workers of the demonstration; none outlives the `with` block."""

    def __init__(self) -> None:
        self._started: list[WorkerProcess] = []

    def start(self, job: Job) -> WorkerProcess:
        """Starts a worker and waits until it is ready; it begins when told to go."""
        return self.start_all([job])[0]

    def start_all(self, jobs: list[Job]) -> list[WorkerProcess]:
        """Starts workers side by side and waits until all are ready."""
        started = []
        for job in jobs:
            worker = WorkerProcess(job)
            self._started.append(worker)
            started.append(worker)
        for worker in started:
            worker.hear("ready")
        return started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._started:
            worker.end()
