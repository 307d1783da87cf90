"""A byte-forwarding proxy between a client and PostgreSQL that cuts the connection on cue."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from enum import Enum


class Cut(Enum):
    """When a connection is cut, relative to the statement that carries the cue."""

    # The server never sees the statement.
    BEFORE = "before"
    # The server has run and committed it, and the client never sees the answer.
    AFTER = "after"


class Forwarder:
    """Takes connections on a free port, and forwards the bytes of each in a thread of its own."""

    def __init__(self, server_port: int, host: str = "127.0.0.1") -> None:
        self._server_port = server_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._is_closing = False
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._is_closing = True
        # Wakes the accepting thread; closing the listener under it would not.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()[:2], 1).close()
        self._accepting.join(10)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

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
                self._copy(client, server)

    def _copy(self, client: socket.socket, server: socket.socket) -> None:
        raise NotImplementedError


class CuttingProxy(Forwarder):
    """Forwards bytes; a connection that sends the cue while armed is cut, once per arming.

    The cue is a piece of the statement's parameters, so that it is found whether the statement
    was prepared before or not. A cut after it waits for the server's answer (which ends with
    ReadyForQuery, so the commit is done) and drops it.
    """

    def __init__(self, server_port: int) -> None:
        self._cue = b""
        self._cut = Cut.BEFORE
        self.cuts = 0
        super().__init__(server_port)

    def arm(self, cue: bytes, cut: Cut) -> None:
        """Cuts the next connection that sends the cue."""
        with self._lock:
            self._cue, self._cut = cue, cut

    def _copy(self, client: socket.socket, server: socket.socket) -> None:
        sent = b""
        while not self._is_closing:
            for source in readable(client, server, seconds=0.05):
                data = source.recv(65536)
                if not data:
                    return
                if source is server:
                    client.sendall(data)
                    continue
                # A cue may arrive in two pieces.
                sent = sent[-200:] + data
                cut = self._cut_for(sent)
                if cut is Cut.BEFORE:
                    return
                server.sendall(data)
                if cut is Cut.AFTER:
                    drain_answer(server)
                    return

    def _cut_for(self, sent: bytes) -> Cut | None:
        with self._lock:
            # Drivers write bytes as they are or in hexadecimal digits.
            if not self._cue or not (self._cue in sent or self._cue.hex().encode() in sent):
                return None
            self._cue = b""
            self.cuts += 1
            return self._cut


def readable(*sources: socket.socket, seconds: float) -> list[socket.socket]:
    """Those that have bytes or have ended, after at most so many seconds.

    With `poll`, which unlike `select` knows no highest number of a descriptor.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    numbers = {number for number, _ in poll.poll(seconds * 1000)}
    return [source for source in sources if source.fileno() in numbers]


def drain_answer(server: socket.socket) -> None:
    """Reads until the server says that the transaction is over and it waits for the next one."""
    server.settimeout(10)
    answer = b""
    # ReadyForQuery of an idle session is the last message of an answer: Z, length 5, I.
    while not answer.endswith(b"Z\x00\x00\x00\x05I"):
        piece = server.recv(65536)
        assert piece, "the server hung up"
        answer += piece
