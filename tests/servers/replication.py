"""A streaming standby of a PostgreSQL server, and an address that moves between servers."""

from __future__ import annotations

import contextlib
import socket
import time

import psycopg

from tests.servers.cutting import Forwarder, readable
from tests.servers.postgres import PostgresServer
from tests.servers.process import START_SECONDS


class StandbyServer(PostgresServer):
    """A copy of a running server that follows it, until it is promoted."""

    name = "standby"

    def __init__(self, primary: PostgresServer, settings: dict[str, str] | None = None) -> None:
        self.primary = primary
        super().__init__(primary.binaries, settings)

    def _make_data(self) -> None:
        follow = f"host=127.0.0.1 port={self.primary.port} user=retrysafe"
        self._run(
            "pg_basebackup",
            *("-D", self.data, "-d", f"{follow} application_name={self.name}"),
            *("--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream", "--no-sync"),
        )

    def wait_until_streaming(self) -> None:
        """Waits until the primary sends it all that is written."""
        until = time.monotonic() + START_SECONDS
        with psycopg.connect(self.primary.url(), autocommit=True) as connection:
            sql = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
            while connection.execute(sql).fetchone() != (1,):
                assert time.monotonic() < until, "the standby does not follow"
                time.sleep(0.02)

    def wait_until_caught_up(self) -> None:
        """Waits until it has replayed all that the primary has written by now."""
        with psycopg.connect(self.primary.url(), autocommit=True) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        until = time.monotonic() + START_SECONDS
        with psycopg.connect(self.url(), autocommit=True) as connection:
            sql = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            while connection.execute(sql, row).fetchone() != (True,):
                assert time.monotonic() < until, "the standby does not catch up"
                time.sleep(0.02)

    def promote(self) -> None:
        """Makes it a primary; returns when it takes writes."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_promote(true, 60)")


class MovingAddress(Forwarder):
    """An address that leads to one of several servers, as a virtual address or a DNS name does.

    A connection that is open stays with its server when the address moves, unless it is cut.
    """

    def __init__(self, server_port: int, host: str = "127.0.0.1") -> None:
        # How many connections were made, by the port that they lead to.
        self.connections: list[int] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        super().__init__(server_port, host)

    def move(self, server_port: int, *, cut: bool) -> None:
        """Leads new connections to another server; cuts the open ones if wanted."""
        self._server_port = server_port
        if cut:
            self.cut()

    def cut(self) -> None:
        """Ends all open connections."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_closing = True
        self.cut()
        super().close()

    def __enter__(self) -> MovingAddress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, client: socket.socket, server: socket.socket) -> None:
        pair = (client, server)
        with self._lock:
            self._pairs.append(pair)
            self.connections.append(server.getpeername()[1])
        try:
            self._carry(*pair)
        finally:
            with self._lock:
                self._pairs.remove(pair)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not self._is_closing:
            for source in readable(client, server, seconds=0.05):
                data = source.recv(65536)
                if not data:
                    return
                (server if source is client else client).sendall(data)
