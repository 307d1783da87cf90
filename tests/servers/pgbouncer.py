"""A real PgBouncer in transaction mode in front of a PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tests.servers.debian import from_debian
from tests.servers.postgres import START_SECONDS, PostgresServer, free_port

# Debian puts it where only the PATH of root looks.
_PLACES = ("/usr/sbin", "/usr/bin", "/usr/local/bin")


def pgbouncer_binary() -> Path | None:
    """PgBouncer, installed from Debian's packages when this process may do that."""
    return from_debian("pgbouncer", _installed)


def _installed() -> Path | None:
    path = os.pathsep.join((os.environ.get("PATH", ""), *_PLACES))
    found = shutil.which("pgbouncer", path=path)
    return None if found is None else Path(found)


class PgBouncer:
    """One PgBouncer; several clients share few server connections, transaction by transaction."""

    def __init__(self, binary: Path, server: PostgresServer, pool_size: int = 4) -> None:
        self.binary = binary
        self.server = server
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="retrysafe-pgbouncer-"))
        self.process: subprocess.Popen[bytes] | None = None
        (self.folder / "users").write_text('"retrysafe" ""\n')
        (self.folder / "ini").write_text(
            "[databases]\n"
            f"* = host=127.0.0.1 port={server.port}\n"
            "[pgbouncer]\n"
            "listen_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\n"
            f"unix_socket_dir = {self.folder}\n"
            "auth_type = trust\n"
            f"auth_file = {self.folder}/users\n"
            "pool_mode = transaction\n"
            f"default_pool_size = {pool_size}\n"
            "max_client_conn = 500\n"
        )
        if server.user is not None:
            entry = pwd.getpwnam(server.user)
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, entry.pw_uid, entry.pw_gid)

    def url(self, database: str = "postgres") -> str:
        return self.server.url(database, self.port)

    def start(self) -> PgBouncer:
        import psycopg

        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.binary, self.folder / "ini"],
                user=self.server.user,
                cwd="/",
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None:
                text = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"PgBouncer did not start:\n{text}")
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
                return self
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def remove(self) -> None:
        """Stops it by its own process id."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)
