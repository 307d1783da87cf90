"""A real NATS server with JetStream, from the package that ships it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.servers.postgres import START_SECONDS, free_port


def nats_binary() -> Path:
    """The server beside the interpreter: a development requirement, so it is always there."""
    return Path(sys.executable).parent / "nats-server"


class NatsServer:
    """One server; `start` may be called again after `stop`, on the same data."""

    def __init__(self, config: str = "") -> None:
        """`config` is the text of a configuration file, such as one with users."""
        self.config = config
        self.folder = Path(tempfile.mkdtemp(prefix="retrysafe-nats-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        (self.folder / "config").write_text(self.config)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    nats_binary(),
                    *("--addr", "127.0.0.1", "--port", str(self.port)),
                    *("--config", self.folder / "config"),
                    *("--jetstream", "--store_dir", self.folder / "data"),
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_SECONDS
        while b"Server is ready" not in (self.folder / "log").read_bytes().split(b"Starting")[-1]:
            if self.process.poll() is not None or time.monotonic() > until:
                text = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"NATS did not start:\n{text}")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """Stops it by its own process id."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
