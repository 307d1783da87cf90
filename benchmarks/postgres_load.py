"""The loads on PostgreSQL, each in a process of its own: python -m benchmarks.postgres_load {…}.

Reads its task as JSON from the command line, says `ready` when it has warmed up, starts at the
first line of input and prints what it measured as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import uvloop

from benchmarks import postgres_bare
from benchmarks.postgres_statements import BODY, CLAIM, COMPLETE
from retrysafe import GLOBAL, AsyncIdempotency, Idempotency

Task = dict[str, Any]
Found = dict[str, Any]
# A load that runs until it is told ends by itself after this time.
UNTIL_TOLD_SECONDS = 300.0
# What piles up beyond this is never worked off: each waits longer, and is renewed meanwhile.
UNDER_WAY_LIMIT = 50_000
# How such a load ends.
OVERLOADED = 3


async def operation() -> str:
    return BODY


def plain_operation() -> str:
    return BODY


def _start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _milliseconds(seconds: list[float]) -> Found:
    return {
        "p50_ms": percentile(seconds, 0.5) * 1000,
        "p99_ms": percentile(seconds, 0.99) * 1000,
        "count": len(seconds),
    }


async def tasks(task: Task) -> Found:
    """Claim and complete as fast as possible, with a fixed number in flight."""
    name, seconds = os.urandom(6).hex(), task["seconds"]
    async with AsyncIdempotency(task["url"], caller=GLOBAL) as idem:

        async def caller(prefix: str, until: float) -> int:
            count = 0
            while time.perf_counter() < until:
                await idem.run(f"{prefix}-{count}", operation)
                count += 1
            return count

        async def burst(length: float, part: str) -> int:
            until = time.perf_counter() + length
            prefixes = [f"{name}-{part}-{number}" for number in range(task["in_flight"])]
            return sum(await asyncio.gather(*(caller(prefix, until) for prefix in prefixes)))

        await burst(0.3, "warm-up")
        _start()
        started, cpu = time.perf_counter(), time.process_time()
        count = await burst(seconds, "run")
        elapsed = time.perf_counter() - started
        cpu = time.process_time() - cpu
        return {"per_second": count / elapsed, "count": count, "cpu_us": cpu / count * 1e6}


def threads(task: Task) -> Found:
    """The same with threads."""
    name, numbers = os.urandom(6).hex(), itertools.count()
    with Idempotency(task["url"], caller=GLOBAL) as idem:
        idem.run(f"{name} warm-up", plain_operation)

        def caller(goes_on: Callable[[], bool]) -> int:
            number, count = next(numbers), 0
            while goes_on():
                idem.run(f"{name}-{number}-{count}", plain_operation)
                count += 1
            return count

        return postgres_bare.in_threads(task, _start, caller)


async def _open_loop(
    rate: float,
    seconds: float,
    run_one: Callable[[int, float], Coroutine[Any, Any, None]],
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Starts operations on a fixed schedule, whether the earlier ones have ended or not.

    Each is given its number and the instant at which it is due, by the clock of all processes.
    Raises when one of them has failed: it would be missing from what is measured, and the slowest
    are the first to fail.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    running: set[asyncio.Task[None]] = set()
    failed: list[BaseException] = []

    def end(one: asyncio.Task[None]) -> None:
        running.discard(one)
        error = one.exception()
        if error is not None:
            failed.append(error)

    for number in range(int(rate * seconds)):
        if is_over():
            break
        due = started + number / rate
        pause = due - loop.time()
        if pause > 0:
            await asyncio.sleep(pause)
        if len(running) > UNDER_WAY_LIMIT:
            # Nobody waits for what is under way.
            os._exit(OVERLOADED)
        one = loop.create_task(run_one(number, due))
        running.add(one)
        one.add_done_callback(end)
    if running:
        await asyncio.wait(running)
    if failed:
        raise RuntimeError(f"{len(failed)} operations failed") from failed[0]


async def paced(task: Task) -> Found:
    """Operations on a schedule: how long the claim of each takes, and when it was asked for."""
    name = os.urandom(6).hex()
    # No lists: the garbage collector would walk over every number in them again and again, and
    # after a minute its walks would be the slowest thing that is measured.
    claims, asked_at = array("d"), array("d")
    async with AsyncIdempotency(task["url"], caller=GLOBAL) as idem:
        # One function for all, as services have it: what every call of it has in common is found
        # out once. By its task, an operation finds out when it was due.
        due_of: dict[asyncio.Task[Any] | None, float] = {}

        async def timed() -> str:
            due = due_of.pop(asyncio.current_task())
            # From when it was due: a loop that stands still asks for nothing meanwhile.
            claims.append(time.monotonic() - due)
            asked_at.append(due)
            return BODY

        async def run_one(number: int, due: float) -> None:
            due_of[asyncio.current_task()] = due
            await idem.run(f"{name}-{number}", timed, request=None)

        async def warm_up(number: int, due: float) -> None:
            await run_one(-1 - number, due)

        # Slowly: after a checkpoint the first change of a page writes it whole, and a load that is
        # too much for the machine just then would not be worked off for long.
        await _open_loop(task["rate"] / 3, task["warm_up"], warm_up)
        del claims[:], asked_at[:]
        _start()
        if task.get("until_told"):
            # One schedule from the start to the end, as with the loads of a given length: pieces
            # that wait for their last operation would let the load catch up in between.
            stopped = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            await _open_loop(task["rate"], UNTIL_TOLD_SECONDS, run_one, stopped.done)
        else:
            await _open_loop(task["rate"], task["seconds"], run_one)
    return {
        "claims_ms": [round(seconds * 1000, 2) for seconds in claims],
        # By the clock that all processes of a machine share, to tell what was going on meanwhile.
        "asked_at": [round(asked, 3) for asked in asked_at],
    }


async def steady(task: Task) -> Found:
    """Operations on a schedule, with nothing in them that is not measured elsewhere too."""
    name = os.urandom(6).hex()
    whole: list[float] = []
    async with AsyncIdempotency(task["url"], caller=GLOBAL) as idem:

        async def run_one(number: int, _due: float) -> None:
            # From its start: the loop's timers are as coarse as what is compared here.
            asked = time.perf_counter()
            await idem.run(f"{name}-{number}", operation)
            whole.append(time.perf_counter() - asked)

        async def warm_up(number: int, due: float) -> None:
            await run_one(-1 - number, due)

        await _open_loop(task["rate"], 0.5, warm_up)
        whole.clear()
        _start()
        await _open_loop(task["rate"], task["seconds"], run_one)
    return _milliseconds(whole)


async def plain(task: Task) -> Found:
    """What people write by hand with asyncpg: two statements, one row each, on a schedule.

    An operation takes until its connection is back in the pool, which resets it by a statement of
    its own. How long it would take without that is told as well.
    """
    whole: list[float] = []
    unreset: list[float] = []
    body = BODY.encode()
    claim, complete = (text.format(schema=task["schema"]) for text in (CLAIM, COMPLETE))
    async with asyncpg.create_pool(task["url"], min_size=8, max_size=8) as pool:

        async def run_one(number: int, _due: float) -> None:
            asked = time.perf_counter()
            async with pool.acquire() as connection:
                digest, token = os.urandom(16), os.urandom(16)
                await connection.fetch(claim, digest, f"key-{number}", token)
                await connection.fetch(complete, digest, token, body)
                unreset.append(time.perf_counter() - asked)
            whole.append(time.perf_counter() - asked)

        await _open_loop(task["rate"], 0.5, run_one)
        whole.clear()
        unreset.clear()
        _start()
        await _open_loop(task["rate"], task["seconds"], run_one)
    return _milliseconds(whole) | {"unreset_p50_ms": percentile(unreset, 0.5) * 1000}


async def replays(task: Task) -> Found:
    """Replays of finished keys, from the store or from the process."""
    name, in_flight, each = os.urandom(6).hex(), task["in_flight"], task["each"]
    async with AsyncIdempotency(task["url"], caller=GLOBAL, cache=task["cache"]) as idem:

        async def once_each(number: int) -> None:
            for count in range(each):
                await idem.run(f"{name}-{number}-{count}", operation)

        await asyncio.gather(*(once_each(number) for number in range(in_flight)))

        async def caller(number: int, until: float) -> int:
            count = 0
            while time.perf_counter() < until:
                await idem.run(f"{name}-{number}-{count % each}", operation)
                count += 1
            return count

        _start()
        started, cpu = time.perf_counter(), time.process_time()
        until = started + task["seconds"]
        count = sum(await asyncio.gather(*(caller(number, until) for number in range(in_flight))))
        elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"per_second": count / elapsed, "count": count, "cpu_us": cpu / count * 1e6}


KINDS: dict[str, Callable[[Task], Any]] = {
    "bare tasks": lambda task: postgres_bare.tasks(task, _start),
    "bare threads": lambda task: postgres_bare.threads(task, _start),
    "tasks": tasks,
    "threads": threads,
    "paced": paced,
    "steady": steady,
    "plain": plain,
    "replays": replays,
}


class Overloaded(Exception):
    """The machine did not keep up with a load on a schedule."""


class Load:
    """A load in a child process: warmed up when this returns, started by `go`."""

    def __init__(self, kind: str, **task: Any) -> None:
        arguments = json.dumps({"kind": kind, **task})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.postgres_load", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            if self._process.wait() == OVERLOADED:
                raise Overloaded
            raise RuntimeError(f"the load {kind} did not start")

    def go(self) -> None:
        """Starts it; called again, ends a load that runs until it is told."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def result(self) -> Found:
        """What it measured."""
        output, _ = self._process.communicate(timeout=600)
        if self._process.returncode == OVERLOADED:
            raise Overloaded
        if self._process.returncode:
            raise RuntimeError("a load failed")
        found: Found = json.loads(output.splitlines()[-1])
        return found


def measure(kind: str, **task: Any) -> Found:
    """Runs one load."""
    load = Load(kind, **task)
    load.go()
    return load.result()


def main() -> None:
    task = json.loads(sys.argv[1])
    if task.get("is_on_one_core"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = KINDS[task["kind"]](task)
    if asyncio.iscoroutine(found):
        found = uvloop.run(found)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
