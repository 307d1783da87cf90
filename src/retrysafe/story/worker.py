"""A worker process of the demonstration: `python -m retrysafe.story.worker`.

It reads its job as one JSON line, says what happens to it in JSON lines, and ends when its
input does, so that it never outlives the demonstration.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from retrysafe.core.policy import InFlight
from retrysafe.errors import RetrysafeError
from retrysafe.idempotency import Idempotency
from retrysafe.runtime.current import current_attempt
from retrysafe.story.charging import Charge
from retrysafe.story.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to do; it is sent as JSON."""

    store: str
    ledger: str
    key: str
    amount: int
    lease_ms: int
    threads: int = 1
    work_seconds: float = 0.0
    # Whether the operation says that it is inside, and goes on when it is told to.
    is_held: bool = False

    def line(self) -> str:
        """The job as it is sent."""
        return json.dumps(asdict(self))


class Worker:
    """Does one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._charge = Charge(
            Ledger(Path(job.ledger)), job.key, job.amount, job.work_seconds, self._midway
        )

    def run(self) -> None:
        """Waits for the start, then charges from all threads at once."""
        with Idempotency(self._job.store) as idempotency:
            self._say({"ready": os.getpid()})
            _await_line()
            threads = self._job.threads
            barrier = threading.Barrier(threads)
            with ThreadPoolExecutor(threads) as pool:
                for _ in range(threads):
                    pool.submit(self._call, idempotency, barrier)

    def _call(self, idempotency: Idempotency, barrier: threading.Barrier) -> None:
        barrier.wait()
        try:
            answer = self._charge.run_once(
                idempotency,
                lease=timedelta(milliseconds=self._job.lease_ms),
                in_flight=InFlight.WAIT,
            )
        except RetrysafeError as error:
            self._say({"error": type(error).__name__, "message": str(error)})
        except Exception as error:
            self._say({"error": repr(error), "message": str(error)})
        else:
            self._say(
                {
                    "receipt": answer.value["receipt"],
                    "is_replay": answer.replayed,
                    "attempt": answer.attempt,
                }
            )

    def _midway(self) -> None:
        if self._job.is_held:
            self._say({"inside": current_attempt().number})
            _await_line()
            self._say({"is_lost": current_attempt().is_lost})

    def _say(self, message: dict[str, Any]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


def _await_line() -> None:
    if not sys.stdin.readline():
        # The demonstration is gone. Ending like a crash is right: only the lease frees the key.
        os._exit(1)


def main() -> None:
    """Does the job on the first line of the input."""
    # The demonstration tells what happens; the log would tell it twice.
    logging.getLogger("retrysafe").addHandler(logging.NullHandler())
    Worker(Job(**json.loads(sys.stdin.readline()))).run()


if __name__ == "__main__":
    main()
