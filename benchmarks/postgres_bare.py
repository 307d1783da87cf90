"""The two statements without retrysafe: what a program written for this one purpose reaches.

Merged by hand, for tasks and for threads. No lease is kept, no request is compared and no outcome
is remembered, so these are bounds and not something to use.
"""

from __future__ import annotations

import asyncio
import collections
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import psycopg

from benchmarks.postgres_statements import BODY, CLAIMS, COMPLETES

BATCH = 64
CONNECTIONS = 4
Row = tuple[bytes, ...]


class Merged:
    """Rows of tasks, sent in batches over a few connections."""

    def __init__(self, pool: asyncpg.Pool, sql: str, connections: int) -> None:
        self._pool = pool
        self._sql = sql
        self._free = connections
        self._queue: collections.deque[tuple[Row, asyncio.Future[None]]] = collections.deque()
        self._loop = asyncio.get_running_loop()
        self._is_called = False
        self._flying: set[asyncio.Task[None]] = set()

    def commit(self, row: Row) -> asyncio.Future[None]:
        """Is done when the row is committed."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._queue.append((row, done))
        if not self._is_called and self._free:
            self._is_called = True
            self._loop.call_soon(self._launch)
        return done

    def _launch(self) -> None:
        self._is_called = False
        while self._queue and self._free:
            count = min(BATCH, len(self._queue))
            batch = [self._queue.popleft() for _ in range(count)]
            self._free -= 1
            flight = self._loop.create_task(self._fly(batch))
            self._flying.add(flight)
            flight.add_done_callback(self._flying.discard)

    async def _fly(self, batch: list[tuple[Row, asyncio.Future[None]]]) -> None:
        columns = zip(*(row for row, _ in batch), strict=True)
        async with self._pool.acquire() as connection:
            await connection.fetch(self._sql, *map(list, columns))
        for _, done in batch:
            done.set_result(None)
        self._free += 1
        self._launch()


async def tasks(task: dict[str, Any], start: Callable[[], None]) -> dict[str, float]:
    """Claim and complete with a fixed number in flight, merged by hand."""
    options = {"min_size": CONNECTIONS, "max_size": CONNECTIONS}
    body = BODY.encode()
    async with asyncpg.create_pool(task["url"], **options, reset=keep) as pool:
        claims, completes = (
            Merged(pool, sql.format(schema=task["schema"]), CONNECTIONS // 2)
            for sql in (CLAIMS, COMPLETES)
        )

        async def caller(until: float) -> int:
            count = 0
            while time.perf_counter() < until:
                digest, token = os.urandom(16), os.urandom(16)
                await claims.commit((digest, token))
                await completes.commit((digest, token, body))
                count += 1
            return count

        async def burst(length: float) -> int:
            until = time.perf_counter() + length
            return sum(await asyncio.gather(*(caller(until) for _ in range(task["in_flight"]))))

        await burst(0.3)
        start()
        started, cpu = time.perf_counter(), time.process_time()
        count = await burst(task["seconds"])
        return _found(count, started, cpu)


async def keep(_connection: object) -> None:
    """Nothing to reset: the pool's own statements are not part of the work."""


def _found(count: int, started: float, cpu: float) -> dict[str, float]:
    return {
        "per_second": count / (time.perf_counter() - started),
        "count": count,
        "cpu_us": (time.process_time() - cpu) / count * 1e6,
    }


def in_threads(
    task: dict[str, Any], start: Callable[[], None], caller: Callable[[Callable[[], bool]], int]
) -> dict[str, float]:
    """All threads together; a caller runs for as long as it is told, and counts."""
    barrier = threading.Barrier(task["in_flight"] + 1)
    counts: list[int] = []
    until = float("inf")

    def run() -> None:
        barrier.wait()
        counts.append(caller(lambda: time.perf_counter() < until))

    workers = [threading.Thread(target=run) for _ in range(task["in_flight"])]
    for worker in workers:
        worker.start()
    start()
    until = time.perf_counter() + task["seconds"]
    started, cpu = time.perf_counter(), time.process_time()
    barrier.wait()
    for worker in workers:
        worker.join()
    return _found(sum(counts), started, cpu)


def threads(task: dict[str, Any], start: Callable[[], None]) -> dict[str, float]:
    """Threads that hand their rows to one writer each for claims and for completions."""
    queues = [_Writer(task, sql) for sql in (CLAIMS, COMPLETES)]
    claims, completes = queues
    body = BODY.encode()

    def caller(goes_on: Callable[[], bool]) -> int:
        count = 0
        while goes_on():
            digest, token = os.urandom(16), os.urandom(16)
            claims.commit((digest, token))
            completes.commit((digest, token, body))
            count += 1
        return count

    try:
        return in_threads(task, start, caller)
    finally:
        for writer in queues:
            writer.end()


class _Writer:
    """A thread that commits the rows of others in batches."""

    def __init__(self, task: dict[str, Any], sql: str) -> None:
        self._connection = psycopg.connect(task["url"], autocommit=True)
        self._sql = sql.format(schema=task["schema"])
        self._wishes: queue.SimpleQueue[tuple[Row, threading.Lock] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def commit(self, row: Row) -> None:
        """Returns when the row is committed."""
        done = threading.Lock()
        done.acquire()
        self._wishes.put((row, done))
        done.acquire()

    def end(self) -> None:
        self._wishes.put(None)
        self._thread.join()

    def _write(self) -> None:
        with self._connection, psycopg.RawCursor(self._connection) as cursor:
            while (first := self._wishes.get()) is not None:
                batch = [first]
                while len(batch) < BATCH and not self._wishes.empty():
                    wish = self._wishes.get()
                    assert wish is not None  # The end comes when nobody waits any more.
                    batch.append(wish)
                columns = zip(*(row for row, _ in batch), strict=True)
                cursor.execute(self._sql, list(map(list, columns)), prepare=True, binary=True)
                cursor.fetchall()
                for _, done in batch:
                    done.release()
