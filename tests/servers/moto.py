"""SQS as Moto imitates it, in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.servers.postgres import START_SECONDS, free_port


class MotoServer:
    """One server on a free port; its queues end with it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> MotoServer:
        with tempfile.TemporaryFile() as log:
            self.process = subprocess.Popen(
                [
                    # Without the script's folder on the path, where this module has moto's name.
                    *(sys.executable, "-P", Path(__file__).with_name("moto_locked.py")),
                    *("-H", "127.0.0.1", "-p", str(self.port)),
                ],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
            until = time.monotonic() + START_SECONDS
            while not self._answers():
                if self.process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(f"Moto did not start:\n{log.read().decode()[-2000:]}")
                time.sleep(0.05)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False

    def stop(self) -> None:
        """Stops it by its own process id."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None
