"""What a choice of the PostgreSQL store is worth: python -m benchmarks.variants balance|resting.

Two variants take turns in one process, on one server, so that noise meets both. It prints the
median time of a whole call, and the median ratios to what the store does, of that time and of this
process's CPU, which decision records quote. What saves less than 5 % of a call is not worth
its lines.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from benchmarks.postgres_filling import migrate
from retrysafe import AsyncIdempotency, Idempotency
from retrysafe.stores.postgres.claims import Claims
from retrysafe.stores.postgres.drivers import asyncpg as driver
from tests.servers.postgres import PostgresServer

ROUNDS = 15
Variants = dict[str, Callable[[], AbstractContextManager[object]]]


async def _give_back(_self: object, pool: object, connection: object, *, is_fine: bool) -> None:
    await driver._release(pool, connection)


def _reading_first(is_first: bool) -> Callable[[], AbstractContextManager[object]]:
    return lambda: mock.patch.object(Claims, "mostly_meet_rows", is_first)


VARIANTS: dict[str, Variants] = {
    "balance": {
        "by balance": nullcontext,
        "always written first": _reading_first(False),
        "always read first": _reading_first(True),
    },
    "resting": {
        "resting connections": nullcontext,
        "asyncpg's pool alone": lambda: mock.patch.object(
            driver.AsyncpgConnector, "_give_back", _give_back
        ),
    },
}


def _measure(title: str, variants: Variants, run: Callable[[int], None], calls: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in variants}
    costs: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS):
        names = list(variants)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            with variants[name]():
                run(40)  # More than the balance remembers.
                started, cpu = time.perf_counter(), time.process_time()
                run(calls)
                times[name].append(time.perf_counter() - started)
                costs[name].append(time.process_time() - cpu)
    base = next(iter(variants))
    for name, taken in times.items():
        ratio, cpu_ratio = (
            statistics.median(a / b for a, b in zip(found[name], found[base], strict=True))
            for found in (times, costs)
        )
        per_call = statistics.median(taken) / calls * 1e6
        print(
            f"{title:28} {name:24} {per_call:6.0f} µs per call  x{ratio:.2f}  CPU x{cpu_ratio:.2f}"
        )


def _operation() -> dict[str, int]:
    return {"ok": 1}


async def _async_operation() -> dict[str, int]:
    return _operation()


def _keys(count: int, numbers: Iterator[int] | None) -> list[str]:
    """New keys, or the same 64 again and again."""
    if numbers is None:
        return [f"done-{number % 64}" for number in range(count)]
    return [f"new-{next(numbers)}" for _ in range(count)]


def _threads(url: str, variants: Variants) -> None:
    with Idempotency(url, caller="bench", cache=False) as idem:

        def run(keys: list[str]) -> None:
            for key in keys:
                idem.run(key, _operation, name="operation", request=1)

        run(_keys(64, None))
        numbers = itertools.count()
        for title, source in (("first", numbers), ("replay", None)):
            _measure(
                f"psycopg, 1 thread, {title}",
                variants,
                lambda count, source=source: run(_keys(count, source)),
                150,
            )


def _tasks(url: str, variants: Variants, many: int) -> None:
    with asyncio.Runner() as runner:
        idem = AsyncIdempotency(url, caller="bench", cache=False)

        async def work(keys: list[str]) -> None:
            left = iter(keys)

            async def one() -> None:
                for key in left:
                    await idem.run(key, _async_operation, name="operation", request=1)

            await asyncio.gather(*[one() for _ in range(many)])

        runner.run(work(_keys(64, None)))
        numbers = itertools.count(many * 1_000_000)
        for title, source in (("first", numbers), ("replay", None)):
            _measure(
                f"asyncpg, {many} tasks, {title}",
                variants,
                lambda count, source=source: runner.run(work(_keys(count, source))),
                150 if many == 1 else 3000,
            )
        runner.run(idem.close())


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in VARIANTS:
        print(f"say which: {', '.join(VARIANTS)}")
        return 2
    variants = VARIANTS[arguments[0]]
    server = PostgresServer()
    server.start()
    try:
        migrate(server.url())
        if arguments[0] != "resting":
            _threads(server.url(), variants)
        for many in (1, 64):
            _tasks(server.url(), variants, many)
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
