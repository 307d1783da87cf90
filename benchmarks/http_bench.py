"""Requests through uvicorn with one worker: bare, with retrysafe, and with its peers.

What is compared is served at the same time and measured within seconds, one after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg

from benchmarks.measuring import Report, Row, compared, in_turn, machine
from benchmarks.postgres_bench import SETTINGS
from benchmarks.postgres_filling import migrate, use_wal_files
from tests.servers.postgres import PostgresServer

CONNECTIONS = 32
# Few enough to come round within the two seconds that an outcome stays in the process.
KEYS = 500
# More than the first calls of all rounds fill.
WAL_FILES = 60
MEMORY = "memory://"
BARE, OURS = "bare", "retrysafe"
# Not a peer but a bound: what Python reaches without what makes the keys safe.
BY_HAND = "by hand"
IDEMKIT, HEADER = "idemkit", "asgi-idempotency-header"
# Loop and parser of uvicorn: as `pip install uvicorn` gives them, and with `uvicorn[standard]`.
SERVERS = {"h11": ("asyncio", "h11"), "httptools": ("uvloop", "httptools")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(server_name: str, framework: str, layer: str, store: str) -> Iterator[dict[str, int]]:
    """An application behind uvicorn in a process of its own; gives its port and its id."""
    port = _free_port()
    loop, parser = SERVERS[server_name]
    task = {"framework": framework, "layer": layer, "store": store}
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "uvicorn", "benchmarks.http_apps:app", "--port", str(port)),
            *("--log-level", "error", "--no-access-log", "--loop", loop, "--http", parser),
        ],
        env={**os.environ, "RETRYSAFE_BENCH_APP": json.dumps(task)},
        stderr=subprocess.DEVNULL,  # Some layers greet with several lines.
    )
    try:
        give_up = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if server.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the server for {task} does not start")
            time.sleep(0.05)
        yield {"port": port, "pid": server.pid}
    finally:
        server.terminate()
        server.wait()


@dataclass(frozen=True)
class Group:
    """Layers that are compared: in one place, over one store, for first calls or for replays."""

    server: str
    framework: str
    store: str
    is_replay: bool
    # Beside the bare application and retrysafe.
    layers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        kind = "replays" if self.is_replay else "first calls"
        return f"{self.framework} on {self.server}, {self.store}, {kind}"

    def target(self, layer: str) -> float | None:
        """The least that retrysafe must reach of a layer in the same rounds."""
        if layer == BARE:
            return None
        if layer == BY_HAND:
            return 0.8 if self.server == "h11" else 0.9
        if layer == HEADER and self.is_replay and self.server == "h11":
            return 0.8  # Nearly all of a replay is the server's there.
        return 1.0


def groups() -> list[Group]:
    """Every peer on every store that it shares with retrysafe."""
    made = []
    for server in SERVERS:
        for is_replay in (False, True):
            by_hand = () if is_replay else (BY_HAND,)
            made += [
                Group(server, "FastAPI", "memory", is_replay, (IDEMKIT, HEADER)),
                Group(server, "Starlette", "SQLite", is_replay),
                Group(server, "Starlette", "PostgreSQL", is_replay, (*by_hand, IDEMKIT)),
            ]
    return made


def _asked(server: dict[str, int], group: Group, layer: str, seconds: float) -> dict[str, float]:
    """One burst of requests; raises when the layer does not do what is measured."""
    keys = KEYS if group.is_replay else 0
    task = {**server, "connections": CONNECTIONS, "seconds": seconds, "keys": keys}
    command = [sys.executable, "-m", "benchmarks.http_load", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    is_true = found["replayed"] == float(group.is_replay) or layer == BARE
    if found["refused"] or not is_true:
        raise RuntimeError(f"{layer}, {group.name} does not do what is measured: {found}")
    return found


def measured(group: Group, urls: dict[str, str], rounds: int, seconds: float) -> list[Row]:
    """The rows of a group: retrysafe to the bare application, then to each layer."""
    cpu: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:

        def way(layer: str) -> Callable[[int], float]:
            place = served(group.server, group.framework.lower(), layer, urls[group.store])
            server, spent = stack.enter_context(place), cpu.setdefault(layer, [])

            def measure(_round: int) -> float:
                asked = _asked(server, group, layer, seconds)
                spent.append(asked["cpu_us"])
                return asked["per_second"]

            return measure

        found = in_turn({layer: way(layer) for layer in (BARE, OURS, *group.layers)}, rounds)
    rows = []
    for layer in (BARE, *group.layers):
        row = compared(found, f"{group.name}, to {layer}", OURS, layer, group.target(layer))
        # Where other work takes the processors, this says more than the rates do.
        ours_us, us = statistics.median(cpu[OURS]), statistics.median(cpu[layer])
        row.note += f"; CPU of the server {ours_us:.0f} µs against {us:.0f} µs a request"
        rows.append(row)
    return rows


def run(is_quick: bool = False) -> Report:
    # Replays are measured for longer than an outcome is remembered in the process, except in a
    # quick run, so that they ask the store now and then.
    rounds, seconds = (3, 1.0) if is_quick else (5, 3.0)
    report = Report(
        f"HTTP, uvicorn with one worker, {CONNECTIONS} connections, {machine()}",
        "the bare application in the same place",
    )
    with tempfile.TemporaryDirectory() as folder, PostgresServer(settings=SETTINGS) as postgres:
        url = postgres.url()
        if not is_quick:
            with psycopg.connect(url, autocommit=True) as connection:
                use_wal_files(connection, WAL_FILES)
        migrate(url)
        idemkit = [sys.executable, "-m", "idemkit.cli", "init-pg", url]
        subprocess.run(idemkit, check=True, capture_output=True)
        for number, group in enumerate(groups()):
            urls = {
                "memory": MEMORY,
                "SQLite": f"sqlite:///{folder}/{number}.db",
                "PostgreSQL": url,
            }
            report.rows += measured(group, urls, rounds, seconds)
    return report
