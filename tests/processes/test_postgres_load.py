"""Many processes at once on PostgreSQL: each key once, no deadlock, and no connection left over."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import psycopg

from retrysafe import AsyncIdempotency, Idempotency, InFlight, OperationInFlight, Policy
from tests.processes.children import CONTEXT
from tests.processes.ledger import note, noted
from tests.processes.overlapping import deadlocks, double_endings, overlap

PROCESSES = 10
KEYS = 10_000
IN_FLIGHT = 256
POLICY = Policy(in_flight=InFlight.FAIL)


def _claim_all(pipe, url: str, ledger: str, barrier, number: int) -> int:
    """Wants every key once, 256 at a time; returns how many ran here."""
    runs = []

    async def operation(key: str) -> None:
        runs.append(key)

    async def worker(idem: AsyncIdempotency, keys: list[str]) -> None:
        for key in keys:
            try:
                await idem.run(key, operation, key)
            except OperationInFlight:
                pass  # Another process has it; that is an answer too.

    async def main() -> None:
        async with AsyncIdempotency(url, caller="racer", policy=POLICY, cache=False) as idem:
            keys = [f"key-{index}" for index in range(KEYS)]
            # Every process in an order of its own, so that they meet everywhere.
            random.Random(number).shuffle(keys)
            async with asyncio.TaskGroup() as group:
                for first in range(IN_FLIGHT):
                    group.create_task(worker(idem, keys[first::IN_FLIGHT]))

    barrier.wait(60)
    asyncio.run(main())
    note(ledger, *runs)
    return len(runs)


def test_ten_processes_claim_ten_thousand_keys_and_each_runs_once(
    start, postgres_server, migrated_url, ledger
):
    """100,000 calls for 10,000 keys: 10,000 executions, not one of them twice, in no process."""
    before = deadlocks(postgres_server.url())
    barrier = CONTEXT.Barrier(PROCESSES)
    children = [
        start(_claim_all, migrated_url, ledger, barrier, number) for number in range(PROCESSES)
    ]
    counts = [child.result(60) for child in children]
    executed = Counter(key for line in noted(ledger) for key in line)
    assert len(executed) == KEYS
    assert set(executed.values()) == {1}
    assert sum(counts) == KEYS
    # The race was one: no process did all the work.
    assert max(counts) < KEYS
    assert deadlocks(postgres_server.url()) == before


def _overlap(pipe, url: str, seed: int, seconds: float) -> dict[str, int]:
    return overlap(url, seed, seconds)


def test_random_overlapping_batches_meet_without_a_deadlock(start, postgres_server, migrated_url):
    """Claims, extends and endings of 8 processes over the same keys; the server saw no deadlock."""
    before = deadlocks(postgres_server.url())
    children = [start(_overlap, migrated_url, seed, 6) for seed in range(8)]
    total: Counter[str] = Counter()
    for child in children:
        total.update(child.result())
    assert deadlocks(postgres_server.url()) == before
    assert double_endings(postgres_server.url(), migrated_url.partition("schema=")[2]) == 0
    # Every kind of row met the others.
    for name in ("admit", "in flight", "settle apply", "settle confirm", "extend apply"):
        assert total[name] > 0, total


def _leave(pipe, url: str) -> None:
    async def main() -> None:
        async with AsyncIdempotency(url, caller="racer", policy=POLICY) as idem:

            async def operation(number: int) -> int:
                return number

            await asyncio.gather(*(idem.run(f"k{n}", operation, n) for n in range(300)))

    asyncio.run(main())
    with Idempotency(url, caller="racer") as idem:
        for number in range(20):
            idem.run(f"other-{number}", int, request=number)
        pipe.send(os.getpid())
        pipe.recv()


def test_no_connection_is_left_and_few_are_used(start, postgres_server, migrated_url):
    """A busy process keeps to its pool, and a closed object leaves no connection behind."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        (since,) = connection.execute("SELECT clock_timestamp()").fetchone()
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'retrysafe' "
            f"AND backend_start > '{since}'"
        )
        child = start(_leave, migrated_url)
        child.receive()
        # The blocking object works one call after the other, so one connection serves them all;
        # the event loop's object is closed by now.
        assert connection.execute(query).fetchone() == (1,)
        child.send("go on")
        child.result()
        assert connection.execute(query).fetchone() == (0,)
