"""Draining the outbox, durable, against the loop that people write by hand.

The loop selects the oldest entry that is not delivered, calls the target, and marks it, one commit
each. It keeps the order because it is alone: a second one would deliver everything twice.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable

import psycopg

from benchmarks.measuring import Report, Row, in_turn, machine, median_ratio
from benchmarks.postgres_filling import migrate
from retrysafe import GLOBAL, Idempotency, current_attempt
from retrysafe.relay import AsyncRelay, Delivery, Relay
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import open_store
from tests.servers.postgres import PostgresServer

ENTRIES = 20_000
QUICK_ENTRIES = 4_000
ROUNDS = 5
# The loop is slow; this many entries tell its rate.
LOOP_ENTRIES = 4_000
AGGREGATES = 1_000
# Entries of one operation while staging.
PER_OPERATION = 500
BODY = '{"order": 1, "note": "' + "x" * 200 + '"}'


def fill(url: str, count: int) -> None:
    """Stages that many entries by operations."""

    def operation(first: int) -> None:
        outbox = current_attempt().outbox
        for number in range(first, min(first + PER_OPERATION, count)):
            outbox.stage("orders.paid", BODY, aggregate=f"order-{number % AGGREGATES}")

    with Idempotency(url, caller=GLOBAL) as idem:
        for first in range(0, count, PER_OPERATION):
            idem.run(f"fill-{first}", operation, first)


class Counted:
    """A target that does nothing but count."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, delivery: Delivery) -> None:
        self.count += 1


def drained_by_threads(url: str, count: int) -> float:
    store, target = open_store(url), Counted()
    started = time.perf_counter()
    Relay(store, target, concurrency=8).drain()
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
        relay = AsyncRelay(store, deliver)
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


def sqlite_loop(url: str) -> float:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
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
        connection.execute("DROP TABLE IF EXISTS loop_outbox")
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


def measured(
    report: Report,
    name: str,
    loop: Callable[[], float],
    fresh: Callable[[], str],
    target: float,
) -> None:
    """The loop and the relays in turn; `fresh` gives a store without entries."""
    count, rounds = (QUICK_ENTRIES, 2) if report.is_quick else (ENTRIES, ROUNDS)

    def way(drained: Callable[[str, int], float]) -> Callable[[int], float]:
        def run_one(_round: int) -> float:
            url = fresh()
            fill(url, count)
            return drained(url, count)

        return run_one

    base = f"{name}, plain loop"
    found = in_turn(
        {
            base: lambda _: loop(),
            f"{name}, Relay, 8 threads": way(drained_by_threads),
            f"{name}, AsyncRelay, 64 tasks": way(drained_by_tasks),
        },
        rounds,
    )
    for title, rates in found.items():
        ratio = median_ratio(rates, found[base])
        goal = None if title == base else target
        report.rows.append(Row(title, statistics.median(rates), ratio, goal))


def run(is_quick: bool = False) -> Report:
    title = f"Outbox, entries delivered to a target that only counts, {machine()}"
    report = Report(title, "the plain loop", is_quick=is_quick)
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def file_url() -> str:
            return f"sqlite:///{folder}/{next(numbers)}.db"

        measured(report, "SQLite", lambda: sqlite_loop(file_url()), file_url, 1.0)
    with PostgresServer() as server:

        def schema_url() -> str:
            url = f"{server.url()}?schema=bench_{next(numbers)}"
            migrate(url)
            return url

        measured(report, "PostgreSQL", lambda: postgres_loop(server.url()), schema_url, 3.0)
    return report
