"""A producer that writes records of Kafka itself: what no library would send, and brokers take."""

from __future__ import annotations

import socket
import struct
import time

# The polynomial of CRC-32C, reversed.
_CASTAGNOLI = 0x82F63B78
_PRODUCE, _VERSION, _CORRELATION = 0, 3, 7


def produce(address, topic, records):
    """Appends records to partition 0; each is a key, a value, and headers as pairs of bytes."""
    now_ms = int(time.time() * 1000)
    count = len(records)
    written = b"".join(_record(place, *record) for place, record in enumerate(records))
    tail = struct.pack(">hiqqqhii", 0, count - 1, now_ms, now_ms, -1, -1, -1, count) + written
    batch = struct.pack(">ibI", -1, 2, _crc32c(tail)) + tail
    batch = struct.pack(">qi", 0, len(batch)) + batch
    name = topic.encode()
    request = struct.pack(">hhih", _PRODUCE, _VERSION, _CORRELATION, 1) + b"x"
    request += struct.pack(">hhii", -1, -1, 10_000, 1)
    request += struct.pack(">h", len(name)) + name
    request += struct.pack(">iii", 1, 0, len(batch)) + batch
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        stream = connection.makefile("rb")
        (size,) = struct.unpack(">i", stream.read(4))
        answer = stream.read(size)
    # Behind the correlation: one topic with its name, one partition with its number.
    (error,) = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(name) + 4 + 4)
    assert error == 0, error


def _record(place, key, value, headers):
    body = b"\0" + _varint(0) + _varint(place) + _bytes(key) + _bytes(value)
    body += _varint(len(headers)) + b"".join(_bytes(part) for pair in headers for part in pair)
    return _varint(len(body)) + body


def _bytes(value):
    return _varint(len(value)) + value


def _varint(number):
    number <<= 1
    written = b""
    while number > 127:
        written += bytes([number & 127 | 128])
        number >>= 7
    return written + bytes([number])


def _crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
