"""Requests through uvicorn with one worker: bare, with retrysafe, and with its peers."""

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
from pathlib import Path

import psycopg

from benchmarks.measuring import Report, Row, in_turn, median_ratio
from benchmarks.postgres_bench import SETTINGS
from benchmarks.postgres_filling import migrate, use_wal_files
from tests.servers.postgres import PostgresServer

CONNECTIONS = 32
# Few enough to come round within the two seconds that an outcome stays in the process.
KEYS = 500
# More than the first calls of all rounds fill.
WAL_FILES = 60
MEMORY = "memory://"
# Not a peer but a bound: what Python reaches without what makes the keys safe.
BY_HAND = "by hand"
# Loop and parser of uvicorn: as `pip install uvicorn` gives them, and with `uvicorn[standard]`.
SERVERS = {"h11": ("asyncio", "h11"), "httptools": ("uvloop", "httptools")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(server_name: str, framework: str, layer: str, store: str) -> Iterator[int]:
    """An application behind uvicorn in a process of its own; gives the port."""
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
        yield port
    finally:
        server.terminate()
        server.wait()


class Ways:
    """What is measured, and the p99 of each on the way."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.p99: dict[str, list[float]] = {}

    def way(
        self, name: str, place: str, layer: str, store: Callable[[], str], *, replays: bool
    ) -> Callable[[int], float]:
        """What measures a layer in a place, such as "FastAPI on h11"."""
        framework, _, server_name = place.partition(" on ")

        def measure(_round: int) -> float:
            with served(server_name, framework.lower(), layer, store()) as port:
                task = {
                    "port": port,
                    "connections": CONNECTIONS,
                    "seconds": self._seconds,
                    "keys": KEYS if replays else 0,
                }
                command = [sys.executable, "-m", "benchmarks.http_load", json.dumps(task)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            is_true = found["replayed"] == (1.0 if replays else 0.0) or layer == "none"
            if found["refused"] or not is_true:
                raise RuntimeError(f"{name} does not do what is measured: {found}")
            self.p99.setdefault(name, []).append(found["p99_ms"])
            return float(found["per_second"])

        return measure


def run(is_quick: bool = False) -> Report:
    # Many short rounds rather than few long ones: the machine is slow for seconds at a time, and a
    # round's ratios are of what was measured within a minute or two. Longer than an outcome is
    # remembered in the process, so that replays ask the store now and then.
    rounds, seconds = (1 if is_quick else 5), 3.0
    with tempfile.TemporaryDirectory() as folder, PostgresServer(settings=SETTINGS) as postgres:
        url = postgres.url()
        if not is_quick:
            with psycopg.connect(url, autocommit=True) as connection:
                use_wal_files(connection, WAL_FILES)
        migrate(url)
        idemkit = [sys.executable, "-m", "idemkit.cli", "init-pg", url]
        subprocess.run(idemkit, check=True, capture_output=True)
        found, p99 = _measured(rounds, seconds, url, Path(folder))
    return _judged(found, p99)


Found = dict[str, list[float]]


def _measured(rounds: int, seconds: float, url: str, folder: Path) -> tuple[Found, Found]:
    ways = Ways(seconds)
    numbers = iter(range(10**6))
    stores: dict[str, Callable[[], str]] = {
        "memory": lambda: MEMORY,
        "SQLite": lambda: f"sqlite:///{folder}/{next(numbers)}.db",
        "PostgreSQL": lambda: url,
    }
    named: dict[str, Callable[[int], float]] = {}

    def add(place: str, layer: str, store: str, *, replays: bool) -> None:
        kind = "replays" if replays else "first calls"
        name = f"{place}, {layer}, {store}, {kind}"
        named[name] = ways.way(name, place, layer, stores[store], replays=replays)

    for server_name in SERVERS:
        fastapi, starlette = f"FastAPI on {server_name}", f"Starlette on {server_name}"
        for place in (fastapi, starlette):
            name = f"{place}, bare"
            named[name] = ways.way(name, place, "none", stores["memory"], replays=False)
        for replays in (False, True):
            add(fastapi, "retrysafe", "memory", replays=replays)
            add(fastapi, "idemkit", "memory", replays=replays)
            add(fastapi, "asgi-idempotency-header", "memory", replays=replays)
            add(starlette, "retrysafe", "SQLite", replays=replays)
            add(starlette, "retrysafe", "PostgreSQL", replays=replays)
            add(starlette, "idemkit", "PostgreSQL", replays=replays)
        add(fastapi, BY_HAND, "memory", replays=False)
        add(starlette, BY_HAND, "PostgreSQL", replays=False)
    return in_turn(named, rounds), ways.p99


# Ratios to the bare application in the same place, asked of every server.
TARGETS = {
    f"{framework} on {server_name}, retrysafe, {rest}": target
    for server_name in SERVERS
    for framework, rest, target in (
        ("FastAPI", "memory, first calls", 0.7),
        ("FastAPI", "memory, replays", 1.2),
        ("Starlette", "PostgreSQL, first calls", 0.45),
        ("Starlette", "PostgreSQL, replays", 0.8),
    )
}


def _judged(found: Found, p99: Found) -> Report:
    report = Report(
        f"HTTP, uvicorn with one worker, {CONNECTIONS} connections, {os.cpu_count()} cores",
        "the bare application in the same place",
    )
    for name, rates in found.items():
        bare = found[f"{name.partition(',')[0]}, bare"]
        note = f"p99 {statistics.median(p99[name]):.1f} ms"
        row = Row(name, statistics.median(rates), median_ratio(rates, bare), TARGETS.get(name))
        row.note = note
        report.rows.append(row)
    for name, rates in found.items():
        place, _, rest = name.partition(", ")
        layer, _, rest = rest.partition(", ")
        if layer not in ("retrysafe", "bare", BY_HAND):
            ours = found[f"{place}, retrysafe, {rest}"]
            ratio = median_ratio(ours, rates)
            title = f"{place}, retrysafe to {layer}, {rest}"
            report.rows.append(Row(title, statistics.median(ours), ratio, 1.0))
    return report
