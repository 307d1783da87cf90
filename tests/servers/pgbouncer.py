"""A real PgBouncer in transaction mode in front of a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.servers.debian import from_debian
from tests.servers.postgres import PostgresServer, takes_connections
from tests.servers.process import ServerProcess

# Debian puts it where only the PATH of root looks.
_FOLDERS = ("/usr/sbin", "/usr/bin", "/usr/local/bin")


def pgbouncer_binary() -> Path | None:
    """PgBouncer, installed from Debian's packages when this process may do that."""
    return from_debian("pgbouncer", _installed)


def _installed() -> Path | None:
    path = os.pathsep.join((os.environ.get("PATH", ""), *_FOLDERS))
    found = shutil.which("pgbouncer", path=path)
    return None if found is None else Path(found)


class PgBouncer(ServerProcess):
    """One PgBouncer; several clients share few server connections, transaction by transaction."""

    name = "PgBouncer"
    look_seconds = 0.05

    def __init__(self, binary: Path, server: PostgresServer, pool_size: int = 4) -> None:
        super().__init__()
        self.binary = binary
        self.server = server
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
        self.give_to(server.user)

    def url(self, database: str = "postgres") -> str:
        return self.server.url(database, self.port)

    def launch(self, log):
        return self.begin(log, (self.binary, self.folder / "ini"), user=self.server.user, cwd="/")

    def answers(self) -> bool:
        return takes_connections(self.url())
