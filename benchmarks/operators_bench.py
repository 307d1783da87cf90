"""The operator's commands on a large table: each as its own process, from start to end.

There is no bare program for them. The target is a second, the start of the program included; how
long the program takes to start alone is the first row.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psycopg

from benchmarks.measuring import Report, Row, machine, progress
from benchmarks.postgres_filling import migrate
from tests.servers.postgres import PostgresServer

KEYS = 5_000_000
QUICK_KEYS = 50_000
FILLED_AT_A_TIME = 500_000
ROUNDS = 3
TARGET_SECONDS = 1.0
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}

START = "retrysafe --version"
# The work of a walk over the whole table; its end is what people wait for, not an answer.
WALKS = ("sweep (nothing to remove)", "worker --once")
COMMANDS: dict[str, tuple[str, ...]] = {
    "keys list": ("keys", "list"),
    "keys list --caller --older-than 12h": (
        *("keys", "list", "--caller", "caller-7", "--older-than", "12h"),
    ),
    "keys list --condition failed": ("keys", "list", "--condition", "failed"),
    "keys list --condition abandoned, before a worker's walk": (
        *("keys", "list", "--condition", "abandoned"),
    ),
    "sweep (nothing to remove)": ("sweep",),
    "worker --once": ("worker", "--once"),
    "keys list --condition abandoned, after it": ("keys", "list", "--condition", "abandoned"),
    "keys show": ("keys", "show", "filled-5", "--caller", "caller-5"),
    "stats": ("stats",),
    "doctor": ("doctor",),
    "outbox list": ("outbox", "list"),
}


def fill(url: str, keys: int) -> None:
    """A day of keys, one in 50,000 abandoned and one in 100,000 failed, in the order of claims."""
    with psycopg.connect(url, autocommit=True) as connection:
        for first in range(1, keys + 1, FILLED_AT_A_TIME):
            progress(f"filling {first:,} of {keys:,} keys")
            last = min(first + FILLED_AT_A_TIME - 1, keys)
            connection.execute(
                f"""
                INSERT INTO retrysafe.keys SELECT
                    d, 'caller-' || i % 1000, 'filled-' || i, 'op-' || i % 7, 1,
                    d, CASE WHEN pending THEN 1 WHEN i % 100003 = 0 THEN 3 ELSE 2 END,
                    d, 1, at_ms, at_ms, at_ms + 30000,
                    CASE WHEN NOT pending THEN at_ms + 50 END,
                    CASE WHEN NOT pending THEN at_ms + 172800000 END,
                    CASE WHEN NOT pending THEN at_ms + 2592000000 END, 'host:1'
                FROM (
                    SELECT
                        i, uuid_send(md5('filled ' || i)::uuid) AS d,
                        i % 50021 = 0 AS pending,
                        now_ms - 86400000 + i * 86400000::bigint / {keys} AS at_ms
                    FROM generate_series({first}::bigint, {last}) AS i,
                        (SELECT (extract(epoch FROM now()) * 1000)::bigint AS now_ms) AS c
                ) AS made""".encode()
            )
        progress("vacuum")
        connection.execute("VACUUM ANALYZE retrysafe.keys")


def cpu_of(postmaster: int) -> float:
    """The CPU seconds of this process's ended children, and of a server with all of its own."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = 0
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    for pid in (str(postmaster), *children):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            # Its own time, and that of those that it has waited for.
            total += sum(int(fields[at]) for at in (11, 12, 13, 14))
    return usage.ru_utime + usage.ru_stime + total / os.sysconf("SC_CLK_TCK")


def seconds_of(*arguments: str) -> float:
    """How long a command takes, as people wait for it."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "retrysafe", *arguments],
        check=False,
        capture_output=True,
        text=True,
    )
    took = time.monotonic() - started
    # Doctor exits with 1 when it finds something.
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return took


def run(is_quick: bool) -> Report:
    """Every command, once before it counts and then in rounds."""
    keys = QUICK_KEYS if is_quick else KEYS
    rounds = 1 if is_quick else ROUNDS
    report = Report(f"Commands on {keys:,} keys in PostgreSQL ({machine()})", "one second")
    # On a machine that has more to do than it can, the start alone takes longer than a second.
    is_idle = os.getloadavg()[0] < (os.cpu_count() or 1)
    with PostgresServer(settings=SETTINGS) as server:
        url = f"{server.url()}?schema=retrysafe"
        migrate(url)
        fill(server.url(), keys)
        start = statistics.median(seconds_of("--version") for _ in range(rounds + 1))
        report.rows.append(Row(START, 1 / start, start, note="seconds in the column of ratios"))
        for name, arguments in COMMANDS.items():
            progress(name)
            assert server.process is not None
            before = cpu_of(server.process.pid)
            found = [seconds_of(*arguments, "--store", url, "--json") for _ in range(rounds)]
            cpu = (cpu_of(server.process.pid) - before) / rounds
            took = statistics.median(found)
            target = None if name in WALKS else TARGET_SECONDS
            note = f"{cpu:.2f} s of CPU, of the program and the server together"
            row = Row(name, 1 / took, took, target, note, is_ceiling=True, is_as_asked=is_idle)
            report.rows.append(row)
    return report
