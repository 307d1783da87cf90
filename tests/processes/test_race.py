"""Many processes and many threads or tasks race for the same keys: each key runs once."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections import defaultdict
from datetime import timedelta

from retrysafe import AsyncIdempotency, Idempotency, InFlight, Policy
from retrysafe.stores import MemoryStore
from tests.processes.children import CONTEXT
from tests.processes.ledger import note, noted

PROCESSES = 4
THREADS = 16
KEYS = [f"key-{number}" for number in range(200)]
TASKS = 500
POLICY = Policy(in_flight=InFlight.WAIT, wait_limit=timedelta(seconds=60))


def _execute(ledger: str, key: str) -> str:
    """The operation: its outcome names this one execution, so another one would differ."""
    outcome = uuid.uuid4().hex
    note(ledger, key, outcome, os.getpid(), threading.get_ident())
    return outcome


def _check(ledger: str, seen: dict[str, list[str]], callers: int) -> None:
    executions = noted(ledger)
    assert sorted(line[0] for line in executions) == sorted(KEYS)
    for key, outcome, *_ in executions:
        assert seen[key] == [outcome] * callers


def _race_threads(pipe, url: str, ledger: str, barrier) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = defaultdict(list)
    failures: list[BaseException] = []
    with Idempotency(url, caller="racer", policy=POLICY) as idem:

        def race() -> None:
            try:
                # Where a process starts makes it the first at some keys, so that every one has
                # work; they meet at all the others.
                first = barrier.wait(60)
                for key in KEYS[first:] + KEYS[:first]:
                    seen[key].append(idem.run(key, _execute, ledger, key))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=race) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return dict(seen)


def test_threads_of_four_processes_run_each_key_once(start, url, ledger):
    """64 threads in 4 processes want 200 keys: 200 executions, and one outcome per key."""
    barrier = CONTEXT.Barrier(PROCESSES * THREADS)
    children = [start(_race_threads, url, ledger, barrier) for _ in range(PROCESSES)]
    seen: dict[str, list[str]] = defaultdict(list)
    for child in children:
        for key, outcomes in child.result().items():
            seen[key] += outcomes
    _check(ledger, seen, PROCESSES * THREADS)
    # The race was one: no process did all the work.
    assert len({line[2] for line in noted(ledger)}) > 1


async def _race_tasks(idem: AsyncIdempotency, ledger: str, tasks: int) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = defaultdict(list)

    async def execute(key: str) -> str:
        await asyncio.sleep(0)
        return _execute(ledger, key)

    async def race() -> None:
        for key in KEYS:
            seen[key].append(await idem.run(key, execute, key))

    async with idem, asyncio.TaskGroup() as group:
        # All of them start in the next turn of the loop, which is a barrier already.
        for _ in range(tasks):
            group.create_task(race())
    return dict(seen)


def test_five_hundred_tasks_run_each_key_once(url, ledger):
    """500 tasks want 200 keys: 200 executions."""
    idem = AsyncIdempotency(url, caller="racer", policy=POLICY)
    _check(ledger, asyncio.run(_race_tasks(idem, ledger, TASKS)), TASKS)


def test_five_hundred_tasks_run_each_key_once_without_the_replay_cache(ledger):
    """Every replay comes from the store then, and there are still 200 executions."""
    idem = AsyncIdempotency(MemoryStore(), caller="racer", policy=POLICY, cache=False)
    _check(ledger, asyncio.run(_race_tasks(idem, ledger, TASKS)), TASKS)


def _race_tasks_in_child(pipe, url: str, ledger: str, barrier) -> dict[str, list[str]]:
    idem = AsyncIdempotency(url, caller="racer", policy=POLICY)
    barrier.wait(60)
    return asyncio.run(_race_tasks(idem, ledger, TASKS // PROCESSES))


def test_tasks_of_four_processes_run_each_key_once(start, url, ledger):
    """500 tasks in 4 event loops of 4 processes: 200 executions, and one outcome per key."""
    barrier = CONTEXT.Barrier(PROCESSES)
    children = [start(_race_tasks_in_child, url, ledger, barrier) for _ in range(PROCESSES)]
    seen: dict[str, list[str]] = defaultdict(list)
    for child in children:
        for key, outcomes in child.result().items():
            seen[key] += outcomes
    _check(ledger, seen, TASKS)
