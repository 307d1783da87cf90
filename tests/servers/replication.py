"""A streaming standby of a PostgreSQL server, and an address that moves between servers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import psycopg

from tests.servers.cutting import readable
from tests.servers.postgres import START_SECONDS, PostgresServer


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


class MovingAddress:
    """An address that leads to one of several servers, as a virtual address or a DNS name does.

    A connection that is open stays with its server when the address moves, unless it is cut.
    """

    def __init__(self, server_port: int, host: str = "127.0.0.1") -> None:
        self._server_port = server_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        # How many connections were made, by the port that they lead to.
        self.connections: list[int] = []
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._is_closing = False
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

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
        # Wakes the accepting thread; closing the listener under it would not.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()[:2], 1).close()
        self._accepting.join(10)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def __enter__(self) -> MovingAddress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._is_closing:
                client.close()
                return
            thread = threading.Thread(target=self._forward, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        port = self._server_port
        with client, contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", port), 10)
            with server:
                pair = (client, server)
                with self._lock:
                    self._pairs.append(pair)
                    self.connections.append(port)
                try:
                    self._copy(*pair)
                finally:
                    with self._lock:
                        self._pairs.remove(pair)

    def _copy(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not self._is_closing:
            for source in readable(client, server, seconds=0.05):
                data = source.recv(65536)
                if not data:
                    return
                (server if source is client else client).sendall(data)
