"""Claim and complete on SQLite, durable, against a hand-written loop of one row a transaction."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop

from benchmarks.measuring import Report, Row, compared, in_turn, machine, median_ratio
from retrysafe import GLOBAL, AsyncIdempotency, Idempotency

BODY = "x" * 500
# What people write by hand: insert to claim, update to complete, each its own commit.
PLAIN_TABLE = "CREATE TABLE keys (key TEXT PRIMARY KEY, fingerprint BLOB, state INTEGER, body BLOB)"
PLAIN_CLAIM = "INSERT INTO keys VALUES (?, ?, 1, NULL) ON CONFLICT DO NOTHING"
PLAIN_COMPLETE = "UPDATE keys SET state = 2, body = ? WHERE key = ?"
# Long enough to be past the growth of a fresh log file, whose flushes are dearer than later ones.
SEQUENTIAL = 1_000
CALLERS = 64
PER_CALLER = 150
ROUNDS = 9


@contextlib.contextmanager
def fresh_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "bench.db"


def plain_connection(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(PLAIN_TABLE)
    return connection


def plain_loop(_round: int) -> float:
    with fresh_file() as path, contextlib.closing(plain_connection(path)) as connection:
        fingerprint = os.urandom(16)
        body = BODY.encode()
        started = time.perf_counter()
        for number in range(SEQUENTIAL):
            connection.execute(PLAIN_CLAIM, (f"key-{number}", fingerprint))
            connection.execute(PLAIN_COMPLETE, (body, f"key-{number}"))
        return SEQUENTIAL / (time.perf_counter() - started)


class _Wish:
    """A row for the writer thread, and the place where its own thread waits."""

    __slots__ = ("done", "row", "statement")

    def __init__(self, statement: str, row: tuple[object, ...]) -> None:
        self.statement = statement
        self.row = row
        self.done = threading.Lock()
        self.done.acquire()


def plain_threads(_round: int) -> float:
    """The loop merged by hand: threads wait for one writer, which commits what is there."""
    with fresh_file() as path:
        wishes: queue.SimpleQueue[_Wish | None] = queue.SimpleQueue()

        def write() -> None:
            with contextlib.closing(plain_connection(path)) as connection:
                while (first := wishes.get()) is not None:
                    batch = [first]
                    while not wishes.empty():
                        wish = wishes.get()
                        assert wish is not None  # The end comes when nobody waits any more.
                        batch.append(wish)
                    connection.execute("BEGIN IMMEDIATE")
                    for statement in (PLAIN_CLAIM, PLAIN_COMPLETE):
                        rows = [wish.row for wish in batch if wish.statement == statement]
                        connection.executemany(statement, rows)
                    connection.execute("COMMIT")
                    for wish in batch:
                        wish.done.release()

        def commit(statement: str, row: tuple[object, ...]) -> None:
            wish = _Wish(statement, row)
            wishes.put(wish)
            wish.done.acquire()

        fingerprint, body = os.urandom(16), BODY.encode()

        def caller(name: int) -> None:
            for number in range(PER_CALLER):
                commit(PLAIN_CLAIM, (f"key-{name}-{number}", fingerprint))
                commit(PLAIN_COMPLETE, (body, f"key-{name}-{number}"))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            return in_threads(caller)
        finally:
            wishes.put(None)
            writer.join()


def in_threads(caller: Callable[[int], None]) -> float:
    """Operations per second of all callers, each in a thread of its own."""
    barrier = threading.Barrier(CALLERS + 1)

    def run(name: int) -> None:
        barrier.wait()
        caller(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in range(CALLERS)]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return CALLERS * PER_CALLER / (time.perf_counter() - started)


def operation() -> str:
    return BODY


async def async_operation() -> str:
    return BODY


def one_caller(_round: int) -> float:
    with fresh_file() as path, Idempotency(f"sqlite:///{path}", caller=GLOBAL) as idem:
        idem.run("warm-up", operation)
        started = time.perf_counter()
        for number in range(SEQUENTIAL):
            idem.run(f"key-{number}", operation)
        return SEQUENTIAL / (time.perf_counter() - started)


def many_threads(_round: int) -> float:
    with fresh_file() as path, Idempotency(f"sqlite:///{path}", caller=GLOBAL) as idem:

        def caller(name: int) -> None:
            for number in range(PER_CALLER):
                idem.run(f"key-{name}-{number}", operation)

        return in_threads(caller)


def many_tasks(_round: int) -> float:
    async def measure() -> float:
        async with AsyncIdempotency(f"sqlite:///{path}", caller=GLOBAL) as idem:

            async def caller(name: int) -> None:
                for number in range(PER_CALLER):
                    await idem.run(f"key-{name}-{number}", async_operation)

            started = time.perf_counter()
            await asyncio.gather(*(caller(name) for name in range(CALLERS)))
            return CALLERS * PER_CALLER / (time.perf_counter() - started)

    with fresh_file() as path:
        return uvloop.run(measure())


LOOP = "plain sqlite3 loop"
MERGED = f"the loop merged by hand, {CALLERS} threads"
ONE_CALLER = "Idempotency.run, 1 caller"
MANY_THREADS = f"Idempotency.run, {CALLERS} threads"
MANY_TASKS = f"AsyncIdempotency.run, {CALLERS} tasks"
# What it is to, and the least ratio in the same rounds.
TARGETS = {
    "1 caller to the loop": (ONE_CALLER, LOOP, 0.65),
    f"{CALLERS} threads to the loop merged by hand": (MANY_THREADS, MERGED, 0.9),
    f"{CALLERS} tasks to the loop merged by hand": (MANY_TASKS, MERGED, 0.9),
}


def run(is_quick: bool = False) -> Report:
    ways: dict[str, Callable[[int], float]] = {
        LOOP: plain_loop,
        ONE_CALLER: one_caller,
        MANY_TASKS: many_tasks,
        MERGED: plain_threads,
        MANY_THREADS: many_threads,
    }
    found = in_turn(ways, 3 if is_quick else ROUNDS)
    report = Report(f"SQLite, claim + complete, synchronous=FULL, {machine()}", LOOP)
    for name, rates in found.items():
        ratio = median_ratio(rates, found[LOOP])
        report.rows.append(Row(name, statistics.median(rates), ratio))
    report.rows += [compared(found, name, *target) for name, target in TARGETS.items()]
    return report
