"""A sweep of a large SQLite file that finds nothing, and what it spares every operation.

The walk is made while somebody else holds the file's write lock: it would fail if it needed it.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from benchmarks.measuring import Report, Row, in_turn, median_ratio, progress
from benchmarks.sqlite_bench import (
    BODY,
    PLAIN_CLAIM,
    PLAIN_COMPLETE,
    SEQUENTIAL,
    fresh_file,
    operation,
    plain_connection,
)
from retrysafe import GLOBAL, Idempotency
from retrysafe.runtime.drive import run_sync
from retrysafe.stores import SqliteStore

ROWS = 1_000_000
ROUNDS = 3
SWEEP_LIMIT = 1_000
HOUR_MS = 60 * 60 * 1_000
# What schema 1 had, and schema 4 dropped.
INDEXES = (
    "CREATE INDEX retrysafe_keys_expiry ON retrysafe_keys (expires_at_ms) "
    "WHERE expires_at_ms IS NOT NULL",
    "CREATE INDEX retrysafe_outcomes_audit ON retrysafe_outcomes (audit_ends_at_ms)",
)
WAL_HEADER_BYTES = 32
FRAME_HEADER_BYTES = 24


def pages_logged(path: Path) -> int:
    """How many pages were written to the log since it was last started."""
    log = Path(f"{path}-wal").read_bytes()
    (page_bytes,) = struct.unpack(">I", log[8:12])
    return (len(log) - WAL_HEADER_BYTES) // (FRAME_HEADER_BYTES + page_bytes)


def start_log(connection: sqlite3.Connection) -> None:
    """Empties the log, and lets it grow without an end from here on."""
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def pages_of_loop() -> float:
    with fresh_file() as path, closing(plain_connection(path)) as connection:
        start_log(connection)
        for number in range(SEQUENTIAL):
            connection.execute(PLAIN_CLAIM, (f"key-{number}", bytes(16)))
            connection.execute(PLAIN_COMPLETE, (BODY.encode(), f"key-{number}"))
        return pages_logged(path) / SEQUENTIAL


def pages_of_run(*statements: str) -> float:
    with fresh_file() as path, Idempotency(f"sqlite:///{path}", caller=GLOBAL) as idem:
        idem.run("warm-up", operation)
        connection = idem._store._connections.writer
        for statement in statements:
            connection.execute(statement)
        start_log(connection)
        for number in range(SEQUENTIAL):
            idem.run(f"key-{number}", operation)
        return pages_logged(path) / SEQUENTIAL


def fill(path: Path, rows: int) -> None:
    """Keys and outcomes as operations leave them, with windows that have not ended."""
    store = SqliteStore(path)
    run_sync(store.migrate())
    now_ms = time.time_ns() // 1_000_000
    body = BODY.encode()

    def keys() -> Iterator[tuple[object, ...]]:
        for number in range(rows):
            times = (now_ms, now_ms, now_ms, now_ms, now_ms + HOUR_MS)
            yield (
                os.urandom(16),
                f"key-{number}",
                os.urandom(32),
                os.urandom(16),
                *times,
                number + 1,
            )

    def outcomes() -> Iterator[tuple[object, ...]]:
        for _ in range(rows):
            yield os.urandom(16), os.urandom(16), body, now_ms, now_ms + HOUR_MS

    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO retrysafe_keys (digest, caller, key, operation, rule, fingerprint, state, "
            "token, attempt, first_claimed_at_ms, claimed_at_ms, lease_ends_at_ms, settled_at_ms, "
            "expires_at_ms, outcome_id, owner) "
            "VALUES (?, 'account-7', ?, 'charge', 1, ?, 2, ?, 1, ?, ?, ?, ?, ?, ?, 'host:1')",
            keys(),
        )
        connection.executemany(
            "INSERT INTO retrysafe_outcomes (digest, token, attempt, state, form, head, body, "
            "settled_at_ms, audit_ends_at_ms) VALUES (?, ?, 1, 2, 'json.1', x'', ?, ?, ?)",
            outcomes(),
        )
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class Walks:
    """Walks over one file, each of which ends when a call says that nothing is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls = 0
        self.longest_seconds = 0.0

    def bare(self, _round: int) -> float:
        """What SQLite itself needs to look at every row."""
        with closing(sqlite3.connect(self.path)) as connection:
            started = time.perf_counter()
            for table, column in (
                ("retrysafe_keys", "expires_at_ms"),
                ("retrysafe_outcomes", "audit_ends_at_ms"),
            ):
                connection.execute(f"SELECT count(*) FROM {table} WHERE {column} <= 0").fetchone()
            return 1 / (time.perf_counter() - started)

    def first(self, _round: int) -> float:
        """By a process that has just started."""
        self._store = SqliteStore(self.path, busy_timeout=timedelta(0))
        return self._walk()

    def next(self, _round: int) -> float:
        """By the same process: the outcomes that it has seen do not end yet."""
        try:
            return self._walk()
        finally:
            run_sync(self._store.close())

    def _walk(self) -> float:
        self.calls = 0
        with closing(sqlite3.connect(self.path, isolation_level=None)) as rival:
            rival.execute("BEGIN IMMEDIATE")
            started = time.perf_counter()
            has_more = True
            while has_more:
                before = time.perf_counter()
                report = run_sync(self._store.sweep(SWEEP_LIMIT))
                self.longest_seconds = max(self.longest_seconds, time.perf_counter() - before)
                self.calls += 1
                assert (report.keys, report.outcomes) == (0, 0)
                has_more = report.has_more
            return 1 / (time.perf_counter() - started)


def run(is_quick: bool = False) -> Report:
    rows = ROWS // 20 if is_quick else ROWS
    progress("counting pages")
    pages = (
        f"pages of log an operation: {pages_of_loop():.1f} by the plain loop, {pages_of_run():.1f} "
        f"by Idempotency.run, {pages_of_run(*INDEXES):.1f} with indexes for the sweep"
    )
    with fresh_file() as path:
        progress(f"filling {rows:,} keys and outcomes")
        fill(path, rows)
        walks = Walks(path)
        ways: dict[str, Callable[[int], float]] = {
            "one SELECT a table": walks.bare,
            "sweep, a process's first walk": walks.first,
            "sweep, its next walk": walks.next,
        }
        found = in_turn(ways, 1 if is_quick else ROUNDS)
    report = Report(f"SQLite, walks over {rows:,} keys and outcomes", "one SELECT a table")
    for name, rates in found.items():
        rate = statistics.median(rates)
        note = f"{1 / rate:.2f} s"
        report.rows.append(
            Row(name, rate, median_ratio(rates, found["one SELECT a table"]), None, note)
        )
    report.rows[-1].note += f" in {walks.calls} calls, the longest {walks.longest_seconds:.3f} s"
    report.rows[0].note += f"; {pages}"
    return report
