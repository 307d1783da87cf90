"""A load of requests from a process of its own: python -m benchmarks.http_load {…}.

Keeps a fixed number of connections busy, each with one request at a time. Reads its task as JSON
from the command line, and prints what it measured as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

BODY = b'{"amount":1000,"currency":"eur","customer":"c1"}'


def request(key: str) -> bytes:
    """One POST, as small as clients send it."""
    return (
        b"POST /charges HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer secret-token-of-the-caller\r\n"
        b'Idempotency-Key: "%b"\r\nContent-Length: %d\r\n\r\n%b' % (key.encode(), len(BODY), BODY)
    )


class Client(asyncio.Protocol):
    """One connection that sends the next request as soon as the last one is answered."""

    def __init__(self, requests: Iterator[bytes], found: Found) -> None:
        self._requests = requests
        self._found = found
        self._buffer = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        item = next(self._requests, None)
        if item is None or time.perf_counter() >= self._found.until:
            self._transport.close()
            return
        self._transport.write(item)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        if not self._is_whole(head, end + 4):
            return
        self._buffer = b""
        if not head.startswith(b"http/1.1 201"):
            self._found.refused += 1
        self._found.replayed += b"replayed: true" in head
        self._found.answered += 1
        self._send()

    def _is_whole(self, head: bytes, start: int) -> bool:
        place = head.find(b"content-length:")
        if place < 0:
            return self._buffer.endswith(b"0\r\n\r\n")  # In chunks, as some layers replay.
        length = int(head[place + 15 : (head + b"\r\n").index(b"\r\n", place)])
        return len(self._buffer) >= start + length

    def connection_lost(self, error: Exception | None) -> None:
        self._found.leave()


class Found:
    """What all connections measured."""

    def __init__(self, connections: int) -> None:
        self.until = 0.0
        self.answered = 0
        self.refused = 0
        self.replayed = 0
        self._open = connections
        self.done = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        self._open -= 1
        if not self._open:
            self.done.set_result(None)


async def _burst(
    port: int, connections: int, length: float, requests: Iterator[bytes]
) -> tuple[Found, float]:
    loop = asyncio.get_running_loop()
    found = Found(connections)
    started = time.perf_counter()
    found.until = started + length
    for _ in range(connections):
        await loop.create_connection(lambda: Client(requests, found), "127.0.0.1", port)
    await found.done
    return found, time.perf_counter() - started


def _cpu_seconds(pid: int) -> float:
    """What a process has used of the processors so far; Linux tells."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(task: dict[str, Any]) -> dict[str, float]:
    """Requests per second and the server's CPU for one; with `keys`, these again and again."""
    port, connections = task["port"], task["connections"]
    fresh = map(request, map(str, iter(uuid.uuid4, None)))
    await _burst(port, connections, 0.5, fresh)
    if task["keys"]:
        seen = list(itertools.islice(fresh, task["keys"]))
        # All keys are done before the first is replayed.
        await _burst(port, connections, 60, iter(seen))
        requests: Iterator[bytes] = itertools.cycle(seen)
    else:
        requests = fresh
    cpu = _cpu_seconds(task["pid"])
    found, elapsed = await _burst(port, connections, task["seconds"], requests)
    cpu = _cpu_seconds(task["pid"]) - cpu
    return {
        "per_second": found.answered / elapsed,
        "cpu_us": cpu / found.answered * 1e6,
        "refused": found.refused,
        "replayed": found.replayed / found.answered,
    }


if __name__ == "__main__":
    uvloop.install()
    print(json.dumps(asyncio.run(measure(json.loads(sys.argv[1])))))
