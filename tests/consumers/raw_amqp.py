"""A publisher that writes bytes of AMQP itself: what no library would send, and brokers take."""

from __future__ import annotations

import socket
import struct
from urllib.parse import urlsplit

_TUNE = struct.pack(">HIH", 2047, 131_072, 0)
# What ends a connection or a channel.
_CLOSED = {(10, 50), (20, 40)}


class RawPublisher:
    """One connection with one channel, whose publishes are confirmed."""

    def __init__(self, url):
        self.socket = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 10)
        self.stream = self.socket.makefile("rb")
        self.socket.sendall(b"AMQP\0\0\x09\x01")
        self._answer()
        login = long(b"") + short(b"PLAIN") + long(b"\0guest\0guest") + short(b"en_US")
        self._call(0, 10, 11, login)
        self._answer()
        self._call(0, 10, 31, _TUNE)
        self._call(0, 10, 40, short(b"/") + short(b"") + b"\0")
        self._answer()
        for class_id, method, arguments in ((20, 10, short(b"")), (85, 10, b"\0")):
            self._call(1, class_id, method, arguments)
            self._answer()

    def _send(self, kind, channel, payload):
        head = struct.pack(">BHI", kind, channel, len(payload))
        self.socket.sendall(head + payload + b"\xce")

    def _call(self, channel, class_id, method, arguments):
        self._send(1, channel, struct.pack(">HH", class_id, method) + arguments)

    def _answer(self):
        while True:
            kind, _, size = struct.unpack(">BHI", self.stream.read(7))
            payload = self.stream.read(size + 1)
            if kind == 1:
                name = struct.unpack_from(">HH", payload)
                assert name not in _CLOSED, payload
                return

    def publish(self, queue, body, *, table=None, message_id=None, timestamp=None):
        flags, properties = 0x1000, b"\2"
        if table is not None:
            flags, properties = flags | 0x2000, long(table) + properties
        if message_id is not None:
            flags, properties = flags | 0x80, properties + short(message_id)
        if timestamp is not None:
            flags, properties = flags | 0x40, properties + struct.pack(">Q", timestamp)
        self.route(b"", queue.encode(), body, struct.pack(">H", flags) + properties)

    def route(self, exchange, key, body, properties=b"\0\0"):
        self._call(1, 60, 40, b"\0\0" + short(exchange) + short(key) + b"\0")
        self._send(2, 1, struct.pack(">HHQ", 60, 0, len(body)) + properties)
        self._send(3, 1, body)
        self._answer()

    def close(self):
        self.stream.close()
        self.socket.close()


def short(value):
    return bytes([len(value)]) + value


def long(value):
    return struct.pack(">I", len(value)) + value


def field(name, kind, value):
    return short(name) + kind + value


def nested(levels):
    """A table in a table in a table."""
    table = b""
    for _ in range(levels):
        table = field(b"a", b"F", long(table))
    return table
