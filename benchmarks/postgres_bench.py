"""Claim and complete on PostgreSQL with full durability, against bare programs on the same server.

R and B are pgbench's: what one row a transaction and merged batches reach without Python. Targets
are ratios to a bare Python program that does the same by hand, in the same rounds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import psycopg

from benchmarks import pgbench, postgres_cleanup
from benchmarks.measuring import Report, Row, compared, in_turn, machine, median_ratio, progress
from benchmarks.postgres_filling import fill, fill_outcomes, migrate, tidy, use_wal_files
from benchmarks.postgres_load import Found, Load, measure
from tests.servers.postgres import PostgresServer

SCHEMA = "retrysafe"
CLIENTS = 32
IN_FLIGHT = 256
THREADS = 64
RATE = 500
READERS = 64


def _buffers_mb() -> int:
    """A quarter of the memory, as PostgreSQL's manual advises; more than 4 GB is not used here."""
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return min(4096, memory_mb // 4)


# What any production server has: memory for the tables in use, and no checkpoint every minute.
# fsync, synchronous_commit and full_page_writes stay on. `min_wal_size` has checkpoints keep the
# WAL files that `use_wal_files` made, so that hardly any is made while something is measured.
SETTINGS = {
    "shared_buffers": f"{_buffers_mb()}MB",
    "max_wal_size": "8GB",
    "min_wal_size": "4GB",
    "checkpoint_timeout": "30min",
}

ONE_ROW = f"R: pgbench, {CLIENTS} clients, one row a transaction"
MERGED = f"B: pgbench, batches of {pgbench.BATCH}, 4 clients"
ONE_PROCESS = f"AsyncIdempotency.run, {IN_FLIGHT} in flight"
TWO_PROCESSES = f"the same, two processes of {IN_FLIGHT}"
MANY_THREADS = f"Idempotency.run, {THREADS} threads"
# One thread at a time has the interpreter, so a process of threads uses one core at a time anyway.
# On a core of its own the next thread takes over there, and no other core need be woken for it.
BOUND_THREADS = "the same, the process bound to one core"
# What Python reaches without retrysafe, to tell its share from that of the language.
BARE = f"merged by hand in Python, {IN_FLIGHT} in flight"
BARE_TWICE = "the same by hand, two processes"
BARE_THREADS = f"merged by hand, {THREADS} threads"
# What it is to, and the least ratio in the same rounds.
TARGETS = {
    "one process to the same by hand": (ONE_PROCESS, BARE, 0.65),
    "two processes to the same by hand": (TWO_PROCESSES, BARE_TWICE, 0.65),
    "two processes to B": (TWO_PROCESSES, MERGED, 0.5),
    f"{THREADS} threads to the same by hand": (MANY_THREADS, BARE_THREADS, 0.9),
}
# Gets the round's number and returns its operations per second.
Way = Callable[[int], float]


class Server:
    """The server under test, and what it counts."""

    def __init__(self, server: PostgresServer) -> None:
        self.url = server.url()
        self.connection = psycopg.connect(self.url, autocommit=True)

    def value(self, sql: str) -> int:
        row = self.connection.execute(sql.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def wal_bytes(self) -> int:
        return self.value("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")

    def updates(self) -> tuple[int, int]:
        """Updates of keys so far, and how many of them were HOT."""
        row = self.connection.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
            "WHERE schemaname = %s AND relname = 'keys'",
            (SCHEMA,),
        ).fetchone()
        assert row is not None
        return row


class Throughput:
    """The ways of writing, measured in turn."""

    def __init__(self, server: Server, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self.loads: dict[str, list[Found]] = {}
        self.wal_per_operation: list[float] = []

    def one_row(self, _round: int) -> float:
        script = pgbench.one_row(SCHEMA)
        return pgbench.run(self._server.url, script, clients=CLIENTS, seconds=self._seconds)

    def merged(self, _round: int) -> float:
        script = pgbench.merged(SCHEMA)
        batches = pgbench.run(self._server.url, script, clients=4, seconds=self._seconds)
        return batches * pgbench.BATCH

    def _processes(
        self, name: str, kind: str, in_flight: int, count: int, is_on_one_core: bool
    ) -> float:
        task = {
            "url": self._server.url,
            "schema": SCHEMA,
            "seconds": self._seconds,
            "is_on_one_core": is_on_one_core,
        }
        loads = [Load(kind, in_flight=in_flight, **task) for _ in range(count)]
        before = self._server.wal_bytes()
        for load in loads:
            load.go()
        found = [load.result() for load in loads]
        written = self._server.wal_bytes() - before
        self.loads.setdefault(name, []).extend(found)
        if name == ONE_PROCESS:
            self.wal_per_operation.append(written / sum(item["count"] for item in found))
        return sum(item["per_second"] for item in found)

    def processes(
        self, name: str, kind: str, in_flight: int, count: int, is_on_one_core: bool = False
    ) -> Way:
        """The way of one kind of load, in that many processes."""
        return lambda _round: self._processes(name, kind, in_flight, count, is_on_one_core)

    def python_note(self, name: str) -> str:
        cpu = statistics.median(found["cpu_us"] for found in self.loads[name])
        return f"{cpu:.0f} µs of Python CPU per operation"


def throughput(server: Server, *, rounds: int, seconds: float) -> tuple[list[Row], float]:
    """The rows of the writing ways, and the most that one process reached."""
    updates_before, hot_before = server.updates()
    way = Throughput(server, seconds)
    loads: dict[str, tuple[Any, ...]] = {
        ONE_PROCESS: ("tasks", IN_FLIGHT, 1),
        BARE: ("bare tasks", IN_FLIGHT, 1),
        TWO_PROCESSES: ("tasks", IN_FLIGHT, 2),
        BARE_TWICE: ("bare tasks", IN_FLIGHT, 2),
        BARE_THREADS: ("bare threads", THREADS, 1),
        MANY_THREADS: ("threads", THREADS, 1),
        BOUND_THREADS: ("threads", THREADS, 1, True),
    }
    ways: dict[str, Way] = {
        ONE_ROW: way.one_row,
        MERGED: way.merged,
        **{name: way.processes(name, *load) for name, load in loads.items()},
    }
    found = in_turn(ways, rounds)
    rows = []
    for name, rates in found.items():
        note = f"from {min(rates):,.0f} to {max(rates):,.0f} in its rounds"
        if name in loads:
            note += f", {way.python_note(name)}"
        ratio = median_ratio(rates, found[ONE_ROW])
        rows.append(Row(name, statistics.median(rates), ratio, None, note))
    rows += [compared(found, name, *target) for name, target in TARGETS.items()]
    updates, hot = server.updates()
    share = (hot - hot_before) / max(1, updates - updates_before)
    wal = statistics.median(way.wal_per_operation)
    rows.append(
        Row("share of HOT updates", 0, share, 0.99, f"{wal:,.0f} bytes of WAL per operation")
    )
    return rows, statistics.median(found[ONE_PROCESS])


def latency(server: Server, *, rounds: int, seconds: float) -> list[Row]:
    """The median at a low, steady rate, against a hand-written loop."""
    ours: list[float] = []
    plain: list[Found] = []
    task = {"url": server.url, "rate": RATE, "seconds": seconds, "schema": SCHEMA}
    for number in range(rounds):
        progress(f"{RATE} operations/s on a schedule")
        # Each of them is the first in turn.
        for kind in ("plain", "steady") if number % 2 else ("steady", "plain"):
            found = measure(kind, **task)
            if kind == "plain":
                plain.append(found)
            else:
                ours.append(found["p50_ms"])
    names = {
        f"median at {RATE}/s to a plain loop on asyncpg's pool": ("p50_ms", 1.1),
        "the same to that loop before the pool's reset": ("unreset_p50_ms", None),
    }
    rows = []
    for name, (field, target) in names.items():
        medians = [found[field] for found in plain]
        note = f"{statistics.median(ours):.2f} ms against {statistics.median(medians):.2f} ms"
        ratio = median_ratio(ours, medians)
        rows.append(Row(name, RATE, ratio, target, note, is_ceiling=True))
    return rows


def replays(server: Server, *, rounds: int, seconds: float, keys: int) -> list[Row]:
    """Replays from the store and from the process, against a SELECT by primary key."""
    script = pgbench.select(SCHEMA, keys)
    task = {"url": server.url, "seconds": seconds}
    ways: dict[str, Way] = {
        f"pgbench SELECT by primary key, {READERS} clients": lambda _: pgbench.run(
            server.url, script, clients=READERS, seconds=seconds
        ),
        "pgbench SELECT by primary key, 1 client": lambda _: pgbench.run(
            server.url, script, clients=1, seconds=seconds
        ),
        f"replay from the store, {READERS} in flight": lambda _: measure(
            "replays", in_flight=READERS, each=50, cache=False, **task
        )["per_second"],
        # Few keys, because an outcome stays in the process for two seconds only.
        "replay from the process, 1 in flight": lambda _: measure(
            "replays", in_flight=1, each=8, cache=True, **task
        )["per_second"],
    }
    found = in_turn(ways, rounds)
    many, one, stored, cached = found
    ratios = {many: (many, None), one: (one, None), stored: (many, 0.8), cached: (one, None)}
    return [
        Row(
            name,
            statistics.median(found[name]),
            median_ratio(found[name], found[baseline]),
            target,
            f"ratio to: {baseline}",
        )
        for name, (baseline, target) in ratios.items()
    ]


def run(is_quick: bool = False) -> Report:
    keys = 50_000 if is_quick else 1_000_000
    rounds, seconds = _extent(is_quick)
    report = Report(_title("claim + complete"), ONE_ROW)
    with PostgresServer(settings=SETTINGS) as started:
        server = _prepared(started, is_quick=is_quick)
        progress(f"filling {keys:,} keys")
        fill(server.connection, SCHEMA, keys)
        fill_outcomes(server.connection, SCHEMA)
        tidy(server.connection, SCHEMA)
        rows, maximum = throughput(server, rounds=rounds, seconds=seconds)
        report.rows += rows
        report.rows += latency(server, rounds=rounds, seconds=seconds)
        report.rows += replays(server, rounds=rounds, seconds=seconds, keys=keys)
        report.rows += postgres_cleanup.run(server.url, maximum, is_quick=is_quick)
        server.connection.close()
    progress("")
    return report


def run_cleanup(is_quick: bool = False) -> Report:
    """The cleanup alone, with half of what one process reaches."""
    rounds, seconds = _extent(is_quick)
    report = Report(_title("cleanup"), "quiet times of the same load")
    with PostgresServer(settings=SETTINGS) as started:
        server = _prepared(started, is_quick=is_quick)
        progress("looking for the maximum")
        task = {"url": server.url, "schema": SCHEMA, "seconds": seconds, "in_flight": IN_FLIGHT}
        rates = [measure("tasks", **task)["per_second"] for _ in range(rounds)]
        maximum = statistics.median(rates)
        report.rows += postgres_cleanup.run(server.url, maximum, is_quick=is_quick)
        server.connection.close()
    progress("")
    return report


def _extent(is_quick: bool) -> tuple[int, float]:
    """How many rounds, and how many seconds of each way in a round.

    Many short ones: a machine that is shared may be half as fast for seconds at a time, and only
    what is measured close together can be compared.
    """
    return (3, 1.0) if is_quick else (9, 2.0)


def _title(what: str) -> str:
    return f"PostgreSQL, {what}, full durability, {machine()}"


def _prepared(started: PostgresServer, *, is_quick: bool) -> Server:
    server = Server(started)
    if not is_quick:
        progress("using WAL files")
        use_wal_files(server.connection)
    migrate(server.url)
    return server
