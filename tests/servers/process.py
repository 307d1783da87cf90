"""A server as a process of its own: its folder and log, its port, its end by its own process id."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, ClassVar, Self

START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unprivileged() -> str | None:
    """Who runs a server that refuses to run as root: somebody who owns nothing."""
    return "nobody" if os.geteuid() == 0 else None


class ServerProcess:
    """One server; `start` may be called again after `stop`, on the same port and folder."""

    name: ClassVar[str]
    end_signal: ClassVar = signal.SIGTERM
    # How often it is looked whether it answers.
    look_seconds: ClassVar = 0.02

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"retrysafe-{self.name.lower()}-"))
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """The process, begun; what it says goes to the log."""
        raise NotImplementedError

    def begin(self, log: IO[bytes], command: Iterable[Any], **options: Any) -> Any:
        return subprocess.Popen([*map(str, command)], stdout=log, stderr=log, **options)

    def answers(self) -> bool:
        """Whether it can be used."""
        return self.replies(b"")

    def replies(self, question: bytes, expected: bytes = b"") -> bool:
        """Whether it takes a connection, and what it says to those bytes begins as expected."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(question)
                connection.settimeout(2)
                return not expected or connection.recv(64).startswith(expected)
        except OSError:
            return False

    def start(self) -> Self:
        with (self.folder / "log").open("ab") as log:
            self.process = self.launch(log)
        until = time.monotonic() + START_SECONDS
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} did not start:\n{self.log()[-3000:]}")
            time.sleep(self.look_seconds)
        return self

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stop(self) -> None:
        """Ends it by its own process id."""
        if self.process is not None:
            self.process.send_signal(self.end_signal)
            self.process.wait(60)
            self.process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def give_to(self, user: str | None) -> None:
        """Lets that user have the folder and what is in it."""
        if user is not None:
            entry = pwd.getpwnam(user)
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, entry.pw_uid, entry.pw_gid)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, *_: object) -> None:
        self.remove()
