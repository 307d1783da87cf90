"""A proxy in front of PostgreSQL whose open connections go silent on cue, while new ones work.

That is what a firewall does that forgets connections, or an address that moves to another host.
"""

from __future__ import annotations

import ctypes
import select
import socket
from collections.abc import Callable
from enum import Enum

from tests.servers.cutting import Cut, CuttingProxy, drain_answer


class Silence(Enum):
    """How a connection is silent."""

    # Its bytes are acknowledged, and nothing comes of them: as behind a proxy that hangs.
    SWALLOWED = "swallowed"
    # Its packets are dropped, so that nothing is acknowledged either: as behind a firewall.
    DROPPED = "dropped"


class SilencingProxy(CuttingProxy):
    """Forwards bytes, until every connection that is open at that moment goes silent."""

    def __init__(self, server_port: int, silence: Silence = Silence.SWALLOWED) -> None:
        self._silence = silence
        self._open: dict[socket.socket, bool] = {}
        self.connections = 0
        # Called when a cue was found, before the connections go silent.
        self.on_silence: Callable[[], None] = lambda: None
        super().__init__(server_port)

    def silence(self) -> int:
        """Silences every connection that is open now, and says how many those are."""
        with self._lock:
            hushed = [client for client, is_heard in self._open.items() if is_heard]
            for client in hushed:
                self._open[client] = False
                if self._silence is Silence.DROPPED:
                    drop_packets(client)
        return len(hushed)

    def _is_heard(self, client: socket.socket) -> bool:
        with self._lock:
            return self._open[client]

    def _copy(self, client: socket.socket, server: socket.socket) -> None:
        with self._lock:
            self._open[client] = True
            self.connections += 1
        try:
            self._carry(client, server)
        finally:
            with self._lock:
                del self._open[client]

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        sent = b""
        while not self._is_closing:
            readable, _, _ = select.select([client, server], [], [], 0.1)
            for source in readable:
                data = source.recv(65536)
                if not data:
                    return
                if not self._is_heard(client):
                    continue  # Taken, and thrown away.
                if source is server:
                    client.sendall(data)
                    continue
                # A cue may arrive in two pieces.
                sent = sent[-200:] + data
                cut = self._cut_for(sent)
                if cut is not Cut.BEFORE:
                    server.sendall(data)
                if cut is Cut.AFTER:
                    drain_answer(server)
                if cut is not None:
                    self.on_silence()
                    self.silence()


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_ushort),
        ("instructions", ctypes.POINTER(_Instruction)),
    )


# BPF_RET: keeps so many bytes of each packet, which is none. The kernel drops a packet of nothing
# before TCP sees it, so that it is not acknowledged. Needs no privilege, and no other tool.
_NOTHING = (_Instruction * 1)(_Instruction(0x06, 0, 0, 0))
_SO_ATTACH_FILTER = 26


def drop_packets(receiver: socket.socket) -> None:
    """Has the kernel drop every packet that arrives for this socket from now on."""
    program = _Program(len(_NOTHING), _NOTHING)
    receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
