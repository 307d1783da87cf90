"""Draining the outbox, durable, against the loop that people write by hand.

The loop selects the oldest entry that is not delivered, calls the target, and marks it, one commit
each. It keeps the order because it is alone: a second one would deliver everything twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.measuring import Report, Row, progress
from retrysafe import GLOBAL, Idempotency, current_attempt
from retrysafe.relay import AsyncRelay, Delivery, Relay, RelayReport
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.servers.postgres import PostgresServer

ENTRIES = 100_000
QUICK_ENTRIES = 4_000
# The loop is slow; this many entries tell its rate.
LOOP_ENTRIES = 4_000
AGGREGATES = 1_000
# Entries of one operation while staging.
PER_OPERATION = 500
BODY = '{"order": 1, "note": "' + "x" * 200 + '"}'
BAR_WIDTH = 40


def fill(url: str, count: int) -> float:
    """Stages that many entries by operations; entries per second."""

    def operation(first: int) -> None:
        outbox = current_attempt().outbox
        for number in range(first, min(first + PER_OPERATION, count)):
            outbox.stage("orders.paid", BODY, aggregate=f"order-{number % AGGREGATES}")

    started = time.perf_counter()
    with Idempotency(url, caller=GLOBAL) as idem:
        for first in range(0, count, PER_OPERATION):
            idem.run(f"fill-{first}", operation, first)
            progress(f"staging {first:,} of {count:,}")
    return count / (time.perf_counter() - started)


class Bar:
    """A progress bar on stderr, redrawn a few times a second."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._drawn_at = 0.0

    def __call__(self, report: RelayReport) -> None:
        now = time.monotonic()
        if now - self._drawn_at < 0.2 and report.delivered < self._total:
            return
        self._drawn_at = now
        filled = BAR_WIDTH * report.delivered // self._total
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        text = f"\r  {self._title:<24} [{bar}] {report.delivered:>8,}/{self._total:,}"
        print(text, end="", file=sys.stderr, flush=True)


class Counted:
    """A target that does nothing but count."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, delivery: Delivery) -> None:
        self.count += 1


def drained_by_threads(url: str, count: int) -> float:
    store, target = open_store(url), Counted()
    started = time.perf_counter()
    Relay(store, target, concurrency=8, on_report=Bar("Relay, 8 threads", count)).drain()
    elapsed = time.perf_counter() - started
    run_sync(store.close())
    assert target.count == count, target.count
    return count / elapsed


def drained_by_tasks(url: str, count: int) -> float:
    delivered = 0

    async def deliver(_: Delivery) -> None:
        nonlocal delivered
        delivered += 1

    async def main() -> float:
        store = open_store(url, is_async=True)
        relay = AsyncRelay(store, deliver, on_report=Bar("AsyncRelay, 64 tasks", count))
        started = time.perf_counter()
        await relay.drain()
        elapsed = time.perf_counter() - started
        if hasattr(store, "schema_name"):
            await store.close()
        else:
            run_sync(store.close())
        return elapsed

    elapsed = asyncio.run(main())
    assert delivered == count, delivered
    return count / elapsed


def sqlite_loop(folder: Path) -> float:
    connection = sqlite3.connect(folder / "loop.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE outbox (id INTEGER PRIMARY KEY, aggregate TEXT, body BLOB, done INTEGER)"
    )
    connection.execute("CREATE INDEX undone ON outbox (id) WHERE done = 0")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO outbox (aggregate, body, done) VALUES (?, ?, 0)",
        [(f"order-{number % AGGREGATES}", BODY) for number in range(LOOP_ENTRIES)],
    )
    connection.execute("COMMIT")
    target = Counted()
    started = time.perf_counter()
    while True:
        row = connection.execute(
            "SELECT id, body FROM outbox WHERE done = 0 ORDER BY id LIMIT 1"
        ).fetchone()
        if row is None:
            break
        target(row[1])
        connection.execute("UPDATE outbox SET done = 1 WHERE id = ?", (row[0],))
    elapsed = time.perf_counter() - started
    connection.close()
    return LOOP_ENTRIES / elapsed


def postgres_loop(url: str) -> float:
    target = Counted()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE loop_outbox (id bigserial PRIMARY KEY, aggregate text, body bytea, "
            "done boolean NOT NULL DEFAULT false)"
        )
        connection.execute("CREATE INDEX ON loop_outbox (id) WHERE NOT done")
        connection.execute(
            "INSERT INTO loop_outbox (aggregate, body) SELECT 'order-' || n %% %s, %s "
            "FROM generate_series(1, %s) AS n",
            (AGGREGATES, BODY.encode(), LOOP_ENTRIES),
        )
        started = time.perf_counter()
        while True:
            row = connection.execute(
                "SELECT id, body FROM loop_outbox WHERE NOT done ORDER BY id LIMIT 1"
            ).fetchone()
            if row is None:
                break
            target(row[1])
            connection.execute("UPDATE loop_outbox SET done = true WHERE id = %s", (row[0],))
        return LOOP_ENTRIES / (time.perf_counter() - started)


@contextlib.contextmanager
def sqlite_urls() -> Iterator[Callable[[], str]]:
    with tempfile.TemporaryDirectory() as folder:
        numbers = iter(range(100))
        yield lambda: f"sqlite:///{folder}/{next(numbers)}.db"


@contextlib.contextmanager
def postgres_urls() -> Iterator[tuple[str, Callable[[], str]]]:
    server = PostgresServer().start()
    try:
        numbers = iter(range(100))

        def fresh() -> str:
            url = f"{server.url()}?schema=bench_{next(numbers)}"
            store: Any = open_store(url)
            run_sync(store.migrate())
            run_sync(store.close())
            return url

        yield server.url(), fresh
    finally:
        server.remove()


def measured(
    report: Report,
    name: str,
    fresh: Callable[[], str],
    count: int,
    base: float,
    target: float,
) -> None:
    ways = {
        f"{name}, Relay, 8 threads": drained_by_threads,
        f"{name}, AsyncRelay, 64 tasks": drained_by_tasks,
    }
    for title, way in ways.items():
        url = fresh()
        staged = fill(url, count)
        rate = way(url, count)
        note = f"{count:,} entries of {AGGREGATES:,} aggregates; staged at {staged:,.0f}/s"
        report.rows.append(Row(title, rate, rate / base, target, note))


def run(is_quick: bool = False) -> Report:
    count = QUICK_ENTRIES if is_quick else ENTRIES
    report = Report("Outbox, entries delivered to a target that only counts", "the plain loop")
    with tempfile.TemporaryDirectory() as folder, sqlite_urls() as fresh:
        base = sqlite_loop(Path(folder))
        report.rows.append(Row("SQLite, plain loop", base, 1.0))
        measured(report, "SQLite", fresh, count, base, 1.0)
    with postgres_urls() as (url, fresh):
        base = postgres_loop(url)
        report.rows.append(Row("PostgreSQL, plain loop", base, 1.0))
        measured(report, "PostgreSQL", fresh, count, base, 3.0)
    print("\r" + " " * 90 + "\r", end="", file=sys.stderr)
    return report
